"""Small studies without Ray: a launcher that starts nothing, results that a node could have sent, and the loop between them."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import optuna
from optuna.storages import BaseStorage, InMemoryStorage

from autotune.acquisition import Choice
from autotune.pool_study import PoolStudy
from autotune.proposal import Proposal
from autotune.records import TrialRecord, TrialResult
from autotune.refit import Refit
from autotune.spec import StudySpec
from launchers.base import Command, StepRecord
from launchers.outcome import Outcome
from search_spaces.config import TrialConfig
from search_spaces.legality import Violation
from search_spaces.model import Workload

MODEL = {"num_layers": 8, "hidden_size": 64, "num_attention_heads": 8, "vocab_size": 256}
POOL = {"name": "laptop", "gpu": "cpu", "gpus_per_node": 4}
PROMISED = Choice(0, 0.0, math.log(1.02), 1.0, 1.0, 1.0, chance_of_gain=0.4, larger_than_oom=0, gains=None)
STEP_LIMITED = "too_much_for_the_launcher"

# Faults of the configuration: results, never exceptions (DESIGN rule 6).
FAULTS = (Outcome.OOM, Outcome.HUNG, Outcome.TIMEOUT, Outcome.NAN, Outcome.CRASHED, Outcome.OVER_GUARD)

# 36 legal candidates of 72 points on four ranks.
SMALL_SEARCH: dict[str, Any] = {
    "tensor_model_parallel_size": [1, 2, 4],
    "pipeline_model_parallel_size": [1, 2, 4],
    "micro_batch_size": [1, 2, 4, 8],
    "use_distributed_optimizer": [False, True],
}


def study_data(**fields: Any) -> dict[str, Any]:
    """A study file's mapping, with some fields replaced."""
    data: dict[str, Any] = {
        "name": "case",
        "model": dict(MODEL),
        "pools": [dict(POOL)],
        "global_batch_size": 16,
        "seq_length": 32,
        "search": dict(SMALL_SEARCH),
        "sampler": "random",
        "budget": {"trials": 1000, "confidence": None},
        "confirm": {"top": 0},
        "measurement": {"steps": 8, "warmup_steps": 2},
    }
    return {**data, **fields}


def study_spec(**fields: Any) -> StudySpec:
    """The same, read."""
    return StudySpec.model_validate(study_data(**fields))


class NoLauncher:
    """Refuses what it is told to refuse, and launches nothing."""

    name = "none"
    program = "none"
    preload: tuple[str, ...] = ()

    def __init__(self, refuses: Callable[[TrialConfig], bool] = lambda config: False) -> None:
        self._refuses = refuses

    def refusals(self, workload: Workload, config: TrialConfig) -> list[Violation]:
        return [Violation(STEP_LIMITED, 1.0, "the launcher cannot run it")] if self._refuses(config) else []

    def job(self, workload: Workload, config: TrialConfig, *, steps: int, seed: int) -> dict[str, Any]:
        return {"steps": steps, "seed": seed}

    def command(self, workload: Workload, config: TrialConfig, folder: Path, *, steps: int, seed: int) -> Command:
        return Command(("true",), {})


def open_pool(
    spec: StudySpec, storage: BaseStorage | None = None, launcher: NoLauncher | None = None, pool: int = 0, *, refits: bool = False
) -> PoolStudy:
    """One pool's study, in memory where no storage is given. Without `refits` made-up seconds teach its predictions nothing."""
    study = PoolStudy(spec, spec.pools[pool], launcher or NoLauncher(), storage or InMemoryStorage(), lambda study, record: None)
    if not refits:
        study.refit = Refit(study.name, study.table, None, ("", ""), None)
    return study


def steps_of(step_s: float, count: int = 8, loss: float = 5.0) -> tuple[StepRecord, ...]:
    """Steps of a trial, the first one slow, the others about `step_s`."""
    seconds = [10 * step_s, *(step_s * (1 + 0.01 * (number % 3)) for number in range(1, count))]
    return tuple(
        StepRecord(number + 1, 1000.0 + number, value, loss - 0.1 * number, 1.0, 512, 0.5) for number, value in enumerate(seconds)
    )


def completed(step_s: float = 0.1) -> TrialResult:
    """A trial that ran to its end."""
    return TrialResult(Outcome.COMPLETED, "", steps_of(step_s))


def failed(outcome: Outcome) -> TrialResult:
    """A trial that ended otherwise, after two steps that must not count as a measurement."""
    return TrialResult(outcome, f"told to end as {outcome}", steps_of(0.001, count=2))


def step_seconds(config: TrialConfig) -> float:
    """A made-up but smooth cost: tensor parallel costs, micro-batches help."""
    pipeline = 1 + 0.1 * config.pipeline_model_parallel_size
    return 0.1 * config.tensor_model_parallel_size**0.5 * pipeline / config.micro_batch_size**0.3


def run_to_end(
    study: PoolStudy, answer: Callable[[Proposal], TrialResult], *, concurrent: int = 1, most: int = 2000
) -> list[Proposal]:
    """Propose and finish until the study says that it has ended; `concurrent` trials run at a time."""
    proposals: list[Proposal] = []
    running: list[Proposal] = []
    for _ in range(most):
        while len(running) < concurrent and (proposal := study.propose()) is not None:
            proposals.append(proposal)
            running.append(proposal)
        if not running:
            return proposals
        proposal = running.pop(0)
        study.finish(proposal, answer(proposal))
    raise AssertionError(f"the study did not end within {most} trials")


def mixed(seed: int, share: float) -> Callable[[Proposal], TrialResult]:
    """`share` of the trials fail, with every kind of fault in turn."""
    generator = random.Random(seed)

    def answer(proposal: Proposal) -> TrialResult:
        if generator.random() < share:
            return failed(FAULTS[proposal.trial.number % len(FAULTS)])
        return completed(step_seconds(proposal.config))

    return answer


def optuna_study(study: PoolStudy) -> optuna.Study:
    """What the storage holds of it."""
    return study._optuna


def record(study: PoolStudy, number: int) -> TrialRecord:
    """One ended trial."""
    return next(record for record in study.records if record.number == number)
