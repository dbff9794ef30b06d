"""Watts per device from a step's seconds by part: mean, peak, clock and slow-down under a limit, throttle risk.

Every part of the step has an activity (dynamic watts over those of large matrix products); hidden communication adds its own on top
of compute; waiting draws little. The peak is what a board's averaging window sees of one uninterrupted stretch of compute, so it
grows with the micro-batch; the change from waiting to full load overshoots, so pipelines with more bubble ask for more. A limit
slows the device most that needs most watts, and the others wait for it. A clock limit lowers the busy watts of the whole step, a
power limit only what passes it, and not all of that: peaks of training reach or exceed TDP (Patel et al., ASPLOS 2024). Nothing
here names a model, a split or a depth. Not for heat: temperatures depend on the chassis.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from search_spaces.clock_power import ClockCurve, PowerCoefficients, hungriest
from search_spaces.columns import Columns
from search_spaces.gpus import GpuSpec
from search_spaces.kernels import Floats, Number
from search_spaces.step_time import TimeTable

COMMUNICATION = ("tp_comm", "cp_comm", "ep_comm")
STRETCHES = 3.0  # a micro-batch's compute is one forward and a backward of twice its length
RISK_WIDTH = 0.2
PEAK_BAND = 0.2
"""How far a peak may pass the power limit, over the limit. An assumption on the side of caution: published telemetry says that
peaks of training reach or exceed TDP and that a power limit lowers them (Patel et al., ASPLOS 2024), but has no figure for so short
a window."""
_FORWARD = {
    "gemm": 1 / 3,
    "attention": 1 / 4,
    "elementwise": 0.4,
    "moe_routing": 0.5,
    "tp_comm": 0.6,
    "cp_comm": 1 / 3,
    "ep_comm": 0.5,
}


@dataclass(frozen=True, slots=True)
class PowerTable:
    """Watts of every row, per device (a package with two devices is halved), arrays of length `rows`.

    Attributes:
        mean_w: Mean over the step, the limit obeyed.
        peak_w: Highest mean over the board's averaging window. It passes the power limit by less than `PEAK_BAND` of it, and the
            further the more watts the busiest stretch asks for.
        pool_mean_w: Sum of the means of all devices.
        slowdown: Step time under the limits over the time without them.
        step_time_s: Seconds of a step under the limits.
        clock_mhz: Clock of the busy phases, of the device that sets the pace.
        throttle_risk: 0 to 1: how likely demand passes the limit for long enough to lower clocks.
    """

    mean_w: Floats
    peak_w: Floats
    pool_mean_w: Floats
    slowdown: Floats
    step_time_s: Floats
    clock_mhz: Floats
    throttle_risk: Floats


@dataclass(frozen=True, slots=True)
class _Load:
    """A step as seconds and dynamic demand (over that of large matrix products).

    Attributes:
        busy_s: Seconds of layers.
        busy: Demand while busy.
        rest_s: Seconds of the step's ends and of waiting.
        rest: Demand then.
        bubble: Share of the step that waits for other stages.
        micro_batch_s: Busy seconds of one micro-batch.
        matrix_share: Share of the busy seconds that are matrix products and attention.
        burst: Demand of the densest busy phase above `busy`.
    """

    busy_s: Floats
    busy: Floats
    rest_s: Floats
    rest: Floats
    bubble: Floats
    micro_batch_s: Floats
    matrix_share: Floats
    burst: Floats

    def at(self, seconds: Number, dynamic: Number) -> _Load:
        """The same step where busy phases take `seconds` times as long and ask for `dynamic` times as much."""
        return replace(
            self,
            busy_s=self.busy_s * seconds,
            busy=self.busy * dynamic,
            micro_batch_s=self.micro_batch_s * seconds,
            burst=self.burst * dynamic,
        )

    @property
    def mean(self) -> Floats:
        """Mean demand of the step."""
        return (self.busy * self.busy_s + self.rest * self.rest_s) / (self.busy_s + self.rest_s)

    def stretch(self, window_s: float) -> Floats:
        """Demand of the busiest stretch within an averaging window."""
        seen = 1.0 - np.exp(-self.micro_batch_s / STRETCHES / window_s)
        return self.mean + (self.busy + self.burst - self.mean) * seen


def estimate(times: TimeTable, columns: Columns, coefficients: PowerCoefficients) -> PowerTable:
    """Watts and slow-down of every row.

    Args:
        times: Seconds by part, of `step_time.estimate` on the same columns.
        columns: The candidates; `gpu_power_limit_w` and `sm_clock_limit_mhz` are read.
        coefficients: Power coefficients of the device.
    """
    gpu, c = times.machine.gpu, coefficients
    load, curve = _load(times, c), ClockCurve.of(gpu, c)
    follows = curve.follows * load.matrix_share
    limit = _limits(columns, gpu)
    static, dynamic = c.static * gpu.idle_w, c.demand * gpu.tdp_w
    highest = _highest_clock(columns, gpu, curve)
    own, pace, free = _clocks(columns, gpu, c, load, limit, highest)
    own_s, pace_s = load.busy_s * curve.seconds(own, follows), load.busy_s * curve.seconds(pace, follows)
    before = load.busy_s * curve.seconds(free, follows) + load.rest_s
    after = pace_s + load.rest_s
    slow = after / before
    own_w = static + dynamic * load.busy * curve.dynamic(own, follows)
    rest_w = np.minimum(static + dynamic * load.rest, limit)
    mean = (own_w * own_s + (static + dynamic * c.waiting) * (pace_s - own_s) + rest_w * load.rest_s) / after
    asked = load.at(curve.seconds(highest, follows), curve.dynamic(highest, follows))
    stretch_w = static + dynamic * asked.stretch(c.window_s)
    peak = _peak(stretch_w, limit)
    wanted = (static + dynamic * asked.busy) * asked.busy_s + rest_w * asked.rest_s
    risk = _risk(gpu, c, wanted / (asked.busy_s + asked.rest_s), stretch_w, asked, limit)
    rows = np.broadcast_shapes(mean.shape, times.step_time_s.shape)
    dies, world = gpu.dies_per_package, columns.workload.world_size
    return PowerTable(
        mean_w=np.broadcast_to(mean / dies, rows),
        peak_w=np.broadcast_to(np.maximum(peak, mean) / dies, rows),
        pool_mean_w=np.broadcast_to(mean / dies * world, rows),
        slowdown=np.broadcast_to(slow, rows),
        step_time_s=times.step_time_s * slow,
        clock_mhz=np.broadcast_to(pace * gpu.clock_mhz.boost, rows),
        throttle_risk=np.broadcast_to(risk, rows),
    )


def matrix_share(times: TimeTable) -> Floats:
    """Share of a micro-batch's own seconds, without recomputation, that are matrix products and attention."""
    parts = times.parts
    matrix = parts["gemm"] + parts["attention"]
    exchange = sum((parts[name] for name in COMMUNICATION), np.zeros(1))
    return np.asarray(matrix / np.maximum(matrix + parts["elementwise"] + parts["moe_routing"] + exchange, 1e-9))


