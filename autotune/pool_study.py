"""PoolStudy: one Optuna study, for one model on one pool at one node count. Proposes by ask, and ends every trial in one funnel."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import cache, partial
from pathlib import Path

import optuna

from autotune.attempts import Attempts
from autotune.candidates import Candidates, candidate_table, fingerprint
from autotune.confirm import next_config
from autotune.earlier import earlier_studies, to_keep
from autotune.launchable import Launchable
from autotune.ledger import Ledger
from autotune.measured import measure
from autotune.metrics import derived
from autotune.pareto import directions
from autotune.proposal import Proposal
from autotune.records import RECORD_ATTRIBUTE, Phase, TrialRecord, TrialResult, record_to_json
from autotune.refit import Refit
from autotune.results import END_REASON, EXPLANATION, FORECAST, PoolResults, results_of, run_spread_of, stored_records, study_name
from autotune.run_spread import RunSpread
from autotune.sampler import candidate_sampler
from autotune.spec import StudySpec
from autotune.starts import Starts
from autotune.stopping import Stopping
from autotune.storage import open_study
from autotune.telling import end_left_open, tell
from autotune.transfer import Earlier, Predictor
from launchers.base import Launcher
from launchers.outcome import Outcome
from search_spaces.config import TrialConfig
from search_spaces.hardware import PoolSpec
from search_spaces.legality import Violation
from search_spaces.normalise import normalise

MAX_REFUSALS_IN_A_ROW = 100
STOPPED_BY_USER = "stopped by the user"


class PoolStudy:
    """One pool's study.

    Attributes:
        name: Optuna study name.
        pool: The pool.
        workload: What is trained there.
        launcher: What runs its trials.
        table: Megatron's legal candidates.
        baseline: Where it starts.
        refit: Predictions of the candidates that follow what is measured.
        end_reason: Why nothing more is proposed; empty while it goes on.
        stopping: When it has explored enough.
        starts: What it tries right after the baseline.
    """

    def __init__(
        self,
        spec: StudySpec,
        pool: PoolSpec,
        launcher: Launcher,
        storage: optuna.storages.BaseStorage,
        on_record: Callable[[PoolStudy, TrialRecord], None],
        calibrations: Path | None = None,
        predictor: Predictor | None = None,
    ) -> None:
        """Open or reopen the study in `storage`; `calibrations` is the folder that keeps what is learned of the machines.

        The sampler starts from what `predictor` says; none = the predictions of the machines as known after the first trial.

        Raises:
            SpecError: where the storage holds a study of this name over another space, workload or direction.
        """
        self.name = study_name(spec, pool)
        self.pool = pool
        self.workload = spec.workload(pool)
        self.table = candidate_table(spec, pool)
        self.refit = Refit.of(self.name, spec, pool, self.table, calibrations)
        self.baseline = normalise(self.workload, spec.baseline)
        self.end_reason = ""
        self.stopping = Stopping(spec)
        self._spec = spec
        self.launcher = launcher
        self._on_record = on_record
        self._launchable = Launchable(spec, pool, launcher, self.table, self.refit)
        self.candidates = Candidates(self.table, spec.baseline, self._launchable.allowed)
        self._legal = self.candidates.left
        self.starts = Starts.of(spec, pool, self.candidates, self.refit.predictions)
        # The sampler learns what predictions miss by itself: ones that moved under it would be corrected twice.
        self._first_predictions = cache(partial(predictor, self.table.columns) if predictor else self.refit.predictions)
        earlier = earlier_studies(spec, pool, storage, self.name)
        self._sampler = candidate_sampler(spec, self.candidates, self._first_predictions, Earlier(earlier, predictor))
        kept = fingerprint(spec, pool, self.table), directions(spec), to_keep(spec, pool, earlier)
        self._optuna = open_study(storage, self.name, self._sampler, *kept)
        self._attempts = Attempts()
        self._baseline_due = True
        self._running: list[Proposal] = []
        self._explored = ""
        self._ledger = self._reload()
        if not self.candidates.left and not self.records:
            self.end_reason = self._launchable.why_nothing()

    @property
    def records(self) -> list[TrialRecord]:
        """All ended trials, in the order of their numbers."""
        return self._ledger.records

    @property
    def launched(self) -> int:
        """Launched trials that count against the budget."""
        return self._ledger.spent.trials

    @property
    def best(self) -> TrialRecord | None:
        """The best trial so far within the limits; None where there is none."""
        return self._ledger.best()

    def results(self) -> PoolResults:
        """What the storage holds now."""
        return results_of(self._optuna, self._spec, self.pool)

    @property
    def notes(self) -> list[str]:
        """What its trials show that cannot be had here although it was asked for."""
        return self._ledger.notes()

    @property
    def run_spread(self) -> RunSpread:
        """How much runs of one configuration have differed so far."""
        return run_spread_of(self.records)

    def close(self) -> None:
        """Keep the reason of the end, what explains the winner, and what the trials say of the machines."""
        self._optuna.set_user_attr(END_REASON, self.end_reason)
        explained = self._ledger.explained(self.table, self.refit.predictions(news=0.0), self.violations)
        self._optuna.set_user_attr(EXPLANATION, explained)

    def propose(self) -> Proposal | None:
        """The next trial to launch; None where there is none now, or, with `end_reason` set, where the study ends.

        Refused proposals are told and recorded, at most 100 in a row; then only legal candidates are drawn.
        """
        if self.end_reason:
            return None
        if retry := self._attempts.next_retry():
            return self._proposal(self._ask(retry[0]), *retry)
        if not self._explored and (proposal := self._explore()) is not None:
            return proposal
        return self._confirm() if self._explored and not self.end_reason else None

    def _explore(self) -> Proposal | None:
        """The next new trial; None where there is none now, or, with `_explored` set, where exploring is over."""
        if reason := self._enough():
            self._end_exploring(reason)
            return None
        for refusals in range(MAX_REFUSALS_IN_A_ROW + 1):
            self._sampler.legal_only = refusals == MAX_REFUSALS_IN_A_ROW
            if not self._baseline_due and not self.candidates.left:
                nothing = self._launchable.why_nothing()
                self._end_exploring(f"all {self._legal} legal candidates were tried" if self.launched else nothing)
                return None
            trial, config, phase = self._draw()
            violations = self.violations(config)
            if not violations:
                return self._proposal(trial, config, phase)
            self._refuse(trial, config, phase, violations)
        raise AssertionError("the sampler proposed an illegal point although only legal ones were asked for")

    def _enough(self) -> str:
        """Why nothing new is tried any more; empty while it is."""
        self.end_reason = self._ledger.cannot_be_shown()
        return self.end_reason or self.stopping.reason(self._ledger, len(self._running), self._sampler.outlook)

    def _confirm(self) -> Proposal | None:
        """The next confirming trial; the study ends where none is left."""
        may = self._ledger.to_confirm(self.stopping.seconds_left())
        chosen = [contender for contender in may if not self._attempts.used_up(contender.config)]
        running = [proposal.config for proposal in self._running]
        if self._ledger.objective is not None:
            config = next_config(chosen, running, self._spec.confirm.repeats, self._ledger.objective)
            if config is not None:
                return self._proposal(self._ask(config), config, Phase.CONFIRM)
        self.end_reason = self.end_reason or ("" if self._running else self._explored)
        return None

    def finish(self, proposal: Proposal, result: TrialResult, stopped_by_user: bool = False) -> TrialRecord:
        """The one funnel for launched trials: tells Optuna, keeps the record, passes it on."""
        self._running = [other for other in self._running if other.trial.number != proposal.trial.number]
        shown = measure(self.workload, result, self._spec.measurement, self.run_spread)
        if stopped_by_user and shown.outcome is not Outcome.COMPLETED:
            shown = replace(shown, outcome=Outcome.LOST, detail=STOPPED_BY_USER)
        gpu = self.refit.machines.gpu if self.refit.machines else None
        record = replace(
            proposal.ended(self.name, shown.outcome, shown.detail, virtual_s=result.virtual_s),
            steps=shown.steps,
            metrics={**shown.metrics, **derived(shown.metrics, self.workload, self.pool, gpu), **proposal.predicted},
            environment=shown.environment,
            contaminated=shown.contaminated,
            log_folder=result.log_folder,
        )
        self._count(record, stopped_by_user)
        return self._tell(proposal.trial, record)

    def violations(self, config: TrialConfig) -> list[Violation]:
        """Megatron's rules, the launcher's, or the study's guards that `config` breaks here."""
        return self._launchable.violations(config)

    def _proposal(self, trial: optuna.Trial, config: TrialConfig, phase: Phase) -> Proposal:
        self.candidates.mark_seen(config)
        if self._optuna.user_attrs.get(END_REASON):
            self._optuna.set_user_attr(END_REASON, "")  # resumed, it goes on
        # Those that others are compared with run to their end.
        beaten_s = self._ledger.beaten_step_s(self.workload) if phase is Phase.EXPLORE else None
        predicted, why = self.refit.metrics(config), self.starts.why(config)
        running, left, outlook = len(self._running), self.candidates.left, self._sampler.outlook
        forecast = None if phase is Phase.CONFIRM else self.stopping.forecast(self._ledger, running, left, outlook)
        trial.set_user_attr(FORECAST, forecast and asdict(forecast))
        self._running.append(Proposal(trial, config, phase, time.time(), predicted, beaten_s, why, forecast))
        return self._running[-1]

    def _end_exploring(self, reason: str) -> None:
        """Exploring is over, unless a running trial may still be lost and come back."""
        if not self._running:
            self._explored = reason

    def _draw(self) -> tuple[optuna.Trial, TrialConfig, Phase]:
        """The baseline first, then where recipes point, then what the sampler proposes, legal or not."""
        if self._baseline_due:
            self._baseline_due = False
            return self._ask(self.baseline), self.baseline, Phase.BASELINE
        if (start := self.starts.next(self.candidates, self.records)) is not None:
            return self._ask(start), start, Phase.EXPLORE
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
        self._tell(trial, proposal.ended(self.name, Outcome.REFUSED, detail, tuple(violations)))

    def _count(self, record: TrialRecord, stopped_by_user: bool) -> None:
        """Budget, retries and the health of the pool."""
        if record.outcome is not Outcome.LOST:
            self._attempts.showed_result(record)
            return
        if stopped_by_user:
            if record.phase is not Phase.CONFIRM:
                self.candidates.reopen(record.config)
            return
        self._attempts.lost(record.config, record.phase)
        if self._attempts.pool_is_lost:
            self.end_reason = f"infrastructure: {self._attempts.lost_in_a_row} trials in a row were lost; the last: {record.detail}"

    def _tell(self, trial: optuna.Trial, record: TrialRecord) -> TrialRecord:
        """Attributes first, then the end: Optuna takes none afterwards."""
        record = self._ledger.valued(record)
        trial.set_user_attr(RECORD_ATTRIBUTE, record_to_json(record))
        tell(self._optuna, trial, record, self._ledger)
        self._ledger.add(record)
        self.refit.learn(record)
        self._on_record(self, record)
        return record

    def _reload(self) -> Ledger:
        """Take over what the storage holds."""
        stored = stored_records(self._optuna)
        ledger = Ledger(self._spec, self.pool, tuple(record for _, record in stored if record is not None))
        end_left_open(self._optuna, stored, ledger)
        for record in ledger.records:
            self.refit.learn(record)
            self._first_predictions()  # after the first trial, as when it had ended
            self._take_over(record)
        return ledger

    def _take_over(self, record: TrialRecord) -> None:
        """A trial of an earlier driver: what it says of its candidate and of the pool."""
        if record.outcome is Outcome.LOST:
            if record.detail != STOPPED_BY_USER:
                self._attempts.lost_before(record.config)
            if not self._attempts.used_up(record.config):
                return
        self.candidates.mark_seen(record.config)
        if record.phase is Phase.BASELINE:
            self._baseline_due = False
