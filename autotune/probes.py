"""Facts about this machine, read within a time limit and without importing what may crash: drivers, GPUs, the ranks' Python.

NVML and AMD SMI belong to telemetry. Here a person's first questions are answered from the kernel's own files and from the vendors'
command line tools, where they are on the path.
"""

from __future__ import annotations

import contextlib
import csv
import io
import json
import os
import re
import signal
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_MIB_PER_GIB = 1024


@dataclass(frozen=True, slots=True)
class Answer:
    """What a command said. `returncode` is None where it could not be started or did not end in time."""

    returncode: int | None
    stdout: str = ""
    stderr: str = ""

    @property
    def ok(self) -> bool:
        """Whether the command ended in time and without an error."""
        return self.returncode == 0

    @property
    def last_line(self) -> str:
        """The last line that says something, of its errors or else of its output."""
        lines = [line.strip() for text in (self.stdout, self.stderr) for line in text.splitlines() if line.strip()]
        return lines[-1] if lines else ""


Ask = Callable[[Sequence[str], float], Answer]


def ask(command: Sequence[str], timeout_s: float, stdin: str = "", env: Mapping[str, str] | None = None) -> Answer:
    """Runs a command in its own session; at the limit it and its children in that session are ended."""
    try:
        process = subprocess.Popen(
            list(command),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            cwd="/",  # no file of the current folder is imported by accident
            env=None if env is None else dict(env),
            start_new_session=True,
        )
    except OSError as error:
        return Answer(None, stderr=f"{command[0]}: {error.strerror}")
    try:
        stdout, stderr = process.communicate(stdin, timeout_s)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=1.0)
        return Answer(None, stderr=f"{Path(command[0]).name} did not end within {timeout_s:g} s")
    return Answer(process.returncode, stdout, stderr)


@dataclass(frozen=True, slots=True)
class Driver:
    """GPU drivers that the kernel has loaded.

    Attributes:
        nvidia: Version of NVIDIA's kernel module; None where it is not loaded.
        amdgpu: Whether the amdgpu module is loaded and offers compute (/dev/kfd).
        rocm: Version of the ROCm installation, "major.minor"; None where there is none.
    """

    nvidia: str | None = None
    amdgpu: bool = False
    rocm: str | None = None


def read_driver(root: Path = Path("/")) -> Driver:
    """Reads the loaded drivers from /proc, /sys, /dev and /opt/rocm below `root`."""
    nvidia = re.search(r"\b(\d{3,}\.\d+(?:\.\d+)?)\b", _text(root / "proc/driver/nvidia/version"))
    rocm = re.match(r"\d+\.\d+", _text(root / "opt/rocm/.info/version"))
    amdgpu = (root / "sys/module/amdgpu").is_dir() and (root / "dev/kfd").exists()
    return Driver(nvidia[1] if nvidia else None, amdgpu, rocm[0] if rocm else None)


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU as its vendor's tool describes it.

    Attributes:
        vendor: "nvidia" or "amd".
        name: Product name.
        memory_gib: Its memory; None where the tool does not say.
        driver: Version of the driver; empty where the tool does not say.
        power_w: Board power now; None where it cannot be read.
        mig: Whether it is cut into MIG instances; such a GPU takes part in no pool.
    """

    vendor: str
    name: str
    memory_gib: float | None = None
    driver: str = ""
    power_w: float | None = None
    mig: bool = False


@dataclass(frozen=True, slots=True)
class GpuList:
    """The GPUs of one vendor, and why there are none where its tool failed."""

    gpus: tuple[Gpu, ...] = ()
    problem: str = ""


_NVIDIA_FIELDS = ("name", "memory.total", "driver_version", "power.draw", "mig.mode.current")


def nvidia_gpus(ask: Ask = ask, timeout_s: float = 8.0) -> GpuList:
    """NVIDIA GPUs from `nvidia-smi`; empty and without a problem where that tool is not installed."""
    answer = ask(("nvidia-smi", f"--query-gpu={','.join(_NVIDIA_FIELDS)}", "--format=csv,noheader,nounits"), timeout_s)
    if not answer.ok:
        return GpuList(problem="" if _is_absent(answer) else answer.last_line)
    rows = [row for row in csv.reader(io.StringIO(answer.stdout), skipinitialspace=True) if len(row) == len(_NVIDIA_FIELDS)]
    return GpuList(tuple(_nvidia_gpu(*row) for row in rows))


def _nvidia_gpu(name: str, memory_mib: str, driver: str, power_w: str, mig: str) -> Gpu:
    memory = _number(memory_mib)
    return Gpu("nvidia", name, memory and memory / _MIB_PER_GIB, driver, _number(power_w), mig == "Enabled")


def amd_gpus(ask: Ask = ask, timeout_s: float = 8.0) -> GpuList:
    """AMD GPUs from `amd-smi`, else from `rocm-smi`; each die of an MI250 counts, as it does for torch."""
    problems = []
    for command, parse in (
        (("amd-smi", "static", "--asic", "--vram", "--json"), _from_amd_smi),
        (("rocm-smi", "--showproductname", "--showmeminfo", "vram", "--json"), _from_rocm_smi),
    ):
        answer = ask(command, timeout_s)
        gpus = tuple(parse(_json(answer.stdout))) if answer.ok else ()
        if gpus:
            return GpuList(gpus)
        if not _is_absent(answer):
            problems.append(f"{command[0]}: {answer.last_line or 'no GPU in its answer'}")
    return GpuList(problem="; ".join(problems))


def _from_amd_smi(found: Any) -> Iterator[Gpu]:
    """A list, or since ROCm 7 an object that holds it as `gpu_data`."""
    for entry in _items(found.get("gpu_data") if isinstance(found, dict) else found):
        asic, size = _mapping(entry.get("asic")), _mapping(_mapping(entry.get("vram")).get("size"))
        memory = _number(str(size.get("value", "")))
        in_gib = memory / _MIB_PER_GIB if memory and size.get("unit") == "MB" else memory
        yield Gpu("amd", str(asic.get("market_name", "AMD GPU")), in_gib)


def _from_rocm_smi(found: Any) -> Iterator[Gpu]:
    """An object per card; the keys' capitals differ between releases."""
    cards = found.items() if isinstance(found, dict) else ()
    for card, entry in cards:
        if not card.startswith("card") or not isinstance(entry, dict):
            continue
        lower = {key.lower(): value for key, value in entry.items()}
        memory = _number(str(lower.get("vram total memory (b)", "")))
        yield Gpu("amd", str(lower.get("card series", "AMD GPU")), memory and memory / _MIB_PER_GIB**3)


