"""Ledger: the ended trials of one pool's study, what each was worth, and what they cost together."""

from __future__ import annotations

import math
from dataclasses import replace

from autotune.budget import Spent, spent
from autotune.confirm import Contender, Decision, contenders, decide
from autotune.confirm_time import confirming_s
from autotune.objective import Objective
from autotune.racing import beaten_step_s
from autotune.records import Phase, TrialRecord
from autotune.spec import StudySpec
from launchers.outcome import Outcome
from search_spaces.candidates import CandidateTable
from search_spaces.hardware import PoolSpec
from search_spaces.model import Workload
from search_spaces.prediction import Predictions


class Ledger:
    """All ended trials, read back or just ended alike.

    Attributes:
        records: In the order of their ends.
        objective: Relative to the first measured trial, the baseline where it completed; None before.
    """

    def __init__(self, spec: StudySpec, pool: PoolSpec, records: tuple[TrialRecord, ...] = ()) -> None:
        self.records: list[TrialRecord] = []
        self.objective: Objective | None = None
        self._spec = spec
        self._pool = pool
        self._worst: float | None = None
        measured = [record for record in records if record.outcome is Outcome.COMPLETED]
        if measured:
            self._relative_to(min(measured, key=lambda record: record.phase is not Phase.BASELINE))
        for record in records:
            self.add(record)

    @property
    def spent(self) -> Spent:
        """What the trials have cost."""
        return spent(self.records, self._pool)

    def valued(self, record: TrialRecord) -> TrialRecord:
        """The record with what it is worth: its score and the limits that it crosses, where it was measured.

        One that failed is worth the worst score so far; one that the infrastructure lost says nothing of its configuration: None.
        """
        if record.outcome is Outcome.LOST:
            return record
        if record.outcome is not Outcome.COMPLETED:
            return replace(record, value=self._worst if self._worst is not None else 0.0)
        objective = self._relative_to(record)
        return replace(record, value=objective.score(record.metrics), violations=tuple(objective.violations(record.metrics)))

    def add(self, record: TrialRecord) -> None:
        """Count an ended trial."""
        self.records.append(record)
        if record.outcome is Outcome.COMPLETED and record.value is not None:
            self._worst = min(record.value, self._worst if self._worst is not None else record.value)

    def infeasibility(self, record: TrialRecord) -> float:
        """Optuna's constraint, always finite: how far over rules and limits; 1 or more for a failure, negative within limits."""
        if record.outcome is Outcome.COMPLETED and self.objective is not None:
            return self.objective.infeasibility(record.metrics)
        amount = sum(violation.amount for violation in record.violations)
        return max(1.0, amount) if math.isfinite(amount) else 1.0

    def cannot_be_shown(self) -> str:
        """Why no trial can be shown to keep the limits, as a reason to end; empty where that is not so."""
        lacking = self.objective.unmeasurable() if self.objective is not None else []
        return f"limits: {', '.join(lacking)} cannot be measured on pool {self._pool.name}" if lacking else ""

    def confirming_s(self) -> float:
        """Seconds that the confirming runs still to come may take; 0 before anything completed."""
        return confirming_s(self._spec, self._pool, self.records)

    def beaten_step_s(self, workload: Workload) -> float | None:
        """Step seconds that a trial has to reach to be of use; None where nothing can be said yet. See `racing`."""
        if self.objective is None or not self._spec.measurement.racing:
            return None
        return beaten_step_s(self.records, self.best(), self.objective, workload)

    def contenders(self) -> list[Contender]:
        """Who is to be confirmed."""
        return contenders(self.records, self.objective, self._spec.confirm) if self.objective is not None else []

    def decision(self) -> Decision | None:
        """The confirmed winner; None before there is one."""
        if self.objective is None:
            return None
        return decide(self.contenders(), self.objective, self._spec.confirm.repeats)

    def best(self) -> TrialRecord | None:
        """The confirmed winner, else the best explored trial within the limits; None where there is none."""
        if (decision := self.decision()) is not None:
            return decision.winner
        beaten = {contender.config for contender in self.contenders() if self.objective and contender.failed(self.objective)}
        within = [record for record in self.records if _within_limits(record) and record.config not in beaten]
        return max(within, key=lambda record: record.value or 0.0, default=None)

    def nearest(self) -> TrialRecord | None:
        """The completed trial that crosses the limits least; None where nothing completed."""
        completed = [record for record in self.records if record.outcome is Outcome.COMPLETED]
        return min(completed, key=self.infeasibility, default=None)

    def explained(self, table: CandidateTable, predictions: Predictions | None) -> list[str]:
        """What explains the winner, a line each; nothing where there is none."""
        best = self.best()
        if best is None or self.objective is None:
            return []
        from autotune.explain_text import explanation_lines  # importance takes a while to import

        baselines = [record for record in self.records if record.phase is Phase.BASELINE and record.outcome is Outcome.COMPLETED]
        return explanation_lines(best, baselines[-1] if baselines else None, self.records, table, predictions, self.objective)

    def _relative_to(self, record: TrialRecord) -> Objective:
        """The objective; relative to this measured trial where there was none."""
        if self.objective is None:
            self.objective = Objective(self._spec.objective, self._spec.limits, record.metrics)
        return self.objective


def _within_limits(record: TrialRecord) -> bool:
    return record.outcome is Outcome.COMPLETED and record.phase is not Phase.CONFIRM and not record.violations
