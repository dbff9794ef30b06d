"""A trial that cannot win ends early; one that still might runs on, whatever else the objective values."""

from __future__ import annotations

import random

import pytest

from autotune.objective import Objective
from autotune.racing import SAVED, beaten_step_s, is_beaten, saved_s
from autotune.records import Phase, TrialRecord, TrialResult
from autotune.run_spread import RunSpread
from launchers.outcome import Outcome
from search_spaces.config import TrialConfig
from tests.autotune.study_cases import completed, open_pool, steps_of, study_spec

WARMUP = 2
STILL = RunSpread(0.005, 20)


def record(throughput: float, **metrics: float) -> TrialRecord:
    shown = {"tokens_per_s_per_gpu": throughput, "tokens_per_s_per_gpu_low": 0.98 * throughput, **metrics}
    return TrialRecord("s", 0, Phase.EXPLORE, TrialConfig(), (), Outcome.COMPLETED, metrics=shown)


def test_the_mark_is_the_lower_end_of_the_best() -> None:
    workload = study_spec().workload(study_spec().pools[0])
    objective = Objective({"tokens_per_s_per_gpu": 1.0}, {}, {"tokens_per_s_per_gpu": 100.0})
    best = record(200.0)
    mark = beaten_step_s([record(100.0), best], best, objective, workload)
    assert mark == pytest.approx(workload.tokens_per_step / (0.98 * 200.0) / workload.world_size)


def test_what_other_terms_may_still_give_is_allowed_for() -> None:
    workload = study_spec().workload(study_spec().pools[0])
    weights = {"tokens_per_s_per_gpu": 1.0, "gpu_peak_power_w_1s": -0.5}
    objective = Objective(weights, {}, {"tokens_per_s_per_gpu": 100.0, "gpu_peak_power_w_1s": 500.0})
    best, frugal = record(200.0, gpu_peak_power_w_1s=500.0), record(100.0, gpu_peak_power_w_1s=250.0)
    with_watts = beaten_step_s([best, frugal], best, objective, workload)
    assert with_watts is not None
    needed = workload.tokens_per_step / with_watts / workload.world_size
    assert needed == pytest.approx(0.98 * 200.0 / 2.0), "twice the range seen: ln 2 x 0.5 over the best, and as much again"


def test_nothing_races_before_something_is_measured_or_where_throughput_is_no_term() -> None:
    workload = study_spec().workload(study_spec().pools[0])
    objective = Objective({"step_time_cv": -1.0}, {}, {"step_time_cv": 0.1})
    assert beaten_step_s([], None, objective, workload) is None
    assert beaten_step_s([record(1.0)], record(1.0), objective, workload) is None


@pytest.mark.parametrize(("step_s", "beaten"), [(1.5, True), (1.0, False), (0.8, False)])
def test_a_slow_run_is_beaten_within_a_few_steps(step_s: float, beaten: bool) -> None:
    assert is_beaten([9.0, 5.0, *(step_s * (1 + 0.01 * (n % 3)) for n in range(5))], WARMUP, 1.1, STILL) is beaten


def test_warm_up_and_too_few_steps_beat_nobody() -> None:
    assert not is_beaten([9.0, 5.0], WARMUP, 1.0, STILL)
    assert not is_beaten([9.0, 5.0, 2.0, 2.0, 2.0], WARMUP, 1.0, STILL)


def test_a_rival_as_fast_as_the_best_is_hardly_ever_ended() -> None:
    numbers = random.Random(1)
    ended = 0
    for _ in range(500):
        run = numbers.gauss(0.0, 0.005)
        steps = [3.0, 2.0, *(1.0 * (1 + run + numbers.gauss(0.0, 0.02)) for _ in range(20))]
        ended += any(is_beaten(steps[:count], WARMUP, 1.01, STILL) for count in range(3, len(steps) + 1))
    assert ended <= 25


def test_a_noisy_machine_makes_racing_careful() -> None:
    steps = [9.0, 5.0, *(1.2 * (1 + 0.01 * (n % 3)) for n in range(6))]
    assert is_beaten(steps, WARMUP, 1.0, STILL)
    assert not is_beaten(steps, WARMUP, 1.0, RunSpread(0.15, 20))


def test_saved_seconds_are_the_steps_not_run() -> None:
    assert saved_s([9.0, 5.0, 1.0, 1.0, 1.0, 1.0], WARMUP, 26) == pytest.approx(20.0)


def test_a_study_races_what_it_explores_and_counts_what_that_saved() -> None:
    study = open_pool(study_spec(measurement={"steps": 28, "warmup_steps": 2}))
    baseline = study.propose()
    assert baseline is not None and baseline.beaten_s is None, "everything is compared with the baseline: it runs to its end"
    study.finish(baseline, completed(0.1))
    rival = study.propose()
    assert rival is not None and rival.beaten_s is not None and rival.beaten_s > 0.1
    ended = study.finish(rival, TrialResult(Outcome.COMPLETED, "beaten", steps_of(0.5), raced_out=True))
    assert ended.outcome is Outcome.COMPLETED and ended.value is not None and ended.value < 0
    assert ended.metrics[SAVED] == pytest.approx(20 * 0.505, rel=0.02)


def test_racing_can_be_switched_off() -> None:
    study = open_pool(study_spec(measurement={"racing": False}))
    first = study.propose()
    assert first is not None
    study.finish(first, completed(0.1))
    second = study.propose()
    assert second is not None and second.beaten_s is None
