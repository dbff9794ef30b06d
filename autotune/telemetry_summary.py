"""What a trial's telemetry says in the window of its steady steps: metrics by name, and marks for all that a reader must know.

A metric that cannot be had is absent and a mark says why. Power is that of boards (`gpu_`, `pool_gpu_`) or, where a command reads
it, that of whole nodes at the wall (`node_wall_`, `pool_wall_`), never one for the other.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from autotune import power_metrics, throttle_metrics
from autotune.power_curves import COUNTER, INTEGRATED, Curve, Package, packages_of, total
from autotune.steady_state import Window
from autotune.telemetry.base import HOST, WALL
from autotune.telemetry.clocks import ClockOffset, on_clock_of
from autotune.telemetry.sensors import distinct
from autotune.telemetry.series import REASONS, NodeTelemetry, Series
from autotune.throttle_metrics import Throttling
from autotune.wall_metrics import BY_COMMAND, wall_metrics
from launchers.gpu_sample import Throttle

_FEW_UPDATES = 20
_MAX_MARK_CHARS = 240


@dataclass(frozen=True, slots=True)
class TrialTelemetry:
    """What all nodes of a trial measured.

    Attributes:
        nodes: By node rank.
        clocks: Each node's clock against the same third one, in the same order; empty where there is one node.
    """

    nodes: tuple[NodeTelemetry, ...] = ()
    clocks: tuple[ClockOffset, ...] = ()


@dataclass(frozen=True, slots=True)
class Summary:
    """Metrics, finite values by name, and marks in words by name."""

    metrics: dict[str, float]
    marks: dict[str, str]


def summarise_telemetry(telemetry: TrialTelemetry, window: Window | None) -> Summary:
    """Everything that telemetry tells about a trial; the window may be missing where no step was measured."""
    series = on_clock_of(telemetry.nodes, telemetry.clocks)
    charged = [one for one in series if one.charged and one.info.is_board]
    clock_bound_s = max((clock.bound_s for clock in telemetry.clocks), default=0.0)
    metrics, marks = {}, _marks_of_nodes(telemetry, charged)
    if temperatures := _values(charged, throttle_metrics.start_temperature_c):
        metrics[throttle_metrics.START_TEMPERATURE] = max(temperatures)
    if window is not None and window.length_s > 0:
        parts = (
            _power(charged, window, clock_bound_s),
            _throttling(charged, window),
            _heat_and_clocks(charged, window),
            _host([one for one in series if one.info.vendor == HOST], window),
            _wall([one for one in series if one.info.vendor == WALL], window, clock_bound_s),
        )
        for part in parts:
            metrics |= part.metrics
            marks |= part.marks
    finite = {name: float(value) for name, value in metrics.items() if math.isfinite(value)}
    return Summary(finite, {name: text[:_MAX_MARK_CHARS] for name, text in marks.items()})


def _marks_of_nodes(telemetry: TrialTelemetry, charged: Sequence[Series]) -> dict[str, str]:
    marks: dict[str, str] = {}
    for node in telemetry.nodes:
        marks |= {f"gaps.node{node.node}.{vendor}": problem for vendor, problem in node.problems.items()}
        marks[f"cost.node{node.node}"] = f"{node.cost.core_fraction:.4f} of a core, {node.cost.late} rounds late"
        for name, sensor in node.sensors.items():
            period = "unknown period" if sensor.update_period_s is None else f"a new value every {sensor.update_period_s:.3f} s"
            duty = "" if sensor.duty is None else f", sees {sensor.duty:.0%} of the time"
            marks[f"sensor.{name}"] = period + duty
        for one in (one for one in node.series if one.info.vendor == WALL):
            marks |= {f"gaps.wall.node{node.node}": why for why in one.gaps.values()}
    reasons: dict[tuple[str, str], list[str]] = {}
    for one in charged:
        for name, why in one.gaps.items():
            reasons.setdefault((name, why), []).append(str(one.info.index))
        if one.lost:
            marks[f"lost.{one.info.uuid}"] = one.lost
    marks |= {f"gaps.{name}": f"{why} (GPU {', '.join(gpus)})" for (name, why), gpus in reasons.items()}
    if len(telemetry.nodes) > 1 and telemetry.clocks:
        marks["clocks"] = "node clocks agree within " + f"{2 * max(clock.bound_s for clock in telemetry.clocks):.4f} s"
    return marks


def _values(series: Sequence[Series], of: Callable[[Series], float | None]) -> list[float]:
    return [value for one in series if (value := of(one)) is not None]


def _power(charged: Sequence[Series], window: Window, clock_bound_s: float) -> Summary:
    start_s, end_s = window.start_s, window.end_s
    packages = packages_of(charged, start_s, end_s)
    known = [package for package in packages if package.best is not None and package.best.covers(start_s, end_s)]
    metrics: dict[str, float] = {}
    marks = _power_marks(charged, packages, known, window)
    if packages:
        metrics["power_coverage_fraction"] = min(_coverage(package, window) for package in packages)
    for package in known:
        _keep_peaks(metrics, marks, "gpu_", package.fine, package.best, window)
    if known:
        means = [power_metrics.mean_power_w(curve, start_s, end_s) for package in known if (curve := package.energy) is not None]
        metrics["gpu_mean_power_w"] = sum(means) / len(means)
        metrics["gpu_max_mean_power_w"] = max(means)
    mig = any(one.info.mig for one in charged)
    if known and len(known) == len(packages) and not mig:
        _pool(metrics, marks, known, window, clock_bound_s)
    return Summary(metrics, marks)


def _coverage(package: Package, window: Window) -> float:
    """Fraction of the window in which power is known: values count, not readings that bring none."""
    curve = package.best
    if curve is None or len(curve.times) < 2:  # noqa: PLR2004
        return 0.0
    covered_s = min(float(curve.times[-1]), window.end_s) - max(float(curve.times[0]), window.start_s) - curve.missing_s
    return max(0.0, covered_s / window.length_s)


def _keep_peaks(
    metrics: dict[str, float], marks: dict[str, str], scope: str, fine: Curve | None, best: Curve | None, window: Window
) -> None:
    """Peaks over each averaging window, the largest seen so far under each name."""
    extrapolated = []
    for seconds in power_metrics.PEAK_WINDOWS_S:
        curve = fine if seconds < 1.0 else best
        if curve is None or not curve.covers(window.start_s, window.end_s):
            continue
        watts, beyond = power_metrics.peak_power_w(curve, seconds, window.start_s, window.end_s)
        name = f"{scope}peak_power_w_{seconds:g}s"
        metrics[name] = max(watts, metrics.get(name, watts))
        extrapolated += [f"{seconds:g} s"] if beyond else []
    if extrapolated:
        marks["power.extrapolated"] = f"peaks over {', '.join(extrapolated)}: the trial was shorter, its mean stands for them"


def _pool(metrics: dict[str, float], marks: dict[str, str], known: Sequence[Package], window: Window, clock_bound_s: float) -> None:
    """Sums over all packages; where clocks differ too much for a window, its peak is the sum of the nodes' peaks."""
    start_s, end_s = window.start_s, window.end_s
    best = total([package.best for package in known if package.best is not None])
    fine_curves = [package.fine for package in known if package.fine is not None]
    fine = total(fine_curves) if len(fine_curves) == len(known) else None
    _keep_peaks(metrics, marks, "pool_gpu_", fine, best, window)
    _bound_peaks(metrics, marks, known, window, clock_bound_s)
    energy_j = sum(package.energy.energy_j(start_s, end_s) for package in known if package.energy is not None)
    metrics["pool_gpu_energy_j"] = energy_j
    metrics["pool_gpu_mean_power_w"] = energy_j / window.length_s
    if (varying := fine or best).is_dense(start_s, end_s):
        _keep_variation(metrics, varying, window)
    if energy_j > 0 and window.tokens:
        metrics["joules_per_token"] = power_metrics.joules_per_token(energy_j, window.tokens)
        metrics["tokens_per_s_per_kw"] = power_metrics.tokens_per_s_per_kw(window.tokens, energy_j)


