"""How much the median step time of one configuration differs from run to run, and an interval that includes it.

Steps of one run share their processes' placement, memory layout and clocks; their interval says nothing of the next run. What a
comparison of two configurations needs is where the median of another run would be.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import exp, log, sqrt
from statistics import NormalDist, fmean, variance

from autotune.steady_state import Interval

DEFAULT_SPREAD = 0.010
"""Relative standard deviation between runs where a study has no repeats; `benchmarks/repeatability.py` measures it."""

_DEFAULT_WEIGHT = 4
_MOST = 50.0  # as a logarithm: wider tells nothing more, and e to it is a number
_TAIL = NormalDist().inv_cdf(0.975)


@dataclass(frozen=True, slots=True)
class RunSpread:
    """Run-to-run spread of the median step time.

    Attributes:
        relative: Standard deviation of runs' medians over the median, without the error that the few steps of a run leave in each.
        repeats: Runs beyond the first of their configuration that it rests on; 0: the default alone.
    """

    relative: float = DEFAULT_SPREAD
    repeats: int = 0

    @property
    def reach(self) -> float:
        """Relative half-width that 95 % of runs' medians keep around their own mean (Student's t)."""
        return _student(self.repeats + _DEFAULT_WEIGHT) * self.relative


def run_spread(runs_by_config: Iterable[Sequence[tuple[float, float]]]) -> RunSpread:
    """The spread that the repeats of a study show, pooled over configurations with the default, which weighs as four repeats.

    s^2 = (4 s0^2 + sum over configurations of (n - 1) s_i^2) / (4 + sum of (n - 1)), of logarithms: the scaled inverse chi-squared
    posterior of a variance (Gelman et al., Bayesian Data Analysis, 3rd ed., 2.6). Medians also differ because each rests on few
    steps, which their own intervals tell, so that s_i^2 is their variance less the mean of these errors' variances, and at least 0
    (analysis of variance: Searle, Casella and McCulloch, Variance Components, 3.6).

    Args:
        runs_by_config: Of each run its median step seconds and the relative half-width of that median's own 95 % interval, one
            sequence per configuration.
    """
    total, repeats = _DEFAULT_WEIGHT * DEFAULT_SPREAD**2, 0
    for runs in runs_by_config:
        if len(runs) > 1:
            errors = fmean((half_width / _TAIL) ** 2 for _, half_width in runs)
            total += (len(runs) - 1) * max(0.0, variance(log(median) for median, _ in runs) - errors)
            repeats += len(runs) - 1
    return RunSpread(sqrt(total / (_DEFAULT_WEIGHT + repeats)), repeats)


def other_runs(within: Interval, spread: RunSpread) -> Interval:
    """Where 95 % of other runs' medians of the same configuration are.

    Two runs differ by the error of either median and by the spread of either run: each squared half-width counts twice. It is wider
    than a confidence interval of the configuration's own median.

    Args:
        within: The interval of one run's median.
        spread: The run-to-run spread.
    """
    below, above = log(within.median / within.low), log(within.high / within.median)
    low, high = _hypotenuse(below, below, spread), _hypotenuse(above, above, spread)
    return Interval(within.median, within.median * exp(-low), within.median * exp(high), within.samples, within.coverage)


def ratio_interval(first: Interval, second: Interval, spread: RunSpread) -> tuple[float, float]:
    """95 % interval of the ratio of two configurations' medians, first over second, one run of each."""
    ratio = first.median / second.median
    low = _hypotenuse(log(first.median / first.low), log(second.high / second.median), spread)
    high = _hypotenuse(log(first.high / first.median), log(second.median / second.low), spread)
    return ratio * exp(-low), ratio * exp(high)


def _hypotenuse(one: float, other: float, spread: RunSpread) -> float:
    return min(sqrt(one**2 + other**2 + 2.0 * spread.reach**2), _MOST)


def _student(freedom: int) -> float:
    """97.5 % quantile of Student's t with at least four degrees of freedom: Abramowitz and Stegun 26.7.5, to 0.3 %."""
    z = _TAIL
    terms: tuple[float, ...] = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
    )
    return z + math.fsum(term / freedom**power for power, term in enumerate(terms, 1))
