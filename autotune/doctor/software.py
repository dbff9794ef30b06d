"""Checks of what is installed: Python, torch against the GPU driver, megatron-core, Ray. Each judges facts read before."""

from __future__ import annotations

from autotune.doctor.finding import Finding, Status
from autotune.probes import Answer, Driver, RankPython

MINIMUM_PYTHON = (3, 11)
TESTED_PYTHONS = ((3, 11), (3, 12))
# Oldest driver for each CUDA major release, by minor version compatibility:
# https://docs.nvidia.com/deploy/cuda-compatibility/minor-version-compatibility.html, table 1.
MINIMUM_NVIDIA_DRIVER = {11: 450, 12: 525, 13: 580}
# PyTorch's wheel variants by the oldest driver that runs them, newest first. GPUs from Blackwell on need cu128, and come with 570.
CUDA_WHEELS = ((580, "cu130"), (570, "cu128"), (525, "cu126"))
WHEEL_INDEX = "https://download.pytorch.org/whl"


def check_python(version: tuple[int, int]) -> Finding:
    """Whether autotune's own Python is new enough, and one that the tests run on."""
    text = ".".join(map(str, version))
    if version < MINIMUM_PYTHON:
        return Finding("Python", Status.FAIL, f"{text} is too old", "install Python 3.11, then `make quickstart PYTHON=python3.11`")
    if version not in TESTED_PYTHONS:
        return Finding("Python", Status.WARN, f"{text} is not among the tested versions (3.11, 3.12)", "use Python 3.11 or 3.12")
    return Finding("Python", Status.OK, text)


def check_torch(ranks: RankPython, driver: Driver, python: str = "python") -> Finding:
    """Whether the ranks' torch can use the GPUs whose driver is loaded.

    Args:
        ranks: What the ranks' interpreter has.
        driver: Loaded GPU drivers.
        python: The interpreter's name for the install line.
    """
    fix = torch_install_line(driver, python)
    if ranks.torch is None:
        return Finding("torch", Status.FAIL, ranks.problem or "not installed", fix)
    build = _build(ranks)
    if ranks.visible_gpus:
        return Finding("torch", Status.OK, f"{build}; {ranks.visible_gpus} GPU(s) usable")
    if driver.nvidia is None and not driver.amdgpu:
        return _without_driver(ranks, build, fix)
    wanted = "CUDA" if driver.nvidia else "ROCm"
    has = "CUDA" if ranks.cuda else "ROCm" if ranks.hip else "CPU"
    if has != wanted:
        detail = f"{build}, but this machine's GPUs need a {wanted} build: only CPU pools can be tuned"
        return Finding("torch", Status.WARN if has == "CPU" else Status.FAIL, detail, fix)
    if ranks.cuda and driver.nvidia and _major(driver.nvidia) < _minimum_driver(ranks.cuda):
        detail = f"{build} needs NVIDIA driver {_minimum_driver(ranks.cuda)} or newer, and {driver.nvidia} is loaded"
        return Finding("torch", Status.FAIL, detail, fix)
    reason = f" ({ranks.problem})" if ranks.problem else ""
    return Finding("torch", Status.FAIL, f"{build} fits the driver but sees no GPU{reason}", _no_access(wanted))


def torch_install_line(driver: Driver, python: str = "python") -> str:
    """The pip command that installs a torch build for the loaded driver."""
    if driver.nvidia:
        fitting = [variant for oldest, variant in CUDA_WHEELS if _major(driver.nvidia) >= oldest]
        if not fitting:
            return f"update the NVIDIA driver {driver.nvidia} to {CUDA_WHEELS[-1][0]} or newer: no current torch runs on it"
        variant = fitting[0]
    elif driver.amdgpu:
        if driver.rocm is None:
            return f"install ROCm, then torch from {WHEEL_INDEX}/rocm<major.minor> of that release"
        variant = f"rocm{driver.rocm}"
    else:
        variant = "cpu"
    return f"{python} -m pip install --force-reinstall torch --index-url {WHEEL_INDEX}/{variant}"


def _without_driver(ranks: RankPython, build: str, fix: str) -> Finding:
    if not (ranks.cuda or ranks.hip):
        return Finding("torch", Status.OK, f"{build}; no GPU driver: CPU pools only")
    detail = f"{build}, but no GPU driver is loaded: CPU pools only"
    return Finding("torch", Status.WARN, detail, f"with GPUs here: load their driver; without: {fix} saves several GB")


def _build(ranks: RankPython) -> str:
    kind = f"CUDA {ranks.cuda}" if ranks.cuda else f"ROCm {ranks.hip}" if ranks.hip else "CPU"
    return f"{ranks.torch}, {kind} build"


def _no_access(wanted: str) -> str:
    if wanted == "CUDA":
        return "run nvidia-smi; in a container start it with --gpus all; check CUDA_VISIBLE_DEVICES and the rights on /dev/nvidia*"
    return "add yourself to the groups video and render; in a container pass --device=/dev/kfd --device=/dev/dri"


def _minimum_driver(cuda: str) -> int:
    """Oldest driver for a CUDA release; the newest known floor for one that is newer than the table."""
    return MINIMUM_NVIDIA_DRIVER.get(_major(cuda), max(MINIMUM_NVIDIA_DRIVER.values()))


def _major(version: str) -> int:
    return int(version.split(".", maxsplit=1)[0])


def check_megatron(ranks: RankPython, python: str = "python") -> Finding:
    """Whether the ranks have the megatron-core release that was tested on their Python."""
    wanted = "0.16" if _python(ranks) < (3, 12) else "0.19"
    fix = f"{python} -m pip install 'megatron-core=={wanted}.*'"
    if ranks.megatron_core is None:
        return Finding("megatron-core", Status.FAIL, "not installed", fix)
    if not ranks.megatron_core.startswith(f"{wanted}."):
        detail = f"{ranks.megatron_core} on Python {ranks.python} is not tested: {wanted}.x is"
        return Finding("megatron-core", Status.WARN, detail, fix)
    return Finding("megatron-core", Status.OK, ranks.megatron_core)


def _python(ranks: RankPython) -> tuple[int, int]:
    major, minor, *_ = (*ranks.python.split("."), "0", "0") if ranks.python else ("3", "11")
    return int(major), int(minor)


RAY_PROBE = "import ray; print(ray.__version__)"


def check_ray(answer: Answer, python: str = "python") -> Finding:
    """Judges `import ray`, done in a process of its own: a broken amdsmi crashes it.

    Args:
        answer: What `python -c RAY_PROBE` said.
        python: The interpreter's name for the install line.
    """
    if answer.ok:
        return Finding("Ray", Status.OK, answer.last_line)
    if "amdsmi" in answer.stderr or "libamd_smi" in answer.stderr:
        cause = "whose library libamd_smi.so is missing or of another ROCm release"
        detail = f"`import ray` crashes inside the package amdsmi, {cause}: {answer.last_line}"
        fix = (
            f"{python} -m pip uninstall amdsmi, or on an AMD node install the amdsmi of that node's ROCm (/opt/rocm/share/amd_smi)"
        )
        return Finding("Ray", Status.FAIL, detail, fix)
    if answer.returncode is None:
        return Finding(
            "Ray", Status.FAIL, f"`import ray`: {answer.last_line}", "see whether the disk of the environment is slow or full"
        )
    return Finding("Ray", Status.FAIL, answer.last_line or "`import ray` failed", f"{python} -m pip install 'ray[tune]>=2.60,<3'")
