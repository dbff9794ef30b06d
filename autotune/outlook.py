"""Outlook: the candidate table as the residual sampler sees it, with what physics predicts of every row."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np

from autotune.feasibility import Memory
from autotune.metric_names import may_be_zero
from autotune.objective import Objective
from autotune.residual_kernels import Floats
from autotune.residual_model import NOISE, Elsewhere, Features
from autotune.spec_parts import Bound
from autotune.transfer import NOTHING, Earlier, Metrics, Past, Table
from autotune.unreached import POWER_LIMIT, PowerLimits
from autotune.wall_metrics import DOMAIN, NODE, POOL, judged_on
from search_spaces.candidates import CandidateTable, pack
from search_spaces.choices import ordered
from search_spaces.columns import Columns
from search_spaces.config import TrialConfig
from search_spaces.prediction import Predictions

METRICS_NOISE = 0.005
"""Standard deviation of the logarithm of measured watts or memory: they repeat more closely than seconds."""
_Z95 = 1.96

_BOARDS = ("gpu_mean_power_w", "gpu_peak_power_w", "gpu_max_mean_power_w", "pool_gpu_mean_power_w", "pool_gpu_peak_power_w")
_FOLLOWED = MappingProxyType(
    {
        "mean_power_w": "pool_gpu_mean_power_w",
        "peak_power_w": "pool_gpu_peak_power_w",
        "joules_per_token": "joules_per_token",
    }
)
_HEADROOM = "memory_headroom_fraction"
_THROUGHPUT = MappingProxyType({"tokens_per_s_per_gpu": 1.0})
_LIMITS = (POWER_LIMIT, "sm_clock_limit_mhz")
_RECOMPUTE = ("recompute_granularity", "recompute_method", "recompute_num_layers", "recompute_modules")


@dataclass(frozen=True, slots=True)
class Limit:
    """A bound on a measured metric of the answer.

    Attributes:
        metric: Name of the metric in a trial's record.
        predicted: Logarithm of its prediction, (rows,), minus that for a lower bound; None where the metric has no logarithm.
        value: The bound, in the metric's unit.
        sign: 1 where the metric must not be above it, -1 where it must not be below.
        elsewhere: What trials of earlier studies measured of it, with that sign; None where there are none.
    """

    metric: str
    predicted: Floats | None
    value: float
    sign: float = 1.0
    elsewhere: Elsewhere | None = None

    @property
    def most(self) -> float:
        """What `measured` must not be above; the bound must be positive."""
        return self.sign * math.log(self.value)

    def measured(self, metrics: Metrics) -> float:
        """Logarithm of what a trial measured, times the sign; NaN where it did not, or where that has none."""
        return self.sign * measured_log(self.metric, metrics)

    def kept_by(self, metrics: Metrics) -> bool:
        """Whether a trial keeps it; one that did not measure the metric is not shown to."""
        found = metrics.get(judged_on(self.metric, metrics))
        return found is not None and self.sign * found <= self.sign * self.value


@dataclass(frozen=True, slots=True)
class Outlook:
    """What is expected of every row of a table before and beside measurements.

    Attributes:
        score: Predicted logarithm of the tokens per second and GPU, up to a constant, (rows,); zeros where nothing is predicted.
        features: What the residual model sees.
        memory: Predicted memory; None where nothing is predicted.
        limits: Bounds on the answer.
        past: Trials of earlier studies; None where there are none.
        elsewhere: What these measured of the score.
        power_limits: The candidates' power limits; None where they have none to choose.
    """

    score: Floats
    features: Features
    memory: Memory | None
    limits: tuple[Limit, ...] = ()
    past: Past | None = None
    elsewhere: Elsewhere | None = None
    power_limits: PowerLimits | None = None


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
        terms = ((weight, predicted_log(followed(name), predictions)) for name, weight in self.weights.items())
        return sum((weight * value for weight, value in terms if value is not None), np.zeros(len(predictions)))

    def bounds(self, predictions: Predictions | None, rows: int, past: Past | None) -> tuple[Limit, ...]:
        """The bounds of a table of so many rows; where nothing is predicted of a metric, only what was measured of it tells."""
        most = [(name, 1.0, bound.max) for name, bound in self.limits.items()]
        least = [(name, -1.0, bound.min) for name, bound in self.limits.items()]
        given = ((name, sign, value) for name, sign, value in most + least if value is not None)
        return tuple(_limit(*bound, predictions, rows, past) for bound in given)

    def elsewhere(self, past: Past) -> Elsewhere:
        """What earlier studies measured of the score, under the weights of this one."""
        reference = past.tables[0].study.records[0].metrics
        return past.about(Objective(self.weights, {}, reference).score, self.score, run_noise)


def _limit(name: str, sign: float, value: float, predictions: Predictions | None, rows: int, past: Past | None) -> Limit:
    """One bound. Room in the device's memory is judged by the peak that leaves it: that has a prediction."""
    if name == _HEADROOM and predictions is not None and value < 1.0:
        name, sign, value = "peak_memory_gib", -sign, (1.0 - value) * predictions.machines.gpu.memory_gib
    if value <= 0.0 or may_be_zero(name):
        return Limit(name, None, value, sign)

    def expected(found: Predictions) -> Floats | None:
        log = predicted_log(followed(name), found)
        return None if log is None else sign * log

    def measured(metrics: Metrics) -> float:
        return sign * measured_log(name, metrics)

    predicted = expected(predictions) if predictions is not None else None
    elsewhere = past.about(measured, expected, metrics_noise) if past else None
    return Limit(name, np.full(rows, sign * math.log(value)) if predicted is None else predicted, value, sign, elsewhere)


