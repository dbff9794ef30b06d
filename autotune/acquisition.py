"""Acquisition: which open candidate is worth the next trial, given what the trials so far showed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from autotune.belief import Belief
from autotune.feasibility import succeeds
from autotune.gains import CONSIDERED, DRAWS, Gains, gains_of
from autotune.limit_models import LimitModels
from autotune.outlook import Outlook
from autotune.residual_kernels import Floats
from autotune.residual_model import (
    EVIDENCE,
    HYPOTHESES,
    NOISE,
    Elsewhere,
    Features,
    Hypothesis,
    ResidualModel,
    Rows,
    warmer_c,
)
from autotune.seen import RISK, Seen

SHORTLIST = 1024
"""Candidates that the Gaussian processes are asked about: the best by a rough mean, and a quarter drawn from all others."""
FIRST_BY_MEAN = 3
"""So many trials go to the highest expected throughput, before improvements over them are compared."""
GAIN = 0.01
"""A candidate that beats the best by less is no gain worth a trial."""
LEAST_RISK = 0.03
"""What remains after more crossings than were afforded: the models were too sure."""
UNSAFE = 0.35
"""Where even the least risky candidate crosses as likely as this, none saves risk, and each is weighed by what it may cost."""
OVERDRAWN = -9.0
"""Where so much more was crossed than afforded, and no candidate is left that would save risk, no trial is worth its launch."""
WORTH_IT = 0.5
"""A crossing is risked for candidates whose expected improvement is this share of the largest, whatever that one's risk is."""
LIKELY = 0.5
"""A candidate saves risk where it is at least so likely to run as the likeliest: one that fails tells nothing of a limit."""
_NO_CHANCE = 1e-9
_NO_IMPROVEMENT = 1e-12


@dataclass(frozen=True, slots=True)
class Choice:
    """The candidate to try next, and why.

    Attributes:
        row: The candidate.
        score: Its expected score.
        improvement: Expected improvement over the best, times the chance; infinite before there is a best.
        fits: Probability that it fits into memory.
        runs: Probability that it fits and does not fail otherwise.
        keeps: Probability that it keeps the limits.
        chance_of_gain: Upper bound of the probability that any candidate of the short list beats the best by `GAIN`: the sum of
            theirs; 1 before there is a best, 0 where limits were crossed too often for any to be tried (`OVERDRAWN`).
        larger_than_oom: Open candidates ranked down because one no larger ran out of memory under the same recompute.
        gains: What this trial and further ones are expected to gain; None before there is a best, and in a Pareto study.
    """

    row: int
    score: float
    improvement: float
    fits: float
    runs: float
    keeps: float
    chance_of_gain: float
    larger_than_oom: int
    gains: Gains | None


class Model(Protocol):
    """What `choose` asks of a model of the scores; `ResidualModel` is one."""

    def rough_mean(self) -> Floats:
        """Expected score of all candidates, cheaply."""

    def belief(self, rows: Rows) -> Belief:
        """Score of some candidates."""


def choose(view: Outlook, seen: Seen, rows: Rows, seed: tuple[int, ...], modelled: tuple[Model, Floats] | None = None) -> Choice:
    """The most promising of the open candidates.

    Args:
        view: What is predicted.
        seen: What was measured.
        rows: Open candidates, at least one.
        seed: Of the candidates drawn at random where there are many.
        modelled: Model of the scores, and what it expects of running trials; none = a residual model of `seen.scores`.
    """
    out_of_memory, fitted = np.array(seen.out_of_memory, dtype=np.intp), np.array(seen.rows, dtype=np.intp)
    peaks = np.log([metrics.get("peak_memory_gib") or np.nan for metrics in seen.metrics])
    roughly_fits = view.memory.fits(out_of_memory, fitted, peaks) if view.memory else np.ones(len(view.score))
    model, believed = modelled or believing(view.features, view.score, seen, seen.scores, seen.noise, elsewhere=view.elsewhere)
    limits = LimitModels(view, seen)
    short = shortlist(rows, model.rough_mean() + np.log(roughly_fits + _NO_CHANCE) + limits.log_roughly_kept(), seed)
    fits = view.memory.fits_as_measured(view.features, out_of_memory, fitted, peaks, short) if view.memory else np.ones(len(short))
    keeps = limits.kept(short)
    runs = fits * _succeeds(view, seen, short)
    belief, chance = model.belief(short), np.maximum(runs * keeps, _NO_CHANCE)
    risked = float((1.0 - limits.kept(np.array(seen.running, dtype=np.intp))).sum())
    risk, best, likely = seen.risk(view.limits) - risked, seen.best(view.limits), _likely(runs)
    place, improvement = _best_place(belief, runs, keeps, risk, best, believed, len(seen.rows))
    return Choice(
        row=int(short[place]),
        score=float(belief.mean[place]),
        improvement=improvement,
        fits=float(fits[place]),
        runs=float(runs[place]),
        keeps=float(keeps[place]),
        chance_of_gain=_chance_of_gain(belief, chance, best) if risk > OVERDRAWN or keeps[likely].max() > 1.0 - RISK else 0.0,
        larger_than_oom=int(view.memory.larger_than(out_of_memory)[rows].sum()) if view.memory else 0,
        gains=_gains(model, belief, short, chance, best, believed, seed) if math.isfinite(best) else None,
    )


