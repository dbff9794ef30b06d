"""Counters of devices: wraps undone, resets and freezes recognised. Never a negative or an invented amount."""

from __future__ import annotations

import math
from typing import Any

_WRAP = 2**32
_ALL_ONES_16 = 0xFFFF
# No board draws more for long; a larger step is a fault of the counter, not energy.
_FALLBACK_LIMIT_W = 3000.0


class EnergyCounter:
    """Joules since its first reading, from a counter of ticks that may wrap or start again.

    A start from anew shows: the joules begin at 0 again. What was used between the two readings is nobody's to invent.

    Args:
        joules_per_tick: Resolution.
        limit_w: Highest power limit of the board; a step that needs over twice that is no energy.
    """

    def __init__(self, joules_per_tick: float, limit_w: float | None = None) -> None:
        self._joules_per_tick = joules_per_tick
        self._limit_w = 2.0 * (limit_w or _FALLBACK_LIMIT_W / 2.0)
        self._last: tuple[float, int] | None = None
        self._joules = 0.0

    def update(self, time_s: float, ticks: int) -> float:
        """Joules up to this reading."""
        if self._last is not None:
            step = self._step(time_s - self._last[0], ticks - self._last[1], self._last[1])
            self._joules = 0.0 if step is None else self._joules + step
        self._last = (time_s, ticks)
        return self._joules

    def _step(self, seconds: float, ticks: int, before: int) -> float | None:
        if ticks >= 0 and self._plausible(ticks, seconds):
            return ticks * self._joules_per_tick
        if _WRAP // 2 <= before < _WRAP and self._plausible(ticks + _WRAP, seconds):
            return (ticks + _WRAP) * self._joules_per_tick
        return None

    def _plausible(self, ticks: int, seconds: float) -> bool:
        # A counter that moves in steps of 100 ms may bring three of them at once.
        return ticks * self._joules_per_tick <= self._limit_w * (seconds + 0.3)


def number(value: Any) -> float | None:
    """What AMD SMI answers as a number; None for "N/A" and for fields that are all ones."""
    if isinstance(value, bool) or not isinstance(value, int | float) or value == _ALL_ONES_16:
        return None
    return float(value)


def plausible_power_w(value: float | None, limit_w: float | None) -> float | None:
    """A reading in watts, None where it cannot be right: no board in operation draws nothing, or twice its limit.

    Some firmware gives milliwatts where watts are documented; the board's limit shows which.

    Args:
        value: What the driver said.
        limit_w: Highest power limit of the board; None = unknown.
    """
    if value is None or not math.isfinite(value) or value <= 0:
        return None
    if limit_w is None or value <= 2.0 * limit_w:
        return value
    return value / 1000.0 if value / 1000.0 <= 2.0 * limit_w else None
