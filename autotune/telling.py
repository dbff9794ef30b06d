"""How the end of a trial is told to Optuna: values and one constraint, or FAIL where there is nothing to tell."""

from __future__ import annotations

from collections.abc import Iterable

import optuna
from optuna.trial import FrozenTrial, TrialState

from autotune.ledger import Ledger
from autotune.records import TrialRecord

# GPSampler wants the same constraints on every trial, so there is one, and the broken rules are in the record.
_CONSTRAINT = "infeasible"


def tell(study: optuna.Study, trial: optuna.Trial, record: TrialRecord, ledger: Ledger) -> None:
    """End a RUNNING trial; it FAILs where the record does not hold a value for each direction: lost, or a term not measured.

    Args:
        study: Its study.
        trial: The trial.
        record: How it ended, valued.
        ledger: What the others showed.
    """
    values = _values(study, record)
    if len(values) != len(study.directions):
        study.tell(trial, state=TrialState.FAIL)
        return
    if not trial.constraints:
        trial.set_constraint(_CONSTRAINT, ledger.infeasibility(record))
    study.tell(trial, values)


def end_left_open(study: optuna.Study, stored: Iterable[tuple[FrozenTrial, TrialRecord | None]], ledger: Ledger) -> None:
    """End the trials that a dead driver left open: those without a record FAIL and may be proposed again.

    Args:
        study: Their study.
        stored: All of its trials with their records.
        ledger: What these showed.
    """
    for frozen, record in stored:
        if frozen.state is TrialState.WAITING:
            # Only a RUNNING trial can be told, and `ask` takes the oldest waiting one.
            study.tell(study.ask().number, state=TrialState.FAIL)
        elif not frozen.state.is_finished() and record is not None:
            # Its driver died between the record and the end.
            tell(study, optuna.Trial(study, frozen._trial_id), record, ledger)
        elif not frozen.state.is_finished():
            study.tell(frozen.number, state=TrialState.FAIL)


def _values(study: optuna.Study, record: TrialRecord) -> tuple[float, ...]:
    """The score, or in a study of several directions the terms."""
    if len(study.directions) > 1:
        return record.values
    return () if record.value is None else (record.value,)
