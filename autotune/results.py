"""What a study has shown so far, read from Optuna's storage: for reports, the command line and resume alike."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import optuna
from optuna.trial import FrozenTrial, TrialState

from autotune.attached import with_attached
from autotune.budget import Spent
from autotune.confirm import Decision
from autotune.earlier import told
from autotune.forecast import Forecast
from autotune.ledger import Ledger
from autotune.one_driver import Driver, running_driver
from autotune.pareto import Point
from autotune.records import Phase, TrialRecord, record_from_trial
from autotune.run_spread import RunSpread, ratio_interval, run_spread
from autotune.settling import SOAK_STEPS
from autotune.spec import StudySpec
from autotune.state_folder import StateFolder
from autotune.steady_state import steady, steady_interval
from autotune.storage import open_storage
from launchers.outcome import Outcome
from search_spaces.config import TrialConfig
from search_spaces.hardware import PoolSpec

END_REASON = "end_reason"
EXPLANATION = "explanation"
FORECAST = "forecast"
"""Attribute of a launched trial: what the budget bought from it on; None of a confirming one."""
_NOTES = "notes"


@dataclass(frozen=True, slots=True)
class PoolResults:
    """One pool's study.

    Attributes:
        study: Optuna study name.
        pool: The pool.
        records: All ended trials, in the order of their numbers.
        running: Trials that are running now, or were when their driver died.
        best: The confirmed winner, else the best explored trial within the limits; a front's knee; None where there is none.
        decision: How the winner was chosen; None where nothing was confirmed.
        nearest: The completed trial that crosses the limits least, where none is within them.
        spent: What the trials have cost.
        end_reason: Why the study ended; empty where it has not.
        explanation: What explains the winner, a line each; empty where the study has not ended or nothing won.
        notes: What the study does not do although it was asked for, and how to change that.
        front: In a Pareto study, the configurations that no other one beats in every term, the knee first.
        hypervolume: What the front covers, see `pareto.hypervolume`; None in a study for one score.
        earlier: What of earlier studies its search started with, in one line; empty where nothing.
        forecast: What the rest of the budget buys, as of the last launch; None where exploring is over, or nothing was launched.
    """

    study: str
    pool: PoolSpec
    records: tuple[TrialRecord, ...]
    running: int
    best: TrialRecord | None
    decision: Decision | None
    nearest: TrialRecord | None
    spent: Spent
    end_reason: str
    explanation: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    front: tuple[Point, ...] = ()
    hypervolume: float | None = None
    earlier: str = ""
    forecast: Forecast | None = None

    @property
    def baseline(self) -> TrialRecord | None:
        """The measured baseline, uncontaminated where there is one; None where it did not complete."""
        measured = [r for r in self.records if r.phase is Phase.BASELINE and r.outcome is Outcome.COMPLETED]
        return next((r for r in measured if not r.contaminated), measured[0] if measured else None)

    @property
    def outcomes(self) -> Counter[Outcome]:
        """Trials by outcome, refused ones included."""
        return Counter(record.outcome for record in self.records)

    @property
    def refusals(self) -> Counter[str]:
        """Refused trials by the rules they broke."""
        refused = (record for record in self.records if record.outcome is Outcome.REFUSED)
        return Counter(violation.name for record in refused for violation in record.violations)

    @property
    def best_tokens_per_s(self) -> float:
        """Tokens per second of the whole job at its best; 0 where nothing completed."""
        return self.best.metrics["tokens_per_s_per_gpu"] * self.pool.world_size if self.best else 0.0


def stored_records(study: optuna.Study) -> list[tuple[FrozenTrial, TrialRecord | None]]:
    """Every trial with its record and what was attached to it; None where its driver died before the record was written."""
    attributes = study.user_attrs
    read = [(trial, record_from_trial(trial)) for trial in study.get_trials(deepcopy=False)]
    return [(trial, with_attached(record, attributes) if record is not None else None) for trial, record in read]


def results_of(study: optuna.Study, spec: StudySpec, pool: PoolSpec) -> PoolResults:
    """Read one study."""
    stored = stored_records(study)
    ledger = Ledger(spec, pool, tuple(record for trial, record in stored if record is not None and trial.state.is_finished()))
    best, end_reason = ledger.best(), study.user_attrs.get(END_REASON, "")
    forecasts = [trial.user_attrs[FORECAST] for trial, _ in stored if FORECAST in trial.user_attrs]
    forecast = forecasts[-1] if forecasts and not end_reason else None
    return PoolResults(
        study=study.study_name,
        pool=pool,
        records=tuple(ledger.records),
        running=sum(trial.state is TrialState.RUNNING for trial, _ in stored),
        best=best,
        decision=ledger.decision(),
        nearest=ledger.nearest() if best is None else None,
        spent=ledger.spent,
        end_reason=end_reason,
        explanation=tuple(study.user_attrs.get(EXPLANATION, ())),
        notes=(*study.user_attrs.get(_NOTES, ()), *ledger.notes()),
        front=ledger.front(),
        hypervolume=ledger.hypervolume(),
        earlier=told(spec, study.user_attrs),
        forecast=Forecast.from_json(forecast) if forecast else None,
    )


def keep_notes(storage: optuna.storages.BaseStorage, name: str, notes: Sequence[str]) -> None:
    """Keep what a study's report must say beside its trials."""
    optuna.load_study(study_name=name, storage=storage).set_user_attr(_NOTES, list(notes))


def read_results(spec: StudySpec, folder: StateFolder) -> list[PoolResults]:
    """Read all pools' studies without changing anything; pools whose study was not opened yet are left out."""
    storage = open_storage(spec.storage, folder.path)
    known = set(optuna.get_all_study_names(storage))
    return [
        results_of(optuna.load_study(study_name=name, storage=storage), spec, pool)
        for pool in spec.studied_pools
        if (name := study_name(spec, pool)) in known
    ]


def read_driver(spec: StudySpec, folder: StateFolder) -> Driver | None:
    """The driver that runs the study now, here or elsewhere; None where none was seen."""
    storage = open_storage(spec.storage, folder.path)
    found = (running_driver(storage, study_name(spec, pool)) for pool in spec.studied_pools)
    return next((driver for driver in found if driver is not None), None)


def study_name(spec: StudySpec, pool: PoolSpec) -> str:
    """Optuna study name: one per pool and node count."""
    return f"{spec.name}/{pool.name}/{pool.nodes}x{pool.gpus_per_node}"


def run_spread_of(records: Sequence[TrialRecord]) -> RunSpread:
    """The run-to-run spread that a study's repeats of a configuration show; contaminated trials do not count."""
    runs: dict[TrialConfig, list[tuple[float, float]]] = {}
    for record in records:
        if record.outcome is Outcome.COMPLETED and not record.contaminated:
            found = record.metrics["step_time_s"], record.metrics["step_interval_fraction"]
            runs.setdefault(record.config, []).append(found)
    return run_spread(runs.values())


def speedup(winner: TrialRecord, baseline: TrialRecord, warmup_steps: int, spread: RunSpread) -> tuple[float, float, float]:
    """How many times faster the winner's median step is than the baseline's, with its 95 % interval, run-to-run spread included."""
    before, after = (steady_interval(_steady_s(record, warmup_steps)) for record in (baseline, winner))
    return (before.median / after.median, *ratio_interval(before, after, spread))


def _steady_s(record: TrialRecord, warmup_steps: int) -> list[float]:
    """Seconds of a trial's steps that count, those that warmed its GPUs up left out."""
    return steady([step.step_s for step in record.steps], max(warmup_steps, int(record.metrics.get(SOAK_STEPS, 0))))
