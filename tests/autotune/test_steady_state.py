"""The interval of the median: it covers the true median as often as it says."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.signal import lfilter

from autotune.steady_state import correlation_steps, is_measured, median_interval, steady, steady_interval, warm_up

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


def test_thousands_of_values_have_an_interval_too():
    # By the normal approximation, with half a step for continuity, k = 2500.5 - 1.96 * sqrt(5000) / 2 = 2431.2.
    found = median_interval(range(1, 5001))
    assert (found.low, found.median, found.high) == (2431.0, 2500.5, 2570.0)
    assert found.coverage == pytest.approx(0.95, abs=0.002)


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


def correlated(generator, count, rho):
    """A stationary AR(1) series with median 0 and variance 1."""
    noise = generator.normal(size=count + 50)
    noise[0] = 0.0
    return lfilter([(1 - rho**2) ** 0.5], [1.0, -rho], noise)[50:]


@pytest.mark.parametrize(("count", "rho"), [(20, 0.6), (40, 0.6), (100, 0.6), (300, 0.8)])
def test_the_interval_covers_although_steps_resemble_the_one_before(count, rho):
    generator = np.random.default_rng(count)
    hits = {median_interval: 0, steady_interval: 0}
    for _ in range(DRAWS // 4):
        values = np.exp(0.05 * correlated(generator, count, rho))
        for method in hits:
            found = method(values)
            hits[method] += found.low <= 1.0 <= found.high
    assert hits[steady_interval] / (DRAWS // 4) >= 0.95 - 2 * MONTE_CARLO
    assert hits[median_interval] / (DRAWS // 4) < 0.93  # so it matters


def test_correlation_is_one_step_without_and_that_of_the_theory_with():
    # The signs of an AR(1) series correlate by 2/pi asin(rho^k); for rho = 0.8 the sum is 5.3.
    generator = np.random.default_rng(0)
    theory = 1 + 2 * sum(2 / np.pi * np.arcsin(0.8**lag) for lag in range(1, 60))
    assert np.mean([correlation_steps(correlated(generator, 4000, 0.8)) for _ in range(20)]) == pytest.approx(theory, rel=0.15)
    assert np.mean([correlation_steps(correlated(generator, 4000, 0.0)) for _ in range(20)]) == pytest.approx(1.0, abs=0.15)
    assert correlation_steps([2.0] * 9) == 1.0


WARM_UPS = {
    "four slow steps": lambda place: 0.3 * (place < 4),
    "slowly faster": lambda place: 0.5 * np.exp(-place / 1.5),
    "four fast steps, before clocks fall": lambda place: -0.1 * (place < 4),
    "one very slow step": lambda place: 3.0 * (place < 1),
}


@pytest.mark.parametrize("kind", WARM_UPS)
@pytest.mark.parametrize("count", [20, 60])
def test_a_warm_up_of_any_kind_is_found_and_leaves_no_bias(kind, count):
    generator = np.random.default_rng(count)
    place = np.arange(count)
    medians, cuts = [], []
    for _ in range(200):
        values = np.exp(WARM_UPS[kind](place) + 0.01 * correlated(generator, count, 0.2))
        cut = warm_up(values)
        cuts.append(cut)
        medians.append(np.log(np.median(values[cut:])))
    assert abs(np.mean(medians)) < 0.003
    assert np.mean(cuts) >= (1 if "one" in kind else 3.5)
    assert max(cuts) <= count // 2


def test_a_steady_series_keeps_nearly_all_its_steps_and_a_slow_one_in_the_middle_is_no_warm_up():
    generator = np.random.default_rng(5)
    cuts = []
    for _ in range(200):
        values = np.exp(0.01 * correlated(generator, 40, 0.2))
        values[15] *= 4.0
        cuts.append(warm_up(values))
    assert np.mean(cuts) < 3


@given(st.lists(finite, min_size=0, max_size=60), st.integers(0, 8))
def test_six_steps_are_left_where_there_are_more(values, at_least):
    cut = warm_up(values, at_least)
    assert cut == at_least or len(values) - cut >= 6
    assert cut >= at_least


@pytest.mark.parametrize(("spread", "most"), [(0.001, 12), (0.01, 40), pytest.param(0.05, 200, marks=pytest.mark.acceptance)])
def test_a_trial_ends_as_soon_as_its_interval_is_narrow_enough(spread, most):
    generator = np.random.default_rng(1)
    ends, hits = [], 0
    for _ in range(100):
        values = list(np.exp(spread * correlated(generator, 200, 0.0)))
        ends.append(next((count for count in range(3, 201) if is_measured(values[:count], 2, 0.01)), 200))
        found = steady_interval(steady(values[: ends[-1]], 2))
        hits += found.low <= 1.0 <= found.high
        assert found.half_width <= 0.01 or ends[-1] == 200
    assert min(ends) >= 10
    assert np.median(ends) <= most
    assert hits >= 88  # a rule that stops at lucky intervals covers a little less than they say
