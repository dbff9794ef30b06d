"""Metrics of throttling, clocks and heat, one function each, over the readings of one GPU in one window."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autotune.telemetry.series import REASONS, Array, Series, has_reason
from launchers.gpu_sample import FAULTS, Throttle

Flags = NDArray[np.bool_]

COUNTERS, SAMPLED_BITS = "counters", "sampled bits"
START_TEMPERATURE = "start_temperature_c"
"""Metric: of a trial's warmest GPU before its ranks start."""
_EVENTS = "throttle_events"
# Counters of throttling move in steps of up to 100 ms: two growths with less between them are one event.
_APART_S = 0.25
_MIN_LOAD = 0.5
_FEWEST_FOR_SLOPE = 4


@dataclass(frozen=True, slots=True)
class Throttling:
    """One GPU's throttling in one window.

    Attributes:
        seconds: By reason; a reason that cannot be seen is no key.
        counts: Events by reason, the same keys.
        sources: `COUNTERS` or `SAMPLED_BITS`, the same keys.
        fault_s: Seconds in which any reason of `FAULTS` was active; overlaps count once, as far as readings tell.
    """

    seconds: dict[Throttle, float]
    counts: dict[Throttle, int]
    sources: dict[Throttle, str]
    fault_s: float


def throttling_of(series: Series, start_s: float, end_s: float) -> Throttling | None:
    """Seconds and events by reason: from cumulative counters, else from sampled reason bits; None where neither exists.

    A bit that is set while the GPU idles is not counted: some firmware never clears it.
    """
    seconds: dict[Throttle, float] = {}
    counts: dict[Throttle, int] = {}
    sources: dict[Throttle, str] = {}
    faults: list[tuple[Array, Array]] = []
    for reason in REASONS:
        found = _from_counter(series, reason) or _from_bits(series, reason)
        if found is None:
            continue
        times, active_s, sources[reason] = found
        seconds[reason] = float(np.sum(active_s * _shares(times, start_s, end_s)))
        counted = _counted(series, reason, start_s, end_s)
        counts[reason] = _runs(times, active_s, start_s, end_s) if counted is None else counted
        if reason in FAULTS:
            faults.append((times, active_s))
    return Throttling(seconds, counts, sources, _overlapping(faults, start_s, end_s)) if seconds else None


def per_minute(metrics: Mapping[str, float], window_s: float) -> dict[str, float]:
    """Events per minute beside every count of events of a window: 60 x events / seconds.

    Args:
        metrics: `throttle_events` and `throttle_events_<reason>` among others.
        window_s: Length of the window.
    """
    counts = {name: value for name, value in metrics.items() if name.startswith(_EVENTS)}
    return {name.replace(_EVENTS, f"{_EVENTS}_per_minute"): 60.0 * count / window_s for name, count in counts.items()}


def _from_counter(series: Series, reason: Throttle) -> tuple[Array, Array, str] | None:
    """Seconds gained between each two readings; a counter that started again gained nothing."""
    times, values = series.column(f"throttle_s.{reason}")
    if len(times) < 2:  # noqa: PLR2004
        return None
    return times, np.clip(np.diff(values), 0.0, None), COUNTERS


def _from_bits(series: Series, reason: Throttle) -> tuple[Array, Array, str] | None:
    """A bit holds from the reading that shows it to the next.

    Where reasons were worked out from counters, without bits of the device, a reason that has no counter cannot be seen.
    """
    times, masks = series.column("throttling")
    has_counters = any(f"throttle_s.{other}" in series.columns for other in REASONS)
    if len(times) < 2 or (has_counters and "reason_bits" not in series.columns):  # noqa: PLR2004
        return None
    active = has_reason(masks, reason) & ~_idle(series, times)
    steps = np.diff(times)
    return times, np.where(active[:-1], np.minimum(steps, 2.0 * np.median(steps)), 0.0), SAMPLED_BITS


def _idle(series: Series, times: Array) -> Flags:
    known, idle = series.column("idle")
    if not len(known):
        known, load = series.column("utilization")
        idle = (load == 0.0).astype(float)
    found: Flags = _held(known, idle, times) > 0.0
    return found


def _held(known: Array, values: Array, times: Array) -> Array:
    """The last value before each time, 0 where nothing is known."""
    if not len(known):
        return np.zeros(len(times))
    found: Array = values[np.clip(np.searchsorted(known, times, side="right") - 1, 0, None)]
    return found


