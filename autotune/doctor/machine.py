"""Checks of the machine: GPUs and the rights to measure them, the state folder's file system, free disk, shared memory."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from autotune.doctor.finding import Finding, Status
from autotune.filesystem import LockReport, filesystem_type, is_network_filesystem, lock_report
from autotune.power_limits import RestoreRecord
from autotune.probes import GpuList

# Ray stops spilling objects at 95 %, tasks then hang: warn while there is time to act.
WARN_DISK_FRACTION, FAIL_DISK_FRACTION = 0.85, 0.95
# Our private Ray takes 200 MB; gloo and NCCL take segments of their own for every pair of ranks.
WARN_SHARED_MEMORY_MIB = 512
_MIB = 1024**2


def check_gpus(nvidia: GpuList, amd: GpuList, *, root: bool) -> Finding:
    """What GPUs there are, whether their power can be read, and whether limits can be set.

    Args:
        nvidia: Answer of NVIDIA's tool.
        amd: Answer of AMD's tool.
        root: Whether this process is root, as setting power limits and clocks needs.
    """
    problems = "; ".join(filter(None, (nvidia.problem, amd.problem)))
    gpus = [gpu for gpu in (*nvidia.gpus, *amd.gpus) if not gpu.mig]
    if not gpus and problems:
        return Finding("GPUs", Status.FAIL, problems, "repair the driver (often: reboot after its update); CPU pools still work")
    if not gpus:
        return Finding("GPUs", Status.OK, "none: CPU pools only, no GPU telemetry")
    seen = ", ".join(f"{count} x {name}" for name, count in Counter(gpu.name for gpu in gpus).items())
    mig = sum(gpu.mig for gpu in nvidia.gpus)
    detail = f"{seen}{f'; {mig} more cut by MIG are left out' if mig else ''}"
    blind = [gpu for gpu in gpus if gpu.vendor == "nvidia" and gpu.power_w is None]
    if problems:
        return Finding("GPUs", Status.WARN, f"{detail}; {problems}", "repair that vendor's driver or tool")
    if blind:
        return Finding(
            "GPUs", Status.WARN, f"{detail}; {len(blind)} do not tell their power", "run outside a restricted container or VM"
        )
    rights = "limits can be set" if root else "power limits and clocks can be read, not set (that needs root)"
    return Finding("GPUs", Status.OK, f"{detail}; {rights}")


def check_power_limits(left: Sequence[RestoreRecord], problems: Sequence[str]) -> Finding:
    """Whether a killed study left changed GPU power limits on this node, and whether they are back.

    Args:
        left: What was left.
        problems: What could not be put back.
    """
    if problems:
        fix = "as root: nvidia-smi -i GPU -pl WATTS, or amd-smi set -g GPU -o WATTS; then run the doctor again"
        return Finding("power limits", Status.FAIL, "; ".join(problems), fix)
    if not left:
        return Finding("power limits", Status.OK, "no study left any changed")
    back = ", ".join(f"{record.watts:g} W on {record.uuid}" for record in left)
    return Finding("power limits", Status.OK, f"left changed by a study that was killed, now back: {back}")


def read_filesystem(state: Path) -> Finding:
    """Tests the file system of the state folder, or of its nearest parent that exists."""
    folder = nearest_existing(state)
    return check_filesystem(state, filesystem_type(folder), is_network_filesystem(folder), lock_report(folder))


def check_filesystem(state: Path, kind: str, network: bool, locks: LockReport) -> Finding:
    """Whether a study's storage can live in the state folder."""
    place = f"{state} on {'network' if network else 'local'} disk ({kind})"
    fix = "choose a state folder on a local disk, or a database server as storage"
    if not (locks.symlinks or locks.exclusive_create):
        return Finding("state folder", Status.FAIL, f"{place}: {locks.detail}", fix)
    if not locks.ok:
        return Finding(
            "state folder", Status.WARN, f"{place}: {locks.detail}", f"SQLite or one kind of journal lock fails here: {fix}"
        )
    if network:
        return Finding("state folder", Status.WARN, f"{place}; locks hold between processes of this node", f"safer: {fix}")
    return Finding("state folder", Status.OK, f"{place}; locks hold")


def read_disks(state: Path) -> list[Finding]:
    """How full the disks are that a study writes to."""
    return [read_disk("state disk", state), read_disk("temporary disk", Path(tempfile.gettempdir()))]


def read_disk(name: str, path: Path) -> Finding:
    """How full the disk of `path` is."""
    usage = shutil.disk_usage(nearest_existing(path))
    return check_disk(name, path, usage.total, usage.free)


def check_disk(name: str, path: Path, total: int, free: int) -> Finding:
    """Judges a disk of `total` bytes with `free` left."""
    used = 1 - free / total if total else 1.0
    detail = f"{path}: {used:.0%} full, {free / 1024**3:.1f} GiB free"
    fix = f"free space on the disk of {path}, or point TMPDIR elsewhere; Ray stops spilling at 95 % and tasks hang"
    if used >= FAIL_DISK_FRACTION:
        return Finding(name, Status.FAIL, detail, fix)
    return Finding(name, Status.WARN, detail, fix) if used >= WARN_DISK_FRACTION else Finding(name, Status.OK, detail)


def read_shared_memory(path: Path = Path("/dev/shm")) -> Finding:
    """How much shared memory is free."""
    return check_shared_memory(shutil.disk_usage(path).free if path.is_dir() else None)


def check_shared_memory(free: int | None) -> Finding:
    """Judges free shared memory in bytes; None where /dev/shm is absent."""
    fix = "start the container with --shm-size=8g or --ipc=host"
    if free is None:
        return Finding("shared memory", Status.FAIL, "/dev/shm is absent", fix)
    status = Status.OK if free >= WARN_SHARED_MEMORY_MIB * _MIB else Status.WARN
    return Finding("shared memory", status, f"/dev/shm: {free / _MIB:.0f} MiB free", "" if status is Status.OK else fix)


def nearest_existing(path: Path) -> Path:
    """`path` itself, or the closest folder above it that exists."""
    return next(folder for folder in (path.absolute(), *path.absolute().parents) if folder.is_dir())


def is_root() -> bool:
    """Whether this process has the rights to set device limits."""
    return os.geteuid() == 0
