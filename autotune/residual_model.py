"""What measured trials say of the predictions' error: Gaussian processes over the candidates, averaged over hypotheses.

The residual, measured minus predicted score (both logarithms), is modelled as a sum of

* an offset, the same for all candidates;
* an error of every part of the step: a part with share s of the time that is off by the factor exp(e) moves the logarithm by s e;
* a stretch of the predicted range: how much of the predicted differences is real;
* an effect of every choice of a knob by itself, smaller ones of pairs, a trend along its scale, or a smooth function of all knobs;
* a slope over how warm a trial's GPUs were when it began, which candidates are asked about without: all at the usual temperature.

How large these are is not known beforehand. A few hypotheses, from "the prediction is nearly right" to "it says nothing", are each
conditioned on the trials and weighted by their marginal likelihood (Rasmussen and Williams 2006, section 5.2), so that few trials
leave the predicted order as it is, and trials that contradict it take its say away.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from scipy.stats import norm
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import ConstantKernel, DotProduct, Kernel, Matern

Floats = npt.NDArray[np.float64]
Rows = npt.NDArray[np.intp]

NOISE = 0.02
"""Standard deviation of a measured logarithm between two runs of one configuration."""
_OFFSET = 1.0
_LEAST = 1e-6  # standard deviation of what is as good as known
_PER_DEGREE = 0.001  # standard deviation of a logarithm's change per degree at the start: 20 degrees, a clock step or two
_NEGLIGIBLE = 0.01  # weight of a hypothesis that is left out
_KNOBS_AT_UNIT_LENGTH = 5


class Hypothesis(NamedTuple):
    """How far the prediction may be off.

    Attributes:
        parts: Standard deviation of a part's log factor.
        stretch: Of the stretch.
        knobs: Of the knobs' smooth function.
        alone: Of the effect of each choice of a knob, whatever the others are. That of two together is a third of it, a step along
            the knob's scale twice as large, so that choices beyond those tried go on as these began.
        weight: Before any trial, in proportion to the others.
    """

    parts: float
    stretch: float
    knobs: float
    alone: float = 0.0
    weight: float = 1.0


HYPOTHESES = (
    *(Hypothesis(parts, parts / 3, knobs) for parts in (0.1, 0.3, 1.0) for knobs in (0.03, 0.1, 0.3)),
    Hypothesis(1.0, 1.0, 1.0),
    *(Hypothesis(0.0, 1.0, knobs * alone, alone, weight=0.005) for knobs in (0.0, 1.0) for alone in (0.02, 0.06, 0.2)),
)
"""The last ones, in which every knob acts by itself, need many trials to be told from chance: few would mislead them."""
LIMIT_HYPOTHESES = (
    *(Hypothesis(scale, scale / 3, knobs) for scale in (0.01, 0.1, 0.5) for knobs in (0.003, 0.01, 0.03, 0.1)),
    Hypothesis(0.3, 1.0, 0.3),
    *(Hypothesis(0.0, 1.0, knobs * alone, alone) for knobs in (0.0, 1.0) for alone in (0.02, 0.06, 0.2)),
)
"""Of a limited metric: watts and memory may be predicted to a percent, as where a power limit holds the watts."""
_TOGETHER = 1 / 3
_TREND = 2.0


class Alike(Kernel):  # type: ignore[misc]  # scikit-learn carries no types
    """Covariance of sums of independent effects: one of each column's value, and a smaller one of each pair of columns' values.

    With k equal columns k + k (k - 1) / 2 x together^2 (the additive kernel of first and second order of Duvenaud, Nickisch and
    Rasmussen 2011, over values that are equal or not).
    """

    def __init__(self, together: float) -> None:
        self.together = together

    def __call__(self, X: Floats, Y: Floats | None = None, eval_gradient: bool = False) -> Any:  # noqa: N803
        """Covariances, with an empty gradient where one is asked for."""
        alike = sum(np.equal.outer(one, other) for one, other in zip(X.T, (X if Y is None else Y).T, strict=True))
        found = self._effects(np.asarray(alike, dtype=np.float64))
        return (found, np.empty((*found.shape, 0))) if eval_gradient else found

    def diag(self, X: Floats) -> Floats:  # noqa: N803
        """Variances."""
        return np.full(len(X), float(self._effects(np.float64(X.shape[1]))))

    def is_stationary(self) -> bool:
        """It depends on which values are equal only."""
        return True

    def _effects(self, alike: Any) -> Any:
        return alike + alike * (alike - 1.0) / 2.0 * self.together**2


class OnColumns(Kernel):  # type: ignore[misc]  # scikit-learn carries no types
    """A kernel with fixed parameters that sees some of the features only."""

    def __init__(self, kernel: Kernel, start: int, stop: int) -> None:
        self.kernel = kernel
        self.start = start
        self.stop = stop

    def __call__(self, X: Floats, Y: Floats | None = None, eval_gradient: bool = False) -> Any:  # noqa: N803
        """Covariances, with an empty gradient where one is asked for."""
        found = self.kernel(self._seen(X), None if Y is None else self._seen(Y))
        return (found, np.empty((*found.shape, 0))) if eval_gradient else found

    def diag(self, X: Floats) -> Floats:  # noqa: N803
        """Variances."""
        return np.asarray(self.kernel.diag(self._seen(X)))

    def is_stationary(self) -> bool:
        """As the kernel inside."""
        return bool(self.kernel.is_stationary())

    def _seen(self, features: Floats) -> Floats:
        return features[:, self.start : self.stop]


@dataclass(frozen=True, slots=True)
class Features:
    """What the model sees of every candidate.

    Attributes:
        matrix: (rows, features): shares of the step's parts, the centred prediction, the scaled knobs,
            centred as well.
        parts: Number of parts.
        following: Number of knobs, the last ones, that follow from the others: they have no choices of their own.
    """

    matrix: Floats
    parts: int
    following: int = 0

    @classmethod
    def of(cls, score: Floats, shares: Floats, knobs: Floats, following: int = 0) -> Features:
        """Join them; `score` and the rows of the others belong to the same candidates."""
        centred = score - np.median(score)
        scales = knobs - knobs.mean(axis=0) if len(knobs) else knobs
        return cls(np.hstack([shares, centred[:, None], scales]), shares.shape[1], following)

    @property
    def knobs(self) -> Floats:
        """The scaled knobs, (rows, knobs)."""
        return self.matrix[:, self.parts + 1 :]

    def stretching(self, predicted: Floats) -> Features:
        """The same candidates for another prediction, whose own range may be stretched."""
        matrix = self.matrix.copy()
        matrix[:, self.parts] = predicted - np.median(predicted)
        return Features(matrix, self.parts, self.following)

    def started(self, rows: Rows, warmer_c: Floats | float) -> Floats:
        """Some rows of the matrix, with how much warmer than usual their trials began as one more column, degrees."""
        return np.column_stack([self.matrix[rows], np.broadcast_to(warmer_c, len(rows))])

    def kernel(self, hypothesis: Hypothesis) -> Kernel:
        """The covariance of the residuals under a hypothesis, over rows as `started` gives them."""
        stretch, width = self.parts, self.matrix.shape[1]
        found = _fixed(_OFFSET) + _fixed(hypothesis.stretch) * OnColumns(_linear(), stretch, stretch + 1)
        found += _fixed(_PER_DEGREE) * OnColumns(_linear(), width, width + 1)
        if self.parts and hypothesis.parts:
            found += _fixed(hypothesis.parts) * OnColumns(_linear(), 0, self.parts)
        if width > stretch + 1:
            if hypothesis.knobs:
                found += _fixed(hypothesis.knobs) * OnColumns(smooth(width - stretch - 1), stretch + 1, width)
            if hypothesis.alone:
                choices = stretch + 1, width - self.following
                found += _fixed(hypothesis.alone) * (
                    OnColumns(Alike(_TOGETHER), *choices) + _fixed(_TREND) * OnColumns(_linear(), *choices)
                )
        return found


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


class ResidualModel:
    """The residuals' Gaussian processes after some trials."""

    def __init__(
        self,
        features: Features,
        predicted: Floats,
        rows: Rows,
        measured: Floats,
        noise: Floats,
        hypotheses: Sequence[Hypothesis] = HYPOTHESES,
        warmer_c: Floats | float = 0.0,
    ) -> None:
        """Condition every hypothesis on the trials.

        Args:
            features: Of all candidates.
            predicted: Predicted score of all candidates, a logarithm up to a constant.
            rows: Candidates that were measured; may be empty.
            measured: Their scores.
            noise: Standard deviations of these.
            hypotheses: How far the prediction may be off.
            warmer_c: How much warmer than usual each trial's GPUs were when it began, degrees.
        """
        self._features = features
        self._seen = features.started(rows, warmer_c)
        self._predicted = predicted
        residuals = measured - predicted[rows]
        # A score may be relative to any reference: only differences between the candidates count.
        self._offset = float(np.median(residuals)) if len(rows) else 0.0
        every = [self._fit(hypothesis, residuals - self._offset, noise) for hypothesis in hypotheses]
        shown = np.array([process.log_marginal_likelihood_value_ if len(rows) else 0.0 for process in every])
        logs = shown + np.log([hypothesis.weight for hypothesis in hypotheses])
        weights = np.exp(logs - logs.max())
        kept = weights >= _NEGLIGIBLE * weights.sum()
        self._processes = [process for process, keep in zip(every, kept, strict=True) if keep]
        self._hypotheses = [hypothesis for hypothesis, keep in zip(hypotheses, kept, strict=True) if keep]
        self._weights = weights[kept] / weights[kept].sum()

    def belief(self, rows: Rows) -> Belief:
        """Score of some candidates, started at the usual temperature."""
        seen = self._features.started(rows, 0.0)
        found = [process.predict(seen, return_std=True) for process in self._processes]
        shape = len(found), len(rows)  # scikit-learn drops the axis of a single candidate
        residuals, deviations = (np.stack(part).reshape(shape) for part in zip(*found, strict=True))
        return Belief(self._predicted[rows] + self._offset + residuals, np.maximum(deviations, _LEAST), self._weights)

    def rough_mean(self) -> Floats:
        """Expected score of all candidates without the knobs' smooth function: a few products per candidate."""
        features = self._features.matrix[:, : self._features.parts + 1]
        slopes, offset = np.zeros(features.shape[1]), self._offset
        for process, hypothesis, weight in zip(self._processes, self._hypotheses, self._weights, strict=True):
            if hasattr(process, "X_train_"):
                scales = np.array([hypothesis.parts] * self._features.parts + [hypothesis.stretch]) ** 2
                slopes += weight * scales * (process.X_train_[:, : len(slopes)].T @ process.alpha_)
                offset += weight * _OFFSET**2 * float(process.alpha_.sum())
        return np.asarray(self._predicted + offset + features @ slopes)

    def _fit(self, hypothesis: Hypothesis, residuals: Floats, noise: Floats) -> GaussianProcessRegressor:
        variances = noise**2 if len(residuals) else NOISE**2
        process = GaussianProcessRegressor(self._features.kernel(hypothesis), alpha=variances, optimizer=None)
        return process.fit(self._seen, residuals) if len(residuals) else process


def smooth(knobs: int) -> Kernel:
    """A twice differentiable function of so many knobs; distances grow with the root of their number, so lengths do as well."""
    return Matern(np.sqrt(knobs / _KNOBS_AT_UNIT_LENGTH), length_scale_bounds="fixed", nu=2.5)


def _linear() -> Kernel:
    return DotProduct(0.0, sigma_0_bounds="fixed")


def _fixed(deviation: float) -> Kernel:
    return ConstantKernel(deviation**2, constant_value_bounds="fixed")
