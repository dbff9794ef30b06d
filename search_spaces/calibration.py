"""Calibration: coefficients refitted from measured steps, with the shipped values as priors.

Robust least squares on the logarithms of the coefficients (Levenberg-Marquardt; residuals beyond the scale count linearly, as
Huber's do), so that few rows move only what they can tell and one bad measurement moves little.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from search_spaces.coefficients import NAMES, Coefficients
from search_spaces.columns import Column, Columns
from search_spaces.config import TrialConfig
from search_spaces.gpus import GpuSpec, Links
from search_spaces.kernels import Floats
from search_spaces.model import Workload
from search_spaces.step_time import estimate

Routing = Literal["balanced", "real"]

PRIOR_SPREAD = {
    "gemm": 0.15,
    "gemm_low": 0.25,
    "tail": 0.6,
    "attention": 0.3,
    "memory": 0.2,
    "launch_us": 0.3,
    "inside": 0.3,
    "between": 0.4,
    "latency": 0.4,
    "overlap": 0.15,
    "tp_hidden": 0.5,
    "step_ms": 1.0,
    "micro_batch_ms": 0.8,
    "imbalance": 0.1,
}
LIMITS = {
    "gemm": (0.2, 0.95),
    "gemm_low": (0.2, 0.95),
    "attention": (0.2, 1.5),
    "memory": (0.3, 0.95),
    "inside": (0.2, 0.95),
    "between": (0.2, 0.95),
    "latency": (0.5, 4.0),
    "overlap": (0.2, 1.0),
    "tp_hidden": (0.1, 1.0),
    "imbalance": (1.0, 2.0),
}
ESTIMATED = 3.0
"""How much wider the priors are where the device's figures are no datasheet's (`cpu`); no share of them is then impossible."""

COMMON = {"gemm", "gemm_low", "attention", "memory", "inside"}
"""Coefficients of one device and its domain: clocks and software raise or lower them together."""

COMMON_SPREAD = 0.2
POOL_SPREAD = 0.15
NOISE = 0.08  # the model's own error within a pool is larger than a measurement's
STEP = 1e-3


@dataclass(frozen=True, slots=True)
class Measured:
    """One measured trial: what was trained, how, seconds per step, and whether the experts' load was forced to balance."""

    workload: Workload
    config: TrialConfig
    step_time_s: float
    routing: Routing = "real"


@dataclass(frozen=True, slots=True)
class Sample:
    """A measured trial and where it ran."""

    measured: Measured
    gpu: GpuSpec
    links: Links


@dataclass(frozen=True, slots=True)
class _Batch:
    """Samples that one table holds."""

    columns: Columns
    gpu: GpuSpec
    links: Links
    routing: Routing
    places: list[int]


class Predictor:
    """Step times of fixed samples under any coefficients, with the tables built once."""

    def __init__(self, samples: Sequence[Sample]) -> None:
        self.size = len(samples)
        self._batches = list(_batches(samples))

    def __call__(self, coefficients: Coefficients) -> Floats:
        """Predicted seconds, one per sample."""
        seconds = np.zeros(self.size)
        for batch in self._batches:
            table = estimate(batch.columns, batch.gpu, batch.links, coefficients, batch.routing)
            seconds[batch.places] = table.step_time_s
        return seconds


def columns_of(workload: Workload, configs: Sequence[TrialConfig]) -> Columns:
    """A table of these configurations."""
    columns = {}
    for name in TrialConfig.model_fields:
        given = [getattr(config, name) for config in configs]
        values = tuple(dict.fromkeys(given))
        if len(values) > 1:
            columns[name] = Column(values, np.array([values.index(value) for value in given], dtype=np.intp))
    return Columns(workload, columns, configs[0])


def _batches(samples: Sequence[Sample]) -> Iterable[_Batch]:
    alike: dict[str, list[int]] = {}
    for place, sample in enumerate(samples):
        key = f"{sample.measured.workload!r}{sample.measured.routing}{sample.gpu.name}{sample.links!r}"
        alike.setdefault(key, []).append(place)
    for places in alike.values():
        first = samples[places[0]]
        columns = columns_of(first.measured.workload, [samples[place].measured.config for place in places])
        yield _Batch(columns, first.gpu, first.links, first.measured.routing, places)


