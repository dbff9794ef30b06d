"""A confirming trial beside scripted GPUs that warm up: a real Megatron trial on CPU, read by the real binding."""

from __future__ import annotations

import math
import os

import pytest

from autotune.measured import measure
from autotune.records import TrialResult
from autotune.run_spread import RunSpread
from autotune.telemetry_summary import TrialTelemetry
from launchers.outcome import Outcome
from search_spaces.model import ModelSpec, Workload
from tests.telemetry.devices import H100, ROOT, Scenario, environment
from tests.telemetry.megatron_trial import MEASUREMENT, MODEL, play_warm

TAU_S, COLD_C, RISE_C = 2.0, 40, 30
SOAK = {"timeout_s": 40.0, "slope_c_per_min": 10.0, "window_s": 4.0}
LAST_DEGREE_S = TAU_S * math.log(RISE_C)


def warming(script, gpu):
    """Whole degrees of 40 + 30 (1 - exp(-t / 2 s)): the last one is gained at 2 ln 30 = 6.8 s."""
    for degree in range(1, RISE_C):
        script.set(gpu, "temperature", COLD_C + degree, -TAU_S * math.log(1.0 - degree / RISE_C))
    return script


def trial(folder, script, charged=("0", "1"), seconds=60.0):
    """The steps, what counts of them, and the metrics with and without warming up."""
    values = environment(script, folder=folder, clock=folder / "clock")
    values = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **values}
    steps, nodes, settled = play_warm(folder, values, {"vendors": ["nvidia"], "gpus": charged}, SOAK, seconds)
    workload = Workload(model=ModelSpec(**MODEL), world_size=1, global_batch_size=4, seq_length=32, device="cpu")

    def shown(found):
        result = TrialResult(Outcome.COMPLETED, "", tuple(steps), settled=found, telemetry=TrialTelemetry(tuple(nodes)))
        return measure(workload, result, MEASUREMENT, RunSpread())

    return steps, settled, shown(settled), shown(None)


@pytest.mark.timeout(300)
@pytest.mark.acceptance
def test_steps_count_once_the_last_degree_is_gained_and_a_hot_neighbour_is_no_matter(tmp_path):
    """GPU 0 has been warm all the time, GPU 1 warms up, GPU 2 keeps warming up but is not the trial's."""
    script = warming(Scenario(H100, 3).set("*", "temperature", COLD_C), 1).set(0, "temperature", 65)
    for second in range(60):
        script.set(2, "temperature", COLD_C + second, float(second))
    steps, settled, warm, cold = trial(tmp_path, script)
    assert settled.why.startswith("settled after ")
    assert steps[settled.steps - 1].time_s - steps[0].time_s >= LAST_DEGREE_S - 0.1, "second 0 is the end of the first step"
    assert len(steps) >= settled.steps + 300
    assert abs(warm.metrics.get("temperature_slope_c_per_min", 0.0)) <= 10.0, "none where the steps took less than 4 readings"
    assert warm.metrics["peak_temperature_c"] == COLD_C + RISE_C - 1
    assert warm.metrics["soak_steps"] == settled.steps
    assert warm.metrics["start_temperature_c"] == cold.metrics["start_temperature_c"] == 65
    assert warm.environment["telemetry.heat"] == settled.why
    assert cold.metrics["steady_steps"] > warm.metrics["steady_steps"]


@pytest.mark.acceptance
@pytest.mark.timeout(300)
def test_gpus_without_a_sensor_are_not_waited_for(tmp_path):
    steps, settled, warm, cold = trial(tmp_path, Scenario(H100, 2).set("*", "temperature", "E3"))
    assert settled.why == "not waited for: no GPU of the trial tells its temperature"
    assert warm.metrics == cold.metrics
    assert 302 <= len(steps) < 604
    assert "NOT_SUPPORTED" in warm.environment["telemetry.gaps.temperature_c"]