def _keep_variation(metrics: dict[str, float], varying: Curve, window: Window) -> None:
    """Swing and ramp of the pool's watts; of readings with holes between them they would be those of straight lines."""
    if (swing_w := power_metrics.power_swing_w(varying, window.start_s, window.end_s)) is not None:
        metrics["pool_gpu_power_swing_w"] = swing_w
    if (ramp := power_metrics.power_ramp_w_per_s(varying, window.start_s, window.end_s)) is not None:
        metrics["pool_gpu_power_ramp_w_per_s"] = ramp


def _bound_peaks(
    metrics: dict[str, float], marks: dict[str, str], known: Sequence[Package], window: Window, clock_bound_s: float
) -> None:
    nodes = sorted({package.series[0].node for package in known})
    if len(nodes) < 2:  # noqa: PLR2004
        return
    bounded = []
    for seconds in power_metrics.PEAK_WINDOWS_S:
        name = f"pool_gpu_peak_power_w_{seconds:g}s"
        if name not in metrics or 2.0 * clock_bound_s <= seconds / 2.0:
            continue
        of_nodes = [[package for package in known if package.series[0].node == node] for node in nodes]
        curves = [total([c for p in members if (c := p.fine if seconds < 1.0 else p.best) is not None]) for members in of_nodes]
        metrics[name] = sum(power_metrics.peak_power_w(curve, seconds, window.start_s, window.end_s)[0] for curve in curves)
        bounded.append(f"{seconds:g} s")
    if bounded:
        marks["power.upper_bound"] = f"peaks over {', '.join(bounded)}: sums of the nodes' peaks, their clocks differ too much"


