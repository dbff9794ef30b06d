"""What measured trials say of the predictions' error: Gaussian processes over the candidates, averaged over hypotheses.

The residual, measured minus predicted score (both logarithms), is modelled as a sum of

* an offset, the same for all candidates;
* an error of every part of the step: a part with share s of the time that is off by the factor exp(e) moves the logarithm by s e;
* a stretch of the predicted range: how much of the predicted differences is real;
* an effect of every choice of a knob by itself, smaller ones of pairs, a trend along its scale, or a smooth function of all knobs;
* a slope over how warm a trial's GPUs were when it began, which candidates are asked about without: all at the usual temperature.

How large these are is not known beforehand. A few hypotheses, from "the prediction is nearly right" to "it says nothing", are each
conditioned on the trials and weighted by their marginal likelihood (Rasmussen and Williams 2006, section 5.2), so that few trials
leave the predicted order as it is, and trials that contradict it take its say away. Many trials are often near each other, and how
well a hypothesis tells these says little of candidates unlike them: of a score they weigh no more than `EVIDENCE` of them (a power
posterior: Gruenwald 2012, "The safe Bayesian"), so that a study does not end surer than it may be.

What trials of earlier studies showed (`Elsewhere`) is correlated with what is off here, but for an offset of each study's own. That
they say nothing here is one more hypothesis.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from scipy.special import logsumexp
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import Kernel

from autotune.belief import Belief
from autotune.residual_kernels import Across, Alike, Floats, OnColumns, fixed, linear, smooth
from autotune.throttle_metrics import START_TEMPERATURE

Rows = npt.NDArray[np.intp]

NOISE = 0.02
"""Standard deviation of a measured logarithm between two runs of one configuration."""
_OFFSET = 1.0
_LEAST = 1e-6  # standard deviation of what is as good as known
_PER_DEGREE = 0.001  # standard deviation of a logarithm's change per degree at the start: 20 degrees, a clock step or two
EVIDENCE = 10
"""Trials whose likelihood weighs the hypotheses of a score; of more of them, each counts for less."""
ENOUGH = 100
"""Trials from which on a study needs no others' to tell it anything, and would only be slower with them."""
UNALIKE = 0.3
"""Probability that what was off in other studies says nothing here, before any trial here tells."""
_NEGLIGIBLE = 0.01  # weight of a hypothesis that is left out


def warmer_c(metrics: Sequence[Mapping[str, float]]) -> Floats:
    """How much warmer than usual the GPUs of each trial were when it began, degrees, by its metrics; 0 where they do not tell."""
    celsius = np.array([measured.get(START_TEMPERATURE, np.nan) for measured in metrics])
    known = np.isfinite(celsius)
    return np.where(known, celsius - np.median(celsius[known]), 0.0) if known.any() else np.zeros(len(celsius))


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
    *(Hypothesis(parts, parts / 3, knobs, weight=parts**-0.5) for parts in (0.1, 0.3, 1.0) for knobs in (0.03, 0.1, 0.3)),
    Hypothesis(1.0, 1.0, 1.0),
    *(Hypothesis(0.0, 1.0, knobs * alone, alone, weight=0.01) for knobs in (0.0, 1.0) for alone in (0.02, 0.06, 0.2)),
)
"""Published steps are predicted 10 % off: wider errors weigh less. Where every knob acts by itself, few trials would mislead."""
LIMIT_HYPOTHESES = (
    *(Hypothesis(scale, scale / 3, knobs) for scale in (0.01, 0.1, 0.5) for knobs in (0.003, 0.01, 0.03, 0.1)),
    Hypothesis(0.3, 1.0, 0.3),
    *(Hypothesis(0.0, 1.0, knobs * alone, alone) for knobs in (0.0, 1.0) for alone in (0.02, 0.06, 0.2)),
)
"""Of a limited metric: watts and memory may be predicted to a percent, as where a power limit holds the watts."""
_TOGETHER = 1 / 3
_TREND = 2.0