def shortlist(rows: Rows, worth: Floats, seed: tuple[int, ...]) -> Rows:
    """The open candidates that are looked at closely, at most `SHORTLIST`; `worth` is of all candidates."""
    if len(rows) <= SHORTLIST:
        return rows
    most = SHORTLIST * 3 // 4
    order = np.argpartition(-worth[rows], most)
    drawn = np.random.default_rng(seed).choice(order[most:], SHORTLIST - most, replace=False)
    return np.sort(rows[np.concatenate([order[:most], drawn])])


def _best_place(
    belief: Belief, runs: Floats, keeps: Floats, risk: float, best: float, believed: Floats, measured: int
) -> tuple[int, float]:
    """Place of the most promising candidate that may be risked, and the largest expected improvement over the best measured.

    Risk is saved for what is worth it: a candidate that may well cross a limit is tried where its improvement is near the largest
    that any candidate promises, and one that costs nothing and probably runs until enough is saved for it. Where none costs little,
    the one that promises most per crossing is tried.
    """
    chance, crosses, likely = np.maximum(runs * keeps, _NO_CHANCE), 1.0 - keeps, _likely(runs)
    least = max(LEAST_RISK, float(crosses[likely].min()))
    may = crosses <= max(risk, least)
    throughput = np.where(may, belief.mean + np.log(chance), -np.inf)
    if math.isinf(best) and not len(believed):
        return int(throughput.argmax()), math.inf
    improvement = chance * belief.expected_improvement(max([best, *believed]))
    if risk < least and least > UNSAFE:
        worth = improvement / np.maximum(crosses, LEAST_RISK)
    else:
        allowed = (crosses <= least) & likely | (may & (improvement >= WORTH_IT * improvement.max()))
        worth = improvement = np.where(allowed, improvement, 0.0)
    first = measured < FIRST_BY_MEAN and not len(believed)
    place = int((throughput if first or improvement.max() < _NO_IMPROVEMENT else worth).argmax())
    return place, float(improvement.max()) if math.isfinite(best) else math.inf


def _likely(runs: Floats) -> np.ndarray:
    """Where a candidate runs so likely that it would tell something of the limits."""
    return np.asarray(runs >= LIKELY * runs.max())


def _chance_of_gain(belief: Belief, chance: Floats, best: float) -> float:
    """Boole's bound on the probability that any of these runs, keeps the limits and beats the best by `GAIN`."""
    if math.isinf(best):
        return 1.0
    beats = 1.0 - belief.probability_below(best + math.log1p(GAIN))
    return min(1.0, float((chance * beats).sum()))


def _gains(
    model: Model, belief: Belief, short: Rows, chance: Floats, best: float, believed: Floats, seed: tuple[int, ...]
) -> Gains | None:
    """What trials of the short list are expected to gain over the best measured; running ones reach what is expected of them."""
    if not isinstance(model, ResidualModel):
        return None
    reached = max([best, *believed])
    worth = chance * belief.expected_improvement(reached)
    top = np.argsort(-worth, kind="stable")[:CONSIDERED]
    random = np.random.default_rng(seed)
    return gains_of(model.drawn(short[top], DRAWS, random), chance[top], reached, best, random)


def believing(
    features: Features,
    predicted: Floats,
    seen: Seen,
    measured: Sequence[float],
    noise: Sequence[float],
    hypotheses: Sequence[Hypothesis] = HYPOTHESES,
    elsewhere: Elsewhere | None = None,
) -> tuple[ResidualModel, Floats]:
    """A residual model with running trials at what is expected of them, and that; `measured` and `noise` are of `seen.rows`."""
    rows, values, spread = np.array(seen.rows, dtype=np.intp), np.array(measured), np.array(noise)
    warmer = warmer_c(seen.metrics)
    model = ResidualModel(features, predicted, rows, values, spread, hypotheses, warmer, elsewhere, EVIDENCE)
    if not seen.running:
        return model, np.zeros(0)
    running = np.array(seen.running, dtype=np.intp)
    believed = model.belief(running).mean
    every = np.concatenate([rows, running]), np.concatenate([values, believed])
    spread = np.append(spread, np.full(len(running), NOISE))
    warmer = np.append(warmer, np.zeros(len(running)))
    return ResidualModel(features, predicted, *every, spread, hypotheses, warmer, elsewhere, EVIDENCE), believed


def _succeeds(view: Outlook, seen: Seen, short: Rows) -> Floats:
    """Probability that each of the short list does not fail, whatever the cause."""
    ends = [False] * len(seen.rows) + [True] * len(seen.failed)
    return succeeds(view.features.knobs, np.array(seen.rows + seen.failed, dtype=np.intp), ends, short)