def _shares(times: Array, start_s: float, end_s: float) -> Array:
    """Which share of each step between two readings lies in the window."""
    overlap = np.minimum(times[1:], end_s) - np.maximum(times[:-1], start_s)
    shares: Array = np.clip(overlap, 0.0, None) / np.diff(times)
    return shares


def _counted(series: Series, reason: Throttle, start_s: float, end_s: float) -> int | None:
    times, values = series.column(f"throttle_counts.{reason}")
    if not len(times):
        return None
    first, last = _held(times, values, np.array([start_s, end_s]))
    return int(last - first)


def _runs(times: Array, active_s: Array, start_s: float, end_s: float) -> int:
    """Stretches of growth that reach into the window, those less than 0.25 s apart taken as one."""
    growing = np.flatnonzero((active_s > 0.0) & (times[1:] > start_s) & (times[:-1] < end_s))
    if not len(growing):
        return 0
    quiet_s = times[growing[1:]] - times[growing[:-1] + 1]
    return int(1 + np.count_nonzero(quiet_s >= _APART_S))


def _overlapping(faults: list[tuple[Array, Array]], start_s: float, end_s: float) -> float:
    """Between two readings the largest reason counts, as reasons may act together; so does the larger of two ways of reading."""
    if not faults:
        return 0.0
    times = faults[0][0]
    alike = [active_s for other, active_s in faults if len(other) == len(times)]
    together = float(np.sum(np.max(alike, axis=0) * _shares(times, start_s, end_s)))
    apart = [float(np.sum(active_s * _shares(other, start_s, end_s))) for other, active_s in faults if len(other) != len(times)]
    return min(max([together, *apart]), end_s - start_s)


def clock_under_load_mhz(series: Series, start_s: float, end_s: float) -> float | None:
    """Mean clock of the compute units over readings of the window in which the GPU worked; None where there are none."""
    times, clocks = series.column("sm_clock_mhz")
    inside = (times >= start_s) & (times <= end_s)
    known, load = series.column("utilization")
    idle = _idle(series, times)
    busy = inside & ~idle & ((_held(known, load, times) >= _MIN_LOAD) if len(known) else np.full(len(times), True))
    return float(np.mean(clocks[busy])) if np.any(busy) else None


def clock_deficit(series: Series, start_s: float, end_s: float) -> float | None:
    """1 - mean clock under load / highest clock of the device."""
    clock_mhz, highest_mhz = clock_under_load_mhz(series, start_s, end_s), series.info.max_sm_clock_mhz
    return 1.0 - clock_mhz / highest_mhz if clock_mhz is not None and highest_mhz else None


def straggler_ratio(clocks_mhz: list[float]) -> float | None:
    """Median GPU's clock over the slowest one's; 1 where all are alike, None for a single GPU."""
    return float(np.median(clocks_mhz) / min(clocks_mhz)) if len(clocks_mhz) > 1 and min(clocks_mhz) > 0 else None


def start_temperature_c(series: Series) -> float | None:
    """The first reading, before the ranks start."""
    _, celsius = series.column("temperature_c")
    return float(celsius[0]) if len(celsius) else None


def peak_temperature_c(series: Series, name: str, start_s: float, end_s: float) -> float | None:
    """Highest reading of a temperature in the window."""
    times, celsius = series.column(name)
    inside = celsius[(times >= start_s) & (times <= end_s)]
    return float(np.max(inside)) if len(inside) else None


def slope_c_per_min(times: Array, celsius: Array, start_s: float, end_s: float) -> float | None:
    """How fast a temperature changes in a window: 60 times its least-squares slope over the seconds.

    Devices tell whole degrees: one degree gained in the middle of W seconds shows as 90 / W. The median of the slopes between all
    pairs of readings (Theil-Sen) is 0 for any one such degree, and would call a device settled that gains one in every window.

    Returns:
        None where fewer than four readings, or readings over less than half of the window, tell it.
    """
    inside = (times >= start_s) & (times <= end_s)
    seconds, values = times[inside], celsius[inside]
    if len(seconds) < _FEWEST_FOR_SLOPE or seconds[-1] - seconds[0] < 0.5 * (end_s - start_s):
        return None
    centred = seconds - seconds.mean()
    variance = float(centred @ centred)
    return 60.0 * float(centred @ values) / variance if variance > 0.0 else None


def clocks_locked(series: Series, start_s: float, end_s: float) -> bool:
    """Whether somebody held the clocks at any reading of the window."""
    times, locked = series.column("clocks_locked")
    return bool(np.any(locked[(times >= start_s) & (times <= end_s)] > 0.0))
