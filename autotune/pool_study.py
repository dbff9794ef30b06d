"""PoolStudy: one Optuna study, for one model on one pool at one node count. Proposes by ask, and ends every trial in one funnel."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace

import optuna
from optuna.trial import TrialState

from autotune.attempts import Attempts
from autotune.candidates import Candidates, candidate_table, launchable, plain_choices
from autotune.judge import infeasibility, judge
from autotune.metrics import readable, summarise
from autotune.outlook import shipped_predictions
from autotune.records import RECORD_ATTRIBUTE, Phase, TrialRecord, TrialResult, record_from_trial, record_to_json
from autotune.results import END_REASON, PoolResults, results_of, study_name
from autotune.sampler import candidate_sampler
from autotune.spec import StudySpec
from autotune.storage import open_study
from launchers.base import Launcher
from launchers.outcome import Outcome
from search_spaces.config import TrialConfig
from search_spaces.hardware import PoolSpec
from search_spaces.legality import Violation, check
from search_spaces.normalise import normalise
from search_spaces.prediction import Predictions

MAX_REFUSALS_IN_A_ROW = 100
STOPPED_BY_USER = "stopped by the user"
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
        predictions: Callable[[], Predictions | None] | None = None,
    ) -> None:
        """Open or reopen the study in `storage`; `predictions` are of the table's rows, none = the shipped ones.

        Raises:
            SpecError: where the storage holds a study of this name over another space, workload or direction.
        """
        self.name = study_name(spec, pool)
        self.pool = pool
        self.workload = spec.workload(pool)
        self.table = candidate_table(spec, pool)
        self._baseline = normalise(self.workload, spec.baseline)
        self.end_reason = ""
        self._spec = spec
        self._launcher = launcher
        self._on_record = on_record
        allowed, self._launcher_refused = launchable(self.table, launcher)
        self.candidates = Candidates(self.table, spec.baseline, allowed)
        self._legal = self.candidates.left
        predictions = predictions or shipped_predictions(self.table, pool)
        self._sampler = candidate_sampler(spec.sampler, spec.seed, self.candidates, predictions)
        self._optuna = open_study(storage, self.name, self._sampler, self._fingerprint())
        self._attempts = Attempts()
        self._baseline_due = True
        self._launched = self._running = 0
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
        """The next trial to launch; None where there is none now, or, with `end_reason` set, where the study ends.

        Refused proposals are told and recorded, at most 100 in a row; then only legal candidates are drawn.
        """
        if self.end_reason:
            return None
        if self._launched + self._running >= self._spec.budget.trials:
            self._end(f"budget: {self._launched} trials")
            return None
        if retry := self._attempts.next_retry():
            return self._proposal(self._ask(retry[0]), *retry)
        for refusals in range(MAX_REFUSALS_IN_A_ROW + 1):
            self._sampler.legal_only = refusals == MAX_REFUSALS_IN_A_ROW
            if not self._baseline_due and not self.candidates.left:
                self._end(f"all {self._legal} legal candidates were tried" if self._launched else self._nothing_legal())
                return None
            trial, config, phase = self._draw()
            violations = self.violations(config)
            if not violations:
                return self._proposal(trial, config, phase)
            self._refuse(trial, config, phase, violations)
        raise AssertionError("the sampler proposed an illegal point although only legal ones were asked for")

    def finish(self, proposal: Proposal, result: TrialResult, stopped_by_user: bool = False) -> TrialRecord:
        """The one funnel for launched trials: tells Optuna, keeps the record, passes it on."""
        self._running -= 1
        steps = readable(result.steps)
        metrics = summarise(self.workload, steps, self._spec.measurement.warmup_steps)
        outcome, detail = judge(result, metrics)
        if stopped_by_user and outcome is not Outcome.COMPLETED:
            outcome, detail = Outcome.LOST, STOPPED_BY_USER
        record = replace(
            self._record(proposal, outcome, detail),
            steps=steps,
            metrics=metrics,
            environment=result.environment,
            log_folder=result.log_folder,
        )
        self._count(record, stopped_by_user)
        return self._tell(proposal.trial, record)

    def violations(self, config: TrialConfig) -> list[Violation]:
        """Megatron's rules and the launcher's that `config` breaks here."""
        return check(self.workload, config) or self._launcher.refusals(self.workload, config)

    def _proposal(self, trial: optuna.Trial, config: TrialConfig, phase: Phase) -> Proposal:
        self.candidates.mark_seen(config)
        self._running += 1
        return Proposal(trial, config, phase, time.time())

    def _end(self, reason: str) -> None:
        """The study ends, unless a running trial may still be lost and come back."""
        if not self._running:
            self.end_reason = reason

    def _draw(self) -> tuple[optuna.Trial, TrialConfig, Phase]:
        """The baseline first, then what the sampler proposes, legal or not."""
        if self._baseline_due:
            self._baseline_due = False
            return self._ask(self._baseline), self._baseline, Phase.BASELINE
        trial = self._ask(None)
        return trial, self.candidates.config(trial.params), Phase.EXPLORE

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
            self._attempts.showed_result()
            return
        if stopped_by_user:
            self.candidates.reopen(record.config)
            return
        self._attempts.lost(record.config, record.phase)
        if self._attempts.pool_is_lost:
            count = self._attempts.lost_in_a_row
            self.end_reason = f"infrastructure: {count} trials in a row were lost; the last: {record.detail}"

    def _tell(self, trial: optuna.Trial, record: TrialRecord) -> TrialRecord:
        """Attributes first, then the end: Optuna takes none afterwards."""
        value = record.metrics.get("tokens_per_s_per_gpu") if record.outcome is Outcome.COMPLETED else self._worst or 0.0
        if record.outcome is Outcome.LOST:
            value = None
        record = replace(record, value=value)
        trial.set_user_attr(RECORD_ATTRIBUTE, record_to_json(record))
        self._conclude(trial, record)
        self._remember(record)
        self._on_record(self, record)
        return record

    def _conclude(self, trial: optuna.Trial, record: TrialRecord) -> None:
        if record.value is None:
            self._optuna.tell(trial, state=TrialState.FAIL)
            return
        if not trial.constraints:
            trial.set_constraint(_CONSTRAINT, infeasibility(record))
        self._optuna.tell(trial, record.value)

    def _remember(self, record: TrialRecord) -> None:
        self._records.append(record)
        if record.outcome is Outcome.COMPLETED and record.value is not None:
            self._worst = min(record.value, self._worst if self._worst is not None else record.value)

    def _reload(self) -> None:
        """Take over what the storage holds; trials that a dead driver left open become FAIL and may be proposed again."""
        for frozen in self._optuna.get_trials(deepcopy=False):
            record = record_from_trial(frozen)
            if frozen.state is TrialState.WAITING:
                # Only a RUNNING trial can be told, and `ask` takes the oldest waiting one.
                self._optuna.tell(self._optuna.ask().number, state=TrialState.FAIL)
            elif not frozen.state.is_finished() and record is not None:
                # Its driver died between the record and the end.
                self._conclude(optuna.Trial(self._optuna, frozen._trial_id), record)
            elif not frozen.state.is_finished():
                self._optuna.tell(frozen.number, state=TrialState.FAIL)
            if record is not None:
                self._take_over(record)

    def _take_over(self, record: TrialRecord) -> None:
        """Count a trial of an earlier driver."""
        self._remember(record)
        if record.outcome is Outcome.LOST:
            if record.detail != STOPPED_BY_USER:
                self._attempts.lost_before(record.config)
            if not self._attempts.used_up(record.config):
                return
        else:
            self._launched += record.outcome is not Outcome.REFUSED
        self.candidates.mark_seen(record.config)
        if record.phase is Phase.BASELINE:
            self._baseline_due = False

    def _fingerprint(self) -> dict[str, object]:
        return {
            "workload": self.workload.model_dump(mode="json"),
            "choices": plain_choices(self.table),
            "baseline": self._baseline.model_dump(mode="json", exclude_defaults=True),
            "launcher": self._spec.launcher,
        }

    def _nothing_legal(self) -> str:
        refused = Counter(self.table.refused) + self._launcher_refused
        worst = ", ".join(f"{name} refused {count}" for name, count in refused.most_common(3))
        return f"no legal candidate: {worst}"
