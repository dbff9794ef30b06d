"""What trials say of limits: how likely each candidate keeps all of them."""

from __future__ import annotations

import numpy as np
from scipy.stats import norm

from autotune.feasibility import succeeds
from autotune.outlook import METRICS_NOISE, Limit, Outlook
from autotune.residual_kernels import Floats
from autotune.residual_model import LIMIT_HYPOTHESES, ResidualModel, Rows, warmer_c
from autotune.seen import Seen, keep_all
from search_spaces.columns import Bools

_ROUGHLY = 0.05  # standard deviation of a limit's logarithm around its rough mean


class LimitModels:
    """A model of every limited metric after some trials.

    A metric with a logarithm has a residual model. Of one that may be zero, as seconds of throttling are, the trials near a
    candidate tell whether it crosses.
    """

    def __init__(self, view: Outlook, seen: Seen) -> None:
        """Condition them on what was measured."""
        self._view, self._seen = view, seen
        self._models = [(limit, _model(view, seen, limit)) for limit in view.limits if limit.predicted is not None]
        self._others = tuple(limit for limit in view.limits if limit.predicted is None)

    def log_roughly_kept(self) -> Floats:
        """Logarithm of the probability that each of all candidates keeps them, cheaply and roughly."""
        every = (norm.logcdf((limit.most - own.rough_mean()) / _ROUGHLY) for limit, own in self._models)
        return sum(every, np.zeros(len(self._view.score)))

    def kept(self, rows: Rows) -> Floats:
        """Probability that each of some candidates keeps them all."""
        found = np.ones(len(rows))
        if len(rows):
            for limit, own in self._models:
                found = found * own.belief(rows).probability_below(limit.most)
            for limit in self._others:
                crossed = [not limit.kept_by(metrics) for metrics in self._seen.metrics]
                found = found * succeeds(self._view.features.knobs, np.array(self._seen.rows, dtype=np.intp), crossed, rows)
        return np.where(self._crosses_again(rows), 0.0, found)

    def _crosses_again(self, rows: Rows) -> Bools:
        """Which of some candidates would only repeat an undisturbed trial that crossed a limit."""
        view, seen = self._view, self._seen
        if view.power_limits is None:
            return np.zeros(len(rows), dtype=np.bool_)
        trials = zip(seen.rows, seen.metrics, seen.metrics_noise, strict=True)
        crossed = [(row, told) for row, told, noise in trials if noise <= METRICS_NOISE and not keep_all(view.limits, told)]
        return view.power_limits.same_run(crossed)[rows]


def _model(view: Outlook, seen: Seen, limit: Limit) -> ResidualModel:
    """The model of a limited metric, on the trials that measured it."""
    assert limit.predicted is not None
    values = np.array([limit.measured(metrics) for metrics in seen.metrics])
    known = np.isfinite(values)
    rows, noise = np.array(seen.rows, dtype=np.intp)[known], np.array(seen.metrics_noise)[known]
    features, warmer = view.features.stretching(limit.predicted), warmer_c(seen.metrics)[known]
    return ResidualModel(features, limit.predicted, rows, values[known], noise, LIMIT_HYPOTHESES, warmer, limit.elsewhere)