def _load(times: TimeTable, c: PowerCoefficients) -> _Load:
    """Demand of the step's phases."""
    parts = times.parts
    compute = parts["gemm"] + c.attention * parts["attention"]
    memory = c.memory * (parts["elementwise"] + parts["moe_routing"])
    exchange = sum((parts[name] for name in COMMUNICATION), np.zeros(1))
    own_s = parts["gemm"] + parts["attention"] + parts["elementwise"] + parts["moe_routing"] + exchange
    own = compute + memory + c.communication * exchange
    again, again_density = parts["recompute"], _forward_density(times, c)
    busy_s = np.maximum(own_s + again, 1e-9)
    hidden = c.communication * np.minimum(times.hidden_s / busy_s, 1.0)
    busy = (own + again * again_density) / busy_s + hidden
    share = again / busy_s
    matrix = matrix_share(times) * (1.0 - share) + 0.8 * share
    waits = parts["bubble"] + parts["launch"] + parts["overhead"]
    moves = parts["pp_comm"] + parts["dp_comm"] + parts["offload"]
    rest_s = waits + moves + parts["optimizer"]
    rest = (c.waiting * waits + c.communication * moves + c.memory * parts["optimizer"]) / np.maximum(rest_s, 1e-9)
    densest = np.maximum(compute / np.maximum(parts["gemm"] + parts["attention"], 1e-9), busy - hidden)
    bubble = parts["bubble"] / (busy_s + rest_s)
    burst = 0.3 * (densest - (busy - hidden))
    return _Load(busy_s, busy, rest_s, rest, bubble, busy_s / times.micro_batches, matrix, burst)


