"""PoolStudy: one Optuna study, for one model on one pool at one node count. Proposes by ask, and ends every trial in one funnel."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace

import optuna
from optuna.trial import TrialState

from autotune.candidates import Candidates, candidate_table, launchable
from autotune.metrics import summarise
from autotune.records import RECORD_ATTRIBUTE, Phase, TrialRecord, TrialResult, record_from_trial, record_to_json
from autotune.results import END_REASON, PoolResults, results_of, study_name
from autotune.sampler import CandidateSampler, inner_sampler
from autotune.spec import StudySpec
from autotune.storage import open_study
from launchers.base import Launcher
from launchers.outcome import Outcome
from search_spaces.config import TrialConfig
from search_spaces.hardware import PoolSpec
from search_spaces.legality import Violation, check
from search_spaces.normalise import normalise

log = logging.getLogger(__name__)

MAX_REFUSALS_IN_A_ROW = 100
STOPPED_BY_USER = "stopped by the user"
_ATTEMPTS_PER_CANDIDATE = 3
_LOST_IN_A_ROW = 3
# GPSampler wants the same constraints on every trial, so there is one, and the broken rules are in the record.
_CONSTRAINT = "infeasible"


@dataclass(frozen=True, slots=True)
class Proposal:
    """A trial to launch.

    Attributes:
        trial: Optuna's trial, RUNNING.
        config: What to run.
        phase: Why.
        proposed_s: Unix time.
    """

    trial: optuna.Trial
    config: TrialConfig
    phase: Phase
    proposed_s: float


class PoolStudy:
    """One pool's study.

    Attributes:
        name: Optuna study name.
        pool: The pool.
        workload: What is trained there.
        table: Megatron's legal candidates.
        end_reason: Why nothing more is proposed; empty while it goes on.
    """

    def __init__(
        self,
        spec: StudySpec,
        pool: PoolSpec,
        launcher: Launcher,
        storage: optuna.storages.BaseStorage,
        on_record: Callable[[PoolStudy, TrialRecord], None],
    ) -> None:
        """Open or reopen the study in `storage`.

        Raises:
            SpecError: where the storage holds a study of this name over another space, workload or direction.
        """
        self.name = study_name(spec, pool)
        self.pool = pool
        self.workload = spec.workload(pool)
        self.table = candidate_table(spec, pool)
        self.end_reason = ""
        self._spec = spec
        self._launcher = launcher
        self._on_record = on_record
        allowed, self._launcher_refused = launchable(self.table, launcher)
        self.candidates = Candidates(self.table, spec.baseline, allowed)
        self._sampler = CandidateSampler(inner_sampler(spec.sampler, spec.seed), self.candidates)
        self._optuna = open_study(storage, self.name, self._sampler, self._fingerprint())
        self._attempts: Counter[TrialConfig] = Counter()
        self._retries: list[tuple[TrialConfig, Phase]] = []
        self._launched = 0
        self._lost_in_a_row = 0
        self._worst: float | None = None
        self._records: list[TrialRecord] = []
        self._reload()
        if not self.candidates.left and not self._records:
            self.end_reason = self._nothing_legal()

    @property
    def records(self) -> list[TrialRecord]:
        """All ended trials, in the order of their numbers."""
        return self._records

    @property
    def launched(self) -> int:
        """Launched trials that count against the budget."""
        return self._launched

    @property
    def best(self) -> TrialRecord | None:
        """The best completed trial so far; None where nothing completed."""
        return self.results().best

    def results(self) -> PoolResults:
        """What the storage holds now."""
        return results_of(self._optuna, self.pool)

    def close(self) -> None:
        """Keep the reason of the end beside the trials."""
        self._optuna.set_user_attr(END_REASON, self.end_reason)

    def propose(self) -> Proposal | None:
        """The next trial to launch; None, with `end_reason` set, where the study ends. Refused proposals are told and recorded."""
        if self.end_reason:
            return None
        if self._launched >= self._spec.budget.trials:
            self.end_reason = f"budget: {self._launched} trials"
            return None
        if self._retries:
            config, phase = self._retries.pop(0)
            return self._proposal(self._ask(config), config, phase)
        for refusals in range(MAX_REFUSALS_IN_A_ROW + 1):
            self._sampler.legal_only = refusals == MAX_REFUSALS_IN_A_ROW
            is_baseline = not any(r.phase is Phase.BASELINE for r in self._records)
            if not is_baseline and not self.candidates.left:
                self.end_reason = f"all {len(self.table)} legal candidates were tried" if self._launched else self._nothing_legal()
                return None
            phase = Phase.BASELINE if is_baseline else Phase.EXPLORE
            trial = self._ask(self._spec.baseline if is_baseline else None)
            config = normalise(self.workload, self._spec.baseline) if is_baseline else self.candidates.config(trial.params)
            violations = self.violations(config)
            if not violations:
                return self._proposal(trial, config, phase)
            self._refuse(trial, config, phase, violations)
        raise AssertionError("the sampler proposed an illegal point although only legal ones were asked for")

    def finish(self, proposal: Proposal, result: TrialResult, stopped_by_user: bool = False) -> TrialRecord:
        """The one funnel for launched trials: tells Optuna, keeps the record, passes it on."""
        outcome, detail = result.outcome, result.detail
        metrics = summarise(self.workload, result.steps, self._spec.measurement.warmup_steps)
        if outcome is Outcome.COMPLETED and "tokens_per_s_per_gpu" not in metrics:
            outcome, detail = Outcome.CRASHED, "all ranks ended without reporting a step"
        if stopped_by_user and outcome is not Outcome.COMPLETED:
            outcome, detail = Outcome.LOST, STOPPED_BY_USER
        record = replace(
            self._record(proposal, outcome, detail),
            steps=result.steps,
            metrics=metrics,
            environment=_environment(result),
            log_folder=result.log_folder,
        )
        self._count(record, stopped_by_user)
        return self._tell(proposal.trial, record)

    def violations(self, config: TrialConfig) -> list[Violation]:
        """Megatron's rules and the launcher's that `config` breaks here."""
        return check(self.workload, config) or self._launcher.refusals(self.workload, config)

    def _proposal(self, trial: optuna.Trial, config: TrialConfig, phase: Phase) -> Proposal:
        self.candidates.mark_seen(config)
        self._attempts[config] += 1
        return Proposal(trial, config, phase, time.time())

    def _ask(self, config: TrialConfig | None) -> optuna.Trial:
        """A RUNNING trial: the sampler's choice, or `config`'s; one outside the table has no parameters."""
        params = self.candidates.params(config) if config is not None else None
        if params is not None:
            self._optuna.enqueue_trial(params)
        trial = self._optuna.ask()
        if config is None or params is not None:
            for name in self.candidates.distributions:
                trial.suggest_int(name, 0, len(self.table.choices[name]) - 1)
        return trial

    def _refuse(self, trial: optuna.Trial, config: TrialConfig, phase: Phase, violations: list[Violation]) -> None:
        self.candidates.mark_seen(config)
        proposal = Proposal(trial, config, phase, time.time())
        detail = "; ".join(violation.message for violation in violations)
        self._tell(trial, self._record(proposal, Outcome.REFUSED, detail, tuple(violations)))

    def _record(self, proposal: Proposal, outcome: Outcome, detail: str, violations: tuple[Violation, ...] = ()) -> TrialRecord:
        return TrialRecord(
            study=self.name,
            number=proposal.trial.number,
            phase=proposal.phase,
            config=proposal.config,
            argv=tuple(proposal.config.argv()),
            outcome=outcome,
            detail=detail,
            violations=violations,
            started_s=proposal.proposed_s,
            ended_s=time.time(),
        )

    def _count(self, record: TrialRecord, stopped_by_user: bool) -> None:
        """Budget, retries and the health of the pool."""
        if record.outcome is not Outcome.LOST:
            self._launched += 1
            self._lost_in_a_row = 0
            return
        if stopped_by_user:
            self.candidates.reopen(record.config)
            return
        self._lost_in_a_row += 1
        if self._attempts[record.config] < _ATTEMPTS_PER_CANDIDATE:
            self._retries.append((record.config, record.phase))
        if self._lost_in_a_row >= _LOST_IN_A_ROW:
            self.end_reason = f"infrastructure: {self._lost_in_a_row} trials in a row were lost; the last: {record.detail}"

    def _tell(self, trial: optuna.Trial, record: TrialRecord) -> TrialRecord:
        """Attributes first, then the end: Optuna takes none afterwards."""
        value = record.metrics.get("tokens_per_s_per_gpu") if record.outcome is Outcome.COMPLETED else self._pessimistic()
        if record.outcome is Outcome.LOST:
            value = None
        record = replace(record, value=value)
        trial.set_user_attr(RECORD_ATTRIBUTE, record_to_json(record))
        if value is None:
            self._optuna.tell(trial, state=TrialState.FAIL)
        else:
            trial.set_constraint(_CONSTRAINT, _infeasibility(record))
            self._optuna.tell(trial, value)
        self._remember(record)
        self._on_record(self, record)
        return record

    def _remember(self, record: TrialRecord) -> None:
        self._records.append(record)
        if record.outcome is Outcome.COMPLETED and record.value is not None:
            self._worst = min(record.value, self._worst if self._worst is not None else record.value)

    def _pessimistic(self) -> float:
        """What a failed trial is told as: the worst value seen; 0 before any."""
        return self._worst if self._worst is not None else 0.0

    def _reload(self) -> None:
        """Take over what the storage holds; trials that a dead driver left RUNNING become FAIL and may be proposed again."""
        for frozen in self._optuna.get_trials(deepcopy=False):
            if not frozen.state.is_finished():
                self._optuna.tell(frozen.number, state=TrialState.FAIL)
                continue
            record = record_from_trial(frozen)
            if record is None:
                continue
            self._remember(record)
            if record.outcome is not Outcome.LOST:
                self.candidates.mark_seen(record.config)
                self._launched += record.outcome is not Outcome.REFUSED

    def _fingerprint(self) -> dict[str, object]:
        return {
            "workload": self.workload.model_dump(mode="json"),
            "choices": {name: [_plain(choice) for choice in choices] for name, choices in self.table.choices.items()},
            "launcher": self._spec.launcher,
        }

    def _nothing_legal(self) -> str:
        refused = Counter(self.table.refused) + self._launcher_refused
        worst = ", ".join(f"{name} refused {count}" for name, count in refused.most_common(3))
        return f"no legal candidate: {worst}"


def _environment(result: TrialResult) -> dict[str, str]:
    """Where it ran: one entry per node and field."""
    return {f"node{rank}.{name}": str(value) for rank, node in enumerate(result.nodes) for name, value in node.items()}


def _plain(choice: object) -> object:
    return list(choice) if isinstance(choice, tuple) else choice


def _infeasibility(record: TrialRecord) -> float:
    """Constraint value: how far over the rules; 1 for a failure, -1 for a trial that completed."""
    if record.outcome is Outcome.COMPLETED:
        return -1.0
    return max(1.0, sum(violation.amount for violation in record.violations))
