"""Run-to-run spread: pooled with the default, and an interval that holds other runs' medians as often as it says."""

import numpy as np
import pytest

from autotune.run_spread import DEFAULT_SPREAD, RunSpread, other_runs, ratio_interval, run_spread
from autotune.steady_state import Interval, steady_interval

STUDENT_4 = 2.776  # 97.5 % quantile of Student's t with four degrees of freedom


def exact(*medians):
    return [(median, 0.0) for median in medians]


def run(generator, spread, noise, steps=20):
    return np.exp(spread * generator.normal() + noise * generator.normal(size=steps))


def test_without_repeats_the_default_holds():
    assert run_spread([]) == run_spread([exact(1.0), exact(2.0)]) == RunSpread(DEFAULT_SPREAD, 0)
    assert RunSpread().reach == pytest.approx(STUDENT_4 * DEFAULT_SPREAD, rel=0.003)


def test_repeats_are_pooled_over_configurations_by_hand():
    # Two runs 2 % apart have a variance of 0.02^2 / 2; the default weighs as four.
    found = run_spread([exact(1.0, np.exp(0.02)), exact(5.0)])
    assert found.repeats == 1
    assert found.relative == pytest.approx(((4 * DEFAULT_SPREAD**2 + 0.02**2 / 2) / 5) ** 0.5)
    assert run_spread([exact(1.0, np.exp(0.02)), exact(5.0, 5.0 * np.exp(0.02))]).repeats == 2


@pytest.mark.parametrize(("spread", "noise"), [(0.01, 0.01), (0.03, 0.01), (0.0, 0.03)])
def test_the_interval_holds_95_of_100_other_runs(spread, noise):
    generator = np.random.default_rng(3)
    inside = []
    for _ in range(60):
        runs = [run(generator, spread, noise) for _ in range(10)]
        within = [steady_interval(one) for one in runs]
        medians = [one.median for one in within]
        pooled = run_spread([[(one.median, one.half_width) for one in within]])
        for place, one in enumerate(within):
            found = other_runs(one, pooled)
            inside += [found.low <= median <= found.high for other, median in enumerate(medians) if other != place]
    assert np.mean(inside) >= 0.94


def test_what_the_steps_of_each_run_leave_open_is_no_spread_between_runs_by_hand():
    # Medians 2 % apart vary by 0.02^2 / 2; half-widths of 1.96 % are errors of 1 %, of 9.8 % errors of 5 %, which explain it all.
    one, far = [(1.0, 0.0196), (np.exp(0.02), 0.0196)], [(1.0, 0.098), (np.exp(0.02), 0.098)]
    found = run_spread([one])
    assert found.relative == pytest.approx(((4 * DEFAULT_SPREAD**2 + 0.02**2 / 2 - 0.01**2) / 5) ** 0.5, rel=1e-4)
    assert run_spread([far]).relative == pytest.approx(DEFAULT_SPREAD * (4 / 5) ** 0.5)


def test_the_spread_counts_twice_because_two_runs_differ():
    exact = Interval(1.0, 1.0, 1.0, 20, 0.95)
    found = other_runs(exact, RunSpread(0.01, 10_000))
    assert np.log(found.high) == pytest.approx(1.96 * 2**0.5 * 0.01, rel=1e-3)
    assert ratio_interval(exact, exact, RunSpread(0.01, 10_000)) == pytest.approx((found.low, found.high))
