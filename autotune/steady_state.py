"""Which steps of a trial count, how sure their median is, and when a trial has been measured well enough."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite

import numpy as np
import numpy.typing as npt

from launchers.base import StepRecord

FEWEST_STEADY_STEPS = 6
"""So many values tell a 95 % interval of the median; warm-up detection leaves at least as many."""

_FEWEST_TO_STOP = 8
_MAD_TO_SIGMA = 1.4826
_CLIP_SIGMAS = 3.0


@dataclass(frozen=True, slots=True)
class Interval:
    """A median with its 95 % confidence interval, in the unit of the values.

    Attributes:
        median: The estimate.
        low: Lower end.
        high: Upper end.
        samples: Values it rests on.
        coverage: Confidence that (low, high) really has; below 0.95 where there are fewer than 6 independent values.
    """

    median: float
    low: float
    high: float
    samples: int
    coverage: float

    @property
    def half_width(self) -> float:
        """The farther end's distance from the median, over the median."""
        return max(self.high - self.median, self.median - self.low) / self.median


def median_interval(values: Sequence[float], confidence: float = 0.95, *, correlation_steps: float = 1.0) -> Interval:
    """Distribution-free interval of the median from order statistics.

    The k-th smallest and k-th largest of n values hold the median with probability 1 - 2 P(Binomial(n, 1/2) < k); k is the largest
    that keeps `confidence` (Conover, Practical Nonparametric Statistics, 3rd ed., 3.2). With too few values k = 1. Values that
    follow each other and resemble each other tell less: n of them count as n / `correlation_steps` (Heidelberger and Lewis,
    Quantile estimation in dependent sequences, Operations Research 32, 1984), and k keeps its share of the ranks.

    Args:
        values: At least one finite value.
        confidence: Wanted coverage.
        correlation_steps: Values that tell as much as one independent value, at least 1; see `correlation_steps`.

    Raises:
        ValueError: where `values` is empty.
    """
    ordered = np.sort(np.asarray(values, dtype=float))
    count = len(ordered)
    if count == 0:
        raise ValueError("no values")
    effective = max(1, int(count / correlation_steps))
    rank, coverage = _covering_rank(effective, confidence)
    if coverage >= confidence:
        rank = max(rank * (count + 1) // (effective + 1), 1)
    return Interval(float(np.median(ordered)), float(ordered[rank - 1]), float(ordered[-rank]), count, coverage)


def _covering_rank(count: int, confidence: float) -> tuple[int, float]:
    """The largest rank whose interval keeps the confidence, 1 where none does, and its coverage; exact for thousands of values."""
    rank = ways = fewer = 1  # of all 2^count draws, `ways` have rank - 1 values below the median and `fewer` have fewer than rank
    while rank < (count + 1) // 2:
        ways = ways * (count - rank + 1) // rank
        if _coverage(count, fewer + ways) < confidence:
            break
        rank, fewer = rank + 1, fewer + ways
    return rank, _coverage(count, fewer)


def _coverage(count: int, fewer: int) -> float:
    return max(0.0, 1.0 - 2 * fewer / (1 << count))


def correlation_steps(values: Sequence[float]) -> float:
    """How many values of a series tell as much about its median as one independent value: 1 or more.

    The integrated autocorrelation time 1 + 2 sum(rho_k) of the series "below the median or not", whose variance is what the error
    of a sample median follows (Heidelberger and Lewis 1984). The sum ends by Geyer's initial monotone sequence (Practical Markov
    chain Monte Carlo, Statistical Science 7, 1992); each estimate is raised by 1/n, its bias where the mean is estimated too. In a
    dozen values a correlation above 0.6 cannot be seen in full.

    Args:
        values: The steady values in their order.
    """
    series = np.asarray(values, dtype=float)
    below = (series <= np.median(series)).astype(float)
    centred = below - below.mean()
    variance = float(centred @ centred)
    if variance == 0.0:
        return 1.0
    count = len(series)
    rho = [1.0, *(float(centred[lag:] @ centred[:-lag]) / variance + 1.0 / count for lag in range(1, count // 2))]
    total, smallest = 0.0, np.inf
    for even, odd in zip(rho[::2], rho[1::2], strict=False):
        smallest = min(smallest, even + odd)
        if smallest <= 0.0:
            break
        total += smallest
    return max(1.0, 2.0 * total - 1.0)


def steady_interval(values: Sequence[float]) -> Interval:
    """95 % interval of the median of one run's steady steps, their correlation in time respected.

    Raises:
        ValueError: where `values` is empty.
    """
    return median_interval(values, correlation_steps=correlation_steps(values) if len(values) > 1 else 1.0)


def warm_up(step_s: Sequence[float], at_least: int = 0) -> int:
    """How many first steps belong to the warm-up: MSER.

    Of all truncation points in the first half the one that makes the standard error of the rest's mean smallest (White, An
    effective truncation heuristic for bias reduction in simulation output, Simulation 69, 1997; MSER-5 takes means of five, which
    a dozen steps do not allow). It works on logarithms, so that the unit does not matter, and on values held within three robust
    standard deviations of the second half, so that a single slow step in the middle is no end of a warm-up.

    Args:
        step_s: Seconds of each step, finite and above 0.
        at_least: First steps that are never measured.

    Returns:
        The number of steps to leave out; at least `FEWEST_STEADY_STEPS` are left where there are more than that after `at_least`.
    """
    seconds = np.log(np.asarray(step_s[at_least:], dtype=float))
    most = min(len(seconds) // 2, len(seconds) - FEWEST_STEADY_STEPS)
    if most <= 0:
        return at_least
    held = _held(seconds)
    errors = [float(((rest := held[cut:]) - rest.mean()) @ (rest - rest.mean())) / len(rest) ** 2 for cut in range(most + 1)]
    return at_least + int(np.argmin(errors))


def _held(seconds: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Values held within the spread of their second half; as they are where that does not vary."""
    half = seconds[len(seconds) // 2 :]
    centre = float(np.median(half))
    spread = _CLIP_SIGMAS * _MAD_TO_SIGMA * float(np.median(np.abs(half - centre)))
    return np.clip(seconds, centre - spread, centre + spread) if spread else seconds


def steady_from(step_s: Sequence[float], warmup_steps: int) -> int:
    """Index of the first step that counts: after the warm-up, the first step of all where the trial was shorter."""
    if len(step_s) <= warmup_steps:
        return 0
    possible = [(place, value) for place, value in enumerate(step_s) if place >= warmup_steps and _is_possible(value)]
    cut = warm_up([value for _, value in possible])
    return possible[cut][0] if possible else warmup_steps


def steady(step_s: Sequence[float], warmup_steps: int) -> list[float]:
    """Seconds of the steps after the warm-up, of all steps where the trial was shorter.

    Args:
        step_s: Seconds of every step; values that no step can take are left out.
        warmup_steps: First steps that never count; `warm_up` may leave out more.
    """
    return [value for value in step_s[steady_from(step_s, warmup_steps) :] if _is_possible(value)]


def _is_possible(value: float) -> bool:
    return isfinite(value) and value > 0


@dataclass(frozen=True, slots=True)
class Window:
    """The steady steps: from the start of the first to the end of the last, on the reporting rank's clock.

    Attributes:
        start_s: Unix time.
        end_s: Unix time.
        tokens: Trained in it.
    """

    start_s: float
    end_s: float
    tokens: int

    @property
    def length_s(self) -> float:
        """Its seconds."""
        return self.end_s - self.start_s


def steady_window(steps: Sequence[StepRecord], warmup_steps: int) -> Window | None:
    """The window of the steps that count; None where no step does."""
    counted = [
        step
        for step in steps[steady_from([step.step_s for step in steps], warmup_steps) :]
        if isfinite(step.time_s) and _is_possible(step.step_s)
    ]
    if not counted:
        return None
    return Window(counted[0].time_s - counted[0].step_s, counted[-1].time_s, sum(step.tokens for step in counted))


def is_measured(step_s: Sequence[float], warmup_steps: int, half_width: float) -> bool:
    """Whether a trial may end because its steady steps tell the median closely enough.

    Asked after every step, a rule that stops at the first narrow interval would stop at lucky ones too often; so it wants eight
    steady steps, and is asked at every second step only (compare Law and Kelton, Confidence intervals for steady-state simulations
    II, Management Science 28, 1982).

    Args:
        step_s: Seconds of every step so far.
        warmup_steps: First steps that never count.
        half_width: Wanted half-width of the 95 % interval over the median.
    """
    values = steady(step_s, warmup_steps)
    if len(step_s) % 2 or len(values) < _FEWEST_TO_STOP:
        return False
    found = steady_interval(values)
    return found.coverage >= 0.95 and found.half_width <= half_width
