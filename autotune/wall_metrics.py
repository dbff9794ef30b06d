"""Watts at the wall in a trial's window, as measured: by each node's own command while it ran, or from a site's log afterwards.

Readings are a second or more apart, so that a peak is told only over windows at least as long as that, and a window with a hole
tells nothing. What is estimated from boards is `metrics.derived`'s, and has `_estimated` at the end of its name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from autotune.power_curves import Curve, total
from autotune.power_metrics import PEAK_WINDOWS_S, joules_per_token, mean_power_w, peak_power_w
from autotune.steady_state import Window
from autotune.telemetry.series import Array

ESTIMATED = "_estimated"
NODE, POOL, DOMAIN = "node_wall_", "pool_wall_", "domain_"
SOURCE = "wall.source"
"""Mark that says where measured watts at the wall come from."""
BY_COMMAND = "wall_power_command"

Readings = tuple[Array, Array]
"""Unix times, rising, and watts."""

_FEWEST = 2
_HOLE_PERIODS = 3.0
_EDGE_PERIODS = 1.5
_ABOUT = 1.1


@dataclass(frozen=True, slots=True)
class WallCurve:
    """Energy of one node, or of one feed, over exactly a window.

    Attributes:
        curve: From the readings by the trapezoid rule; the outermost ones hold to the window's ends.
        period_s: Median time between two readings.
        readings: How many are inside.
    """

    curve: Curve
    period_s: float
    readings: int


def wall_curve(readings: Readings, window: Window) -> WallCurve | None:
    """The curve over a window; None where the readings do not cover it.

    They do where at least two are inside, no two neighbours are more than three periods apart, and the outermost ones are at most
    one and a half periods inside the window's ends.
    """
    times, watts = readings
    if len(times) < _FEWEST:
        return None
    period_s = float(np.median(np.diff(times)))
    near = np.abs(times - np.clip(times, window.start_s, window.end_s)) <= _HOLE_PERIODS * period_s
    times, watts = times[near], watts[near]
    inside = (times > window.start_s) & (times < window.end_s)
    if np.count_nonzero(inside) < _FEWEST or np.any(np.diff(times) > _HOLE_PERIODS * period_s):
        return None
    if times[0] > window.start_s + _EDGE_PERIODS * period_s or times[-1] < window.end_s - _EDGE_PERIODS * period_s:
        return None
    points = np.concatenate([[window.start_s], times[inside], [window.end_s]])
    levels = np.interp(points, times, watts)
    joules = np.concatenate([[0.0], np.cumsum(np.diff(points) * (levels[1:] + levels[:-1]) / 2.0)])
    return WallCurve(Curve(points, joules), period_s, int(np.count_nonzero(inside)))


def scope_metrics(scope: str, curves: Sequence[WallCurve], window: Window) -> dict[str, float]:
    """Mean, energy and peaks of what these curves add up to.

    Args:
        scope: What they are the watts of, as the start of the metrics' names.
        curves: At least one, all over the window.
        window: The steady steps.
    """
    joined = total([one.curve for one in curves])
    energy_j = joined.energy_j(window.start_s, window.end_s)
    found = {f"{scope}mean_power_w": mean_power_w(joined, window.start_s, window.end_s), f"{scope}energy_j": energy_j}
    for seconds in told_windows_s(curves):
        found[f"{scope}peak_power_w_{seconds:g}s"] = peak_power_w(joined, seconds, window.start_s, window.end_s)[0]
    return found


def told_windows_s(curves: Sequence[WallCurve]) -> tuple[float, ...]:
    """The averaging windows whose peaks these readings can tell: those that are not shorter than their period."""
    period_s = max(one.period_s for one in curves)
    return tuple(seconds for seconds in PEAK_WINDOWS_S if period_s <= _ABOUT * seconds)


def wall_metrics(
    nodes: Mapping[int, Readings], window: Window, source: str, clock_bound_s: float = 0.0
) -> tuple[dict[str, float], dict[str, str]]:
    """Metrics and marks of a trial's nodes in one window: `node_wall_` is the node that draws most, `pool_wall_` the sum of all.

    Args:
        nodes: Readings by node rank, on one clock; empty ones for a node without.
        window: The steady steps.
        source: Where the readings come from, for the mark.
        clock_bound_s: How far each node's clock may be off; beyond a quarter of an averaging window the pool's peak over it is the
            sum of the nodes' peaks.
    """
    curves = {node: wall_curve(readings, window) for node, readings in nodes.items()}
    known = [curve for curve in curves.values() if curve is not None]
    marks: dict[str, str] = {}
    if len(known) < len(curves):
        lacking = ", ".join(f"{node}" for node, curve in curves.items() if curve is None)
        marks["wall.not_covered"] = f"the readings of node {lacking} do not cover the window of {window.length_s:.1f} s"
    if not known:
        return {}, marks
    each = [scope_metrics(NODE, [curve], window) for curve in known]
    metrics = {name: max(one[name] for one in each) for name in each[0] if all(name in one for one in each)}
    del metrics[f"{NODE}energy_j"]
    marks |= {SOURCE: source} | _marks(known, window)
    if len(known) == len(curves):
        metrics |= scope_metrics(POOL, known, window)
        loose = [seconds for seconds in told_windows_s(known) if 2.0 * clock_bound_s > seconds / 2.0]
        for name in (f"peak_power_w_{seconds:g}s" for seconds in loose if len(known) > 1):
            metrics[POOL + name] = sum(one[NODE + name] for one in each)
            marks["wall.upper_bound"] = "the nodes' clocks differ too much: short peaks are sums of the nodes' peaks"
        if window.tokens:
            metrics[f"{POOL}joules_per_token"] = joules_per_token(metrics[f"{POOL}energy_j"], window.tokens)
    return metrics, marks


def _marks(known: Sequence[WallCurve], window: Window) -> dict[str, str]:
    fewest, period_s = min(curve.readings for curve in known), max(curve.period_s for curve in known)
    marks = {"wall.readings": f"{fewest} in {window.length_s:.1f} s, one every {period_s:.1f} s"}
    if beyond := [f"{seconds:g} s" for seconds in told_windows_s(known) if seconds > window.length_s]:
        marks["wall.extrapolated"] = f"peaks over {', '.join(beyond)}: the trial was shorter, its mean stands for them"
    return marks


def is_measured(name: str) -> bool:
    """Whether a metric of that name is measured watts or joules at the wall."""
    return name.startswith((NODE, POOL, DOMAIN)) and not name.endswith(ESTIMATED)


def judged_on(name: str, metrics: Mapping[str, float]) -> str:
    """The metric that a limit named `name` is judged on: watts at the wall are measured where they can be, else estimated."""
    measured = name.removesuffix(ESTIMATED)
    return next((one for one in (measured, measured + ESTIMATED) if one in metrics), name)


def wall_words(metrics: Mapping[str, float], environment: Mapping[str, str]) -> str:
    """A trial's mean watts at the wall and where they come from; empty where they are not even estimated."""
    name = judged_on(f"{POOL}mean_power_w", metrics)
    if name not in metrics:
        return ""
    source = environment.get(f"telemetry.{SOURCE}", "") if is_measured(name) else ""
    return f"{metrics[name]:,.0f} W " + (f"(measured, {source})" if source else "(estimated from its boards)")
