"""What failed trials say of the others: which candidates probably do not fit, and which probably fail otherwise."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.stats import norm
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import ConstantKernel

from autotune.residual_model import Floats, Rows, smooth
from search_spaces.columns import Ints

SPREAD = 0.05
"""Standard deviation of the logarithm of measured over predicted memory between configurations."""
_BIAS = 0.1
_BIASES = np.linspace(-0.4, 0.4, 41)
LARGER_THAN_OOM = 0.05
"""What is left of the chance of a candidate that is predicted larger than one that ran out of memory under the same recompute."""
_FAILURES_VARIANCE = 0.2
_LEAST = 0.02


@dataclass(frozen=True, slots=True)
class Memory:
    """Predicted memory of every candidate.

    Attributes:
        load: Logarithm of expected over available memory, (rows,).
        recompute: A number per way of recomputation, equal for equal ones, (rows,).
    """

    load: Floats
    recompute: Ints

    def fits(self, out_of_memory: Rows, fitted: Rows) -> Floats:
        """Probability that each candidate fits, (rows,); never rises with predicted memory under the same recompute.

        The predictions share an unknown bias, which the trials tell, and have a spread around it.

        Args:
            out_of_memory: Candidates that ran out of memory.
            fitted: Candidates that did not.
        """
        logs = norm.logpdf(_BIASES, scale=_BIAS)
        logs += norm.logcdf((self.load[out_of_memory][:, None] + _BIASES) / SPREAD).sum(axis=0)
        logs += norm.logcdf(-(self.load[fitted][:, None] + _BIASES) / SPREAD).sum(axis=0)
        weights = np.exp(logs - logs.max())
        grid = np.linspace(-1.0, 1.0, 401)
        probability = norm.cdf(-(grid[:, None] + _BIASES) / SPREAD) @ weights / weights.sum()
        found: Floats = np.interp(self.load, grid, probability)
        found[self.larger_than(out_of_memory)] *= LARGER_THAN_OOM
        return found

    def larger_than(self, out_of_memory: Rows) -> np.ndarray:
        """Where a candidate is predicted at least as large as one of these under the same recompute, bool (rows,)."""
        larger = np.zeros(len(self.load), dtype=np.bool_)
        for row in out_of_memory:
            larger |= (self.recompute == self.recompute[row]) & (self.load >= self.load[row])
        return larger


def succeeds(knobs: Floats, tried: Rows, failed: Sequence[bool], rows: Rows) -> Floats:
    """Probability that candidates do not fail, by the trials near them in the knobs, (rows,).

    Args:
        knobs: Scaled knobs of all candidates.
        tried: Candidates that ended.
        failed: Whether each of these failed.
        rows: The candidates asked about.
    """
    if not any(failed) or not knobs.shape[1]:
        return np.ones(len(rows))
    ends = np.asarray(failed, dtype=np.float64)
    usual = (ends.sum() + 0.5) / (len(ends) + 2)
    kernel = ConstantKernel(_FAILURES_VARIANCE, "fixed") * smooth(knobs.shape[1])
    process = GaussianProcessRegressor(kernel, alpha=0.05, optimizer=None).fit(knobs[tried], ends - usual)
    return np.asarray(np.clip(1.0 - usual - process.predict(knobs[rows]), _LEAST, 1.0))
