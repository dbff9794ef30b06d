"""Which steps of a trial count, and how sure their median is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import comb, isfinite

import numpy as np


@dataclass(frozen=True, slots=True)
class Interval:
    """A median with its 95 % confidence interval, in the unit of the values.

    Attributes:
        median: The estimate.
        low: Lower end.
        high: Upper end.
        samples: Values it rests on.
        coverage: Confidence that (low, high) really has; below 0.95 where there are fewer than 6 values.
    """

    median: float
    low: float
    high: float
    samples: int
    coverage: float


def median_interval(values: Sequence[float], confidence: float = 0.95) -> Interval:
    """Distribution-free interval of the median from order statistics.

    The k-th smallest and k-th largest of n values hold the median with probability 1 - 2 P(Binomial(n, 1/2) < k); k is the largest
    that keeps `confidence` (Conover, Practical Nonparametric Statistics, 3rd ed., 3.2). With too few values k = 1.

    Args:
        values: At least one finite value.
        confidence: Wanted coverage.

    Raises:
        ValueError: where `values` is empty.
    """
    ordered = np.sort(np.asarray(values, dtype=float))
    count = len(ordered)
    if count == 0:
        raise ValueError("no values")
    rank = 1
    while rank < (count + 1) // 2 and _coverage(count, rank + 1) >= confidence:
        rank += 1
    return Interval(float(np.median(ordered)), float(ordered[rank - 1]), float(ordered[-rank]), count, _coverage(count, rank))


def _coverage(count: int, rank: int) -> float:
    below = sum(comb(count, smaller) for smaller in range(rank)) / 2.0**count
    return max(0.0, 1.0 - 2.0 * below)


def steady(step_s: Sequence[float], warmup_steps: int) -> list[float]:
    """Seconds of the steps after warm-up, of all steps where the trial was shorter; values that no step can take are left out."""
    return [value for value in step_s[warmup_steps:] or step_s if isfinite(value) and value > 0]
