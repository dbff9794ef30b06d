"""The residual model: what trials tell of other candidates, and which hypotheses survive them."""

import math

import numpy as np
import pytest

from autotune.belief import Belief
from autotune.residual_kernels import Across, Alike
from autotune.residual_model import ENOUGH, EVIDENCE, HYPOTHESES, LIMIT_HYPOTHESES, NOISE, Elsewhere, Features, ResidualModel

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
    said = [hypothesis for hypothesis in HYPOTHESES if not hypothesis.alone]  # where every knob acts by itself: no say yet
    assert len(belief.weights) == len(said)
    assert belief.weights.tolist() == sorted(belief.weights, reverse=True), "wider errors weigh less"
    assert belief.weights[0] > 2 * belief.weights[-1]


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


def test_many_trials_near_each_other_make_no_candidate_unlike_them_sure():
    """Thirty trials that are nearly as predicted: how sure that makes of one far away rests on the likelihood of ten of them."""
    knobs = np.vstack([KNOBS[:30], np.full((30, 3), 12.0)])
    features, far = Features.of(PREDICTED, np.zeros((60, 0)), knobs), np.array([45])
    measured = PREDICTED[:30] + 0.06 * np.sin(3.0 * KNOBS[:30].sum(axis=1))

    def chance(trials, evidence):
        rows, noise = np.arange(trials), np.full(trials, NOISE)
        found = ResidualModel(features, PREDICTED, rows, measured[:trials], noise, evidence=evidence)
        return 1.0 - found.belief(far).probability_below(PREDICTED[45] + 0.25).item()

    assert chance(30, EVIDENCE) > 100 * chance(30, math.inf)
    assert chance(9, EVIDENCE) == chance(9, math.inf)


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


def test_what_is_alike_by_hand():
    """Three equal columns are three effects and three pairs of them."""
    rows = np.array([[1.0, 2.0, 3.0], [1.0, 2.0, 0.0], [9.0, 9.0, 9.0]])
    found = Alike(0.5)(rows)
    assert found[0].tolist() == [3 + 3 * 0.25, 2 + 0.25, 0.0]
    assert np.diag(found) == pytest.approx(Alike(0.5).diag(rows))
    assert np.linalg.eigvalsh(found).min() > 0


def test_effects_of_choices_are_learned_where_the_prediction_says_nothing():
    """Every choice has an effect of its own, and nothing is as predicted: half of the candidates tell the others."""
    numbers = np.random.default_rng(3)
    effects = numbers.normal(0.0, 0.2, size=(3, 4))
    truth = sum(effects[knob, KNOBS[:, knob].astype(int)] for knob in range(3))
    rows = numbers.permutation(60)[:30]
    features = Features.of(PREDICTED, SHARES, KNOBS).stretching(PREDICTED)
    others = np.setdiff1d(EVERY, rows)

    def error(hypotheses):
        found = ResidualModel(features, PREDICTED, rows, truth[rows], np.full(30, 0.005), hypotheses)
        return np.sqrt(np.mean((found.belief(others).mean - truth[others]) ** 2))

    assert error(LIMIT_HYPOTHESES) < 0.05
    assert error(LIMIT_HYPOTHESES) < 0.5 * error([one for one in LIMIT_HYPOTHESES if not one.alone])


def test_another_prediction_is_stretched_by_itself():
    """Watts of which only half of the predicted range is real, as the trials show."""
    watts = np.random.default_rng(4).normal(0.0, 0.5, size=60)
    features = Features.of(PREDICTED, SHARES, KNOBS)
    rows = np.arange(8)
    found = ResidualModel(features.stretching(watts), watts, rows, 0.5 * watts[rows], np.full(8, 0.005), LIMIT_HYPOTHESES)
    assert found.belief(EVERY).mean == pytest.approx(0.5 * watts, abs=0.08)
    assert features.matrix[:, features.parts] == pytest.approx(PREDICTED - np.median(PREDICTED))


def test_trials_that_began_warm_do_not_speak_against_their_candidates():
    """All is as predicted but for 0.2 % a degree; every second trial began 20 degrees warmer, after a hotter one."""
    rows = np.random.default_rng(5).permutation(60)[:16]
    celsius = np.where(np.arange(16) % 2, 55.0, 35.0)
    measured = PREDICTED[rows] - 0.002 * (celsius - 45.0)
    features, others = Features.of(PREDICTED, SHARES, KNOBS), np.setdiff1d(EVERY, rows)
    told, untold = (
        ResidualModel(features, PREDICTED, rows, measured, np.full(16, 0.005), warmer_c=warmer_c)
        for warmer_c in (celsius - 45.0, 0.0)
    )
    assert np.std(told.belief(rows).mean - PREDICTED[rows]) < 0.5 * np.std(untold.belief(rows).mean - PREDICTED[rows])
    assert np.std(told.belief(others).mean - PREDICTED[others]) < np.std(untold.belief(others).mean - PREDICTED[others])


