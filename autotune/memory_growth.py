"""Whether memory still grew while a trial was measured: a trial of some dozen steps passes, and the long run dies hours later."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

GROWTH = "memory_growth_gib_per_1000_steps"
FULL_AFTER = "memory_full_after_steps"

_CHANCE = 1e-3
_LONGEST_RUN_STEPS = 1e6


def growth_gib_per_1000_steps(peaks_gib: Sequence[float]) -> float:
    """How fast the peak of a trial's memory still rises in the second half of its steps; 0 where that may be chance.

    Steps that need differently much, as with experts, raise the peak now and then although nothing grows: among n values in any
    order the i-th is above all before it with probability 1/i, independently of the others (Renyi, Theorie des elements saillants
    d'une suite d'observations, 1962), and equal values make it rarer. Memory grows where so many new peaks have a probability
    below 0.1 %.

    Args:
        peaks_gib: The largest memory so far after each step, without the first steps that never count.
    """
    count, half = len(peaks_gib), len(peaks_gib) // 2
    if not half:
        return 0.0
    rises = np.diff(np.asarray(peaks_gib, dtype=float)[half - 1 :])
    if _chance(int((rises > 0).sum()), half + 1, count) >= _CHANCE:
        return 0.0
    return 1000.0 * float(rises.mean())


def _chance(peaks: int, first: int, last: int) -> float:
    """Probability of at least so many new peaks from the value with number `first` to that with number `last`."""
    by_count = np.ones(1)
    for number in range(first, last + 1):
        by_count = np.convolve(by_count, [1.0 - 1.0 / number, 1.0 / number])
    return float(by_count[peaks:].sum())


def full_after_steps(metrics: Mapping[str, float], device_gib: float) -> dict[str, float]:
    """After how many further steps a device of so much memory is full, as a metric; nothing where memory does not grow."""
    growth, peak_gib = metrics.get(GROWTH, 0.0), metrics.get("peak_memory_gib")
    return {FULL_AFTER: max(0.0, device_gib - peak_gib) / growth * 1000.0} if growth > 0.0 and peak_gib is not None else {}


def growth_words(metrics: Mapping[str, float]) -> str:
    """What a person must know of a configuration before a long run of it; empty where no run is so long."""
    left = metrics.get(FULL_AFTER)
    if left is None or left > _LONGEST_RUN_STEPS:
        return ""
    return f"memory still grew by {metrics[GROWTH]:.3g} GiB per 1,000 steps and is full after about {left:,.0f} steps"
