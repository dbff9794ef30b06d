"""Outlook: the candidate table as the residual sampler sees it, with what physics predicts of every row."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np

from autotune.feasibility import Memory
from autotune.residual_model import Features, Floats
from autotune.spec_parts import Bound
from search_spaces.candidates import CandidateTable, pack
from search_spaces.prediction import Predictions

_THROUGHPUT = MappingProxyType({"tokens_per_s_per_gpu": 1.0})
_LIMITS = ("gpu_power_limit_w", "sm_clock_limit_mhz")
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


@dataclass(frozen=True, slots=True)
class Expects:
    """What a study values and allows, in terms of what can be predicted.

    Attributes:
        weights: Weight by metric; positive where more is better.
        limits: Bounds by metric.
    """

    weights: Mapping[str, float]
    limits: Mapping[str, Bound]

    def score(self, predictions: Predictions) -> Floats:
        """Predicted score up to a constant, (rows,): weights x logarithms of the metrics that can be predicted."""
        terms = ((weight, predicted_log(name, predictions)) for name, weight in self.weights.items())
        return sum((weight * value for weight, value in terms if value is not None), np.zeros(len(predictions)))

    def bounds(self, predictions: Predictions) -> tuple[Limit, ...]:
        """The upper bounds; where nothing is predicted of a metric, only what was measured of it tells."""
        found = []
        for name, bound in self.limits.items():
            if bound.max is not None and bound.max > 0:
                predicted = predicted_log(name, predictions)
                unknown = np.full(len(predictions), math.log(bound.max))
                found.append(Limit(name, unknown if predicted is None else predicted, math.log(bound.max)))
        return tuple(found)


def predicted_log(metric: str, predictions: Predictions) -> Floats | None:
    """Logarithm of a metric's prediction, (rows,); None where nothing predicts it."""
    world_size = predictions.workload.world_size
    mean_w = np.broadcast_to(predictions.power.mean_w, (len(predictions),))
    known = {
        "tokens_per_s_per_gpu": predictions.tokens_per_s_per_gpu,
        "step_time_s": predictions.step_time_s,
        "peak_memory_gib": predictions.memory.memory_gib,
        "gpu_mean_power_w": mean_w,
        "pool_gpu_mean_power_w": mean_w * world_size,
    }
    if metric.startswith("gpu_peak_power_w"):
        return np.log(predictions.peak_power_w)
    if metric.startswith("pool_gpu_peak_power_w"):
        return np.log(predictions.peak_power_w * world_size)
    return np.log(known[metric]) if metric in known else None


def outlook_of(table: CandidateTable, predictions: Predictions | None, expects: Expects = Expects(_THROUGHPUT, {})) -> Outlook:
    """The table with its predictions."""
    knobs, following = knob_features(table), _following(table).shape[1]
    if predictions is None:
        nothing = np.zeros(len(table))
        return Outlook(nothing, Features.of(nothing, np.zeros((len(table), 0)), knobs, following), None)
    score = expects.score(predictions)
    load = np.log(predictions.memory.device_gib / predictions.machines.gpu.memory_gib)
    recompute = pack([table.columns.column(name) for name in _RECOMPUTE], len(table))
    features = Features.of(score, _shares(predictions), knobs, following)
    memory = Memory(load, recompute, np.log(predictions.memory.memory_gib))
    return Outlook(score, features, memory, expects.bounds(predictions))


def knob_features(table: CandidateTable) -> Floats:
    """The knobs on scales where steps matter about equally, (rows, knobs): base-2 logarithms of whole numbers, places of others.

    Last come the data parallel size and the number of micro-batches, which follow from the others: much of a step depends on them.
    """
    scales = [_scale(name, table.choices[name])[table.index_matrix[:, place]] for place, name in enumerate(table.knobs)]
    return np.hstack([_varying(scales, len(table)), _following(table)])


def _following(table: CandidateTable) -> Floats:
    """Those that follow from the knobs, (rows, at most 2)."""
    columns = table.columns
    return _varying([np.log2(np.maximum(number, 1)) for number in (columns.dp, columns.micro_batches)], len(table))


def _varying(columns: Sequence[Floats], rows: int) -> Floats:
    """The columns that are not the same for all rows."""
    found = np.stack([np.broadcast_to(column, (rows,)) for column in columns], axis=1).astype(np.float64)
    return found[:, np.ptp(found, axis=0) > 0] if rows else found


def _scale(name: str, choices: tuple[Any, ...]) -> Floats:
    """A place on the axis of a knob for each of its choices; no limit lies a step above the highest one."""
    if not all(choice is None or type(choice) is int for choice in choices):
        return np.arange(len(choices), dtype=np.float64)
    numbers = sorted({choice for choice in choices if choice})
    none = 1
    if name in _LIMITS and numbers:
        none = numbers[-1] * numbers[-1] // numbers[-2] if len(numbers) > 1 else 2 * numbers[-1]
    return np.log2([max(none if choice is None else choice, 1) for choice in choices])


def _shares(predictions: Predictions) -> Floats:
    """Shares of the step's parts, what power and clock limits add last, (rows, parts); parts that nothing takes are left out."""
    seconds = predictions.step_time_s
    parts = [np.broadcast_to(part, seconds.shape) for part in predictions.times.parts.values()]
    limited = np.maximum(seconds - predictions.times.step_time_s, 0.0)
    shares = np.stack([*parts, limited], axis=1) / seconds[:, None]
    return np.asarray(shares[:, shares.any(axis=0)])
