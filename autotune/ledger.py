"""Ledger: the ended trials of one pool's study, what each was worth, and what they cost together."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from autotune.budget import Spent, spent, used_up, usual
from autotune.confirm import Contender, Decision, contenders, decide, repeated
from autotune.confirm_budget import affordable_contenders, contenders_in_time, exploring_budget, fewest_confirming_s
from autotune.confirm_time import confirming_s
from autotune.objective import Objective
from autotune.pareto import Point, front_contenders, front_of, hypervolume, values_of, worst_values
from autotune.power_domains import domain_limits
from autotune.racing import beaten_step_s
from autotune.records import Phase, TrialRecord
from autotune.spec import StudySpec
from autotune.spec_parts import Budget
from launchers.outcome import Outcome
from search_spaces.candidates import CandidateTable
from search_spaces.config import TrialConfig
from search_spaces.hardware import PoolSpec
from search_spaces.legality import Violation
from search_spaces.model import Workload
from search_spaces.prediction import Predictions

Refusals = Callable[[TrialConfig], Sequence[Violation]]
"""What forbids to launch a configuration."""


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
        # Objective and limits may have been edited since, or watts attached: all are worth what they are worth now.
        for record in records:
            self.add(self.valued(record) if record.outcome is Outcome.COMPLETED else record)

    @property
    def spent(self) -> Spent:
        """What the trials have cost."""
        return spent(self.records, self._pool)

    @property
    def usual(self) -> Spent:
        """What a trial costs, see `budget.usual`."""
        return usual(self.records, self._pool)

    def valued(self, record: TrialRecord) -> TrialRecord:
        """The record with what it is worth: its score, its terms in a Pareto study, and the limits that it crosses.

        One that failed is worth the worst so far; one that the infrastructure lost says nothing of its configuration: None.
        """
        if record.outcome is Outcome.LOST:
            return record
        if record.outcome is not Outcome.COMPLETED:
            values = worst_values(self.records, self._spec.objective) if self._spec.pareto else ()
            return replace(record, value=self._worst if self._worst is not None else 0.0, values=values)
        objective = self._relative_to(record)
        values = values_of(objective, record.metrics) if self._spec.pareto else ()
        violations = tuple(objective.violations(record.metrics))
        return replace(record, value=objective.score(record.metrics), values=values, violations=violations)

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
        """Why no trial can be shown to be better, to keep the limits, or to lie on the front, as a reason to end; else empty."""
        if self._spec.pareto and self.objective is not None and self.objective.dropped:
            missed = ", ".join(self.objective.dropped)
            return f"pareto: {missed} cannot be measured on pool {self._pool.name}; `objective` without it can be searched"
        if self.objective is not None and not self.objective.terms:
            missed = ", ".join(self.objective.dropped)
            return f"objective: {missed} cannot be measured on pool {self._pool.name}, and nothing else counts"
        lacking = self.objective.unmeasurable() if self.objective is not None else []
        return f"limits: {', '.join(lacking)} cannot be measured on pool {self._pool.name}" if lacking else ""

    def notes(self) -> list[str]:
        """What was asked for, and the trials so far show that it cannot be had on this pool."""
        found, pool = [], self._pool.name
        if self.objective is not None and self.objective.dropped and self.objective.terms and not self._spec.pareto:
            names = ", ".join(self.objective.dropped)
            found.append(f"objective: without {names}, which cannot be measured on pool {pool}.")
        measured = any(record.outcome is Outcome.COMPLETED for record in self.records)
        if self._spec.budget.energy_kwh is not None and measured and self.spent.energy_kwh is None:
            found.append(f"budget: energy_kwh is not kept, because no trial on pool {pool} could tell its energy.")
        return found

    def exploring_budget(self) -> Budget:
        """The budget without what is kept for confirming."""
        return exploring_budget(self._spec, self._pool, self.records)

    def confirming_s(self) -> float:
        """Seconds that the confirming runs still to come may take; 0 before anything completed."""
        return confirming_s(self._spec, self._pool, self.records)

    def fewest_confirming_s(self) -> float:
        """Seconds below which confirming shows nothing."""
        return fewest_confirming_s(self._spec, self.records)

    def beaten_step_s(self, workload: Workload) -> float | None:
        """Step seconds that a trial has to reach to be of use; None where nothing can be said yet. See `racing`.

        In a Pareto study a slow trial may be the best of another term, so none is raced.
        """
        if self.objective is None or not self._spec.measurement.racing or self._spec.pareto:
            return None
        return beaten_step_s(self.records, self.best(), self.objective, workload)

    def contenders(self) -> list[Contender]:
        """Who is to be confirmed."""
        if self.objective is None:
            return []
        choose = front_contenders if self._spec.pareto else contenders
        chosen = choose(self.records, self.objective, self._spec.confirm)
        return affordable_contenders(chosen, self.objective, self._spec, self._pool, self.records)

    def to_confirm(self, left_s: float | None) -> list[Contender]:
        """The contenders whose runs end in `left_s` (None = no limit); nobody where GPU-hours, energy or money is used up."""
        if self.objective is None or used_up(self._spec.budget, replace(self.spent, trials=0)):
            return []
        return contenders_in_time(self.contenders(), self.objective, self._spec, self.records, left_s)

    def decision(self) -> Decision | None:
        """The confirmed winner; None before there is one, and in a Pareto study."""
        if self.objective is None or self._spec.pareto:
            return None
        return decide(self.contenders(), self.objective, self._spec.confirm.repeats)

    def front(self) -> tuple[Point, ...]:
        """The Pareto front, the knee first; empty where there is none, or the study is for one score."""
        if self.objective is None or not self._spec.pareto:
            return ()
        return front_of(self.records, self.objective, self._spec.confirm)

    def hypervolume(self) -> float | None:
        """What the front covers; None in a study for one score, and before anything was measured."""
        return hypervolume(self.front(), self.objective) if self.objective is not None and self._spec.pareto else None

    def best(self) -> TrialRecord | None:
        """The confirmed winner, else the best explored trial within the limits; the front's knee; None where there is none."""
        if self._spec.pareto:
            return next((point.record for point in self.front() if point.knee), None)
        if (decision := self.decision()) is not None:
            return decision.winner
        beaten = {contender.config for contender in self.contenders() if self.objective and contender.failed(self.objective)}
        explored = [record for record in self._completed() if record.phase is not Phase.CONFIRM and record.config not in beaten]
        within = [record for record in explored if not record.violations]
        return max(within, key=lambda record: record.value or 0.0, default=None)

    def nearest(self) -> TrialRecord | None:
        """The completed trial that crosses the limits least; None where nothing completed."""
        return min(self._completed(), key=self.infeasibility, default=None)

    def _completed(self) -> list[TrialRecord]:
        """Completed trials but disturbed ones that were run again: they may keep limits that their configuration crosses."""
        completed = [record for record in self.records if record.outcome is Outcome.COMPLETED]
        return [record for record in completed if not repeated(record, self.records)]

    def explained(self, table: CandidateTable, predictions: Predictions | None, refusals: Refusals) -> list[str]:
        """What explains the winner, a line each; nothing where there is none, or several in a Pareto study.

        Args:
            table: The candidates.
            predictions: Of its rows; None where nothing is predicted.
            refusals: What forbids to launch a configuration.
        """
        best = self.best()
        if best is None or self.objective is None or self._spec.pareto:
            return []
        from autotune.explain_text import explanation_lines  # importance takes a while to import
        from autotune.prospects import Prospects

        baselines = [record for record in self.records if record.phase is Phase.BASELINE and record.outcome is Outcome.COMPLETED]
        prospects = Prospects(table, self.records, predictions, self.objective, self._pool, refusals)
        return explanation_lines(best, baselines[-1] if baselines else None, prospects)

    def _relative_to(self, record: TrialRecord) -> Objective:
        """The objective; relative to this measured trial where there was none."""
        if self.objective is None:
            spec, domains = self._spec, domain_limits(self._spec.power_domains, self._pool)
            self.objective = Objective(spec.objective, spec.limits, record.metrics, domains, spec.pareto)
        return self.objective