def _power_marks(
    charged: Sequence[Series], packages: Sequence[Package], known: Sequence[Package], window: Window
) -> dict[str, str]:
    marks: dict[str, str] = {}
    if sensors := {one.info.power_source for one in charged if one.info.power_source}:
        marks["power.sensor"] = ", ".join(sorted(sensors))
    sources = Counter(package.source for package in known)
    if len(sources) == 1:
        marks["energy.source"] = next(iter(sources))
    elif sources:
        marks["energy.source"] = f"mixed: {sources[COUNTER]} {COUNTER}, {sources[INTEGRATED]} {INTEGRATED}; not comparable"
    if packages and not any(package.best for package in packages):
        marks["power.unavailable"] = "no usable sensor"
    if packages and len(known) < len(packages):
        marks["power.partial"] = f"{len(known)} of {len(packages)} packages tell their power; no sum over the pool"
    if any(one.info.mig for one in charged):
        marks["power.shared"] = "MIG: the board's power is shared with other instances and belongs to no trial"
    for package in packages:
        for flag, why in package.flags.items():
            marks[f"energy.{flag}"] = f"{why} ({package.key})"
    for one in charged:
        times, watts = one.column("power_w")
        inside = watts[(times >= window.start_s) & (times <= window.end_s)]
        if len(inside) and distinct(inside) < _FEW_UPDATES and window.length_s < _FEW_UPDATES:
            marks["power.few_updates"] = (
                f"{distinct(inside)} different power readings in {window.length_s:.1f} s: peaks rest on few"
            )
    return marks


