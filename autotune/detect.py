"""What pools this machine is: one for each type of GPU in it, or four ranks on its CPU."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

from autotune.errors import SpecError
from autotune.probes import Gpu, GpuList, amd_gpus, nvidia_gpus
from autotune.telemetry.visible import cuda_visible
from search_spaces.hardware import PoolSpec

CPU_POOL = PoolSpec(name="laptop", gpu="cpu", gpus_per_node=4)
_VENDOR_WORDS = re.compile(r"\b(NVIDIA|Tesla|GeForce|Quadro|AMD|Instinct|Radeon)\b", re.IGNORECASE)


def detect_machine(nvidia: GpuList | None = None, amd: GpuList | None = None) -> list[PoolSpec]:
    """The pools of this machine, ready for a study file. Asks the vendors' tools, each within a time limit.

    Args:
        nvidia: NVIDIA GPUs; none asks `nvidia-smi`.
        amd: AMD GPUs; none asks `amd-smi` or `rocm-smi`.

    Returns:
        One pool for each type of GPU, GPUs cut by MIG left out; the CPU pool "laptop" where no GPU is found.
    """
    found = (*(nvidia or nvidia_gpus()).gpus, *(amd or amd_gpus()).gpus)
    counts = Counter(gpu_type(gpu) for gpu in found if not gpu.mig)
    pools = [PoolSpec(name=f"local-{kind.lower()}", gpu=kind, gpus_per_node=count) for kind, count in counts.items()]
    return pools or [CPU_POOL]


def usable_gpus(
    wanted: Sequence[int | str] | None, visible: str | None, nvidia: GpuList | None = None, amd: GpuList | None = None
) -> tuple[str, ...]:
    """The GPUs of this machine that a private Ray may use, as CUDA_VISIBLE_DEVICES takes them; MIG instances are left out.

    Args:
        wanted: `gpus:` of the study file; none = all that `visible` names.
        visible: Value of CUDA_VISIBLE_DEVICES; none = all that the vendors' tools list.
        nvidia: NVIDIA GPUs; none asks `nvidia-smi`.
        amd: AMD GPUs; none asks `amd-smi` or `rocm-smi`.

    Raises:
        SpecError: where only MIG instances are named.
    """
    if wanted is not None:
        return _without_mig("gpus", [str(gpu) for gpu in wanted])
    if visible is not None:
        return _without_mig("CUDA_VISIBLE_DEVICES", list(cuda_visible(visible)))
    listed = (nvidia or nvidia_gpus()).gpus or (amd or amd_gpus()).gpus
    return tuple(str(index) for index, gpu in enumerate(listed) if not gpu.mig)


def _without_mig(field: str, names: list[str]) -> tuple[str, ...]:
    boards = tuple(name for name in names if not name.startswith("MIG-"))
    if names and not boards:
        hint = "name whole GPUs: instances share their board's power, clocks and links, so that a trial shows nothing"
        raise SpecError(field, ",".join(names), "a MIG instance cannot run a training trial", hint)
    return boards


def gpu_type(gpu: Gpu) -> str:
    """A product's name without its vendor, words joined: "NVIDIA H100 80GB HBM3" is "H100-80GB-HBM3"."""
    words = re.findall(r"[A-Za-z0-9]+", _VENDOR_WORDS.sub(" ", gpu.name))
    return "-".join(words)[:48].rstrip("-") or f"{gpu.vendor}-GPU"
