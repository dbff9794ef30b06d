"""Sampler: reads a node's GPUs from a thread of the agent while a trial runs, each group of fields at its own period."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from autotune.telemetry.base import BLOCKING_FIELDS, FAST_FIELDS, SLOW_FIELDS, Fields, Gpu
from autotune.telemetry.series import COLUMNS, Array, Cost, Ring, Series

log = logging.getLogger(__name__)
FAST_PERIOD_S = 0.05
SLOW_PERIOD_S = 1.0
# What a blocking call leaves free between two of them; the call itself takes about 100 ms.
_BLOCKING_PAUSE_S = 0.1
_KEPT_S = 1800.0
_END_S = 5.0


@dataclass(slots=True)
class _Recorded:
    """One GPU's readings so far."""

    gpu: Gpu
    rings: dict[frozenset[Fields], Ring] = field(default_factory=dict)

    def read(self, fields: frozenset[Fields]) -> None:
        if not self.gpu.lost:
            sample = self.gpu.read(fields)
            self.rings[fields].append(sample)

    def series(self, charged: bool, node: int) -> Series:
        columns = {name: pair for ring in self.rings.values() for name, pair in ring.columns().items()}
        return Series(self.gpu.info, columns, charged, dict(self.gpu.gaps), self.gpu.lost, node)


class Sampler:
    """Reads GPUs from `start` to `stop`.

    Args:
        gpus: All GPUs of the node that can be seen.
        period_s: Period of the fast fields.
        blocks: Which GPUs have fields whose reading blocks; these get a thread of their own.
    """

    def __init__(self, gpus: Sequence[Gpu], period_s: float = FAST_PERIOD_S, blocks: Callable[[Gpu], bool] | None = None) -> None:
        self._period_s = period_s
        self._blocks = blocks or (lambda gpu: gpu.info.vendor == "amd" and "throttle_s" not in gpu.gaps)
        kept = int(_KEPT_S / period_s)
        capacities = {FAST_FIELDS: kept, SLOW_FIELDS: int(_KEPT_S / SLOW_PERIOD_S), BLOCKING_FIELDS: int(_KEPT_S / 0.1)}
        self._recorded = [
            _Recorded(gpu, {group: Ring(COLUMNS[group], capacity) for group, capacity in capacities.items()}) for gpu in gpus
        ]
        self._stop = threading.Event()
        self._threads: list[threading.Thread] = []
        self._cpu_s: dict[str, float] = {}
        self._begin_s = self._end_s = 0.0
        self._rounds = self._late = 0

    def start(self) -> None:
        """Begin to read. Returns at once, also where a driver hangs."""
        self._begin_s = time.monotonic()
        targets = {"telemetry": self._loop}
        if any(self._blocks(recorded.gpu) for recorded in self._recorded):
            targets["telemetry-blocking"] = self._loop_blocking
        for name, target in targets.items():
            thread = threading.Thread(target=self._counted, args=(name, target), name=name, daemon=True)
            self._threads.append(thread)
            thread.start()

    def lost(self) -> dict[str, str]:
        """Why GPUs stopped answering, by UUID."""
        return {recorded.gpu.info.uuid: recorded.gpu.lost for recorded in self._recorded if recorded.gpu.lost}

    def power_w(self, charged: frozenset[str], window_s: float) -> list[float]:
        """Mean board watts of each charged GPU over the last seconds; those that cannot be told are left out."""
        rings = (recorded.rings[FAST_FIELDS] for recorded in self._recorded if recorded.gpu.info.uuid in charged)
        return [watts for ring in rings if (watts := ring.recent_mean("power_w", window_s)) is not None]

    def temperatures(self, charged: frozenset[str]) -> list[tuple[Array, Array]]:
        """Times and degrees of each charged GPU that tells any, so far."""
        rings = (recorded.rings[SLOW_FIELDS] for recorded in self._recorded if recorded.gpu.info.uuid in charged)
        return [told for ring in rings if (told := ring.columns().get("temperature_c")) is not None]

    def halt(self) -> None:
        """End the reading."""
        self._stop.set()
        for thread in self._threads:
            thread.join(_END_S)
        self._end_s = self._end_s or time.monotonic()

    def stop(self, charged: frozenset[str], node: int = 0) -> tuple[tuple[Series, ...], Cost]:
        """End it; everything that was read.

        Args:
            charged: UUIDs of the GPUs that the trial ran on.
            node: The node's rank.
        """
        self.halt()
        wall_s, begin_s = self._end_s - self._begin_s, time.thread_time()
        series = tuple(recorded.series(recorded.gpu.info.uuid in charged, node) for recorded in self._recorded)
        cpu_s = sum(self._cpu_s.values()) + time.thread_time() - begin_s
        dropped = sum(ring.dropped for recorded in self._recorded for ring in recorded.rings.values())
        return series, Cost(cpu_s, wall_s, self._rounds * len(self._recorded), self._late, dropped)

    def _counted(self, name: str, loop: Callable[[], None]) -> None:
        try:
            loop()
        finally:
            self._cpu_s[name] = time.thread_time()

    def _round(self, fields: frozenset[Fields]) -> None:
        for recorded in self._recorded:
            recorded.read(fields)

    def _loop(self) -> None:
        """Fast fields of every GPU each period; of the slow ones a few GPUs each time, so that no round is long.

        All slow ones first: heat before the ranks have started. The fast ones once more at the end: a step may have ended just
        before, and a counter read too early misses what it took.
        """
        self._round(SLOW_FIELDS)
        due_s = time.monotonic()
        while not self._stop.wait(max(0.0, due_s - time.monotonic())):
            self._round(FAST_FIELDS)
            self._rounds += 1
            for recorded in self._slow_now():
                recorded.read(SLOW_FIELDS)
            due_s += self._period_s
            if (missed := int((time.monotonic() - due_s) / self._period_s)) > 0:
                self._late += missed
                due_s += missed * self._period_s
        self._round(FAST_FIELDS)
        self._rounds += 1

    def _slow_now(self) -> list[_Recorded]:
        rounds = max(1, round(SLOW_PERIOD_S / self._period_s))
        return [recorded for index, recorded in enumerate(self._recorded) if self._rounds % rounds == index * 2 % rounds]

    def _loop_blocking(self) -> None:
        while not self._stop.is_set():
            for recorded in self._recorded:
                if self._blocks(recorded.gpu):
                    recorded.read(BLOCKING_FIELDS)
                if self._stop.wait(_BLOCKING_PAUSE_S / len(self._recorded)):
                    return
