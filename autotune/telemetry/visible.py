"""Which GPU a name means: numbers, UUIDs and MIG names of visible-device lists against the GPUs that telemetry opened."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from autotune.telemetry.base import Gpu, TelemetryError

_ENTRY = re.compile(r"(GPU|MIG)-[0-9A-Za-z/-]+|[0-9a-fA-F]{8}-[0-9a-fA-F-]+")
_NUMBER = re.compile(r"\+?(\d+)")


def cuda_visible(text: str) -> tuple[str, ...]:
    """The entries of CUDA_VISIBLE_DEVICES as CUDA reads it.

    It ends at the first that it would not accept, sees nothing where one is repeated, and of "1gpu" reads the 1.
    """
    entries: list[str] = []
    for part in text.split(","):
        entry = part.strip()
        if not _ENTRY.fullmatch(entry):
            number = _NUMBER.match(entry)
            if number is None:
                break
            entry = str(int(number[1]))
        if entry in entries:
            return ()
        entries.append(entry)
    return tuple(entries)


def is_mig(entry: str) -> bool:
    """Whether a visible-device entry is a MIG instance, in the old or new form of its name."""
    return entry.startswith("MIG-")


def amd_visible(environment: Mapping[str, str]) -> tuple[str, ...] | None:
    """Devices that HIP sees, as it numbers them without any list: ROCR's list filters first, HIP's indexes what is left.

    None where no list is set. HIP reads CUDA_VISIBLE_DEVICES where its own variable is absent.
    """
    rocr = environment.get("ROCR_VISIBLE_DEVICES")
    hip = environment.get("HIP_VISIBLE_DEVICES", environment.get("CUDA_VISIBLE_DEVICES"))
    left = None if rocr is None else cuda_visible(rocr)
    if hip is None:
        return left
    chosen = cuda_visible(hip)
    if left is None:
        return chosen
    return tuple(left[int(entry)] for entry in chosen if entry.isdigit() and int(entry) < len(left))


def physical(vendor: str, ids: Sequence[str], environment: Mapping[str, str]) -> Sequence[str]:
    """Ray's numbers as `select` takes them: AMD's count what ROCR's list of visible devices has left, as HIP does."""
    rocr = environment.get("ROCR_VISIBLE_DEVICES")
    if vendor != "amd" or not ids or rocr is None:
        return ids
    return amd_visible({"ROCR_VISIBLE_DEVICES": rocr, "HIP_VISIBLE_DEVICES": ",".join(ids)}) or ids


def select(gpus: Sequence[Gpu], ids: Sequence[str]) -> list[Gpu]:
    """The GPUs of these names, in the names' order.

    Args:
        gpus: GPUs of one vendor.
        ids: Numbers (NVIDIA: NVML's, which CUDA shares where CUDA_DEVICE_ORDER=PCI_BUS_ID or all boards are alike; AMD: HIP's),
            UUIDs or unique starts of one, or PCI bus ids.

    Raises:
        TelemetryError: where a name means no GPU, or more than one.
    """
    return [_one(gpus, name) for name in ids]


def _one(gpus: Sequence[Gpu], name: str) -> Gpu:
    found = [gpu for gpu in gpus if _is_named(gpu, name)]
    found = [gpu for gpu in found if name in (gpu.info.uuid, gpu.info.pci_bus_id)] or found
    if len(found) == 1:
        return found[0]
    known = ", ".join(f"{gpu.info.index} {gpu.info.uuid} {gpu.info.pci_bus_id}" for gpu in gpus) or "none"
    problem = "means more than one GPU" if found else "means no GPU that telemetry can see"
    raise TelemetryError(f"{name!r} {problem}", f"there are: {known}")


def _is_named(gpu: Gpu, name: str) -> bool:
    info = gpu.info
    if not name.isdigit():
        return info.uuid.lower().startswith(name.lower()) or info.pci_bus_id == name.lower() or name in info.aliases
    if info.vendor == "amd":
        return name in info.aliases  # without HIP's own numbers a row of AMD SMI says nothing about HIP's device of that number
    return info.index == int(name) and not is_mig(info.uuid)