def _throttling(charged: Sequence[Series], window: Window) -> Summary:
    """Worst GPU's seconds and fractions, all GPUs' events. A GPU that cannot see throttling leaves all of it unknown."""
    found = [(one, throttle_metrics.throttling_of(one, window.start_s, window.end_s)) for one in charged]
    seen = [throttling for _, throttling in found if throttling is not None]
    marks: dict[str, str] = {}
    if any(throttle_metrics.clocks_locked(one, window.start_s, window.end_s) for one in charged):
        marks["clocks_locked"] = "somebody fixed the clocks: not comparable with GPUs that run free"
    if not charged or len(seen) < len(charged):
        if charged:
            marks["throttle.source"] = f"{len(seen)} of {len(charged)} GPUs tell throttling: events are unknown"
        return Summary({}, marks)
    marks["throttle.source"] = _sources_of(seen)
    metrics: dict[str, float] = {}
    for reason in (reason for reason in REASONS if any(reason in throttling.seconds for throttling in seen)):
        metrics[f"throttle_s_{reason}"] = max(throttling.seconds.get(reason, 0.0) for throttling in seen)
        metrics[f"throttle_events_{reason}"] = sum(throttling.counts.get(reason, 0) for throttling in seen)
    faults = [name for name in metrics if name.startswith("throttle_events_") and not name.endswith("_power_cap")]
    metrics["throttle_events"] = sum(metrics[name] for name in faults)
    metrics |= throttle_metrics.per_minute(metrics, window.length_s)
    metrics["throttle_fraction"] = max(throttling.fault_s for throttling in seen) / window.length_s
    if "throttle_s_power_cap" in metrics:
        metrics["power_cap_fraction"] = min(1.0, metrics["throttle_s_power_cap"] / window.length_s)
    if metrics["throttle_events"]:
        worst = max(found, key=lambda pair: pair[1].fault_s if pair[1] else 0.0)[0].info
        marks["throttle.worst_gpu"] = f"{worst.index} {worst.uuid}"
    return Summary(metrics, marks)


def _sources_of(seen: Sequence[Throttling]) -> str:
    """Counters, sampled bits, or which reasons are from bits where most are from counters."""
    by_source: dict[str, set[Throttle]] = {}
    for throttling in seen:
        for reason, source in throttling.sources.items():
            by_source.setdefault(source, set()).add(reason)
    if len(by_source) == 1:
        return next(iter(by_source))
    sampled = ", ".join(sorted(by_source[throttle_metrics.SAMPLED_BITS]))
    return f"{throttle_metrics.COUNTERS}; {throttle_metrics.SAMPLED_BITS} for {sampled}"


def _heat_and_clocks(charged: Sequence[Series], window: Window) -> Summary:
    start_s, end_s = window.start_s, window.end_s
    metrics: dict[str, float] = {}
    if deficits := _values(charged, lambda one: throttle_metrics.clock_deficit(one, start_s, end_s)):
        metrics["clock_deficit"] = max(deficits)
    clocks = _values(charged, lambda one: throttle_metrics.clock_under_load_mhz(one, start_s, end_s))
    if (ratio := throttle_metrics.straggler_ratio(clocks)) is not None:
        metrics["straggler_ratio"] = ratio
    for name in ("temperature_c", "memory_temperature_c"):
        if peaks := _values(charged, lambda one, name=name: throttle_metrics.peak_temperature_c(one, name, start_s, end_s)):  # type: ignore[misc]
            metrics[f"peak_{name}"] = max(peaks)
    if slopes := _values(charged, lambda one: throttle_metrics.slope_c_per_min(*one.column("temperature_c"), start_s, end_s)):
        metrics["temperature_slope_c_per_min"] = max(slopes, key=abs)
    return Summary(metrics, {})


def _host(zones: Sequence[Series], window: Window) -> Summary:
    """CPU packages and memory, where the kernel lets us read them."""
    curves = [package.best for package in packages_of(zones, window.start_s, window.end_s) if package.best is not None]
    if not curves or not all(curve.covers(window.start_s, window.end_s) for curve in curves):
        return Summary({}, {})
    energy_j = total(curves).energy_j(window.start_s, window.end_s)
    metrics = {"host_energy_j": energy_j, "host_mean_power_w": energy_j / window.length_s}
    if window.tokens:
        metrics["host_joules_per_token"] = power_metrics.joules_per_token(energy_j, window.tokens)
    return Summary(metrics, {})


def _wall(meters: Sequence[Series], window: Window, clock_bound_s: float) -> Summary:
    """What the nodes' own command read."""
    return Summary(*wall_metrics({one.node: one.column("power_w") for one in meters}, window, BY_COMMAND, clock_bound_s))
