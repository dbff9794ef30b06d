"""Curves of energy over time: what all metrics of power are taken from.

A package (a board, or the two dies that share one) has up to two: from the device's energy counter, and from its power readings
by the trapezoid rule. Both are piecewise linear, so that means over any window are exact differences.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from autotune.telemetry.series import Array, Series

COUNTER, INTEGRATED = "counter", "integrated"
# Readings further apart than this show nothing of what was between them.
MAX_GAP_S = 1.0
_MISMATCH = 0.15
_FEW_JOULES = 1.0
_MANY_READINGS = 20
_CLOCK_MOVED = 0.1


@dataclass(frozen=True, slots=True)
class Curve:
    """Cumulative energy.

    Attributes:
        times: Unix, s, rising.
        joules: At those times.
        missing_s: Seconds inside it that no reading covers.
        resets: Times that its counter started again, each of which hides the energy between two readings.
    """

    times: Array
    joules: Array
    missing_s: float = 0.0
    resets: int = 0

    def at(self, times: Array) -> Array:
        """Joules at these times, constant outside."""
        found: Array = np.interp(times, self.times, self.joules)
        return found

    def energy_j(self, start_s: float, end_s: float) -> float:
        """Joules between two times."""
        first, last = self.at(np.array([start_s, end_s]))
        return float(last - first)

    def covers(self, start_s: float, end_s: float) -> bool:
        """Whether it reaches over the window, but for a gap that shows nothing anyway, with no hole."""
        if len(self.times) < 2:  # noqa: PLR2004
            return False
        return not self.missing_s and self.times[0] <= start_s + MAX_GAP_S / 2 and self.times[-1] >= end_s - MAX_GAP_S / 2

    def is_dense(self, start_s: float, end_s: float) -> bool:
        """Whether no two of its points in the window are so far apart that nothing shows what was between them."""
        first, last = np.searchsorted(self.times, [start_s, end_s])
        return self.covers(start_s, end_s) and bool(np.all(np.diff(self.times[max(first - 1, 0) : last + 1]) <= MAX_GAP_S))


@dataclass(frozen=True, slots=True)
class Package:
    """What draws power as one.

    Attributes:
        key: `GpuInfo.package`.
        series: Its dies or, mostly, its only GPU.
        fine: From power readings, for windows below 1 s; None where it has no power sensor that can be believed.
        best: From the counter where that can be trusted, else the same as `fine`; None where nothing can be known.
        energy: The same, for energy and means: without a counter, from the device's own average where it tells one.
        source: `COUNTER` or `INTEGRATED`; empty where nothing can be known.
        flags: What was wrong, by name.
    """

    key: str
    series: tuple[Series, ...]
    fine: Curve | None
    best: Curve | None
    energy: Curve | None
    source: str
    flags: dict[str, str] = field(default_factory=dict)


def packages_of(series: Sequence[Series], start_s: float, end_s: float) -> list[Package]:
    """The packages of these GPUs, judged over one window; MIG's boards are left out: their power cannot be told apart."""
    groups: dict[tuple[int, str], list[Series]] = {}
    for one in series:
        if not one.info.mig:
            groups.setdefault((one.node, one.info.package), []).append(one)
    return [_package(key, tuple(members), start_s, end_s) for (_, key), members in groups.items()]


def _package(key: str, members: tuple[Series, ...], start_s: float, end_s: float) -> Package:
    """Of two dies the one that tells more watts speaks for both: the other repeats it, or tells nothing."""
    curves = [(one, integrated(one, start_s, end_s), counted(one, start_s, end_s)) for one in members]
    speaker, fine, counter = max(curves, key=lambda entry: max(_joules(curve, start_s, end_s) for curve in entry[1:]))
    flags: dict[str, str] = {}
    if fine is not None and is_frozen(speaker, start_s, end_s):
        fine, flags["sensor_frozen"] = None, "the power sensor stood still while the clock changed"
    if counter is not None and (problem := _distrust(counter, fine, start_s, end_s)):
        flags |= problem
        counter = counter if "energy_mismatch" in problem or fine is None else None
    average = integrated(speaker, start_s, end_s, "average_power_w") if fine is not None else None
    source = COUNTER if counter is not None else INTEGRATED if fine is not None else ""
    return Package(key, members, fine, counter or fine, counter or average or fine, source, flags)


def is_frozen(series: Series, start_s: float, end_s: float) -> bool:
    """Whether many power readings in a row were the same although the clock moved by a tenth or more."""
    times, watts = series.column("power_w")
    stamps, clocks = series.column("sm_clock_mhz")
    watts = watts[(times >= start_s) & (times <= end_s)]
    clocks = clocks[(stamps >= start_s) & (stamps <= end_s)]
    if len(watts) < _MANY_READINGS or not len(clocks) or np.ptp(watts) > 0.0:
        return False
    return bool(np.ptp(clocks) > _CLOCK_MOVED * np.max(clocks))


def _joules(curve: Curve | None, start_s: float, end_s: float) -> float:
    return -1.0 if curve is None else curve.energy_j(start_s, end_s)


def _distrust(counter: Curve, fine: Curve | None, start_s: float, end_s: float) -> dict[str, str]:
    """Why a counter is not believed, by flag."""
    told_j = counter.energy_j(start_s, end_s)
    seen_j = _joules(fine, start_s, end_s)
    if counter.resets:
        return {"counter_reset": "the energy counter started again"}
    if fine is None or not fine.covers(start_s, end_s) or seen_j < _FEW_JOULES:
        return {}
    if told_j <= 0.0:
        return {"counter_frozen": "the energy counter stood still while power was drawn"}
    if abs(told_j - seen_j) > _MISMATCH * max(told_j, seen_j):
        return {"energy_mismatch": f"the counter says {told_j:.0f} J, the power readings {seen_j:.0f} J"}
    return {}


def counted(series: Series, start_s: float, end_s: float) -> Curve | None:
    """From the energy counter, around a window; None where there is none."""
    times, joules = _around(*series.column("energy_j"), start_s, end_s)
    if not len(times):
        return None
    steps = np.diff(joules)
    return Curve(times, np.concatenate([[0.0], np.cumsum(np.clip(steps, 0.0, None))]), resets=int(np.count_nonzero(steps < 0)))


def integrated(series: Series, start_s: float, end_s: float, sensor: str = "power_w") -> Curve | None:
    """From power readings, around a window; None where there are none."""
    times, watts = _around(*series.column(sensor), start_s, end_s)
    if not len(times):
        return None
    steps = np.diff(times)
    holes = steps > MAX_GAP_S
    joules = np.concatenate([[0.0], np.cumsum(np.where(holes, 0.0, steps * (watts[1:] + watts[:-1]) / 2.0))])
    return Curve(times, joules, float(steps[holes].sum()))


def _around(times: Array, values: Array, start_s: float, end_s: float) -> tuple[Array, Array]:
    """The readings of a window, with one more on each side."""
    first = max(0, int(np.searchsorted(times, start_s)) - 1)
    last = int(np.searchsorted(times, end_s)) + 1
    return times[first:last], values[first:last]


def total(curves: Sequence[Curve]) -> Curve:
    """Their sum over the time that all of them cover."""
    times = np.unique(np.concatenate([curve.times for curve in curves]))
    start_s = max(float(curve.times[0]) for curve in curves)
    end_s = min(float(curve.times[-1]) for curve in curves)
    times = times[(times >= start_s) & (times <= end_s)]
    return Curve(times, np.sum([curve.at(times) for curve in curves], axis=0), max(curve.missing_s for curve in curves))