@dataclass(frozen=True, slots=True)
class Features:
    """What the model sees of every candidate.

    Attributes:
        matrix: (rows, features): shares of the step's parts, the prediction and the scaled knobs, both centred.
        parts: Number of parts.
        following: Number of knobs, the last ones, that follow from the others: they have no choices of their own.
    """

    matrix: Floats
    parts: int
    following: int = 0

    @classmethod
    def of(cls, score: Floats, shares: Floats, knobs: Floats, following: int = 0, own: int | None = None) -> Features:
        """Join them; `score` and the rows of the others belong to the same candidates.

        Args:
            score: Predicted score, (rows,).
            shares: Shares of the step's parts, (rows, parts).
            knobs: Scaled knobs, (rows, knobs).
            following: Number of those that follow from others, the last ones.
            own: So many rows, the first ones, are candidates of this study, around which all are centred; none = all.
        """
        centred = score - np.median(score[:own])
        scales = knobs - knobs[:own].mean(axis=0) if len(knobs) else knobs
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
        """Some rows of the matrix with two more columns: how much warmer than usual their trials began, degrees, and study 0."""
        return _started(self.matrix[rows], warmer_c, 0)

    def kernel(self, hypothesis: Hypothesis, alike: tuple[float, ...] = (1.0,)) -> Kernel:
        """The covariance of the residuals under a hypothesis, over rows as `started` gives them.

        Args:
            hypothesis: How far the prediction may be off.
            alike: Of each study; every one has an offset of its own.
        """
        stretch, width = self.parts, self.matrix.shape[1]
        found = fixed(hypothesis.stretch) * OnColumns(linear(), stretch, stretch + 1)
        if self.parts and hypothesis.parts:
            found += fixed(hypothesis.parts) * OnColumns(linear(), 0, self.parts)
        if width > stretch + 1:
            if hypothesis.knobs:
                found += fixed(hypothesis.knobs) * OnColumns(smooth(width - stretch - 1), stretch + 1, width)
            if hypothesis.alone:
                choices = stretch + 1, width - self.following
                found += fixed(hypothesis.alone) * (
                    OnColumns(Alike(_TOGETHER), *choices) + fixed(_TREND) * OnColumns(linear(), *choices)
                )
        offset = fixed(_OFFSET)
        if len(alike) > 1:
            study = width + 1, width + 2
            found, offset = found * OnColumns(Across(alike), *study), offset * OnColumns(Across((0.0,) * len(alike)), *study)
        return offset + fixed(_PER_DEGREE) * OnColumns(linear(), width, width + 1) + found


@dataclass(frozen=True, slots=True)
class Elsewhere:
    """What trials of other studies measured of a score, none of which is a candidate here.

    Attributes:
        matrix: What the model sees of each, on the candidates' scales, (trials, features).
        residuals: Measured minus predicted, a logarithm; each study's median is 0, (trials,).
        noise: Standard deviations of what was measured, (trials,).
        warmer_c: How much warmer than usual in its study each trial's GPUs were when it began, degrees, (trials,).
        studies: Number of each trial's study, from 1, (trials,).
        alike: Correlation of what is off in each study, from 1 on, with what is off here; the first is this study's, 1.
    """

    matrix: Floats
    residuals: Floats
    noise: Floats
    warmer_c: Floats
    studies: Rows
    alike: tuple[float, ...]

    def started(self) -> Floats:
        """As `Features.started`."""
        return _started(self.matrix, self.warmer_c, self.studies)


class _Trials(NamedTuple):
    """Measured trials: what the model sees of them, and what they showed."""

    seen: Floats
    residuals: Floats
    noise: Floats


