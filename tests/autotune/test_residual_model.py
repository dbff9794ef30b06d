"""The residual model: what trials tell of other candidates, and which hypotheses survive them."""

import numpy as np
import pytest

from autotune.residual_model import HYPOTHESES, NOISE, Belief, Features, ResidualModel

RANDOM = np.random.default_rng(0)
SHARES = RANDOM.dirichlet(np.ones(4), size=60)
KNOBS = RANDOM.integers(0, 4, size=(60, 3)).astype(float)
PREDICTED = RANDOM.normal(0.0, 0.3, size=60)


def model(rows, measured, *, shares=SHARES, knobs=KNOBS, noise=NOISE):
    rows = np.array(rows, dtype=np.intp)
    features = Features.of(PREDICTED, shares, knobs)
    return ResidualModel(features, PREDICTED, rows, np.asarray(measured, dtype=float), np.full(len(rows), noise))


EVERY = np.arange(60)


def test_without_trials_the_prediction_stands():
    belief = model([], []).belief(EVERY)
    assert belief.mean == pytest.approx(PREDICTED)
    assert len(belief.weights) == sum(hypothesis.weight == 1.0 for hypothesis in HYPOTHESES)  # the others have no say yet


def test_a_constant_factor_changes_no_order():
    rows = [0, 7, 20, 33]
    belief = model(rows, PREDICTED[rows] - 8.0).belief(EVERY)
    assert np.argsort(belief.mean).tolist() == np.argsort(PREDICTED).tolist()
    assert belief.mean == pytest.approx(PREDICTED - 8.0, abs=1e-6)


def test_a_part_that_takes_three_times_as_long_is_learned_from_few_trials():
    truth = PREDICTED - np.log1p(2.0 * SHARES[:, 1])
    rows = RANDOM.permutation(60)[:12]
    rest = np.setdiff1d(EVERY, rows)
    found = model(rows, truth[rows]).belief(rest).mean
    before = np.std((truth - PREDICTED)[rest])
    assert np.std(found - truth[rest]) < 0.4 * before


def test_measurements_that_contradict_the_prediction_take_its_say_away():
    """The order is upside down: from 20 trials on, the belief follows the measurements."""
    truth, rows = -PREDICTED, RANDOM.permutation(60)[:20]
    rest = np.setdiff1d(EVERY, rows)
    few, many = model(rows[:1], truth[rows[:1]]), model(rows, truth[rows])
    assert np.corrcoef(few.belief(rest).mean, truth[rest])[0, 1] < -0.9
    assert np.corrcoef(many.belief(rest).mean, truth[rest])[0, 1] > 0.9


def test_a_measured_candidate_is_known_and_a_far_one_is_not():
    belief = model([3], [PREDICTED[3]]).belief(EVERY)
    deviations = belief.weights @ belief.deviations
    assert deviations[3] < 1.5 * NOISE
    assert deviations.argmin() == 3


def test_a_noisy_measurement_moves_less():
    rows = [3, 9, 14]
    measured = PREDICTED[rows] + [0.3, 0.0, 0.0]
    sharp, vague = (model(rows, measured, noise=noise).belief(np.array([3])).mean[0] for noise in (0.02, 1.0))
    assert abs(sharp - measured[0]) < 0.05
    assert abs(vague - measured[0]) > 0.15


def test_the_rough_mean_is_the_mean_where_no_knob_matters():
    rows = RANDOM.permutation(60)[:10]
    measured = PREDICTED[rows] - np.log1p(SHARES[rows, 1])
    without_knobs = model(rows, measured, knobs=np.zeros((60, 0)))
    assert without_knobs.rough_mean() == pytest.approx(without_knobs.belief(EVERY).mean, abs=1e-6)


def test_expected_improvement_of_a_certain_gain_is_the_gain():
    belief = Belief(np.array([[1.0, 0.0]]), np.full((1, 2), 1e-6), np.ones(1))
    assert belief.expected_improvement(0.5) == pytest.approx([0.5, 0.0], abs=1e-5)
    assert belief.probability_below(0.5) == pytest.approx([0.0, 1.0])