def measured_log(metric: str, metrics: Metrics) -> float:
    """Logarithm of a metric as a limit on it is judged; NaN where it was not measured."""
    value = metrics.get(judged_on(metric, metrics), 0.0)
    return math.log(value) if value > 0 else math.nan


def metrics_noise(_: Metrics) -> float:
    """`METRICS_NOISE`, whatever was measured."""
    return METRICS_NOISE


def run_noise(metrics: Metrics) -> float:
    """Standard deviation of a measured logarithm: `NOISE` between runs, and what the trial's own interval says."""
    low, high = (metrics.get(f"tokens_per_s_per_gpu_{end}", 0.0) for end in ("low", "high"))
    return math.hypot(NOISE, math.log(high / low) / (2 * _Z95) if 0 < low < high else 0.0)


def predicted_log(metric: str, predictions: Predictions) -> Floats | None:
    """Logarithm of a metric's prediction, (rows,); None where nothing predicts it. `gpu_` watts are a board's, of all its dies."""
    per_device, mean_w, peak_w = predictions.tokens_per_s_per_gpu, predictions.power.mean_w, predictions.peak_power_w
    known = {
        "tokens_per_s_per_gpu": per_device,
        "step_time_s": predictions.step_time_s,
        "peak_memory_gib": predictions.memory.memory_gib,
        "joules_per_token": mean_w / per_device,
        "tokens_per_s_per_kw": 1000.0 * per_device / mean_w,
    }
    if metric.startswith(_BOARDS):
        dies, world_size = predictions.machines.gpu.dies_per_package, predictions.workload.world_size
        known[metric] = (mean_w if "mean_power_w" in metric else peak_w) * (dies if metric.startswith("gpu_") else world_size)
    return np.log(np.broadcast_to(known[metric], (len(predictions),))) if metric in known else None


def followed(metric: str) -> str:
    """What a metric at the wall follows of the boards, but for a factor that nothing predicts; any other metric itself."""
    if not metric.startswith((NODE, POOL, DOMAIN)):
        return metric
    return next((boards for kind, boards in _FOLLOWED.items() if kind in metric), metric)


