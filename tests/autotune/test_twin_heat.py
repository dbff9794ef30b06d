"""On a twin, in virtual time: a confirming run counts steps on warm GPUs only, and shows what a cold one does not."""

from __future__ import annotations

import math
from dataclasses import asdict

import numpy as np
import pytest

from autotune.measured import measure
from autotune.records import TrialResult
from autotune.run_spread import RunSpread
from autotune.settling import Settling
from autotune.spec_parts import Measurement, Soaking
from autotune.telemetry.node import Recording
from autotune.telemetry.sampler import Sampler
from autotune.telemetry_summary import TrialTelemetry
from launchers import soak as heating
from launchers.gpu_sample import Throttle
from launchers.outcome import Outcome
from launchers.simulated import play
from launchers.soak import Demand, Gpus, soak
from tests.autotune.study_cases import study_spec

GPU = {
    "name": "h200",
    "vendor": "nvidia",
    "idle_w": 80.0,
    "tdp_w": 700.0,
    "lowest_clock": 0.2,
    "dies_per_package": 1,
    "clock_mhz": 1980.0,
    "memory_gib": 141.0,
}
LOAD = Demand(step_s=0.5, clocked=0.6, mean_w=650.0, peak_w=700.0, memory_gib=80.0)
NODES, PER_NODE, SEED = 1, 8, 3
MEASUREMENT = Measurement(steps=40, warmup_steps=2, interval=0.0)
RULE = Soaking()
TAU_S = heating._SECONDS


def job(steps, **gpu):
    return {
        "load": asdict(LOAD),
        "gpu": {**GPU, **gpu},
        "nodes": NODES,
        "gpus_per_node": PER_NODE,
        "limit_w": None,
        "clock": 1.0,
        "tokens": 512,
        "pool_seed": SEED,
        "run_seed": "run",
        "steps": steps,
    }


def confirmed(most_steps, rule=None):
    """Metrics and marks of a trial on the twin, followed as a real one is; without a rule it takes its steps cold."""
    shown = play(job(most_steps if rule else MEASUREMENT.steps), 5000.0)
    recording = Recording(Sampler([]), frozenset(), {}, {})
    recording.report(shown.samples)
    settling = Settling(rule, MEASUREMENT, most_steps, recording.slopes_c_per_min) if rule else None
    steps = []
    for step in shown.steps:
        steps.append(step)
        if settling and settling.stepped(step):
            break
    telemetry = TrialTelemetry((recording.end(0),))
    result = TrialResult(Outcome.COMPLETED, "", tuple(steps), settled=settling and settling.ended(), telemetry=telemetry)
    spec = study_spec()
    return measure(spec.workload(spec.pools[0]), result, MEASUREMENT, RunSpread())


def steady_state(steps=3000):
    """An hour or so of the same load: hottest GPU, watts of all boards, median step, each over the last 200 steps."""
    shown = soak(LOAD, Gpus.of(GPU, NODES, PER_NODE, SEED), steps, None)
    last = slice(-200, None)
    return (
        float(np.max(shown.temperature_c[last])),
        float(np.sum(shown.mean_w[last], axis=1).mean()),
        float(np.median(shown.step_s[last])),
    )


def settles_after_s():
    """When 1 degree per minute is left over a minute, from R C = 75 s: each GPU rises exponentially by R x (watts - idle)."""
    gpus = Gpus.of(GPU, NODES, PER_NODE, SEED)
    watts = soak(LOAD, gpus, 1, None).mean_w[0]
    rise_c = float(np.max(gpus.rise_c * (watts - gpus.idle_w) / gpus.own_w))
    half_s = RULE.window_s / 2
    x = half_s / TAU_S
    straight = 3.0 * (x * math.cosh(x) - math.sinh(x)) / x**3  # least squares over a window, against the slope in its middle
    return TAU_S * math.log(60.0 * rise_c * straight / TAU_S / RULE.slope_c_per_min) + half_s


def test_a_confirming_run_counts_soaked_steps_only():
    cold, warm = confirmed(1600), confirmed(1600, RULE)
    hottest_c, watts, step_s = steady_state()
    assert warm.environment["telemetry.heat"].startswith("settled after ")
    assert warm.metrics["soak_s"] == pytest.approx(settles_after_s(), abs=4.0)
    assert warm.metrics["steady_steps"] <= 38
    assert warm.metrics["peak_temperature_c"] == pytest.approx(hottest_c, abs=1.0)
    assert cold.metrics["peak_temperature_c"] < hottest_c - 15.0, "20 seconds after the start it has gone a quarter of the way"
    assert abs(warm.metrics["temperature_slope_c_per_min"]) < 1.5 < 10.0 < cold.metrics["temperature_slope_c_per_min"]
    assert warm.metrics["pool_gpu_mean_power_w"] == pytest.approx(watts, rel=0.01)
    assert warm.metrics["step_time_s"] == pytest.approx(step_s, rel=0.01)


def test_where_heat_holds_clocks_back_only_the_soaked_run_shows_it(monkeypatch):
    """Heat sinks so weak that rear GPUs reach 87 degrees: cold, nothing is held back."""
    monkeypatch.setattr(heating, "_RISE_C", 62.0)
    cold, warm = confirmed(1600, None), confirmed(1600, RULE)
    hottest_c, watts, step_s = steady_state()
    assert hottest_c > heating._SLOW_C - 1.0
    assert cold.metrics["throttle_fraction"] == 0.0 < warm.metrics["throttle_fraction"]
    assert warm.metrics["step_time_s"] > 1.02 * cold.metrics["step_time_s"]
    assert warm.metrics["pool_gpu_mean_power_w"] < 0.98 * cold.metrics["pool_gpu_mean_power_w"]
    assert warm.metrics["pool_gpu_mean_power_w"] == pytest.approx(watts, rel=0.03)
    assert warm.metrics["step_time_s"] == pytest.approx(step_s, rel=0.03)


def test_a_run_without_the_time_to_warm_up_is_measured_as_it_is():
    short = confirmed(1600, Soaking(timeout_s=60.0))
    assert short.environment["telemetry.heat"].startswith("not settled within 60 s: ")
    assert 60.0 <= short.metrics["soak_s"] < 65.0
    assert short.metrics["temperature_slope_c_per_min"] > 1.0


@pytest.mark.parametrize(
    ("vendor", "told"),
    [("nvidia", set(Throttle)), ("amd", {Throttle.POWER_CAP, Throttle.SW_THERMAL, Throttle.HW_THERMAL, Throttle.POWER_BRAKE})],
)
def test_a_twin_tells_the_throttle_reasons_of_its_vendor_so_that_limits_on_them_can_be_rehearsed(vendor, told):
    sample = next(play(job(3, vendor=vendor), 5000.0).samples)
    assert set(sample.throttle_s) == told
    assert sample.throttle_s[Throttle.HW_THERMAL] == 0.0
