"""How the end of a trial is told to Optuna: its value and one constraint, or FAIL where it says nothing of its configuration."""

from __future__ import annotations

import optuna
from optuna.trial import TrialState

from autotune.ledger import Ledger
from autotune.records import TrialRecord

# GPSampler wants the same constraints on every trial, so there is one, and the broken rules are in the record.
_CONSTRAINT = "infeasible"


def tell(study: optuna.Study, trial: optuna.Trial, record: TrialRecord, ledger: Ledger) -> None:
    """End a RUNNING trial.

    Args:
        study: Its study.
        trial: The trial.
        record: How it ended, valued.
        ledger: What the others showed.
    """
    if record.value is None:
        study.tell(trial, state=TrialState.FAIL)
        return
    if not trial.constraints:
        trial.set_constraint(_CONSTRAINT, ledger.infeasibility(record))
    study.tell(trial, record.value)
