"""Seconds of throttling from AMD's violation accumulators (MI300 and newer)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from launchers.gpu_sample import Throttle

# amdsmi.h, amdsmi_violation_status_t: PPT is the package power limit; PROCHOT and the regulators' heat act in hardware, the
# socket's and the memory's heat through firmware.
SOURCES: dict[Throttle, tuple[str, ...]] = {
    Throttle.POWER_CAP: ("ppt_pwr",),
    Throttle.HW_THERMAL: ("prochot_thrm", "vr_thrm"),
    Throttle.SW_THERMAL: ("socket_thrm", "hbm_thrm"),
}


class ViolationSeconds:
    """Adds up what fraction of the firmware's ticks each violation was active, times the time that passed.

    An accumulator that stands still while its "active" bit is set shows nothing: some firmware never clears that bit. Where two
    causes share a reason the larger one counts: they may overlap.
    """

    def __init__(self) -> None:
        self._last: tuple[float, Mapping[str, Any]] | None = None
        self._seconds: dict[Throttle, float] = {}

    def update(self, time_s: float, status: Mapping[str, Any]) -> tuple[dict[Throttle, float] | None, tuple[Throttle, ...] | None]:
        """Seconds by reason since the first reading, and the reasons whose accumulators grew; None where the board has none."""
        for reason, names in SOURCES.items():
            if any(_count(status, f"acc_{name}") is not None for name in names):
                self._seconds.setdefault(reason, 0.0)
        grown = self._grown(time_s, status)
        self._last = (time_s, status)
        if not self._seconds:
            return None, None
        for reason, seconds in grown.items():
            self._seconds[reason] += seconds
        return dict(self._seconds), tuple(reason for reason, seconds in grown.items() if seconds > 0.0)

    def _grown(self, time_s: float, status: Mapping[str, Any]) -> dict[Throttle, float]:
        if self._last is None:
            return {}
        before_s, before = self._last
        ticks = _growth(before, status, "acc_counter")
        if not ticks:
            return {}
        per_tick = (time_s - before_s) / ticks
        grown = {}
        for reason, names in SOURCES.items():
            counts = [count for name in names if (count := _growth(before, status, f"acc_{name}")) is not None]
            if counts:
                grown[reason] = per_tick * min(ticks, max(counts))
        return grown


def _count(status: Mapping[str, Any], name: str) -> int | None:
    value = status.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _growth(before: Mapping[str, Any], after: Mapping[str, Any], name: str) -> int | None:
    """Ticks gained; None where it cannot be told, also after a restart of the counter."""
    first, last = _count(before, name), _count(after, name)
    return last - first if first is not None and last is not None and last >= first else None