def fit(
    samples: Sequence[Sample],
    prior: Coefficients,
    names: Sequence[str] = NAMES,
    weights: Floats | None = None,
    iterations: int = 12,
    start: Coefficients | None = None,
    pools: Sequence[str] = (),
) -> Coefficients:
    """Coefficients that explain measured steps, near the prior where the samples say nothing.

    Args:
        samples: Measured trials of one kind of GPU.
        prior: Shipped coefficients.
        names: Coefficients to move.
        weights: Of every sample; none = one each.
        iterations: At most so many steps.
        start: Where to begin, e.g. an earlier fit of most of these samples; none = the prior.
        pools: Of every sample; each pool then gets a factor of its own that is no part of the answer, so that what differs
            between pools does not pass for what differs between configurations.
    """
    if not samples:
        return prior
    predict = Predictor(samples)
    measured = np.log([sample.measured.step_time_s for sample in samples])
    origin = np.array(prior.vector())
    moved, count = [NAMES.index(name) for name in names], len(names)
    labels = list(dict.fromkeys(pools))
    member = np.array([[label == own for own in labels] for label in pools], dtype=float).reshape(len(samples), len(labels))
    scale = np.sqrt(weights) if weights is not None else np.ones(len(samples))

    def at(shift: Floats) -> Coefficients:
        logs = origin.copy()
        logs[moved] += shift[:count]
        return Coefficients.of_vector(list(logs))

    def residuals(shift: Floats) -> Floats:
        return (np.log(predict(at(shift))) + member @ shift[count:] - measured) / NOISE * scale

    estimated = samples[0].gpu.vendor == "cpu"
    wider = ESTIMATED if estimated else 1.0
    spread = np.array([wider * PRIOR_SPREAD[name] for name in names] + [POOL_SPREAD] * len(labels))
    common = np.array([COMMON_SPREAD * (name in COMMON) for name in names] + [0.0] * len(labels))
    precision = np.linalg.inv(np.diag(spread**2) + np.outer(common, common))
    limits = _limits(origin[moved], 3.0 * np.sqrt(spread**2 + common**2), {} if estimated else LIMITS, names)
    begin = np.zeros(len(spread))
    begin[:count] = np.array((start or prior).vector())[moved] - origin[moved]
    return at(_minimise(residuals, precision, limits, iterations, np.clip(begin, *limits)))


def _limits(
    origin: Floats, reach: Floats, possible: Mapping[str, tuple[float, float]], names: Sequence[str]
) -> tuple[Floats, Floats]:
    """How far each logarithm may move: so far, and within what is physically possible; pools' factors so far."""
    low, high = -reach, reach.copy()
    physical = np.log([possible.get(name, (1e-6, 1e6)) for name in names]) - origin[:, None]
    low[: len(names)] = np.minimum(np.maximum(physical[:, 0], low[: len(names)]), 0.0)
    high[: len(names)] = np.maximum(np.minimum(physical[:, 1], high[: len(names)]), 0.0)
    return low, high


def minimise(residuals: Callable[[Floats], Floats], spread: Floats, limits: tuple[Floats, Floats], iterations: int) -> Floats:
    """Robust least squares with a normal prior around zero.

    Args:
        residuals: Of a shift, in units of the noise.
        spread: The prior's standard deviations.
        limits: Lowest and highest shift.
        iterations: At most so many steps.
    """
    return _minimise(residuals, np.diag(spread**-2), limits, iterations, np.zeros(len(spread)))


def _minimise(
    residuals: Callable[[Floats], Floats], precision: Floats, limits: tuple[Floats, Floats], iterations: int, start: Floats
) -> Floats:
    """Iteratively reweighted Levenberg-Marquardt; the prior is given by its inverse covariance."""
    shift = start
    damping, now = 1e-2, residuals(shift)
    for _ in range(iterations):
        jacobian = np.stack([(residuals(shift + STEP * unit) - now) / STEP for unit in np.eye(len(shift))], axis=1)
        weight = 1.0 / np.maximum(np.abs(now), 1.0)
        normal = jacobian.T @ (jacobian * weight[:, None]) + precision
        slope = jacobian.T @ (now * weight) + precision @ shift
        for _ in range(6):
            trial = shift - np.linalg.solve(normal + damping * np.diag(np.diag(normal)), slope)
            trial = np.clip(trial, *limits)
            after = residuals(trial)
            if _loss(after, trial, precision) < _loss(now, shift, precision):
                break
            damping *= 5.0
        else:
            return shift
        done = float(np.abs(trial - shift).max()) < 1e-3
        shift, now, damping = trial, after, max(damping / 3.0, 1e-6)
        if done:
            break
    return shift


def _loss(residuals: Floats, shift: Floats, precision: Floats) -> float:
    """Huber's loss of the residuals and the prior's."""
    size = np.abs(residuals)
    return float(np.where(size < 1, 0.5 * size**2, size - 0.5).sum() + 0.5 * shift @ precision @ shift)
