"""Earlier studies of the same machines in the same storage: which of their trials a new study's sampler starts with.

They are chosen when a study is created, and their numbers are kept with it, so that a resumed study starts with the same.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import optuna
from optuna.storages import BaseStorage
from optuna.trial import FrozenTrial, TrialState
from pydantic import ValidationError

from autotune.records import TrialRecord, record_from_trial
from autotune.refit import calibration_key
from autotune.simulation import note
from autotune.spec import StudySpec
from launchers.outcome import Outcome
from search_spaces.hardware import PoolSpec
from search_spaces.model import Workload

CHOSEN = "earlier_trials"
"""Optuna attribute of a study: by the name of each earlier study, the numbers of its trials that the sampler starts with."""
MACHINES = "machines"
"""Optuna attribute of a study: machines and software of its pool, as calibrations are kept, and what launches its trials."""
MOST_STUDIES = 4
MOST_TRIALS = 25
ALIKE = 0.8
"""Correlation of what is off in the predictions of two studies of one workload: software settles, machines age."""
ALIKE_PER_DOUBLING = 0.9
"""What is left of it for every doubling between their GPUs, global batches, sequence lengths, hidden sizes and layers."""


@dataclass(frozen=True, slots=True)
class EarlierStudy:
    """An earlier study.

    Attributes:
        name: Optuna's name of it.
        workload: What was trained.
        records: Its trials that count.
        alike: How alike what is off there is expected to be to what is off here, from 0 to 1.
    """

    name: str
    workload: Workload
    records: tuple[TrialRecord, ...]
    alike: float


def earlier_studies(spec: StudySpec, pool: PoolSpec, storage: BaseStorage, name: str) -> tuple[EarlierStudy, ...]:
    """Those that a study starts with, most alike first; none where it wants none or its sampler learns from its own trials alone.

    Args:
        spec: The study.
        pool: Where it runs.
        storage: Where it and the earlier ones are kept.
        name: Optuna's name of it; it may exist already.
    """
    if not spec.transfer or spec.sampler != "residual":
        return ()
    attributes = {study.study_name: study.user_attrs for study in storage.get_all_studies()}
    workload, machines = spec.workload(pool), _machines(spec, pool)
    if name in attributes:
        chosen = attributes[name].get(CHOSEN, {})
    else:
        chosen = {other: None for other, known in attributes.items() if known.get(MACHINES) == machines}
    compared = ((other, _comparable(attributes[other], workload)) for other in chosen if other in attributes)
    alike = sorted((-alike_to(workload, there), other, there) for other, there in compared if there is not None)
    studies = (EarlierStudy(other, there, _records(storage, other, chosen[other]), -less) for less, other, there in alike)
    telling = (study for study in studies if len({record.config for record in study.records}) > 1)
    return tuple(islice(telling, MOST_STUDIES))


def to_keep(spec: StudySpec, pool: PoolSpec, earlier: Sequence[EarlierStudy]) -> dict[str, object]:
    """The attributes of a new study."""
    chosen = {study.name: [record.number for record in study.records] for study in earlier}
    return {MACHINES: _machines(spec, pool), CHOSEN: chosen}


def told(spec: StudySpec, attributes: Mapping[str, Any]) -> str:
    """How many trials of which studies the sampler started with, in one line, by a study's attributes; empty where none."""
    chosen = attributes.get(CHOSEN, {}) if spec.transfer else {}
    count = sum(len(numbers) for numbers in chosen.values())
    return f"The search started with what {count} trials of earlier studies showed: {', '.join(chosen)}." if count else ""


def alike_to(workload: Workload, other: Workload) -> float:
    """How alike two workloads are, from 0 to `ALIKE`."""
    sizes = (
        (one.world_size, one.global_batch_size, one.seq_length, one.model.hidden_size, one.model.num_layers)
        for one in (workload, other)
    )
    doublings = sum(abs(math.log2(here / there)) for here, there in zip(*sizes, strict=True))
    return float(ALIKE * ALIKE_PER_DOUBLING**doublings)


def _machines(spec: StudySpec, pool: PoolSpec) -> list[str]:
    return [*calibration_key(pool), spec.launcher, *note(spec)]


def _comparable(known: Mapping[str, Any], workload: Workload) -> Workload | None:
    """What a study with these attributes trains.

    None where another version of this program wrote it, it has just begun, or only one of the two models has experts.
    """
    try:
        there = Workload.model_validate(known.get("fingerprint", {}).get("workload"))
    except ValidationError:
        return None
    return there if there.model.is_moe == workload.model.is_moe else None


def _records(storage: BaseStorage, name: str, numbers: Sequence[int] | None) -> tuple[TrialRecord, ...]:
    """A study's trials of these numbers; none = the measured, undisturbed ones, spread evenly from the slowest to the fastest."""
    trials = optuna.load_study(study_name=name, storage=storage).get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
    measured = [record for trial in trials if (record := _record(trial)) is not None]
    if numbers is not None:
        return tuple(record for record in measured if record.number in numbers)
    if len(measured) > MOST_TRIALS:
        by_speed = sorted(measured, key=lambda record: record.metrics["tokens_per_s_per_gpu"])
        places = np.linspace(0, len(by_speed) - 1, MOST_TRIALS).round().astype(int)
        measured = sorted((by_speed[place] for place in places), key=lambda record: record.number)
    return tuple(measured)


def _record(trial: FrozenTrial) -> TrialRecord | None:
    """A trial's record; None where it was not measured, or was disturbed."""
    try:
        record = record_from_trial(trial)
    except ValidationError:
        return None
    counts = record is not None and record.outcome is Outcome.COMPLETED and not record.contaminated
    return record if counts and record and record.metrics.get("tokens_per_s_per_gpu", 0.0) > 0.0 else None
