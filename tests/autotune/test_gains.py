"""What further trials are expected to gain: against brute force where that is exact, and against what studies then gained."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from sklearn.gaussian_process import GaussianProcessRegressor

from autotune import acquisition
from autotune.acquisition import believing, choose
from autotune.gains import gains_of
from autotune.outlook import Outlook, outlook_of
from autotune.residual_model import HYPOTHESES
from autotune.seen import Seen

from .test_residual_sampler import gpu_study, truth

BEFORE, AFTER, STUDIES = 5, 6, 40
NOISE = 0.02


def drawn(count: int = 3, draws: int = 20_000) -> np.ndarray:
    return np.random.default_rng(1).normal(0.0, 1.0, (draws, count))


def test_the_next_one_gains_what_its_distribution_says_and_all_together_the_most_of_them() -> None:
    scores = drawn()
    gains = gains_of(scores, np.ones(3), 0.5, 0.5, np.random.default_rng(0))
    assert gains.expected[0] == pytest.approx(0.198, abs=0.01)  # of a normal distribution above 0.5
    most = np.maximum(scores.max(axis=1) - 0.5, 0.0)
    assert gains.expected[2] == pytest.approx(most.mean())
    assert (gains.low[2], gains.high[2]) == pytest.approx(tuple(np.quantile(most, (0.1, 0.9))))


def test_a_copy_of_a_candidate_adds_nothing_and_is_tried_last() -> None:
    scores = drawn()
    scores[:, 1] = scores[:, 0]
    gains = gains_of(scores, np.ones(3), 0.5, 0.5, np.random.default_rng(0))
    assert gains.expected[1] > 1.5 * gains.expected[0]
    assert gains.expected[2] == gains.expected[1]


def test_what_may_not_run_gains_in_proportion_and_several_fail_together_more_often_than_by_chance() -> None:
    gains = gains_of(np.ones((20_000, 2)), np.full(2, 0.5), 0.0, 0.0, np.random.default_rng(0))
    assert gains.expected[0] == pytest.approx(0.5, abs=0.01)
    assert gains.expected[1] == pytest.approx(2 / 3, abs=0.01)  # 0.75 if their chances had nothing in common


def test_what_running_trials_are_expected_to_reach_counts_as_gained() -> None:
    gains = gains_of(drawn() - 9.0, np.ones(3), 0.5, 0.2, np.random.default_rng(0))
    assert gains.expected == pytest.approx([0.3] * 3)


def test_draws_are_spread_as_believed_and_the_same_for_what_is_the_same() -> None:
    view, seen = all_fit(), Seen([0, 9], [0.0, 0.3], [NOISE] * 2, [{}] * 2, [NOISE] * 2)
    model, _ = believing(view.features, view.score, seen, seen.scores, seen.noise)
    rows = np.array([3, 3, 20])
    found, belief = model.drawn(rows, 20_000, np.random.default_rng(0)), model.belief(rows)
    assert found[:, 0] == pytest.approx(found[:, 1], abs=1e-4)
    for bound in (-0.1, 0.0, 0.2):
        assert (found < belief.mean + bound).mean(axis=0) == pytest.approx(belief.probability_below(belief.mean + bound), abs=0.02)


@cache
def all_fit() -> Outlook:
    """What is predicted of a small table, as if everything in it ran."""
    return replace(outlook_of(gpu_study().table, truth()), memory=None)


@pytest.fixture(scope="module")
def forecasts() -> np.ndarray:
    """For each study: expected gain of further trials, both ends of the interval, and the gain that came, (studies, 4)."""
    return np.array([one_study(seed) for seed in range(STUDIES)])


def one_study(seed: int) -> tuple[float, float, float, float]:
    """A study on a truth drawn from what the model believes before any trial; then as many more trials as were forecast."""
    random, view = np.random.default_rng(seed), all_fit()
    weights = np.array([hypothesis.weight for hypothesis in HYPOTHESES])
    hypothesis = HYPOTHESES[random.choice(len(weights), p=weights / weights.sum())]
    covariance = view.features.kernel(hypothesis)(view.features.started(np.arange(len(view.score)), 0.0))
    scores = random.multivariate_normal(view.score, covariance, method="eigh")
    seen, untried, gains, best = Seen(), list(range(len(scores))), None, 0.0
    for trial in range(BEFORE + AFTER):
        if trial == 0:
            row = int(random.integers(len(scores)))
        else:
            chosen = choose(view, seen, np.array(untried), (seed, trial))
            row = chosen.row
            if trial == BEFORE:
                gains, best = chosen.gains, max(seen.scores)
        untried.remove(row)
        seen.rows.append(row)
        seen.scores.append(scores[row] + random.normal(0.0, NOISE))
        seen.noise.append(NOISE)
        seen.metrics.append({})
        seen.metrics_noise.append(NOISE)
    assert gains is not None
    return *(curve[AFTER - 1] for curve in (gains.expected, gains.low, gains.high)), max(seen.scores) - best


@pytest.mark.acceptance
def test_studies_gain_about_what_was_forecast(forecasts: np.ndarray) -> None:
    expected, _, _, came = forecasts.T
    assert 0.6 < expected.mean() / came.mean() < 1.6


@pytest.mark.acceptance
def test_the_interval_holds_about_eight_of_ten_and_tells_studies_apart(forecasts: np.ndarray) -> None:
    expected, low, high, came = forecasts.T
    inside = (came >= low - NOISE / 4) & (came <= high + NOISE / 4)
    assert 0.7 <= inside.mean() <= 0.97
    assert np.corrcoef(expected, came)[0, 1] > 0.3


def test_nothing_is_expected_once_all_that_is_good_was_tried() -> None:
    view = all_fit()
    order = np.argsort(-view.score)

    def expected(tried: int) -> float:
        rows = order[[*range(tried), *range(len(order) - 8, len(order))]].tolist()
        known = [0.02] * len(rows)
        seen = Seen(rows=rows, scores=view.score[rows].tolist(), noise=known, metrics=[{}] * len(rows), metrics_noise=known)
        gains = choose(view, seen, np.array([row for row in order if row not in rows]), (0, 0)).gains
        assert gains is not None
        return float(gains.expected[-1])

    best_untried = view.score[order[0]] - view.score[order[-8]]
    assert expected(0) > 0.5 * best_untried
    assert expected(len(order) // 2) < 1e-3


def test_no_model_is_fitted_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    fits, fit = [], GaussianProcessRegressor.fit
    monkeypatch.setattr(GaussianProcessRegressor, "fit", lambda *args: fits.append(1) or fit(*args))
    view, seen = outlook_of(gpu_study().table, truth()), Seen([0, 1], [0.0, 0.1], [NOISE] * 2, [{}] * 2, [NOISE] * 2)
    assert choose(view, seen, np.arange(2, 20), (0, 0)).gains is not None
    with_gains = len(fits)
    monkeypatch.setattr(acquisition, "_gains", lambda *args: None)
    choose(view, seen, np.arange(2, 20), (0, 0))
    assert with_gains == len(fits) - with_gains > 0
