"""What further trials are expected to gain, from joint draws of what the sampler believes of its candidates."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from scipy.special import ndtr

from autotune.residual_kernels import Floats

CONSIDERED = 64
"""Candidates that are drawn together: those of the highest expected improvement."""
DRAWS = 256
_SHARED = 0.5  # of what makes a candidate fail or cross a limit is the same for all, such as a bias of predicted memory
_LOW, _HIGH = 0.1, 0.9


@dataclass(frozen=True, slots=True)
class Gains:
    """What the best of the next trials is above the best so far, by their number: differences of scores, which are logarithms.

    Attributes:
        expected: Of the next one, of the next two, ..., (trials,).
        low: A tenth of what is believed possible lies below, (trials,).
        high: A tenth lies above, (trials,).
    """

    expected: Floats
    low: Floats
    high: Floats


def gains_of(drawn: Floats, chance: Floats, reached: float, best: float, random: np.random.Generator) -> Gains:
    """The gains of trying candidates one after the other, each the one that adds most to those before, over all draws.

    That is a batch by greedy expected improvement (Ginsbourger, Le Riche and Carraro 2010), chosen before any of it is run. A study
    learns from every trial, and has more candidates than these: it gains a little more where much is left to learn. The order is
    chosen on the draws that it is judged by, which flatters it by less.

    Args:
        drawn: Scores of candidates, drawn together, (draws, candidates).
        chance: Probability that each runs and keeps the limits, (candidates,); half of what decides it is common to all.
        reached: Score that running trials are expected to reach, at least the best.
        best: Best score measured within the limits.
        random: Draws which of them run.
    """
    own = random.standard_normal(drawn.shape)
    common = random.standard_normal((len(drawn), 1))
    runs = ndtr(math.sqrt(_SHARED) * common + math.sqrt(1.0 - _SHARED) * own) < chance
    scores = np.where(runs, drawn, -np.inf)
    top, after = np.full(len(drawn), reached), []
    for _ in range(drawn.shape[1]):
        adds = np.maximum(scores - top[:, None], 0.0).mean(axis=0)
        top = np.maximum(top, scores[:, adds.argmax()])
        after.append(top - best)
    gained = np.stack(after)
    low, high = np.quantile(gained, (_LOW, _HIGH), axis=1)
    return Gains(gained.mean(axis=1), low, high)
