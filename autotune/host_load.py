"""Who used a node's processors while a trial ran: the trial and what runs it, or somebody else.

Looks at /proc twice a second, from a thread of the agent. Not for GPUs; `telemetry` and `gpu_guard` do that.
"""

from __future__ import annotations

import os
import pwd
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from launchers.process_tree import Process, all_processes, below

TICKS_PER_S = os.sysconf("SC_CLK_TCK")
ENDED = "by processes that have ended or that this container does not see"
_PERIOD_S = 0.5
_COST_SHARE = 0.01
_BUSY_COLUMNS = (0, 1, 2, 5, 6, 7)  # user, nice, system, irq, softirq, steal: not idle, iowait, nor guest, which user holds


@dataclass(frozen=True, slots=True)
class HostLoad:
    """Processor use on a trial's cores over one period.

    Attributes:
        begin_s: Unix time of its begin.
        end_s: Unix time of its end.
        foreign_fraction: Share of the cores' time that others used, what a hypervisor took included.
        owner: The other process that used most, e.g. "stress (pid 4711, user anna)"; `ENDED` where others used something and
            none of those that still run did, empty where nobody used anything.
    """

    begin_s: float
    end_s: float
    foreign_fraction: float
    owner: str


@dataclass(frozen=True, slots=True)
class Look:
    """What /proc says at one time: busy time of the cores, of the study's own processes, and everybody else."""

    time_s: float
    busy_ticks: int
    own_ticks: int
    others: dict[tuple[int, int], Process]


class HostWatch:
    """Watches while it is entered.

    Attributes:
        loads: One entry per period, in order; complete after the exit.
    """

    def __init__(self, roots: Callable[[], Iterable[int]]) -> None:
        """Prepare.

        Args:
            roots: Processes that belong to the trial and to what runs it, with everything below them, asked at every look.
        """
        self.loads: list[HostLoad] = []
        self._roots = roots
        self._cores = frozenset(os.sched_getaffinity(0))
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="host-watch", daemon=True)

    def __enter__(self) -> Self:
        """Begin to look."""
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Look once more, and end."""
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        before, cost_s = self._look(), 0.0
        while not self._over.is_set():
            self._over.wait(max(_PERIOD_S, cost_s / _COST_SHARE))
            begin_s = time.perf_counter()
            now = self._look()
            cost_s = time.perf_counter() - begin_s
            self.loads.append(between(before, now, len(self._cores)))
            before = now

    def _look(self) -> Look:
        busy, processes, roots = busy_ticks(self._cores), all_processes(), set(self._roots())
        own = {p.key: p for p in [*below(processes, roots), *(p for p in processes if p.pid in roots)]}
        others = {process.key: process for process in processes if process.key not in own}
        return Look(time.time(), busy, sum(process.cpu_ticks + process.reaped_ticks for process in own.values()), others)


def busy_ticks(cores: frozenset[int], file: Path = Path("/proc/stat")) -> int:
    """Processor time in clock ticks since the start that these cores were not idle."""
    total = 0
    for line in file.read_text(encoding="ascii").splitlines():
        name, *columns = line.split()
        if name.startswith("cpu") and name[3:].isdigit() and int(name[3:]) in cores:
            total += sum(int(columns[column]) for column in _BUSY_COLUMNS if column < len(columns))
    return total


def between(before: Look, now: Look, num_cores: int) -> HostLoad:
    """What was used from one look to the next."""
    elapsed_s = max(now.time_s - before.time_s, 1e-3)
    foreign = (now.busy_ticks - before.busy_ticks) - max(now.own_ticks - before.own_ticks, 0)
    fraction = min(max(foreign / TICKS_PER_S / elapsed_s / num_cores, 0.0), 1.0)
    return HostLoad(before.time_s, now.time_s, fraction, _busiest(before, now) or (ENDED if fraction > 0 else ""))


def _busiest(before: Look, now: Look) -> str:
    used = {
        key: process.cpu_ticks - (before.others[key].cpu_ticks if key in before.others else 0)
        for key, process in now.others.items()
    }
    key = max(used, key=used.__getitem__, default=None)
    return describe(now.others[key]) if key is not None and used[key] > 0 else ""


def describe(process: Process) -> str:
    """A process with its owner, for a report."""
    try:
        user = _user(os.stat(f"/proc/{process.pid}").st_uid)
    except OSError:
        user = "unknown"
    return f"{process.name} (pid {process.pid}, user {user})"


def _user(number: int) -> str:
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return str(number)


def foreign_fraction(loads: Sequence[HostLoad], begin_s: float, end_s: float) -> tuple[float, str]:
    """Mean share that others used between two times, and the owner seen in the worst period; 0 and empty where nothing was seen."""
    shares = [(max(0.0, min(load.end_s, end_s) - max(load.begin_s, begin_s)), load) for load in loads]
    total_s = sum(overlap_s for overlap_s, _ in shares)
    if total_s <= 0.0:
        return 0.0, ""
    worst = max((load for overlap_s, load in shares if overlap_s > 0.0), key=lambda load: load.foreign_fraction)
    return sum(overlap_s * load.foreign_fraction for overlap_s, load in shares) / total_s, worst.owner
