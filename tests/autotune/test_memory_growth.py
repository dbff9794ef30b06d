"""Memory that creeps up while a trial is measured: told apart from steps that need differently much, and shown in the report."""

import io
from dataclasses import replace

import numpy as np
import pytest
import yaml
from rich.console import Console

from autotune.memory_growth import FULL_AFTER, GROWTH, full_after_steps, growth_gib_per_1000_steps, growth_words
from autotune.report import final_report
from launchers.base import StepRecord

from .study_cases import completed, open_pool, run_to_end, study_spec
from .test_guards import spec

DEVICE_GIB = 141.0


def creeping(per_step, steps=30, start=100.0):
    return [start + per_step * number for number in range(steps)]


def test_B029_a_slope_over_the_measured_steps_says_when_memory_is_full(shared):
    """B029: 1 GB more every 500 iterations with 8 GB free: fails near iteration 4,000."""
    (case,) = [c for c in yaml.safe_load((shared / "data" / "cases" / "memory.yaml").read_text()) if c["id"] == "B029"]
    peaks = creeping(case["input"]["growth_gb_per_500_iters"] / 500)
    metrics = {GROWTH: growth_gib_per_1000_steps(peaks), "peak_memory_gib": peaks[-1]}
    found = full_after_steps(metrics, peaks[-1] + case["input"]["free_after_warmup_gb"])
    assert found[FULL_AFTER] == pytest.approx(case["expected"]["fails_near_iteration"], rel=1e-6)
    assert found[FULL_AFTER] < case["input"]["planned_iters"]
    assert "full after about 4,000 steps" in growth_words(metrics | found)


@pytest.mark.parametrize(
    ("peaks", "growth"),
    [
        (creeping(0.002), 2.0),
        (creeping(0.002, steps=12), 2.0),
        ([90.0] * 30, 0.0),
        (creeping(0.5, steps=15) + [107.0] * 15, 0.0),
        ([*[100.0] * 20, 101.0, *[101.0] * 9], 0.0),
        (creeping(0.002, steps=6), 0.0),
        ([100.0], 0.0),
        ([], 0.0),
    ],
    ids=["creeps", "creeps, few steps", "flat", "grows at first only", "one jump", "too few to tell", "one step", "none"],
)
def test_growth_by_hand(peaks, growth):
    assert growth_gib_per_1000_steps(peaks) == pytest.approx(growth)


def test_steps_that_need_differently_much_are_no_growth():
    """By its definition less than 1 in 1,000 is taken for it; with a creep of three times their spread over the trial most are."""
    numbers = np.random.default_rng(5)
    demand = numbers.normal(0.0, 1.0, (4000, 40))
    by_chance = [growth_gib_per_1000_steps(list(np.maximum.accumulate(100.0 + row))) for row in demand]
    assert sum(growth > 0 for growth in by_chance) <= 8
    creep = np.arange(40) * 0.5
    found = [growth_gib_per_1000_steps(list(np.maximum.accumulate(100.0 + 0.3 * row + creep))) for row in demand[:200]]
    assert sum(growth > 0 for growth in found) >= 180
    assert np.median(found) == pytest.approx(500.0, rel=0.1)


def shown_with(peaks, **fields):
    """What a study's report says where every trial's memory is like that."""
    study = open_pool(spec(**fields), refits=True)
    result = completed()
    template = result.steps[-1]
    steps = tuple(
        StepRecord(number + 1, 1000.0 + number, 0.1 + 0.001 * (number % 3), 5.0, 1.0, template.tokens, peak)
        for number, peak in enumerate(peaks)
    )
    run_to_end(study, lambda proposal: replace(result, steps=steps))
    study.close()
    console = Console(width=400, file=io.StringIO())
    console.print(final_report([study.results()], 2))
    return study, console.file.getvalue()


def test_the_report_warns_of_a_winner_whose_memory_grows_and_of_no_other():
    study, text = shown_with(creeping(0.002, steps=32))
    assert study.best.metrics[GROWTH] == pytest.approx(2.0)
    left_gib = DEVICE_GIB - study.best.metrics["peak_memory_gib"]
    assert study.best.metrics[FULL_AFTER] == pytest.approx(left_gib / 0.002)
    words = f"its memory still grew by 2 GiB per 1,000 steps and is full after about {left_gib / 0.002:,.0f} steps"
    assert f"The winner is at risk in a long run: {words}." in text
    study, text = shown_with([100.0] * 32)
    assert study.best.metrics[GROWTH] == 0.0
    assert FULL_AFTER not in study.best.metrics
    assert "long run" not in text
    slowest = {GROWTH: 1e-5, "peak_memory_gib": 100.0}
    assert growth_words(slowest | full_after_steps(slowest, DEVICE_GIB)) == ""


def test_a_limit_keeps_it_out_of_the_answer():
    never = {"limits": {GROWTH: {"max": 0}}}
    assert shown_with(creeping(0.002, steps=32), **never)[0].best is None
    assert shown_with([100.0] * 32, **never)[0].best is not None


def test_on_cpu_it_is_not_told():
    study = open_pool(study_spec())
    study.finish(study.propose(), completed())
    assert study.best is not None
    assert GROWTH not in study.best.metrics
