"""A trial between Optuna's ask and tell."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field

import optuna
from optuna.trial import TrialState

from autotune.forecast import Forecast
from autotune.records import Phase, TrialRecord
from launchers.outcome import Outcome
from search_spaces.config import TrialConfig
from search_spaces.legality import Violation


@dataclass(frozen=True, slots=True)
class Proposal:
    """A trial to launch.

    Attributes:
        trial: Optuna's trial, RUNNING.
        config: What to run.
        phase: Why.
        proposed_s: Unix time; virtual in a rehearsal.
        predicted: What is predicted of it, as metrics.
        beaten_s: Step seconds that it has to reach to be of use; None = it runs to its end.
        why: Where its configuration comes from; empty where that is the study itself or its sampler.
        forecast: What the budget buys from it on; None for a confirming run, which is on top of the budget.
    """

    trial: optuna.Trial
    config: TrialConfig
    phase: Phase
    proposed_s: float
    predicted: Mapping[str, float] = field(default_factory=dict)
    beaten_s: float | None = None
    why: str = ""
    forecast: Forecast | None = None

    def withdraw(self) -> None:
        """End it unlaunched: it leaves no record, and may be proposed again."""
        self.trial.study.tell(self.trial, state=TrialState.FAIL)

    def ended(
        self,
        study: str,
        outcome: Outcome,
        detail: str,
        violations: tuple[Violation, ...] = (),
        virtual_s: float | None = None,
    ) -> TrialRecord:
        """The record of its end: now, or so many virtual seconds after its start."""
        ended_s = time.time() if virtual_s is None else self.proposed_s + virtual_s
        return TrialRecord(
            study=study,
            number=self.trial.number,
            phase=self.phase,
            config=self.config,
            argv=tuple(self.config.argv()),
            outcome=outcome,
            detail=detail,
            violations=violations,
            started_s=self.proposed_s,
            ended_s=max(self.proposed_s, ended_s),
            why=self.why,
        )
