"""What is known of one trial, once: Optuna's attributes, MLflow, reports and the command line all show this record."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, ClassVar

from optuna.trial import FrozenTrial
from pydantic import ConfigDict, TypeAdapter

from autotune.contamination import Witness
from autotune.settling import Settled
from autotune.telemetry_summary import TrialTelemetry
from launchers.base import StepRecord
from launchers.outcome import Outcome
from search_spaces.config import TrialConfig
from search_spaces.legality import Violation


class Phase(StrEnum):
    """Why a trial was run."""

    BASELINE = "baseline"
    EXPLORE = "explore"
    CONFIRM = "confirm"


@dataclass(frozen=True, slots=True)
class TrialResult:
    """What one launched trial showed, over all its nodes.

    Attributes:
        outcome: How it ended: the first node's that did not complete, else COMPLETED.
        detail: Why.
        steps: Every step, in order.
        launched_s: Unix time at which the agents were asked to run it.
        ended_s: Unix time at which the last node had ended.
        nodes: Each agent's description at the launch.
        log_folder: Folder of the ranks' logs.
        agent_failed: Whether an agent died or did not answer; it is not to be trusted with another trial.
        raced_out: Whether it was ended because it could not win.
        settled: From where on its steps count, where it waited for the temperatures of its GPUs.
        witnesses: What the agents saw beside it.
        virtual_s: Virtual seconds that a rehearsed trial took, start-up included; None for a real one.
        telemetry: What the nodes measured.
    """

    outcome: Outcome
    detail: str
    steps: tuple[StepRecord, ...] = ()
    launched_s: float = 0.0
    ended_s: float = 0.0
    nodes: tuple[dict[str, Any], ...] = ()
    log_folder: Path | None = None
    agent_failed: bool = False
    raced_out: bool = False
    settled: Settled | None = None
    witnesses: tuple[Witness, ...] = ()
    virtual_s: float | None = None
    telemetry: TrialTelemetry = field(default_factory=TrialTelemetry)

    @property
    def environment(self) -> dict[str, str]:
        """Where it ran: one entry per node and field."""
        nodes = [*enumerate(self.nodes), *((witness.node_rank, witness.facts) for witness in self.witnesses)]
        return {f"node{rank}.{name}": str(value) for rank, facts in nodes for name, value in facts.items()}


@dataclass(frozen=True, slots=True)
class TrialRecord:
    """One trial, also a refused one.

    Attributes:
        study: Optuna study name, one per pool and node count.
        number: Optuna's trial number.
        phase: Why it was run.
        config: What was run.
        argv: The same as Megatron-LM arguments.
        outcome: How it ended.
        detail: Why, in words; the last lines of the log where it failed.
        value: What it is worth in one number (higher is better), which Optuna was told; None until told.
        metrics: Finite values by name, units in the names.
        violations: Broken rules and limits.
        steps: Every step that was reported.
        started_s: Unix time at which it was proposed; virtual where it was rehearsed.
        ended_s: Time of its end, alike.
        environment: Where it ran: node, pool label, versions.
        log_folder: Folder of the ranks' logs; None where nothing was launched.
        contaminated: Who disturbed its measurement; empty where nobody is known to.
        why: Where its configuration comes from, such as `recipe: ...`; empty where that is the study itself or its sampler.
        values: In a Pareto study, what Optuna was told in place of `value`: each term against the reference; empty where one lacks.
        attached: The log that its watts at the wall were taken from after its end (see `autotune.attached`); empty where none was.
    """

    # A NaN loss must survive JSON.
    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(ser_json_inf_nan="constants")

    study: str
    number: int
    phase: Phase
    config: TrialConfig
    argv: tuple[str, ...]
    outcome: Outcome
    detail: str = ""
    value: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    violations: tuple[Violation, ...] = ()
    steps: tuple[StepRecord, ...] = ()
    started_s: float = 0.0
    ended_s: float = 0.0
    environment: Mapping[str, str] = field(default_factory=dict)
    log_folder: Path | None = None
    contaminated: str = ""
    why: str = ""
    values: tuple[float, ...] = ()
    attached: str = ""

    @property
    def took_s(self) -> float:
        """Seconds that it held its pool's GPUs, start-up included; virtual ones where it was rehearsed."""
        return self.ended_s - self.started_s


_SHORT = {
    "tensor_model_parallel_size": "TP",
    "pipeline_model_parallel_size": "PP",
    "num_virtual_stages_per_pipeline_rank": "VPP",
    "context_parallel_size": "CP",
    "expert_model_parallel_size": "EP",
    "expert_tensor_parallel_size": "ETP",
    "micro_batch_size": "MBS",
    "sequence_parallel": "SP",
    "recompute_granularity": "recompute",
    "use_distributed_optimizer": "dist-opt",
}


def short(config: TrialConfig) -> str:
    """A configuration in one line: what differs from Megatron's defaults, common knobs abbreviated."""
    parts = []
    for name, value in config.changed().items():
        label = _SHORT.get(name, name)
        if value is True:
            parts.append(label)
        elif label.isupper():
            parts.append(f"{label}{value}")
        else:
            parts.append(f"{label}={'+'.join(value) if isinstance(value, tuple) else value}")
    return " ".join(parts) or "Megatron's defaults"


def spelled(value: Any) -> str:
    """A knob's value as a study and `--set` take it: YAML without blanks, `none` for none."""
    if isinstance(value, tuple):
        return f"[{','.join(map(spelled, value))}]"
    return "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def as_settings(values: Mapping[str, Any]) -> str:
    """Knobs with their values as `--set` takes them."""
    return " ".join(f"{name}={spelled(value)}" for name, value in values.items())


def counted(count: int, one: str) -> str:
    """A number of things whose plural ends in s."""
    return f"{count:,} {one}" if count == 1 else f"{count:,} {one}s"


RECORD_ATTRIBUTE = "record"
_RECORD = TypeAdapter(TrialRecord)


def record_to_json(record: TrialRecord) -> str:
    """The record as one JSON text, for Optuna's attribute of that name and for `--json`."""
    return _RECORD.dump_json(record).decode()


def record_from_trial(frozen: FrozenTrial) -> TrialRecord | None:
    """The record that a finished Optuna trial carries; None where its driver died before it was written."""
    text: Any = frozen.user_attrs.get(RECORD_ATTRIBUTE)
    return None if text is None else _RECORD.validate_json(text)
