"""What failed trials say of the others: which candidates probably do not fit, and which probably fail otherwise."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.stats import norm
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import ConstantKernel, DotProduct

from autotune.residual_kernels import Floats, smooth
from autotune.residual_model import LIMIT_HYPOTHESES, Features, ResidualModel, Rows
from search_spaces.columns import Ints

SPREAD = 0.05
"""Standard deviation of the logarithm of measured over predicted memory between configurations, unless trials show a wider one."""
_SPREADS = {SPREAD: 0.95, 0.15: 0.04, 0.45: 0.01}
"""Probability of each before any trial."""
_BIAS = 0.1
_BIASES = np.linspace(-0.4, 0.4, 41)
LARGER_THAN_OOM = 0.05
"""What is left of the chance of a candidate that is predicted larger than one that ran out of memory under the same recompute."""
SAME_PROGRAM = 0.01
"""Chance that a configuration ends otherwise than one that differs from it in limits of the device only."""
_FAILURES_VARIANCE = 0.2
_FAILURES_SLOPE = 0.04  # variance of what one step of one knob's scale adds
_LEAST = 0.02
_USUAL_AT_MOST = 0.5
"""Where nearly all fail, what is far from them must still look better than what is near."""
_FEWEST_PEAKS = 3
_PEAK_NOISE = 0.01
_BEYOND = 0.2
"""How far the peak of a trial that ran out of memory is taken to be above the device's memory, and how sure that is: logarithms."""


@dataclass(frozen=True, slots=True)
class Memory:
    """Predicted memory of every candidate.

    Attributes:
        load: Logarithm of expected over available memory, (rows,).
        recompute: A number per way of recomputation, equal for equal ones, (rows,).
        allocated: Logarithm of the peak that is expected to be measured, (rows,); None where nothing is expected.
        program: A number per training program, (rows,), equal where only power or clock limits differ; None: no two are.
    """

    load: Floats
    recompute: Ints
    allocated: Floats | None = None
    program: Ints | None = None

    def fits(self, out_of_memory: Rows, fitted: Rows, measured: Floats | None = None) -> Floats:
        """Probability that each candidate fits, (rows,); never rises with predicted memory under the same recompute.

        The predictions share an unknown bias and have a spread around it; the trials tell both. The wider the spread, the less an
        out-of-memory says of candidates that are predicted larger. The same program under other limits ends as it did.

        Args:
            out_of_memory: Candidates that ran out of memory.
            fitted: Candidates that did not.
            measured: Logarithms of the peaks measured on these, NaN where there is none.
        """
        weights = self._weights(out_of_memory, fitted, measured)
        grid = np.linspace(-1.0, 1.0, 401)
        below = norm.cdf(-(grid[:, None, None] + _BIASES) / np.array(list(_SPREADS))[:, None])
        found: Floats = np.interp(self.load, grid, np.einsum("gsb,sb->g", below, weights))
        found[self.larger_than(out_of_memory)] *= 1.0 - float(weights[0].sum()) * (1.0 - LARGER_THAN_OOM)
        return self._as_it_ended(found, np.arange(len(found)), out_of_memory, fitted)

    def fits_as_measured(self, features: Features, out_of_memory: Rows, fitted: Rows, measured: Floats, rows: Rows) -> Floats:
        """Probability that some candidates fit, (len(rows),), where measured peaks may not follow the predicted ones.

        As far as they do, closely or roughly, `fits` tells it: what is predicted several times too large is not worth a launch
        because some configurations fragment. Where only the widest spread explains the peaks, a residual model of these tells it,
        in which one that ran out of memory counts as somewhat larger than the device.

        Args:
            features: What the model sees of every candidate.
            out_of_memory: As for `fits`.
            fitted: As for `fits`.
            measured: As for `fits`.
            rows: The candidates asked about.
        """
        by_load, known = self.fits(out_of_memory, fitted, measured)[rows], np.isfinite(measured)
        if self.allocated is None or known.sum() < _FEWEST_PEAKS:
            return by_load
        trusted = float(self._weights(out_of_memory, fitted, measured)[:-1].sum())
        if trusted > 1.0 - _LEAST:
            return by_load
        most = self.allocated - self.load
        peaks = np.concatenate([measured[known], most[out_of_memory] + _BEYOND])
        noise = np.concatenate([np.full(int(known.sum()), _PEAK_NOISE), np.full(len(out_of_memory), _BEYOND)])
        tried = np.concatenate([fitted[known], out_of_memory])
        model = ResidualModel(features.stretching(self.allocated), self.allocated, tried, peaks, noise, LIMIT_HYPOTHESES)
        found = trusted * by_load + (1.0 - trusted) * model.belief(rows).probability_below(most[rows])
        return self._as_it_ended(found, rows, out_of_memory, fitted)

    def _as_it_ended(self, found: Floats, rows: Rows, out_of_memory: Rows, fitted: Rows) -> Floats:
        """`found` of some candidates, but for those whose program was tried under other limits of the device."""
        if self.program is not None:
            for ended, known in ((fitted, 1.0 - SAME_PROGRAM), (out_of_memory, SAME_PROGRAM)):
                found = np.where(np.isin(self.program[rows], self.program[ended]), known, found)
        return found

    def _weights(self, out_of_memory: Rows, fitted: Rows, measured: Floats | None) -> Floats:
        """Probability of each spread and bias, (spreads, biases)."""
        spreads = np.array(list(_SPREADS))[:, None]
        logs = np.log(list(_SPREADS.values()))[:, None] + norm.logpdf(_BIASES, scale=_BIAS)
        logs = logs + norm.logcdf((self.load[out_of_memory][:, None, None] + _BIASES) / spreads).sum(axis=0)
        logs = logs + norm.logcdf(-(self.load[fitted][:, None, None] + _BIASES) / spreads).sum(axis=0)
        if measured is not None and self.allocated is not None:
            logs = logs + _scatter_log(measured - self.allocated[fitted], spreads)
        weights = np.exp(logs - logs.max())
        return np.asarray(weights / weights.sum())

    def larger_than(self, out_of_memory: Rows) -> np.ndarray:
        """Where a candidate is predicted at least as large as one of these under the same recompute, bool (rows,)."""
        larger = np.zeros(len(self.load), dtype=np.bool_)
        for row in out_of_memory:
            larger |= (self.recompute == self.recompute[row]) & (self.load >= self.load[row])
        return larger


def _scatter_log(ratios: Floats, spreads: Floats) -> Floats:
    """Log likelihood of each spread, (spreads, 1), from measured over predicted logarithms around their own unknown mean."""
    known = ratios[np.isfinite(ratios)]
    if len(known) < 2:  # noqa: PLR2004
        return np.zeros_like(spreads)
    squares = float(((known - known.mean()) ** 2).sum())
    return np.asarray(-(len(known) - 1) * np.log(spreads) - squares / (2.0 * spreads**2))


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
    usual = min((ends.sum() + 0.5) / (len(ends) + 2), _USUAL_AT_MOST)
    kernel = ConstantKernel(_FAILURES_VARIANCE, "fixed") * smooth(knobs.shape[1])
    kernel += ConstantKernel(_FAILURES_SLOPE, "fixed") * DotProduct(0.0, "fixed")
    seen = knobs - knobs[tried].mean(axis=0)
    process = GaussianProcessRegressor(kernel, alpha=0.05, optimizer=None).fit(seen[tried], ends - usual)
    return np.asarray(np.clip(1.0 - usual - process.predict(seen[rows]), _LEAST, 1.0))
