"""What out-of-memory and other failures tell of the candidates that were not tried."""

import math

import numpy as np
import pytest

from autotune.feasibility import LARGER_THAN_OOM, SAME_PROGRAM, Memory, succeeds
from autotune.residual_model import Features

LOAD = np.log(np.array([0.5, 0.8, 0.95, 1.0, 1.05, 1.4]))
NONE = np.array([], dtype=np.intp)


def memory(recompute=0):
    return Memory(LOAD, np.broadcast_to(recompute, LOAD.shape))


def test_before_any_trial_the_expectation_decides():
    fits = memory().fits(NONE, NONE)
    assert fits[0] > 0.99
    assert fits[3] == pytest.approx(0.5, abs=0.01)
    assert fits[5] < 0.01


@pytest.mark.parametrize("out_of_memory", [[], [2], [2, 4], [0]])
@pytest.mark.parametrize("fitted", [[], [1], [4]])
def test_never_rises_with_predicted_memory(out_of_memory, fitted):
    fits = memory().fits(np.array(out_of_memory, dtype=np.intp), np.array(fitted, dtype=np.intp))
    assert np.all(np.diff(fits) <= 1e-12)


def test_a_measured_oom_teaches_the_bias_of_the_prediction():
    """0.95 of the memory ran out: 0.8 fits less surely than before, and 1.0 hardly."""
    before, after = memory().fits(NONE, NONE), memory().fits(np.array([2]), NONE)
    assert after[1] < before[1]
    assert after[3] < LARGER_THAN_OOM * before[3] * 1.01


def test_a_measured_fit_teaches_it_as_well():
    before, after = memory().fits(NONE, NONE), memory().fits(NONE, np.array([4]))
    assert after[4] > 0.6 > 0.4 > before[4]


def test_only_larger_ones_under_the_same_recompute_are_ranked_down():
    other = Memory(LOAD, np.array([0, 0, 0, 1, 0, 1]))
    assert other.larger_than(np.array([1])).tolist() == [False, True, True, False, True, False]


def test_the_same_program_under_another_power_limit_ends_as_it_did():
    """Rows 0 and 3, 1 and 4, 2 and 5 differ in a power limit only; the first ran out of memory, the second fitted."""
    told = Memory(np.tile(LOAD[:3], 2), np.zeros(6, dtype=np.int64), np.tile(LOAD[:3], 2), np.array([0, 1, 2, 0, 1, 2]))
    out, fitted, knobs = np.array([0]), np.array([1, 1, 1]), np.tile(np.arange(3.0), 2)[:, None]
    assert told.fits(out, fitted)[3:5].tolist() == [SAME_PROGRAM, 1 - SAME_PROGRAM]
    assert SAME_PROGRAM < told.fits(out, fitted)[5] < 1 - SAME_PROGRAM
    # nor do peaks that contradict the prediction change it
    features, rows = Features.of(np.zeros(6), np.zeros((6, 0)), knobs), np.array([4, 3])
    scattered = LOAD[1] + np.array([0.5, -0.5, 0.5])
    assert told.fits_as_measured(features, out, fitted, scattered, rows).tolist() == [1 - SAME_PROGRAM, SAME_PROGRAM]


def test_nothing_is_ever_impossible():
    assert np.all(memory().fits(np.array([0]), NONE)[:4] > 0)


def test_peaks_that_do_not_follow_the_prediction_take_its_say_away():
    """Measured peaks scatter by half around what was expected: an out-of-memory then says little of what is predicted larger."""
    told = Memory(LOAD, np.zeros(len(LOAD), dtype=np.int64), LOAD)
    fitted, oom = np.array([0, 0, 1, 1, 2]), np.array([1])
    close = told.fits(oom, fitted, LOAD[fitted] + 0.02 * np.array([1, -1, 1, -1, 1]))
    wide = told.fits(oom, fitted, LOAD[fitted] + 0.5 * np.array([1, -1, 1, -1, 1]))
    assert wide[3] > 5 * close[3]
    assert np.all(np.diff(wide) <= 1e-12)


KNOBS = np.array([[tp, size] for tp in range(4) for size in range(4)], dtype=float)
EVERY = np.arange(16)


def test_without_failures_all_succeed():
    assert np.all(succeeds(KNOBS, np.array([0, 5]), [False, False], EVERY) == 1.0)


def test_neighbours_of_failures_are_less_likely_than_those_of_successes():
    chance = succeeds(KNOBS, np.array([0, 1, 14, 15]), [True, True, False, False], EVERY)
    assert chance[4] < 0.6 < chance[11]
    assert np.all(chance > 0)


def test_where_predictions_say_nothing_of_memory_measured_peaks_do():
    """What is predicted small needs most: seven peaks and one out-of-memory turn the verdict round."""
    load = np.log(np.linspace(0.4, 1.4, 24))
    knobs = np.repeat(np.arange(4.0), 6)[:, None]
    needs = np.log(np.array([1.6, 1.2, 0.8, 0.4]))[knobs[:, 0].astype(int)]
    fitted, oom, others = np.array([12, 14, 16, 18, 20, 22, 23]), np.array([0]), np.array([3, 5, 13, 15, 19, 21])
    told, features = Memory(load, np.zeros(24, dtype=np.int64), load), Features.of(load, np.zeros((24, 0)), knobs)
    by_load = told.fits(oom, fitted, needs[fitted])[others]
    found = told.fits_as_measured(features, oom, fitted, needs[fitted], others)
    assert np.all(found[:2] < 0.5)
    assert np.all(found[2:] > 0.8)
    assert found[-1] > by_load[-1]


def test_where_peaks_follow_the_prediction_it_stands():
    fitted, oom = np.array([0, 0, 1, 1, 2]), np.array([4])
    told = Memory(LOAD, np.zeros(len(LOAD), dtype=np.int64), LOAD)
    features = Features.of(LOAD, np.zeros((len(LOAD), 0)), np.arange(6.0)[:, None])
    peaks = LOAD[fitted] + 0.01 * np.array([1, -1, 1, -1, 1])
    rows = np.arange(len(LOAD))
    assert told.fits_as_measured(features, oom, fitted, peaks, rows) == pytest.approx(told.fits(oom, fitted, peaks), abs=0.05)
    assert told.fits_as_measured(features, oom, fitted[:2], peaks[:2], rows) == pytest.approx(told.fits(oom, fitted[:2], peaks[:2]))


def test_what_is_predicted_far_too_large_stays_so_where_some_configurations_fragment():
    """By chance the larger ones fragmented least, as if predicted differences were not real."""
    load = np.append(np.linspace(-0.25, -0.1, 11), math.log(4.0))
    told = Memory(load, np.zeros(len(load), dtype=np.int64), load)
    features = Features.of(load, np.zeros((len(load), 0)), np.zeros((len(load), 0)))
    fitted = np.arange(11)
    fragmented = load[fitted] + np.log([1.24, 1.06, 1.28, 1.11, 1.19, 1.09, 1.18, 1.12, 1.01, 0.96, 0.98])
    assert told.fits_as_measured(features, NONE, fitted, fragmented, np.array([11]))[0] < 0.02


def test_where_everything_fails_what_is_far_from_it_looks_better():
    knobs = np.arange(10.0)[:, None]
    near, far = succeeds(knobs, np.array([0, 1, 2]), [True] * 3, np.array([1, 9]))
    assert far > 2 * near
