"""Outlook: the candidate table as the residual sampler sees it, with what physics predicts of every row."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import numpy as np

from autotune.errors import SpecError
from autotune.feasibility import Memory
from autotune.plan import machines_of
from autotune.residual_model import Features, Floats
from search_spaces.candidates import CandidateTable, pack
from search_spaces.hardware import PoolSpec
from search_spaces.prediction import Predictions, predict

_RECOMPUTE = ("recompute_granularity", "recompute_method", "recompute_num_layers", "recompute_modules")


@dataclass(frozen=True, slots=True)
class Limit:
    """A bound on a measured metric of the answer.

    Attributes:
        metric: Name of the metric in a trial's record.
        predicted: Logarithm of its prediction, (rows,).
        most: Logarithm of the largest value allowed.
    """

    metric: str
    predicted: Floats
    most: float


@dataclass(frozen=True, slots=True)
class Outlook:
    """What is expected of every row of a table before and beside measurements.

    Attributes:
        score: Predicted logarithm of the tokens per second and GPU, up to a constant, (rows,); zeros where nothing is predicted.
        features: What the residual model sees.
        memory: Predicted memory; None where nothing is predicted.
        limits: Bounds on the answer.
    """

    score: Floats
    features: Features
    memory: Memory | None
    limits: tuple[Limit, ...] = ()


def shipped_predictions(table: CandidateTable, pool: PoolSpec) -> Callable[[], Predictions | None]:
    """What the shipped coefficients predict of a pool's candidates, worked out when first asked for.

    The answer is None where the table is empty or the pool's GPU unknown.
    """
    return cache(partial(_predicted, table, pool))


def _predicted(table: CandidateTable, pool: PoolSpec) -> Predictions | None:
    try:
        return predict(table.columns, machines_of(pool)) if len(table) else None
    except SpecError:
        return None


def outlook_of(table: CandidateTable, predictions: Predictions | None) -> Outlook:
    """The table with its predictions."""
    knobs = knob_features(table)
    if predictions is None:
        nothing = np.zeros(len(table))
        return Outlook(nothing, Features.of(nothing, np.zeros((len(table), 0)), knobs), None)
    score = np.log(predictions.tokens_per_s_per_gpu)
    load = np.log(predictions.memory.device_gib / predictions.machines.gpu.memory_gib)
    recompute = pack([table.columns.column(name) for name in _RECOMPUTE], len(table))
    return Outlook(score, Features.of(score, _shares(predictions), knobs), Memory(load, recompute))


def knob_features(table: CandidateTable) -> Floats:
    """The knobs on scales where steps matter about equally, (rows, knobs): base-2 logarithms of whole numbers, places of others.

    Data parallel size and number of micro-batches, which follow from the knobs, are knobs here: much of a step depends on them.
    """
    columns = table.columns
    scales = [_scale(table.choices[name])[table.index_matrix[:, place]] for place, name in enumerate(table.knobs)]
    derived = [np.log2(np.broadcast_to(np.maximum(number, 1), (len(table),))) for number in (columns.dp, columns.micro_batches)]
    found = np.stack([*scales, *derived], axis=1).astype(np.float64)
    return found[:, np.ptp(found, axis=0) > 0] if len(table) else found


def _scale(choices: tuple[Any, ...]) -> Floats:
    """A place on the axis of a knob for each of its choices."""
    if all(choice is None or type(choice) is int for choice in choices):
        return np.log2([max(choice or 1, 1) for choice in choices])
    return np.arange(len(choices), dtype=np.float64)


def _shares(predictions: Predictions) -> Floats:
    """Shares of the step's parts, what power and clock limits add last, (rows, parts); parts that nothing takes are left out."""
    seconds = predictions.step_time_s
    parts = [np.broadcast_to(part, seconds.shape) for part in predictions.times.parts.values()]
    limited = np.maximum(seconds - predictions.times.step_time_s, 0.0)
    shares = np.stack([*parts, limited], axis=1) / seconds[:, None]
    return np.asarray(shares[:, shares.any(axis=0)])
