"""ParetoSampler: the residual sampler for a front, by a weighting of the terms drawn anew for every proposal.

ParEGO (Knowles 2006): the terms are joined to one score, the augmented Chebyshev distance to the ideal point under random weights,
and the residual model of that score proposes as for one objective. Different weights lead to different parts of the front.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Self

import numpy as np
from optuna.distributions import BaseDistribution
from optuna.study import Study
from optuna.trial import FrozenTrial

from autotune.acquisition import Seen
from autotune.objective import on_scale
from autotune.outlook import Outlook, predicted_log
from autotune.pareto import WORSE
from autotune.records import TrialRecord
from autotune.residual_model import Features, Floats
from autotune.residual_sampler import ResidualSampler
from launchers.outcome import Outcome

_AUGMENTATION = 0.05  # Knowles 2006, equation 2
_ALIKE = 1e-9


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
        """Minus the augmented distance of each candidate, (candidates,)."""
        short = (terms - self.ideal) * self.weights
        return np.asarray(short.min(axis=1) + _AUGMENTATION * short.sum(axis=1))

    def noise(self, terms: Floats, noise: Floats) -> Floats:
        """Standard deviation of each candidate's score: of the term that decides, (candidates,)."""
        deciding = ((terms - self.ideal) * self.weights).argmin(axis=1)
        return np.asarray(noise * self.weights[deciding])


class ParetoSampler(ResidualSampler):
    """Proposes candidates of the front; never tells what is left to gain, because no one value says that.

    The front's range is taken among what counts for the hypervolume: candidates at most `WORSE` below the reference in every term.
    """

    _reference: Mapping[str, float] = MappingProxyType({})

    def sample_relative(self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]) -> dict[str, Any]:
        """The most promising open candidate under new weights; empty where none is left."""
        found = super().sample_relative(study, trial, search_space)
        self.expected_improvement, self.chance_of_gain = math.inf, 1.0
        return found

    def problem(self, study: Study, trial: FrozenTrial) -> tuple[Outlook, Seen]:
        """The terms joined under weights drawn for this trial, of what is expected and of what was measured."""
        view, seen = super().problem(study, trial)
        signs = {name: float(np.sign(weight)) for name, weight in self._expects.weights.items()}
        rows = [[sign * self._change(name, metrics[name]) for name, sign in signs.items()] for metrics in seen.metrics]
        measured = np.array(rows, dtype=np.float64).reshape(len(rows), len(signs))
        expected = self._expected(signs, len(view.score))
        if len(measured):
            # Only differences between candidates are predicted, so each term is moved to where it was measured.
            expected = expected + np.median(measured - expected[seen.rows], axis=0)
        fits = view.memory.load <= 0.0 if view.memory else np.ones(len(expected), dtype=np.bool_)
        known = np.concatenate([measured, expected[fits if fits.any() else slice(None)]])
        counts = (known > -WORSE).all(axis=1) & bool(len(measured))
        joined = Chebyshev.drawn(known[counts] if counts.any() else known, np.random.default_rng((self._seed, trial.number)))
        score = joined.score(expected)
        parts = view.features.matrix[:, : view.features.parts]
        noise = joined.noise(measured, np.array(seen.noise)) if len(measured) else np.zeros(0)
        return (
            replace(view, score=score, features=Features.of(score, parts, view.features.knobs)),
            replace(seen, scores=joined.score(measured).tolist(), noise=np.maximum(noise, _ALIKE).tolist()),
        )

    def _add(self, seen: Seen, row: int, record: TrialRecord) -> None:
        """Also keep what the terms are relative to."""
        super()._add(seen, row, record)
        if record.outcome is Outcome.COMPLETED:
            terms = zip(self._expects.weights, record.values, strict=True)
            self._reference = {name: on_scale(name, record.metrics[name]) - change for name, change in terms}

    def _change(self, name: str, value: float) -> float:
        return on_scale(name, value) - self._reference[name]

    def _expected(self, signs: dict[str, float], rows: int) -> Floats:
        """Each term of each row as predicted, (rows, terms); the same everywhere where nothing predicts it."""
        newest = self._predictions()
        found = [None if newest is None else predicted_log(name, newest) for name in signs]
        columns = [np.zeros(rows) if log is None else sign * log for log, sign in zip(found, signs.values(), strict=True)]
        return np.stack(columns, axis=1)
