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
    "launch_us": 0.5,
    "inside": 0.3,
    "between": 0.4,
    "latency": 0.4,
    "overlap": 0.15,
    "step_ms": 0.4,
    "micro_batch_ms": 0.8,
    "imbalance": 0.1,
}
LIMITS = {
    "gemm": (0.2, 0.95),
    "gemm_low": (0.2, 0.95),
    "attention": (0.1, 0.9),
    "memory": (0.3, 0.95),
    "inside": (0.2, 0.95),
    "between": (0.2, 0.95),
    "latency": (0.5, 4.0),
    "overlap": (0.2, 1.0),
    "imbalance": (1.0, 2.0),
}
ESTIMATED = 3.0
"""How much wider the priors are where the device's figures are no datasheet's (`cpu`); no share of them is then impossible."""
NOISE = 0.03
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
) -> Coefficients:
    """Coefficients that explain measured steps, near the prior where the samples say nothing.

    Args:
        samples: Measured trials of one kind of GPU.
        prior: Shipped coefficients.
        names: Coefficients to move.
        weights: Of every sample; none = one each.
        iterations: At most so many steps.
        start: Where to begin, e.g. an earlier fit of most of these samples; none = the prior.
    """
    if not samples:
        return prior
    predict = Predictor(samples)
    measured = np.log([sample.measured.step_time_s for sample in samples])
    origin = np.array(prior.vector())
    moved = [NAMES.index(name) for name in names]
    estimated = samples[0].gpu.vendor == "cpu"
    spread = np.array([PRIOR_SPREAD[name] for name in names]) * (ESTIMATED if estimated else 1.0)
    limits = _limits(origin[moved], spread, {} if estimated else LIMITS, names)
    scale = np.sqrt(weights) if weights is not None else np.ones(len(samples))

    def at(shift: Floats) -> Coefficients:
        logs = origin.copy()
        logs[moved] += shift
        return Coefficients.of_vector(list(logs))

    def residuals(shift: Floats) -> Floats:
        return (np.log(predict(at(shift))) - measured) / NOISE * scale

    begin = np.clip(np.array((start or prior).vector())[moved] - origin[moved], *limits)
    return at(minimise(residuals, spread, limits, iterations, begin))


def _limits(
    origin: Floats, spread: Floats, possible: Mapping[str, tuple[float, float]], names: Sequence[str]
) -> tuple[Floats, Floats]:
    """How far each logarithm may move: three spreads, and within what is physically possible."""
    physical = np.log([possible.get(name, (1e-6, 1e6)) for name in names]) - origin[:, None]
    return np.minimum(np.maximum(physical[:, 0], -3.0 * spread), 0.0), np.maximum(np.minimum(physical[:, 1], 3.0 * spread), 0.0)


def minimise(
    residuals: Callable[[Floats], Floats],
    spread: Floats,
    limits: tuple[Floats, Floats],
    iterations: int,
    start: Floats | None = None,
) -> Floats:
    """Iteratively reweighted Levenberg-Marquardt with a normal prior of the given spread around zero."""
    shift = np.zeros(len(spread)) if start is None else start
    damping, now = 1e-2, residuals(shift)
    for _ in range(iterations):
        jacobian = np.stack([(residuals(shift + STEP * unit) - now) / STEP for unit in np.eye(len(shift))], axis=1)
        weight = 1.0 / np.maximum(np.abs(now), 1.0)
        normal = jacobian.T @ (jacobian * weight[:, None]) + np.diag(spread**-2)
        slope = jacobian.T @ (now * weight) + shift / spread**2
        for _ in range(6):
            trial = shift - np.linalg.solve(normal + damping * np.diag(np.diag(normal)), slope)
            trial = np.clip(trial, *limits)
            after = residuals(trial)
            if _loss(after, trial, spread) < _loss(now, shift, spread):
                break
            damping *= 5.0
        else:
            return shift
        done = float(np.abs(trial - shift).max()) < 1e-3
        shift, now, damping = trial, after, max(damping / 3.0, 1e-6)
        if done:
            break
    return shift


def _loss(residuals: Floats, shift: Floats, spread: Floats) -> float:
    """Huber's loss of the residuals and the prior's."""
    size = np.abs(residuals)
    return float(np.where(size < 1, 0.5 * size**2, size - 0.5).sum() + 0.5 * ((shift / spread) ** 2).sum())
