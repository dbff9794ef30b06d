"""Belief: what is believed of some candidates' scores."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.stats import norm

from autotune.residual_kernels import Floats


@dataclass(frozen=True, slots=True)
class Belief:
    """A mixture of normal distributions for every one of some candidates.

    Attributes:
        means: (hypotheses, candidates).
        deviations: Standard deviations, same shape.
        weights: (hypotheses,), their sum is 1.
    """

    means: Floats
    deviations: Floats
    weights: Floats

    @property
    def mean(self) -> Floats:
        """Expected score, (candidates,)."""
        return np.asarray(self.weights @ self.means)

    def expected_improvement(self, best: float) -> Floats:
        """Expected amount by which each candidate exceeds `best` (Jones, Schonlau and Welch 1998), (candidates,)."""
        z = (self.means - best) / self.deviations
        return np.asarray(self.weights @ (self.deviations * (z * norm.cdf(z) + norm.pdf(z))))

    def probability_below(self, bound: float | Floats) -> Floats:
        """Probability that each candidate's value is at most `bound`, or its own one, (candidates,)."""
        return np.asarray(self.weights @ norm.cdf((bound - self.means) / self.deviations))
