"""Pareto studies (`pareto: true`): one direction per term of the objective and no sum.

The answer is a front: the configurations that no other one beats in every term. Terms are compared as their change against the
reference, the logarithm of the ratio or, where a metric may be zero, the difference; the sign of a weight is the term's direction.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from optuna._hypervolume import compute_hypervolume

from autotune.confirm import Contender, able, median_run
from autotune.objective import Objective
from autotune.records import Phase, TrialRecord
from autotune.spec import StudySpec
from autotune.spec_parts import Confirmation
from autotune.storage import Direction
from launchers.outcome import Outcome

Floats = npt.NDArray[np.float64]

WORSE = 1.0
"""By how much less than this a point is worse than the reference in every term, on its scale, to count for the hypervolume."""
NOTE = (
    "pareto: no trial is raced, the study does not end by convergence and no winner is explained, because each of these needs one "
    "value; without `pareto` the terms are summed"
)


@dataclass(frozen=True, slots=True)
class Point:
    """A configuration of the front.

    Attributes:
        record: A run of it: the confirming one with the median score, else the exploring one.
        changes: Each term against the reference, the mean over its confirming runs where there are any.
        knee: Whether its weighted sum of these is the largest of the front.
    """

    record: TrialRecord
    changes: Mapping[str, float]
    knee: bool = False


def directions(spec: StudySpec) -> tuple[Direction, ...]:
    """Optuna's directions of a study: one, of the sum, or one for each term."""
    if not spec.pareto:
        return ("maximize",)
    return tuple("maximize" if weight > 0 else "minimize" for weight in spec.objective.values())


def values_of(objective: Objective, metrics: Mapping[str, float]) -> tuple[float, ...]:
    """What Optuna is told of a measurement, a value per term in the objective's order; empty where one was not measured."""
    changes = objective.changes(metrics)
    return tuple(changes.values()) if len(changes) == len(objective.weights) else ()


def worst_values(records: Sequence[TrialRecord], weights: Mapping[str, float]) -> tuple[float, ...]:
    """What Optuna is told of a failure: of every term the worst that was measured; before any the reference's own, 0."""
    measured = [record.values for record in records if record.outcome is Outcome.COMPLETED and record.values]
    columns = zip(*measured, strict=True) if measured else ((0.0,) for _ in weights)
    return tuple((min if weight > 0 else max)(column) for weight, column in zip(weights.values(), columns, strict=True))


def front_contenders(records: Sequence[TrialRecord], objective: Objective, confirmation: Confirmation) -> list[Contender]:
    """Who is confirmed: of the explored front at most `top`, the knee and then who adds most hypervolume, and the baseline.

    What failed when it was confirmed stays in the list and does not count; who was behind it moves up.
    """
    if not confirmation.top:
        return []
    everyone = able(records, objective)
    held = [contender for contender in everyone if not contender.failed(objective)]
    gains = _gains([objective.changes(contender.explored.metrics) for contender in held], objective)
    chosen = [held[place] for place in _spread(gains, confirmation.top)]
    failed = [contender for contender in everyone if contender.failed(objective)]
    baseline = [contender for contender in held if contender.explored.phase is Phase.BASELINE and contender not in chosen]
    return [*chosen, *failed, *baseline]


def front_of(records: Sequence[TrialRecord], objective: Objective, confirmation: Confirmation) -> tuple[Point, ...]:
    """The front, largest weighted sum first: of the confirmed configurations, else of the explored ones within the limits."""
    held = [contender for contender in able(records, objective) if not contender.failed(objective)]
    confirmed = [contender for contender in held if len(contender.runs) >= confirmation.repeats]
    points = [Point(median_run(one, objective), _mean_changes(one, objective)) for one in confirmed]
    if not points:
        explored = (contender.explored for contender in held)
        points = [Point(record, objective.changes(record.metrics)) for record in explored]
    best = _on_front(_gains([point.changes for point in points], objective))
    found = sorted((point for point, on in zip(points, best, strict=True) if on), key=lambda point: -_sum(point, objective))
    return tuple(Point(point.record, point.changes, knee=place == 0) for place, point in enumerate(found))


def hypervolume(points: Sequence[Point], objective: Objective) -> float:
    """Volume that a front dominates (Zitzler and Thiele 1998), where every term is one unit of its scale worse than the reference.

    One unit: e times as bad, or a difference of 1 where a metric may be zero. The reference alone dominates 1.0.
    """
    return _volume(_gains([point.changes for point in points], objective))


def _mean_changes(contender: Contender, objective: Objective) -> dict[str, float]:
    runs = [objective.changes(run.metrics) for run in contender.runs]
    return {name: float(np.mean([run[name] for run in runs])) for name in runs[0]}


def _sum(point: Point, objective: Objective) -> float:
    return sum(objective.weights[name] * change for name, change in point.changes.items())


def _gains(changes: Sequence[Mapping[str, float]], objective: Objective) -> Floats:
    """Changes with the sign with which more is better, (points, terms)."""
    signs = {name: np.sign(weight) for name, weight in objective.weights.items()}
    found = [[sign * one[name] for name, sign in signs.items()] for one in changes]
    return np.array(found, dtype=np.float64).reshape(len(changes), len(signs))


def _on_front(gains: Floats) -> npt.NDArray[np.bool_]:
    """Which points no other one equals or beats in every term and beats in one, bool (points,)."""
    no_less = (gains[:, None] >= gains[None]).all(axis=2)
    more = (gains[:, None] > gains[None]).any(axis=2)
    return np.asarray(~(no_less & more).any(axis=0))


def _volume(gains: Floats) -> float:
    worse = np.full(gains.shape[1], -WORSE)
    counted = gains[(gains > worse).all(axis=1)]
    return float(compute_hypervolume(-counted, -worse)) if len(counted) else 0.0


def _spread(gains: Floats, most: int) -> list[int]:
    """Places of at most `most` points of the front: the first, then in turn the one that adds most volume."""
    left = np.flatnonzero(_on_front(gains)).tolist()
    chosen: list[int] = left[:1]
    left = left[1:]
    while left and len(chosen) < most:
        chosen.append(max(left, key=lambda place: _volume(gains[[*chosen, place]])))
        left.remove(chosen[-1])
    return chosen
