"""A confirming trial's steps count once temperatures have come to rest: by hand, from the constants of the heating."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from autotune.confirm_time import confirming_s, soaking, steps_to_warm_up
from autotune.measured import measure
from autotune.records import Phase, TrialResult
from autotune.results import speedup
from autotune.run_spread import RunSpread
from autotune.settling import Settled, Settling
from autotune.spec_parts import Measurement, Soaking
from autotune.telemetry.series import NodeTelemetry
from autotune.telemetry_summary import TrialTelemetry
from autotune.throttle_metrics import slope_c_per_min
from launchers.base import StepRecord
from launchers.outcome import Outcome
from search_spaces.hardware import PoolSpec
from tests.autotune.study_cases import POOL, open_pool, study_spec
from tests.autotune.test_power_metrics import series

TAU_S, RISE_C, STEP_S, BEGIN_S = 75.0, 30.0, 4.0, 1000.0
MEASUREMENT = Measurement(steps=60, warmup_steps=2, interval=0.0)
RULE = Soaking(timeout_s=600.0, slope_c_per_min=1.0, window_s=60.0)
READ_S = np.arange(BEGIN_S - 300.0, BEGIN_S + 2000.0)


def heated(second, rise_c=RISE_C, tau_s=TAU_S):
    """At the inlet's 40 degrees until the first step begins at second 0."""
    return 40.0 + rise_c * (1.0 - math.exp(-max(second, 0.0) / tau_s))


def readings(of, digits=6):
    return READ_S, np.array([round(of(second - BEGIN_S), digits) for second in READ_S])


def slopes_of(*gpus, asked=None):
    def slopes(start_s, end_s):
        if asked is not None:
            asked.append((start_s, end_s))
        return [slope_c_per_min(*gpu, start_s, end_s) for gpu in gpus]

    return slopes


def steps(count, step_s=STEP_S):
    return [StepRecord(n, BEGIN_S + n * step_s, step_s, 5.0, None, 512, None) for n in range(1, count + 1)]


def follow(slopes, rule=RULE, most_steps=10_000, step_s=STEP_S, measurement=MEASUREMENT):
    """The settling and the number of steps after which the trial may end."""
    settling = Settling(rule, measurement, most_steps, slopes)
    for step in steps(most_steps, step_s):
        if settling.stepped(step):
            return settling, step.iteration
    return settling, most_steps


def least_squares_slope(second, window_s=60.0):
    """Of `heated` over the window that ends there, per minute: the integral by hand, 12 / W^3 times that of the centred seconds."""
    half, centre = window_s / 2, second - window_s / 2
    odd = half * TAU_S * math.cosh(half / TAU_S) - TAU_S**2 * math.sinh(half / TAU_S)
    return 60.0 * 12.0 / window_s**3 * RISE_C * math.exp(-centre / TAU_S) * 2.0 * odd


def test_the_slope_of_a_heating_is_the_one_of_its_integral():
    found = slope_c_per_min(*readings(heated), BEGIN_S + 100.0, BEGIN_S + 160.0)
    assert found == pytest.approx(least_squares_slope(160.0), rel=0.01)
    assert slope_c_per_min(*readings(lambda second: 50.0 - second / 10), BEGIN_S, BEGIN_S + 60.0) == pytest.approx(-6.0)


def test_one_degree_in_the_middle_of_a_window_shows_as_90_over_its_seconds():
    times, celsius = readings(lambda second: 50.0 + (second > 30.0))
    assert slope_c_per_min(times, celsius, BEGIN_S, BEGIN_S + 60.0) == pytest.approx(90.0 / 60.0, rel=0.05)


@pytest.mark.parametrize(("first", "last"), [(BEGIN_S, BEGIN_S + 2.5), (BEGIN_S + 31.0, BEGIN_S + 60.0)])
def test_too_few_readings_or_too_short_a_stretch_tell_no_slope(first, last):
    times, celsius = readings(heated)
    told = (times >= first) & (times <= last)
    assert slope_c_per_min(times[told], celsius[told], BEGIN_S, BEGIN_S + 60.0) is None


def test_steps_count_from_the_first_one_at_which_the_slope_is_low_enough():
    """The first step's end at which the slope by hand is 1 degree per minute or less: second 272, of which 8 were the warm-up."""
    expected = next(n for n in range(1, 200) if n * STEP_S >= 68.0 and least_squares_slope(n * STEP_S) <= 1.0)
    settling, end = follow(slopes_of(readings(heated)))
    assert expected == 68
    assert settling.settled.steps == expected
    assert settling.settled.why.startswith("settled after 264 s: ")
    assert end == expected + MEASUREMENT.steps - MEASUREMENT.warmup_steps
    left_c = 40.0 + RISE_C - heated(expected * STEP_S)
    assert left_c < 1.0, "within a degree of where it would end"


def test_whole_degrees_settle_it_at_about_the_same_time():
    settling, _ = follow(slopes_of(readings(heated, digits=0)))
    assert 55 <= settling.settled.steps <= 75


