"""Limits of every kind: upper and lower bounds, room in memory, and metrics that may be zero."""

import math

import numpy as np
import pytest

from autotune.acquisition import choose
from autotune.limit_models import LimitModels
from autotune.outlook import METRICS_NOISE, Expects, Outlook, outlook_of
from autotune.seen import Seen, keep_all
from autotune.spec_parts import Bound

from .test_residual_sampler import gpu_study, truth

SPEED = "tokens_per_s_per_gpu"
EVENTS = "throttle_events"


def view_of(**limits: Bound) -> Outlook:
    return outlook_of(gpu_study().table, truth(), Expects({SPEED: 1.0}, limits))


def seen_of(*trials: tuple[int, float, dict[str, float]]) -> Seen:
    rows, scores, metrics = zip(*trials, strict=True)
    return Seen(list(rows), list(scores), [0.02] * len(rows), list(metrics), [METRICS_NOISE] * len(rows))


@pytest.mark.parametrize(
    ("limits", "metrics", "kept"),
    [
        ({"step_time_s": Bound(max=2.0)}, {"step_time_s": 2.0}, True),
        ({"step_time_s": Bound(max=2.0)}, {"step_time_s": 2.1}, False),
        ({SPEED: Bound(min=100.0)}, {SPEED: 99.0}, False),
        ({SPEED: Bound(min=100.0, max=200.0)}, {SPEED: 150.0}, True),
        ({SPEED: Bound(min=100.0, max=200.0)}, {SPEED: 250.0}, False),
        ({"memory_headroom_fraction": Bound(min=0.1)}, {"peak_memory_gib": 71.0}, True),
        ({"memory_headroom_fraction": Bound(min=0.1)}, {"peak_memory_gib": 73.0}, False),
        ({EVENTS: Bound(max=0.0)}, {EVENTS: 0.0}, True),
        ({EVENTS: Bound(max=0.0)}, {EVENTS: 1.0}, False),
        ({"temperature_slope_c_per_min": Bound(max=-1.0)}, {"temperature_slope_c_per_min": 0.0}, False),
        ({EVENTS: Bound(max=0.0)}, {}, False),
    ],
)
def test_a_trial_keeps_its_limits_or_crosses_them(limits, metrics, kept):
    assert keep_all(view_of(**limits).limits, metrics) == kept


@pytest.mark.parametrize(
    ("limits", "good", "bad"),
    [
        ({SPEED: Bound(min=1000.0)}, {SPEED: 1100.0}, {SPEED: 900.0}),
        ({"memory_headroom_fraction": Bound(min=0.1)}, {"peak_memory_gib": 60.0}, {"peak_memory_gib": 79.0}),
        ({EVENTS: Bound(max=0.0)}, {EVENTS: 0.0}, {EVENTS: 4.0}),
    ],
)
def test_what_crosses_is_no_best_and_makes_its_neighbours_unlikely(limits, good, bad):
    view = view_of(**limits)
    seen = seen_of((0, 0.0, good), (40, 0.5, bad))
    assert seen.best(view.limits) == 0.0
    near_good, near_bad = LimitModels(view, seen).kept(np.array([0, 40]))
    assert near_bad < 0.7 * near_good
    assert choose(view, seen, np.array([41]), (0, 0)).keeps < 0.9


def test_room_in_memory_is_predicted_by_the_peak():
    view = view_of(memory_headroom_fraction=Bound(min=0.1))
    (limit,) = view.limits
    assert limit.predicted == pytest.approx(np.log(truth().memory.memory_gib))
    assert limit.most == pytest.approx(math.log(0.9 * truth().machines.gpu.memory_gib))


def test_a_floor_is_modelled_with_its_prediction():
    view = view_of(**{SPEED: Bound(min=1000.0)})
    slow, fast = int(view.score.argmin()), int(view.score.argmax())
    middle = int(np.argsort(view.score)[len(view.score) // 2])
    chances = LimitModels(view, seen_of((middle, 0.0, {SPEED: 1000.0}))).kept(np.array([slow, fast]))
    assert chances[0] < 0.1
    assert chances[1] > 0.9


def test_limits_count_where_nothing_is_predicted():
    study = gpu_study()
    view = outlook_of(study.table, None, Expects({SPEED: 1.0}, {"gpu_mean_power_w": Bound(max=500.0)}))
    seen = seen_of((0, 0.0, {"gpu_mean_power_w": 450.0}), (40, 0.5, {"gpu_mean_power_w": 600.0}))
    assert seen.best(view.limits) == 0.0
    kept = LimitModels(view, seen).kept(np.array([0, 40]))
    assert kept[0] > 0.9
    assert kept[1] < 0.1