def outlook_of(
    table: CandidateTable,
    predictions: Predictions | None,
    expects: Expects = Expects(_THROUGHPUT, {}),
    earlier: Earlier = NOTHING,
) -> Outlook:
    """The table with its predictions, and trials of earlier studies beside it."""
    others, rows = earlier.tables(predictions), len(table)
    every = [predictions, *(other.predictions for other in others)]
    knobs, following = _knobs(table, others)
    score = (
        np.zeros(len(knobs)) if predictions is None else np.concatenate([expects.score(one) for one in every if one is not None])
    )
    joined = Features.of(score, _shares(every, len(knobs)), np.hstack([knobs, following]), following.shape[1], rows)
    features = Features(joined.matrix[:rows], joined.parts, joined.following)
    past = Past(tuple(others), joined.matrix[rows:], joined.parts) if others else None
    elsewhere = expects.elsewhere(past) if past else None
    limits = PowerLimits.of(table) if POWER_LIMIT in table.knobs else None
    memory, bounds = memory_of(table, predictions) if predictions else None, expects.bounds(predictions, rows, past)
    return Outlook(score[:rows], features, memory, bounds, past, elsewhere, limits)


def memory_of(table: CandidateTable, predictions: Predictions) -> Memory:
    """Predicted memory of every row of a table."""
    load = np.log(predictions.memory.device_gib / predictions.machines.gpu.memory_gib)
    recompute = pack([table.columns.column(name) for name in _RECOMPUTE], len(table))
    program = pack([table.columns.column(name) for name in table.knobs if name not in _LIMITS], len(table))
    return Memory(load, recompute, np.log(predictions.memory.memory_gib), program)


def knob_features(table: CandidateTable) -> Floats:
    """The knobs on scales where steps matter about equally, (rows, knobs): base-2 logarithms of whole numbers, places of others.

    Last come the data parallel size and the number of micro-batches, which follow from the others: much of a step depends on them.
    """
    return np.hstack(_knobs(table, ()))


def _knobs(table: CandidateTable, others: Sequence[Table]) -> tuple[Floats, Floats]:
    """Scaled knobs, and those that follow from them, at most 2; (rows, columns) of the candidates and then of other trials.

    Knobs that are not searched are among them where other trials had them otherwise.
    """
    tables = [table.columns, *(other.columns for other in others)]
    chosen = ({name: set(one.column(name).values) for name in TrialConfig.model_fields} for one in tables[1:])
    apart = [name for there in chosen for name, values in there.items() if values != set(table.columns.column(name).values)]
    names = dict.fromkeys((*table.knobs, *apart))
    follow = [[np.log2(np.maximum(number, 1)) for number in (one.dp, one.micro_batches)] for one in tables]
    return _varying([_scaled(name, tables) for name in names], tables), _varying(
        [_stacked(numbers, tables) for numbers in zip(*follow, strict=True)], tables
    )


def _scaled(name: str, tables: Sequence[Columns]) -> Floats:
    """A knob's place on its axis in all rows of some tables."""
    columns = [table.column(name) for table in tables]
    choices = ordered(dict.fromkeys(value for column in columns for value in column.values))
    scale = dict(zip(choices, _scale(name, choices), strict=True))
    return _stacked([np.array([scale[value] for value in column.values])[column.codes] for column in columns], tables)


def _stacked(columns: Sequence[Floats], tables: Sequence[Columns]) -> Floats:
    """One column of each table, one after the other."""
    return np.concatenate([np.broadcast_to(column, (len(table),)) for column, table in zip(columns, tables, strict=True)])


def _varying(columns: Sequence[Floats], tables: Sequence[Columns]) -> Floats:
    """The columns that are not the same for all rows."""
    rows = sum(len(table) for table in tables)
    found = np.stack(columns, axis=1) if columns else np.zeros((rows, 0))
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


def _shares(every: Sequence[Predictions | None], rows: int) -> Floats:
    """Shares of the step's parts, what power and clock limits add last, (rows, parts); parts that nothing takes are left out."""
    found = [_shares_of(predictions) for predictions in every if predictions is not None]
    shares = np.vstack(found) if found else np.zeros((rows, 0))
    return np.asarray(shares[:, shares.any(axis=0)])


def _shares_of(predictions: Predictions) -> Floats:
    seconds = predictions.step_time_s
    parts = [np.broadcast_to(part, seconds.shape) for part in predictions.times.parts.values()]
    limited = np.maximum(seconds - predictions.times.step_time_s, 0.0)
    return np.asarray(np.stack([*parts, limited], axis=1) / seconds[:, None])