def _forward_density(times: TimeTable, c: PowerCoefficients) -> Floats:
    """Demand of a forward pass: more element-wise work and exchange for each product than the backward pass has."""
    weight = {"gemm": 1.0, "attention": c.attention, "elementwise": c.memory, "moe_routing": c.memory}
    seconds = {name: times.parts[name] * share for name, share in _FORWARD.items()}
    total = np.maximum(sum(seconds.values(), np.zeros(1)), 1e-12)
    return np.asarray(sum((weight.get(name, c.communication) * part for name, part in seconds.items()), np.zeros(1)) / total)


def _limits(columns: Columns, gpu: GpuSpec) -> Floats:
    """Power limit of every row per package; TDP where none is set."""
    asked = columns.number("gpu_power_limit_w")
    return np.where(asked > 0, np.clip(asked, gpu.power_limit_w[0], gpu.power_limit_w[1]), gpu.tdp_w)


def _highest_clock(columns: Columns, gpu: GpuSpec, curve: ClockCurve) -> Floats:
    """Clock that the clock limit of every row allows; the device's highest where none is set."""
    asked = columns.number("sm_clock_limit_mhz") / gpu.clock_mhz.boost
    return np.maximum(np.where(asked > 0, np.minimum(asked, 1.0), 1.0), curve.floor)


def _clocks(
    columns: Columns, gpu: GpuSpec, c: PowerCoefficients, load: _Load, limit: Floats, highest: Floats
) -> tuple[Floats, Floats, Floats]:
    """Clock of the mean device, of the one that sets the pace, and of the latter with TDP as its limit."""
    curve = ClockCurve.of(gpu, c)
    most = hungriest(c.spread, max(columns.workload.world_size // gpu.dies_per_package, 1))

    def clock(watts: Number) -> Floats:
        return curve.clock((watts - c.static * gpu.idle_w) / (c.demand * gpu.tdp_w * load.busy), curve.follows * load.matrix_share)

    free = clock(gpu.tdp_w / most)
    return np.minimum(clock(limit), highest), np.minimum(np.minimum(clock(limit / most), highest), free), free


def _peak(wanted: Floats, limit: Floats) -> Floats:
    """Peak watts: the limiter is slower than a burst, so some of what passes the limit is seen, ever less of it."""
    over = np.maximum(wanted / limit - 1.0, 0.0)
    return np.where(wanted > limit, limit * (1.0 + PEAK_BAND * np.tanh(over / (2.0 * PEAK_BAND))), wanted)


def _risk(gpu: GpuSpec, c: PowerCoefficients, mean: Floats, peak: Floats, load: _Load, limit: Floats) -> Floats:
    """Sustained demand, its bursts, and the overshoot at every change from waiting to full load, against the limit.

    The same waiting in fewer, longer pieces has fewer changes per second: overshoot falls with the root of a micro-batch's time.
    """
    changes = load.bubble * np.minimum(np.sqrt(c.window_s / load.micro_batch_s), 2.0)
    step_up = c.overshoot * changes * np.maximum(peak - gpu.idle_w, 0.0)
    asked = mean + 0.6 * np.maximum(peak - mean, 0.0) + step_up
    return np.asarray(1.0 / (1.0 + np.exp(-np.clip((asked / limit - 1.0) / RISK_WIDTH, -60.0, 60.0))))