def test_idle_readings_before_the_load_are_no_rest():
    """300 seconds at one temperature lie before the first step: a window that reached into them would see little slope."""
    asked = []
    settling, _ = follow(slopes_of(readings(heated), asked=asked))
    assert min(start for start, _ in asked) == BEGIN_S + MEASUREMENT.warmup_steps * STEP_S
    assert settling.settled.steps > 60


def test_the_gpu_that_changes_fastest_decides_also_where_it_cools_down():
    warm, cold = readings(lambda second: 70.0), readings(heated)
    alone, _ = follow(slopes_of(warm))
    assert alone.settled.steps == 2 + 60 // STEP_S
    assert follow(slopes_of(warm, cold))[0].settled.steps == 68
    cooling = readings(lambda second: 140.0 - heated(second))
    assert follow(slopes_of(cooling))[0].settled.steps == 68


def test_what_does_not_settle_in_time_is_measured_and_marked():
    drifting = readings(lambda second: 40.0 + second / 30.0)
    settling, end = follow(slopes_of(drifting))
    assert settling.settled == Settled(2 + 600 // 4, "not settled within 600 s: 2.00 C/min over 60 s")
    assert end == settling.settled.steps + 58


def test_with_less_time_than_a_window_it_says_over_how_much_it_looked():
    settling, _ = follow(slopes_of(readings(lambda second: 60.0)), rule=RULE.model_copy(update={"timeout_s": 20.0}))
    assert settling.settled == Settled(2 + 20 // 4, "not settled within 20 s: 0.00 C/min over 20 s")


def test_a_gpu_that_tells_too_little_is_not_settled():
    times, celsius = readings(lambda second: 60.0)
    settling, _ = follow(slopes_of((times[::40], celsius[::40])))
    assert settling.settled.why == "not settled within 600 s: too few readings"


def test_without_a_sensor_nothing_is_waited_for():
    settling, end = follow(slopes_of())
    assert settling.settled == Settled(2, "not waited for: no GPU of the trial tells its temperature")
    assert end == MEASUREMENT.steps


def test_a_program_that_ends_by_itself_is_not_ended():
    settling, end = follow(slopes_of(), most_steps=MEASUREMENT.steps)
    assert end == MEASUREMENT.steps
    assert settling.stepped(steps(61)[-1]) == ""


def test_a_program_that_runs_out_of_steps_is_measured_over_its_last_ones():
    settling, _ = follow(slopes_of(readings(heated)), most_steps=65)
    assert settling.settled is None
    assert settling.ended() == Settled(65 - 58, "not settled before the trial ended")
    short, _ = follow(slopes_of(readings(heated)), most_steps=68)
    assert short.ended().steps == 68 - 58, "nothing would count where it settled at the very end"


def test_long_steps_are_looked_at_two_at_a_time():
    asked = []
    follow(slopes_of(readings(heated), asked=asked), step_s=50.0, most_steps=10)
    assert {round(end - start) for start, end in asked[1:]} == {100}


def test_it_asks_no_more_often_than_temperatures_are_read():
    asked = []
    follow(slopes_of(readings(heated), asked=asked), step_s=0.05)
    assert len(asked) <= 2 + (272 - 60) / 2.0


@pytest.mark.parametrize("place", [0, 1, 30])
def test_a_step_without_a_time_is_passed_over(place):
    settling = Settling(RULE, MEASUREMENT, 10_000, slopes_of(readings(heated)))
    told = steps(126)
    told[place] = replace(told[place], time_s="soon")
    ends = [settling.stepped(step) != "" for step in told]
    assert settling.settled.steps == 68
    assert ends == [False] * 125 + [True]


def soaked_result(settled, count=130):
    """Steps that get slower while it warms up, as clocks fall, and are 0.1 % apart afterwards."""
    told = steps(count)
    slower = [replace(step, step_s=4.0 - 0.5 * math.exp(-step.iteration / 20) + 0.004 * (step.iteration % 2)) for step in told]

    def celsius(time_s):
        return heated(time_s - BEGIN_S)

    gpu = series(lambda time_s: 500.0 + 2.0 * celsius(time_s), seconds=540.0, start_s=BEGIN_S, temperature_c=celsius)
    telemetry = TrialTelemetry((NodeTelemetry(0, (gpu,)),))
    return TrialResult(Outcome.COMPLETED, "", tuple(slower), settled=settled, telemetry=telemetry)


def test_only_steps_on_warm_gpus_are_measured():
    spec = study_spec(measurement={"steps": 30, "warmup_steps": 2})
    workload, spread = spec.workload(spec.pools[0]), RunSpread()
    cold = measure(workload, soaked_result(None, count=30), spec.measurement, spread)
    warm = measure(workload, soaked_result(Settled(72, "settled after 280 s: 0.9 C/min over 60 s")), spec.measurement, spread)
    assert warm.metrics["steady_steps"] <= 58
    assert warm.metrics["step_time_s"] == pytest.approx(4.0, rel=0.005)
    assert warm.metrics["step_time_s"] > cold.metrics["step_time_s"]
    # 640 W and 70 degrees in the end, 1.2 degrees less at second 240.
    assert warm.metrics["gpu_mean_power_w"] == pytest.approx(640.0, abs=2.5)
    assert cold.metrics["gpu_mean_power_w"] < warm.metrics["gpu_mean_power_w"] - 10.0
    assert abs(warm.metrics["temperature_slope_c_per_min"]) < 1.0
    assert (warm.metrics["soak_steps"], warm.metrics["soak_s"]) == (72.0, pytest.approx(72 * 4.0, abs=1.0))
    assert warm.environment["telemetry.heat"] == "settled after 280 s: 0.9 C/min over 60 s"
    assert "soak_steps" not in cold.metrics and "telemetry.heat" not in cold.environment
    assert len(warm.steps) == 130, "nothing is dropped"


def test_a_trial_that_waited_for_nothing_is_measured_as_ever():
    spec = study_spec(measurement={"steps": 30, "warmup_steps": 2})
    told = [
        measure(spec.workload(spec.pools[0]), soaked_result(settled), spec.measurement, RunSpread()).metrics
        for settled in (None, Settled(2, "not waited for: no GPU of the trial tells its temperature"))
    ]
    assert told[0] == told[1]


def finished(study, settled=None):
    proposal = study.propose()
    return proposal, study.finish(proposal, soaked_result(settled))


def test_a_comparison_leaves_the_steps_of_warming_up_out():
    """110 steps of 3 s and 20 of 4 s: where the first ones warmed the GPUs up, it is a run of 4 s."""
    _, record = finished(open_pool(study_spec()))
    told = tuple(replace(step, step_s=3.0 if step.iteration <= 110 else 4.0) for step in steps(130))
    plain = replace(record, steps=told)
    warm = replace(plain, metrics={**record.metrics, "soak_steps": 110.0})
    assert speedup(plain, plain, 2, RunSpread())[0] == 1.0
    assert speedup(plain, warm, 2, RunSpread())[0] == pytest.approx(4.0 / 3.0)


H200 = {"name": "pool", "gpu": "h200", "gpus_per_node": 8}
CONFIRM = {"top": 1, "repeats": 3, "steps": 60}
EXPLORING = {"steps": 30, "warmup_steps": 2}


def explored(spec):
    """One explored trial of 40 s: 20 s of start-up and five steps of 4 s; 60 of these would take it 260 s."""
    _, record = finished(open_pool(spec))
    told = tuple(replace(step, step_s=4.0) for step in record.steps[:5])
    return replace(record, steps=told, metrics={**record.metrics, "step_time_s": 4.0}, started_s=0.0, ended_s=40.0)


def test_the_wall_time_that_is_left_is_shared_by_the_runs_to_come():
    """Two configurations three times: 6 x 260 s for measuring; of 3360 s each may warm up for 300."""
    spec = study_spec(confirm=CONFIRM, measurement=EXPLORING)
    records = [explored(spec)]
    assert soaking(spec, records, None) == Soaking()
    assert soaking(spec, records, 3360.0).timeout_s == pytest.approx(300.0)
    assert soaking(spec, records, 1e6).timeout_s == 600.0
    assert soaking(spec, records, 60.0).timeout_s == 0.0
    done = [replace(records[0], phase=Phase.CONFIRM)] * 4
    assert soaking(spec, records + done, 1120.0).timeout_s == pytest.approx(300.0)
    assert soaking(study_spec(confirm={**CONFIRM, "soak": {"timeout_s": 0}}), records, None) is None


def test_time_is_kept_for_warming_up_where_gpus_can_tell_how_warm_they_are():
    spec = study_spec(confirm=CONFIRM, measurement=EXPLORING)
    records = [explored(spec)]
    cpu, gpus = spec.pools[0], PoolSpec.model_validate(H200)
    assert confirming_s(spec, cpu, records) == pytest.approx(6 * 260.0)
    assert confirming_s(spec, gpus, records) == pytest.approx(6 * 860.0)
    assert confirming_s(spec, gpus, []) == 0.0
    assert confirming_s(spec.model_copy(update={"launcher": "simulated"}), gpus, records) == pytest.approx(6 * 860.0)


def test_a_program_is_asked_for_the_steps_that_warming_up_may_take_and_on_cpu_for_none():
    spec = study_spec()
    records = [explored(spec)]
    step_s = records[0].metrics["step_time_s"]
    cpu, beside = spec.pools[0], PoolSpec.model_validate({**POOL, "telemetry": {"vendors": ["nvidia"]}})
    wanted = math.ceil(1.25 * 600.0 / step_s) + 1
    assert steps_to_warm_up(RULE, PoolSpec.model_validate(H200), records[0].config, records, {}) == wanted
    assert steps_to_warm_up(RULE, beside, records[0].config, records, {}) == wanted
    assert steps_to_warm_up(RULE, cpu, records[0].config, records, {}) == 0
    assert steps_to_warm_up(RULE, beside, records[0].config, [], {"predicted_step_time_s": 10.0}) == 76
    assert steps_to_warm_up(RULE, beside, records[0].config, [], {}) == 0
