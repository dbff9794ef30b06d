"""ParetoSampler: the residual sampler for a front, by a weighting of the terms drawn anew for every proposal.

ParEGO (Knowles 2006) with a residual model for each term: the terms are joined to one score, the augmented Chebyshev distance to
the ideal point under random weights, and the candidate with the highest expected improvement of that score is proposed. Different
weights lead to different parts of the front; what a trial says of a term counts under all (Daulton, Balandat and Bakshy 2020).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Self

import numpy as np
from optuna.study import Study
from optuna.trial import FrozenTrial

from autotune.acquisition import Choice, Model, believing, choose
from autotune.belief import Belief
from autotune.objective import THROUGHPUT, on_scale
from autotune.outlook import Outlook, followed, metrics_noise, predicted_log, run_noise
from autotune.pareto import WORSE
from autotune.records import TrialRecord
from autotune.residual_kernels import Floats
from autotune.residual_model import HYPOTHESES, LIMIT_HYPOTHESES, ResidualModel, Rows
from autotune.residual_sampler import ResidualSampler
from autotune.seen import Seen
from launchers.outcome import Outcome
from search_spaces.prediction import Predictions

_AUGMENTATION = 0.05  # Knowles 2006, equation 2
_ALIKE = 1e-9
_DRAWS = 256
_SMOOTH = 1e-3  # standard deviation around a draw of the joined score
_TIMES = (THROUGHPUT, "step_time_s")


@dataclass(frozen=True, slots=True)
class Chebyshev:
    """A scalarisation of the terms; more is better in every one of them.

    Attributes:
        ideal: The best of each term, (terms,).
        weights: Weight of each term's shortfall, (terms,).
    """

    ideal: Floats
    weights: Floats

    @classmethod
    def drawn(cls, known: Floats, random: np.random.Generator) -> Self:
        """With random weights, each term relative to its range on the front.

        The range is from the ideal to the worst that a term has where another one is best; where that is nothing, of all known. The
        weights are 1 on average, so that the score keeps the scale of the terms, logarithms.

        Args:
            known: Terms of measured and expected candidates, (candidates, terms), at least one.
            random: Draws the weights, uniformly over those that add up to 1.
        """
        ideal = known.max(axis=0)
        extremes = known[(known + _ALIKE * known.sum(axis=1, keepdims=True)).argmax(axis=0)]
        on_front = ideal - extremes.min(axis=0)
        ranges = np.where(on_front > _ALIKE, on_front, ideal - known.min(axis=0))
        differ = ranges > _ALIKE
        shares = np.divide(1.0, ranges, out=np.zeros_like(ranges), where=differ)
        drawn = random.dirichlet(np.ones(len(ranges))) * shares
        return cls(ideal, drawn * len(ranges) * differ.sum() / shares.sum() if differ.any() else drawn)

    def score(self, terms: Floats) -> Floats:
        """Minus the augmented distance, for terms along the last axis."""
        short = (terms - self.ideal) * self.weights
        return np.asarray(short.min(axis=-1) + _AUGMENTATION * short.sum(axis=-1))


class JoinedModel:
    """The joined score's model, by draws from the terms' own."""

    def __init__(self, terms: Sequence[ResidualModel], expected: Floats, joined: Chebyshev, random: np.random.Generator) -> None:
        """Join models; the draws are the same for every candidate.

        Args:
            terms: A model for each term.
            expected: Their rough means, (candidates, terms).
            joined: How they are joined.
            random: Draws.
        """
        self._terms, self._expected, self._joined = terms, expected, joined
        self._picks = random.random((len(terms), _DRAWS))
        self._errors = random.standard_normal((len(terms), _DRAWS, 1))

    def rough_mean(self) -> Floats:
        """Score of what is roughly expected of every candidate."""
        return self._joined.score(self._expected)

    def belief(self, rows: Rows) -> Belief:
        """Score of some candidates, a narrow normal distribution per draw."""
        draws = []
        for term, picks, errors in zip(self._terms, self._picks, self._errors, strict=True):
            belief = term.belief(rows)
            picked = np.minimum(np.searchsorted(belief.weights.cumsum(), picks), len(belief.weights) - 1)
            draws.append(belief.means[picked] + belief.deviations[picked] * errors)
        scores = self._joined.score(np.stack(draws, axis=-1))
        return Belief(scores, np.full(scores.shape, _SMOOTH), np.full(_DRAWS, 1.0 / _DRAWS))


class ParetoSampler(ResidualSampler):
    """Proposes candidates of the front; never tells what is left to gain, because no one value says that.

    The front's range is taken among what counts for the hypervolume: candidates at most `WORSE` below the reference in every term.
    """

    _reference: Mapping[str, float] = MappingProxyType({})

    def choice(self, study: Study, trial: FrozenTrial, rows: Rows) -> Choice:
        """The most promising of the open candidates under weights drawn for this trial."""
        view, seen = self.outlook(), self.seen(study, but=trial.number)
        measured = self._measured(seen)
        found = [self._term(name, view, seen, values) for name, values in zip(self._expects.weights, measured.T, strict=True)]
        models = [model for model, _ in found]
        expected = np.stack([model.rough_mean() for model in models], axis=-1)
        fits = view.memory.load <= 0.0 if view.memory else np.ones(len(expected), dtype=np.bool_)
        known = np.concatenate([measured, expected[fits if fits.any() else slice(None)]])
        counts = (known > -WORSE).all(axis=1) & bool(len(measured))
        random = np.random.default_rng((self._seed, trial.number))
        joined = Chebyshev.drawn(known[counts] if counts.any() else known, random)
        believed = joined.score(np.stack([values for _, values in found], axis=-1))
        modelled: tuple[Model, Floats] = JoinedModel(models, expected, joined, random), believed
        scored = replace(seen, scores=joined.score(measured).tolist())
        return replace(choose(view, scored, rows, (self._seed, trial.number), modelled), improvement=math.inf, chance_of_gain=1.0)

    def _measured(self, seen: Seen) -> Floats:
        """Each term of each measured candidate against the reference, more is better, (measured, terms)."""
        found = [
            [np.sign(weight) * (on_scale(name, metrics[name]) - self._reference[name]) for metrics in seen.metrics]
            for name, weight in self._expects.weights.items()
        ]
        return np.array(found, dtype=np.float64).T

    def _term(self, name: str, view: Outlook, seen: Seen, measured: Floats) -> tuple[ResidualModel, Floats]:
        """A term's model, and what it expects of running trials."""
        newest, sign = self._predictions(), float(np.sign(self._expects.weights[name]))

        def expected(predictions: Predictions) -> Floats | None:
            log = predicted_log(followed(name), predictions)
            return None if log is None else sign * log

        log = None if newest is None else expected(newest)
        predicted = np.zeros(len(view.score)) if log is None else log
        close = log is not None and name not in _TIMES
        features = view.features.stretching(predicted)
        noise, hypotheses = (seen.metrics_noise, LIMIT_HYPOTHESES) if close else (seen.noise, HYPOTHESES)
        shown = partial(_shown, name, sign)
        elsewhere = view.past.about(shown, expected, metrics_noise if close else run_noise) if view.past else None
        return believing(features, predicted, seen, measured.tolist(), noise, hypotheses, elsewhere)

    def _add(self, seen: Seen, row: int, record: TrialRecord) -> None:
        """Also keep what the terms are relative to."""
        super()._add(seen, row, record)
        if record.outcome is Outcome.COMPLETED:
            terms = zip(self._expects.weights, record.values, strict=True)
            self._reference = {name: on_scale(name, record.metrics[name]) - change for name, change in terms}


def _shown(name: str, sign: float, metrics: Mapping[str, float]) -> float:
    """A term as a trial of an earlier study measured it, more is better; NaN where it did not."""
    return sign * on_scale(name, metrics[name]) if name in metrics else math.nan
