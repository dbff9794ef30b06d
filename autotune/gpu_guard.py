"""Who else uses a trial's GPUs: before its launch, while it runs, and whether a silent trial hangs.

A look costs a few calls of the driver and is taken once a second, from a thread of the agent. Metrics of power and heat are
`telemetry.sampler`'s; nothing here is measured for them.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Self

from autotune.host_load import describe
from autotune.telemetry import FAST_FIELDS, SLOW_FIELDS, Gpu, GpuProcess
from launchers.gpu_sample import GpuSample, Throttle
from launchers.process_tree import all_processes, below, read_process

_FIELDS = FAST_FIELDS | SLOW_FIELDS
_FREE_GIB = 2.0
_PERIOD_S = 1.0
_OWN_NAMESPACE_OF_HOST = "pid:[4026531836]"  # PROC_PID_INIT_INO of linux/proc_ns.h
_BUSY = 0.95
_HANG_POWER = 0.5
_HANG_STEPS = 5.0
_HANG_S = 10.0


def busy(gpus: Sequence[Gpu]) -> str:
    """Who holds these GPUs before a launch, when nobody of ours does; empty where they are free.

    A driver's own reserve stays below two GiB. A container may hide the processes; their memory shows all the same.
    """
    return "; ".join(found for gpu in gpus if (found := _occupant(gpu)))


def _occupant(gpu: Gpu) -> str:
    memory_gib = gpu.read(_FIELDS).memory_used_gib
    processes = gpu.processes() or ()
    if not processes and (memory_gib is None or memory_gib < _FREE_GIB):
        return ""
    size = f"{memory_gib:.1f} GiB" if memory_gib is not None else "memory"
    owners = ", ".join(owner(process.pid) for process in processes) or "a process that this container does not see"
    return f"{size} of GPU {gpu.info.index} in use by {owners}"


def owner(pid: int) -> str:
    """A process number of the host's namespace, with name and user where this process is in that namespace."""
    process = read_process(pid) if sees_host_processes() else None
    return describe(process) if process else f"pid {pid} of the host"


def sees_host_processes() -> bool:
    """Whether process numbers here are the host's, which drivers report."""
    try:
        return os.readlink("/proc/self/ns/pid") == _OWN_NAMESPACE_OF_HOST
    except OSError:
        return False


class GpuGuard:
    """Looks at a trial's GPUs while it is entered."""

    def __init__(self, gpus: Sequence[Gpu], roots: Callable[[], set[int]]) -> None:
        """Prepare.

        Args:
            gpus: The trial's GPUs.
            roots: Processes below which everything is the trial's own.
        """
        self._gpus = tuple(gpus)
        self._roots = roots
        self._found: dict[str, None] = {}
        self._memory_before_gib = [gpu.read(_FIELDS).memory_used_gib for gpu in self._gpus]
        self._limit_before_w = [gpu.read(_FIELDS).power_limit_w for gpu in self._gpus]
        self._foreign_memory = ""
        self._typical_w: list[float] = []
        self._last: list[GpuSample] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="gpu-guard", daemon=True)

    def __enter__(self) -> Self:
        """Begin to look."""
        if self._gpus:
            self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """End; the trial's own processes have ended by now, so what memory is left is somebody else's."""
        self._over.set()
        if self._thread.ident is not None:
            self._thread.join()
        for gpu, before_gib in zip(self._gpus, self._memory_before_gib, strict=True):
            now_gib = gpu.read(_FIELDS).memory_used_gib
            if before_gib is not None and now_gib is not None and now_gib - before_gib > _FREE_GIB:
                self._foreign(f"{now_gib - before_gib:.1f} GiB of GPU {gpu.info.index} are in use after the trial's end")

    @property
    def disturbances(self) -> tuple[str, ...]:
        """What disturbed the trial, once each."""
        return tuple(self._found)

    @property
    def foreign_memory(self) -> str:
        """Who held memory of the trial's GPUs beside it: running out of it is then not the configuration's fault."""
        return self._foreign_memory

    def hangs(self, silent_s: float, step_s: float) -> str:
        """Why a trial without a step for `silent_s` hangs, empty where nothing says so: all GPUs busy at a fraction of their power.

        Ranks that wait in a collective spin: their GPUs show full utilisation and draw little.

        Args:
            silent_s: Seconds since the last step.
            step_s: Seconds of a usual step.
        """
        samples, typical_w = self._last, self._typical_w
        if silent_s < max(_HANG_S, _HANG_STEPS * step_s) or not samples or len(typical_w) < len(samples):
            return ""
        spins = [
            sample.utilization is not None
            and sample.utilization >= _BUSY
            and sample.power_w is not None
            and sample.power_w < _HANG_POWER * usual_w
            for sample, usual_w in zip(samples, typical_w, strict=True)
        ]
        if not all(spins):
            return ""
        now_w, usual_w = sum(sample.power_w or 0.0 for sample in samples), sum(typical_w)
        return f"GPUs spin at {now_w:.0f} W in place of {usual_w:.0f} W, without a step for {silent_s:.0f} s"

    def stepped(self) -> None:
        """A step ended: what the GPUs draw now is usual."""
        watts = [sample.power_w for sample in self._last]
        if watts and all(value is not None for value in watts):
            now_w = [value for value in watts if value is not None]
            self._typical_w = [max(pair) for pair in zip(now_w, self._typical_w or now_w, strict=True)]

    def _watch(self) -> None:
        while not self._over.wait(_PERIOD_S):
            self.look()

    def look(self) -> None:
        """Look at every GPU once."""
        self._last = [gpu.read(_FIELDS) for gpu in self._gpus]
        own = self._own() if sees_host_processes() else None
        for gpu, sample, limit_w in zip(self._gpus, self._last, self._limit_before_w, strict=True):
            self._look(gpu, sample, limit_w, own)

    def _look(self, gpu: Gpu, sample: GpuSample, limit_w: float | None, own: set[int] | None) -> None:
        name = f"GPU {gpu.info.index}"
        if own is not None:
            for process in gpu.processes() or ():
                if process.pid not in own and not self._over.is_set():
                    self._foreign(f"{owner(process.pid)} uses {name}{_size(process)}")
        if sample.clocks_locked:
            self._found[f"somebody locked the clocks of {name}"] = None
        if Throttle.POWER_BRAKE in (sample.throttling or ()):
            self._found[f"{name} was throttled from outside (power brake)"] = None
        if limit_w is not None and sample.power_limit_w is not None and abs(sample.power_limit_w - limit_w) > 1.0:
            self._found[f"somebody changed the power limit of {name} from {limit_w:g} to {sample.power_limit_w:g} W"] = None

    def _own(self) -> set[int]:
        roots = self._roots()
        return roots | {process.pid for process in below(all_processes(), roots)}

    def _foreign(self, what: str) -> None:
        self._found[what] = None
        self._foreign_memory = self._foreign_memory or what


def _size(process: GpuProcess) -> str:
    return "" if process.memory_gib is None else f" ({process.memory_gib:.1f} GiB)"


def wait_until_free(gpus: Sequence[Gpu], limit_s: float, stop: Callable[[], bool]) -> str:
    """Wait for somebody else to leave the GPUs; who still holds them at the limit, empty where they are free."""
    deadline_s = time.monotonic() + limit_s
    while (found := busy(gpus)) and time.monotonic() < deadline_s and not stop():
        time.sleep(min(_PERIOD_S, limit_s))
    return found
