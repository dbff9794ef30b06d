"""The interval of the median: it covers the true median as often as it says."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.steady_state import median_interval, steady

DRAWS = 2000
# Three standard deviations of a share of 0.95 over so many draws.
MONTE_CARLO = 3 * (0.95 * 0.05 / DRAWS) ** 0.5
finite = st.floats(0.001, 1e6)


def simulated_coverage(count, draw):
    generator = np.random.default_rng(count)
    hits = 0
    for _ in range(DRAWS):
        found = median_interval(draw(generator, count))
        hits += found.low <= 1.0 <= found.high
    return hits / DRAWS


SHAPES = {
    "log-normal": lambda generator, count: generator.lognormal(0.0, 0.5, count),
    "with outliers": lambda generator, count: (
        generator.lognormal(0.0, 0.1, count) * np.where(generator.random(count) < 0.05, 10.0, 1.0) ** generator.choice([-1, 1])
    ),
}


@pytest.mark.parametrize("count", [6, 7, 10, 16, 25, 40])
def test_the_interval_holds_the_true_median_as_often_as_it_says(count):
    said = median_interval(range(1, count + 1)).coverage
    measured = simulated_coverage(count, SHAPES["log-normal"])
    assert said >= 0.95
    assert measured >= 0.95 - MONTE_CARLO
    assert measured == pytest.approx(said, abs=MONTE_CARLO)


def test_outliers_do_not_spoil_it():
    assert simulated_coverage(12, SHAPES["with outliers"]) >= 0.95 - MONTE_CARLO


@pytest.mark.parametrize(("count", "coverage"), [(1, 0.0), (2, 0.5), (3, 0.75), (4, 0.875), (5, 0.9375), (6, 0.96875)])
def test_few_samples_give_the_whole_range_and_say_how_little_it_covers(count, coverage):
    values = [float(number) for number in range(count, 0, -1)]
    found = median_interval(values)
    assert (found.low, found.high, found.samples) == (1.0, float(count), count)
    assert found.coverage == pytest.approx(coverage)


def test_the_narrowest_interval_that_still_covers_is_taken():
    # By hand for n = 12: k = 3 gives 1 - 2 * 79 / 4096 = 0.961, k = 4 gives 0.854.
    found = median_interval([float(number) for number in range(1, 13)])
    assert (found.low, found.median, found.high) == (3.0, 6.5, 10.0)
    assert found.coverage == pytest.approx(1 - 2 * 79 / 4096)


def test_no_value_is_an_error():
    with pytest.raises(ValueError, match="no values"):
        median_interval([])


@given(st.lists(finite, min_size=1, max_size=60))
def test_low_is_below_the_median_is_below_high_and_order_does_not_matter(values):
    found = median_interval(values)
    assert min(values) <= found.low <= found.median <= found.high <= max(values)
    assert median_interval(values[::-1]) == found


@given(st.lists(finite, min_size=1, max_size=60), st.floats(0.5, 0.99), st.floats(0.5, 0.99))
def test_more_confidence_never_narrows(values, one, two):
    low, high = (median_interval(values, confidence) for confidence in sorted((one, two)))
    assert high.low <= low.low <= low.high <= high.high


@pytest.mark.parametrize(
    ("values", "warmup", "expected"),
    [
        ([9.0, 8.0, 1.0, 2.0], 2, [1.0, 2.0]),
        ([9.0, 8.0], 2, [9.0, 8.0]),
        ([], 2, []),
        ([1.0], 0, [1.0]),
        ([9.0, 1.0, float("nan"), 0.0, -1.0, float("inf"), 2.0], 1, [1.0, 2.0]),
        ([9.0, float("nan")], 1, []),
    ],
)
def test_warm_up_and_impossible_values_are_left_out(values, warmup, expected):
    assert steady(values, warmup) == expected