def _items(found: Any) -> list[dict[str, Any]]:
    return [entry for entry in found if isinstance(entry, dict)] if isinstance(found, list) else []


def _mapping(found: Any) -> dict[str, Any]:
    """`found` where it is an object: AMD's tools put "N/A" in its place."""
    return found if isinstance(found, dict) else {}


def _is_absent(answer: Answer) -> bool:
    return answer.returncode is None and "No such file" in answer.stderr


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None


@dataclass(frozen=True, slots=True)
class RankPython:
    """What the interpreter that runs the ranks has.

    Attributes:
        python: Its version.
        torch: Version of torch; None where it is missing or cannot be imported.
        cuda: CUDA release that torch was built for.
        hip: ROCm release that torch was built for.
        visible_gpus: GPUs that torch can use now.
        megatron_core: Version of megatron-core; None where it is missing.
        problem: Why something could not be found out.
    """

    python: str = ""
    torch: str | None = None
    cuda: str | None = None
    hip: str | None = None
    visible_gpus: int = 0
    megatron_core: str | None = None
    problem: str = ""


_RANK_PROBE = """
import importlib.metadata, json, platform
facts = {"python": platform.python_version()}
try:
    facts["megatron_core"] = importlib.metadata.version("megatron-core")
except importlib.metadata.PackageNotFoundError:
    pass
try:
    import torch
    facts.update(torch=torch.__version__, cuda=torch.version.cuda, hip=torch.version.hip)
    facts.update(visible_gpus=torch.cuda.device_count() if torch.cuda.is_available() else 0)
except (ImportError, OSError, RuntimeError) as error:
    facts["problem"] = str(error).strip()
print("facts:" + json.dumps(facts))
"""


def rank_python(python: str, ask: Ask = ask, timeout_s: float = 12.0) -> RankPython:
    """Imports torch in `python`, in a process of its own, and reports what it is."""
    answer = ask((python, "-c", _RANK_PROBE), timeout_s)
    found = re.search(r"^facts:(.*)$", answer.stdout, re.MULTILINE)
    if found is None:
        crash = f"ended by signal {-answer.returncode}" if answer.returncode and answer.returncode < 0 else answer.last_line
        return RankPython(problem=crash or "no answer")
    facts: dict[str, Any] = json.loads(found[1])
    if facts.get("torch") and not facts.get("visible_gpus") and answer.stderr.strip():
        facts.setdefault("problem", answer.stderr.strip().splitlines()[0])
    return RankPython(**facts)
