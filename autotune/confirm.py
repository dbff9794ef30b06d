"""Confirmation: the best explored configurations run again, in turns, and the winner is chosen among these measurements only.

Exploring picks the largest of many noisy numbers, so its best is flattered (winner's curse); it also runs on cool machines.
Everything here is a function of the records, so that a resumed study goes on where it was.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy import stats

from autotune.objective import THROUGHPUT, Objective
from autotune.records import Phase, TrialRecord
from autotune.spec_parts import Bound, Confirmation
from launchers.outcome import Outcome
from search_spaces.config import TrialConfig

POWER = "gpu_mean_power_w"
_MOST_CONTENDERS = 3


@dataclass(frozen=True, slots=True)
class Contender:
    """A configuration and its confirming runs.

    Attributes:
        explored: The run that put it among the best.
        runs: Confirming runs that ended, in order; lost ones left out, and disturbed ones where there are enough others.
    """

    explored: TrialRecord
    runs: tuple[TrialRecord, ...]

    @property
    def config(self) -> TrialConfig:
        """What runs."""
        return self.explored.config

    def failed(self, objective: Objective) -> bool:
        """Whether a confirming run failed or crossed a limit."""
        return any(run.outcome is not Outcome.COMPLETED or objective.violations(run.metrics) for run in self.runs)

    def scores(self, objective: Objective) -> np.ndarray:
        """Score of each confirming run, float (runs,)."""
        return np.array([objective.score(run.metrics) for run in self.runs])


@dataclass(frozen=True, slots=True)
class Comparison:
    """How two contenders compare, run by run.

    Attributes:
        difference: Mean difference of the scores.
        low: Lower end of its 95 % interval (Student's t over the paired runs).
        high: Upper end.
    """

    difference: float
    low: float
    high: float

    @property
    def decided(self) -> bool:
        """Whether the interval leaves out 0."""
        return self.low > 0 or self.high < 0


@dataclass(frozen=True, slots=True)
class Decision:
    """The winner among the confirmed.

    Attributes:
        winner: Its confirming run with the median score.
        runner_up: The next best contender's; None where only one was confirmed.
        margin: Winner's scores less the runner-up's.
        over_baseline: Winner's ln(tokens/s) less the baseline's; None where the baseline was not confirmed or has won.
        by_power: Whether the winner was taken from several that are not told apart, for its lower power.
    """

    winner: TrialRecord
    runner_up: TrialRecord | None = None
    margin: Comparison | None = None
    over_baseline: Comparison | None = None
    by_power: bool = False


def able(records: Sequence[TrialRecord], objective: Objective) -> list[Contender]:
    """Who may be confirmed: the explored within the limits, best score first, and those that were run to confirm already.

    Limits are tightened by what confirming has shown over exploring so far (`heat_margins`).
    """
    everyone = _ranked(records, objective)
    tight = replace(objective, limits=_tightened(objective.limits, heat_margins(everyone)))
    return [contender for contender in everyone if contender.runs or not tight.violations(contender.explored.metrics)]


def contenders(records: Sequence[TrialRecord], objective: Objective, confirmation: Confirmation) -> list[Contender]:
    """Who is confirmed: the best of the able until `top` hold, others that reach the best's interval, the baseline."""
    if not confirmation.top:
        return []
    everyone = able(records, objective)
    chosen: list[Contender] = []
    holding = 0
    for contender in everyone:
        reaches = bool(chosen) and _reaches(contender, chosen[0], objective)
        if holding < confirmation.top or (reaches and len(chosen) < _MOST_CONTENDERS * confirmation.top):
            chosen.append(contender)
            holding += not contender.failed(objective)
    baseline = [contender for contender in everyone if contender.explored.phase is Phase.BASELINE and contender not in chosen]
    return chosen + baseline


def next_config(
    chosen: Sequence[Contender], running: Sequence[TrialConfig], repeats: int, objective: Objective
) -> TrialConfig | None:
    """The next to run: in turns, each turn beginning with another one; None where all have run often enough or are running."""
    due = []
    for place, contender in enumerate(chosen):
        rounds = len(contender.runs) + running.count(contender.config)
        if rounds < repeats and not contender.failed(objective):
            due.append((rounds, (place - rounds) % len(chosen), contender.config))
    return min(due, key=lambda item: item[:2])[2] if due else None


def decide(chosen: Sequence[Contender], objective: Objective, repeats: int) -> Decision | None:
    """The winner among contenders that ran `repeats` times within all limits; None where nothing was confirmed.

    Of those that are not told apart from the best, the one that draws least power. Nobody wins while one that has begun lacks runs:
    where a budget ends there, those that were ahead in turn are not the better ones.
    """
    holding = [contender for contender in chosen if contender.runs and not contender.failed(objective)]
    if not holding or any(len(contender.runs) < repeats for contender in holding):
        return None
    confirmed = sorted(holding, key=lambda contender: -float(contender.scores(objective).mean()))
    leader = confirmed[0]
    tied = [leader, *(other for other in confirmed[1:] if not compare(leader, other, objective).decided)]
    winner = min(tied, key=_mean_power_w) if all(_mean_power_w(contender) < np.inf for contender in tied) else leader
    others = [contender for contender in confirmed if contender is not winner]
    baselines = [contender for contender in others if contender.explored.phase is Phase.BASELINE]
    throughput = replace(objective, weights={THROUGHPUT: 1.0})
    return Decision(
        winner=median_run(winner, objective),
        runner_up=median_run(others[0], objective) if others else None,
        margin=compare(winner, others[0], objective) if others else None,
        over_baseline=compare(winner, baselines[0], throughput) if baselines else None,
        by_power=winner is not leader,
    )


def compare(one: Contender, other: Contender, objective: Objective) -> Comparison:
    """One's scores minus the other's, paired by turn.

    The mean of n paired differences has the 95 % interval mean +- t(0.975, n - 1) s / sqrt(n) (Student 1908). With one pair it is
    unbounded.
    """
    pairs = min(len(one.runs), len(other.runs))
    differences = one.scores(objective)[:pairs] - other.scores(objective)[:pairs]
    mean = float(differences.mean())
    half = float(stats.t.ppf(0.975, pairs - 1) * differences.std(ddof=1) / np.sqrt(pairs)) if pairs > 1 else np.inf
    return Comparison(mean, mean - half, mean + half)


def heat_margins(everyone: Sequence[Contender]) -> dict[str, float]:
    """By metric, the largest ratio of a confirmed to its explored value, at least 1: what longer and warmer runs add."""
    margins: dict[str, float] = {}
    for contender in everyone:
        explored = contender.explored.metrics
        for run in contender.runs:
            for name, value in run.metrics.items():
                if explored.get(name, 0.0) > 0 and value > 0:
                    margins[name] = max(margins.get(name, 1.0), value / explored[name])
    return margins


def _tightened(limits: Mapping[str, Bound], margins: Mapping[str, float]) -> dict[str, Bound]:
    """Upper bounds, divided by the margin."""
    return {
        name: bound if bound.max is None else bound.model_copy(update={"max": bound.max / margins.get(name, 1.0)})
        for name, bound in limits.items()
    }


def _ranked(records: Sequence[TrialRecord], objective: Objective) -> list[Contender]:
    """All explored configurations that completed, best score first, with their confirming runs."""
    explored: dict[TrialConfig, TrialRecord] = {}
    runs: dict[TrialConfig, list[TrialRecord]] = {}
    for record in records:
        if record.phase is Phase.CONFIRM:
            if record.outcome is not Outcome.LOST and not repeated(record, records):
                runs.setdefault(record.config, []).append(record)
        elif record.outcome is Outcome.COMPLETED and (record.config not in explored or explored[record.config].contaminated):
            explored[record.config] = record
    ranked = sorted(explored.values(), key=lambda record: -objective.score(record.metrics))
    return [Contender(record, tuple(runs.get(record.config, ()))) for record in ranked]


def repeated(record: TrialRecord, records: Sequence[TrialRecord]) -> bool:
    """Whether a disturbed trial was run once more, undisturbed, so that it need not count; confirming runs apart from others."""
    confirming = record.phase is Phase.CONFIRM
    later = records[records.index(record) + 1 :] if record.contaminated else ()
    return any(
        other.config == record.config
        and (other.phase is Phase.CONFIRM) is confirming
        and other.outcome is not Outcome.LOST
        and not other.contaminated
        for other in later
    )


def _reaches(contender: Contender, best: Contender, objective: Objective) -> bool:
    """Whether the upper end of its throughput's interval would bring its score to the best's lower end."""

    def score(record: TrialRecord, end: str) -> float:
        metrics = dict(record.metrics)
        return objective.score({**metrics, THROUGHPUT: metrics.get(f"{THROUGHPUT}_{end}", metrics[THROUGHPUT])})

    return score(contender.explored, "high") >= score(best.explored, "low")


def _mean_power_w(contender: Contender) -> float:
    values = [run.metrics[POWER] for run in contender.runs if POWER in run.metrics]
    return float(np.mean(values)) if len(values) == len(contender.runs) else np.inf


def median_run(contender: Contender, objective: Objective) -> TrialRecord:
    """The confirming run with the median score; the lower one of two."""
    order = np.argsort(contender.scores(objective), kind="stable")
    return contender.runs[int(order[(len(order) - 1) // 2])]