class _Fit(NamedTuple):
    """A hypothesis conditioned on trials, and the logarithm of its weight times their likelihood."""

    process: GaussianProcessRegressor
    hypothesis: Hypothesis
    log: float


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
        elsewhere: Elsewhere | None = None,
        evidence: float = math.inf,
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
            elsewhere: What trials of other studies showed; left out from `ENOUGH` trials on.
            evidence: Trials here whose likelihood weighs the hypotheses; that of more is raised to the power evidence / trials.
        """
        if elsewhere is not None and (len(rows) >= ENOUGH or not len(elsewhere.residuals)):
            elsewhere = None
        self._features = features
        self._predicted = predicted
        self._power = min(1.0, evidence / len(rows)) if len(rows) else 1.0
        self._alike = elsewhere.alike if elsewhere else (1.0,)
        residuals = measured - predicted[rows]
        # A score may be relative to any reference: only differences between the candidates count.
        self._offset = float(np.median(residuals)) if len(rows) else 0.0
        here = _Trials(features.started(rows, warmer_c), residuals - self._offset, noise)
        every = self._fitted(hypotheses, here)
        if elsewhere is not None:
            there = _Trials(elsewhere.started(), elsewhere.residuals, elsewhere.noise)
            both = _Trials(*(np.concatenate(parts) for parts in zip(here, there, strict=True)))
            told = math.log(1.0 - UNALIKE) - logsumexp([fit.log for fit in self._fitted(hypotheses, there)])
            every = [fit._replace(log=fit.log + math.log(UNALIKE)) for fit in every]
            every += [fit._replace(log=fit.log + told) for fit in self._fitted(hypotheses, both)]
        logs = np.array([fit.log for fit in every])
        weights = np.exp(logs - logs.max())
        kept = weights >= _NEGLIGIBLE * weights.sum()
        self._fits = [fit for fit, keep in zip(every, kept, strict=True) if keep]
        self._weights = weights[kept] / weights[kept].sum()

    def belief(self, rows: Rows) -> Belief:
        """Score of some candidates, started at the usual temperature."""
        seen = self._features.started(rows, 0.0)
        found = [process.predict(seen, return_std=True) for process, *_ in self._fits]
        shape = len(found), len(rows)  # scikit-learn drops the axis of a single candidate
        residuals, deviations = (np.stack(part).reshape(shape) for part in zip(*found, strict=True))
        return Belief(self._predicted[rows] + self._offset + residuals, np.maximum(deviations, _LEAST), self._weights)

    def drawn(self, rows: Rows, draws: int, random: np.random.Generator) -> Floats:
        """Scores that some candidates may have together, (draws, candidates): each draw follows one of the hypotheses."""
        seen, shares = self._features.started(rows, 0.0), random.multinomial(draws, self._weights)
        joint = [fit.process.predict(seen, return_cov=True) for fit in self._fits]
        found = [random.multivariate_normal(mean, cov, n, method="eigh") for (mean, cov), n in zip(joint, shares, strict=True)]
        return self._predicted[rows] + self._offset + np.concatenate(found)

    def rough_mean(self) -> Floats:
        """Expected score of all candidates without the knobs' smooth function: a few products per candidate."""
        features = self._features.matrix[:, : self._features.parts + 1]
        slopes, offset = np.zeros(features.shape[1]), self._offset
        for (process, hypothesis, _), weight in zip(self._fits, self._weights, strict=True):
            if hasattr(process, "X_train_"):
                scales = np.array([hypothesis.parts] * self._features.parts + [hypothesis.stretch]) ** 2
                study = process.X_train_[:, -1].astype(np.intp)
                slopes += weight * scales * (process.X_train_[:, : len(slopes)].T @ (process.alpha_ * np.take(self._alike, study)))
                offset += weight * _OFFSET**2 * float(process.alpha_[study == 0].sum())
        return np.asarray(self._predicted + offset + features @ slopes)

    def _fitted(self, hypotheses: Sequence[Hypothesis], trials: _Trials) -> list[_Fit]:
        """Every hypothesis conditioned on some trials; as it is where there are none."""
        every, total = [], sum(hypothesis.weight for hypothesis in hypotheses)
        for hypothesis in hypotheses:
            variances = trials.noise**2 if len(trials.noise) else NOISE**2
            process = GaussianProcessRegressor(self._features.kernel(hypothesis, self._alike), alpha=variances, optimizer=None)
            log = math.log(hypothesis.weight / total)
            if len(trials.residuals):
                likelihood = process.fit(trials.seen, trials.residuals).log_marginal_likelihood_value_
                log += self._power * likelihood
            every.append(_Fit(process, hypothesis, log))
        return every


def _started(matrix: Floats, warmer_c: Floats | float, study: Rows | int) -> Floats:
    return np.column_stack([matrix, *(np.broadcast_to(column, len(matrix)) for column in (warmer_c, study))])