def test_a_knob_whose_larger_values_were_never_tried_goes_on_as_it_began():
    """Steps of 0.2 a doubling, of which only the first was seen: the next is expected in the same direction, and less surely."""
    scales = np.repeat([0.0, 1.0, 2.0, 3.0], 15)[:, None]
    features, nothing = Features.of(np.zeros(60), np.zeros((60, 0)), scales), np.zeros(60)
    rows = np.arange(30)
    alone = [one for one in HYPOTHESES if one.alone]
    belief = ResidualModel(features, nothing, rows, 0.2 * scales[rows, 0], np.full(30, 0.005), alone).belief(np.array([20, 35, 50]))
    deviations = np.sqrt(belief.weights @ (belief.deviations**2 + (belief.means - belief.mean) ** 2))
    assert belief.mean[0] == pytest.approx(0.2, abs=0.01)
    assert belief.mean[0] + 0.02 < belief.mean[1] < belief.mean[2]
    assert deviations[0] < deviations[1] < deviations[2]


def test_what_follows_from_the_knobs_is_no_choice_of_its_own():
    """Two knobs of independent effects, and their product as a third column: it is not learned as if it were chosen."""
    numbers = np.random.default_rng(7)
    knobs = numbers.integers(0, 4, size=(60, 2)).astype(float)
    effects = numbers.normal(0.0, 0.2, size=(2, 4))
    truth = sum(effects[knob, knobs[:, knob].astype(int)] for knob in range(2))
    columns = np.column_stack([knobs, knobs.sum(axis=1)])
    rows, alone = numbers.permutation(60)[:14], [one for one in LIMIT_HYPOTHESES if one.alone]
    others = np.setdiff1d(EVERY, rows)
    errors = []
    for following in (1, 0):
        features = Features.of(np.zeros(60), np.zeros((60, 0)), columns, following)
        found = ResidualModel(features, np.zeros(60), rows, truth[rows], np.full(14, 0.005), alone).belief(others)
        errors.append(np.sqrt(np.mean((found.mean - truth[others]) ** 2)))
    assert errors[0] < 0.8 * errors[1]


def test_how_alike_trials_of_different_studies_are_by_hand():
    """The same study 1; another the product of how alike each is to the first."""
    rows = np.array([[0.0], [1.0], [2.0], [1.0]])
    found = Across((1.0, 0.8, 0.5))(rows)
    assert found == pytest.approx(np.array([[1, 0.8, 0.5, 0.8], [0.8, 1, 0.4, 1], [0.5, 0.4, 1, 0.4], [0.8, 1, 0.4, 1]]))
    assert Across((1.0, 0.8, 0.5))(rows[:1], rows[2:]) == pytest.approx(np.array([[0.5, 0.8]]))


def elsewhere(residuals, rows, *, alike=0.8, knobs=KNOBS):
    """One other study that tried these rows."""
    matrix = Features.of(PREDICTED, SHARES, knobs).matrix[rows]
    count = len(rows)
    return Elsewhere(
        matrix, np.asarray(residuals), np.full(count, NOISE), np.zeros(count), np.ones(count, dtype=np.intp), (1.0, alike)
    )


SLOW = np.log1p(2.0 * SHARES[:, 1])  # a part that takes three times as long


def beside(rows, truth, other, *, knobs=KNOBS):
    rows, features = np.array(rows, dtype=np.intp), Features.of(PREDICTED, SHARES, knobs)
    return ResidualModel(features, PREDICTED, rows, truth[rows], np.full(len(rows), NOISE), elsewhere=other)


def test_what_was_off_elsewhere_is_expected_here_the_less_the_less_alike_they_are():
    there, slow, fast = np.arange(0, 30), np.argsort(SLOW)[-5:], np.argsort(SLOW)[:5]
    gaps = []
    for alike in (0.0, 0.4, 0.8):
        found = beside([], PREDICTED, elsewhere(np.median(SLOW[there]) - SLOW[there], there, alike=alike)).belief(EVERY)
        off = found.mean - PREDICTED
        gaps.append(off[fast].mean() - off[slow].mean())
    assert gaps[0] == pytest.approx(0.0, abs=1e-6)
    assert 0.05 < gaps[1] < gaps[2] < SLOW[slow].mean() - SLOW[fast].mean()


def test_a_few_trials_outvote_what_was_off_elsewhere():
    """Nothing is off here: after six trials most of what was expected from elsewhere is gone."""
    there, slow, fast = np.arange(0, 30), np.argsort(SLOW)[-5:], np.argsort(SLOW)[:5]
    other = elsewhere(np.median(SLOW[there]) - SLOW[there], there)
    off = [beside(rows, PREDICTED, other).belief(EVERY).mean - PREDICTED for rows in ([], [1, 12, 25, 33, 41, 58])]
    before, after = (one[fast].mean() - one[slow].mean() for one in off)
    assert abs(after) < 0.25 * before


def test_the_rough_mean_is_the_mean_beside_other_studies_too():
    rows, there, nothing = RANDOM.permutation(60)[:10], np.arange(20, 50), np.zeros((60, 0))
    found = beside(rows, PREDICTED - SLOW, elsewhere(np.median(SLOW[there]) - SLOW[there], there, knobs=nothing), knobs=nothing)
    assert found.rough_mean() == pytest.approx(found.belief(EVERY).mean, abs=1e-6)


def test_from_enough_trials_on_other_studies_say_nothing():
    many = np.tile(EVERY, 2)[:ENOUGH]
    other = elsewhere(SLOW[:30], np.arange(30))
    few, enough = (beside(rows, PREDICTED, other).belief(EVERY).mean for rows in (many[:10], many))
    assert enough == pytest.approx(beside(many, PREDICTED, None).belief(EVERY).mean, abs=1e-12)
    assert few != pytest.approx(beside(many[:10], PREDICTED, None).belief(EVERY).mean, abs=1e-12)
