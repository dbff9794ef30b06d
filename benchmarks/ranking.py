"""Errors and rankings of predictions against measurements."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
SMALLEST_GROUP = 8


@dataclass(frozen=True, slots=True)
class Ranking:
    """Kendall's tau over groups of rows: median, worst, number of groups."""

    median: float | None
    worst: float | None
    groups: int


def kendall_tau(predicted: Floats, measured: Floats) -> float:
    """Kendall's tau-b: 1 where all pairs are in order, 0 for a constant prediction; ties count as scipy's do."""
    i, j = np.triu_indices(len(predicted), 1)
    a, b = np.sign(predicted[i] - predicted[j]), np.sign(measured[i] - measured[j])
    norm = np.sqrt(np.count_nonzero(a) * np.count_nonzero(b))
    return float((a * b).sum() / norm) if norm else 0.0


def ranking(groups: Sequence[Hashable], predicted: Floats, measured: Floats) -> Ranking:
    """Tau of every group with enough rows."""
    places: dict[Hashable, list[int]] = {}
    for place, group in enumerate(groups):
        places.setdefault(group, []).append(place)
    taus = [kendall_tau(predicted[found], measured[found]) for found in places.values() if len(found) >= SMALLEST_GROUP]
    if not taus:
        return Ranking(None, None, 0)
    return Ranking(float(np.median(taus)), min(taus), len(taus))


def errors(predicted: Floats, measured: Floats) -> dict[str, float]:
    """Mean and largest absolute error and bias, as shares of the measured values."""
    relative = predicted / measured - 1.0
    return {
        "mape": round(float(np.abs(relative).mean()), 4),
        "max_ape": round(float(np.abs(relative).max()), 4),
        "bias": round(float(relative.mean()), 4),
    }
