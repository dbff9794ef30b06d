"""`autotune plan`: what physics says of a study's candidates before a GPU is used. No Ray, no torch, nothing is launched."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from pydantic import ValidationError

from autotune.candidates import candidate_table
from autotune.errors import SpecError
from autotune.guards import guards_of, keep
from autotune.hf_model import shapes_of
from autotune.machines import find_gpu, machines_of
from autotune.outlook import memory_of
from autotune.plan_power import PowerChoice, power_choices
from autotune.spec import StudySpec, pool_title
from autotune.spec_errors import spec_error
from launchers.base import Launcher
from search_spaces.candidates import CandidateTable
from search_spaces.columns import Columns
from search_spaces.config import TrialConfig
from search_spaces.device_rules import arithmetic_findings, device_violations, lacks_bf16
from search_spaces.hardware import PoolSpec
from search_spaces.legality import Violation, check
from search_spaces.normalise import normalise
from search_spaces.prediction import Machines, Prediction, Predictions, predict

MegatronVersion = Literal["0.16", "0.19"]
DOES_NOT_FIT = "does_not_fit"
_NUMBERS = ("global_batch_size", "seq_length")


@dataclass(frozen=True, slots=True)
class Planned:
    """A configuration and what is predicted of it."""

    config: TrialConfig
    prediction: Prediction


@dataclass(frozen=True)
class PoolPlan:
    """One pool's candidates, ranked by prediction.

    Attributes:
        pool: Machines name.
        gpu: Name of the device in hardware.yaml.
        table: Megatron's legal candidates.
        predictions: Of every row of the table.
        ranking: Rows that fit or are at risk and keep the study's guards, where any does, most tokens/s per GPU times the chance of
            fitting first, as tuning begins.
        verdicts: Rows by memory verdict.
        too_large: Rows that do not fit, by the largest component of their fullest stage.
        nodes: Nodes of a trial.
        choices: What each per-GPU power limit gives, most tokens/s first; empty where nothing asks for it.
        lacking: What candidates ask for that the device does not have or a guard does not allow, one sentence each.
        cautions: What nothing forbids and a person should know, a sentence each.
    """

    pool: str
    gpu: str
    table: CandidateTable
    predictions: Predictions
    ranking: npt.NDArray[np.intp]
    verdicts: dict[str, int]
    too_large: dict[str, int] = field(default_factory=dict)
    nodes: int = 1
    choices: tuple[PowerChoice, ...] = ()
    lacking: tuple[str, ...] = ()
    cautions: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether anything fits."""
        return len(self.ranking) > 0

    def best(self, top: int) -> list[Planned]:
        """The best configurations, at most so many."""
        return [Planned(self.table.config(int(row)), self.predictions.row(int(row))) for row in self.ranking[:top]]

    @property
    def smallest(self) -> Planned | None:
        """The candidate that needs the least memory; None where none is legal."""
        if not len(self.table):
            return None
        row = int(np.argmin(self.predictions.memory.device_gib))
        return Planned(self.table.config(row), self.predictions.row(row))

    def frontier(self) -> npt.NDArray[np.intp]:
        """Ranked rows that no other beats in both tokens/s and peak watts, most tokens/s first."""
        fastest = self.ranking[np.argsort(-self.predictions.tokens_per_s_per_gpu[self.ranking], kind="stable")]
        watts = self.predictions.peak_power_w[fastest]
        least = np.minimum.accumulate(watts)
        return fastest[np.flatnonzero(np.append(True, watts[1:] < least[:-1]))] if len(watts) else fastest


@dataclass(frozen=True, slots=True)
class PlannedOne:
    """One configuration on one pool: what is predicted, or why Megatron would refuse it.

    Attributes:
        title: The pool, and the node count where it has several.
        config: The configuration.
        violations: Broken rules.
        prediction: None where there are any.
    """

    title: str
    config: TrialConfig
    violations: tuple[Violation, ...]
    prediction: Prediction | None

    @property
    def ok(self) -> bool:
        """Whether it is legal and may fit."""
        return self.prediction is not None and self.prediction.fits != DOES_NOT_FIT


def plan_pool(
    spec: StudySpec, pool: PoolSpec, machines: Machines | None = None, megatron: MegatronVersion | None = None
) -> PoolPlan:
    """Predict every legal candidate of a pool and rank those that fit.

    Args:
        spec: The study.
        pool: One of its pools, at one node count.
        machines: What the pool is made of; none = the shipped figures of its GPU.
        megatron: Version whose rules hold; none = the installed megatron-core's.

    Raises:
        SpecError: the pool's GPU is unknown.
    """
    machines = machines or machines_of(pool, spec.hardware)
    table = candidate_table(spec, pool, megatron)
    if not len(table):
        return _nothing(pool, machines, table, spec)
    predictions = predict(table.columns, machines)
    possible, lacking = _possible(table, machines)
    fits = predictions.fits[possible]
    kept = possible[fits != DOES_NOT_FIT]
    launchable, over = _within_guards(spec, pool, table, predictions, kept)
    none = np.zeros(0, dtype=np.intp)
    expected = predictions.tokens_per_s_per_gpu * memory_of(table, predictions).fits(none, none)
    order = np.argsort(-expected[launchable], kind="stable")
    asked = compares_power(spec)
    names, counts = np.unique(fits, return_counts=True)
    return PoolPlan(
        pool=pool.name,
        gpu=machines.gpu.name,
        table=table,
        predictions=predictions,
        ranking=launchable[order],
        verdicts=dict(zip(names.tolist(), counts.tolist(), strict=True)),
        too_large=predictions.memory.deciding(possible[fits == DOES_NOT_FIT]),
        nodes=pool.nodes,
        choices=tuple(power_choices(pool, table, predictions, kept, spec.power_domains)) if asked else (),
        lacking=(*lacking, *over),
    )


def _possible(table: CandidateTable, machines: Machines) -> tuple[npt.NDArray[np.intp], tuple[str, ...]]:
    """Rows of which the device has all that they ask for, and what the others ask for."""
    able = np.ones(len(table), dtype=np.bool_)
    lacking = []
    for finding in arithmetic_findings(machines.gpu, table.columns).values():
        broken = np.broadcast_to(finding.broken, able.shape)
        if broken.any():
            lacking.append(f"{broken.sum():,} candidates are not predicted: {finding.text}.")
            able &= ~broken
    return np.flatnonzero(able), tuple(lacking)


def _within_guards(
    spec: StudySpec, pool: PoolSpec, table: CandidateTable, predictions: Predictions, rows: npt.NDArray[np.intp]
) -> tuple[npt.NDArray[np.intp], tuple[str, ...]]:
    """Of some rows those that the study's guards let be launched, all where none may, and what to know of the others."""
    allowed = np.isin(np.arange(len(table)), rows)
    able, over = keep(allowed, guards_of(spec, pool, table.columns, predictions))
    if not over:
        return rows, ()
    guards = ", ".join(f"{name} {count:,}" for name, count in over.items())
    if not able.any():
        return rows, (f"None of these may be launched as its power limit is: {guards}. Search lower values of gpu_power_limit_w.",)
    return np.flatnonzero(able), (f"{over.total():,} candidates that may fit are left out: none may be launched ({guards}).",)


def compares_power(spec: StudySpec) -> bool:
    """Whether the study asks how many nodes or which per-GPU power limit."""
    return bool(spec.power_domains) or any(pool.other_nodes for pool in spec.pools)


def _nothing(pool: PoolSpec, machines: Machines, table: CandidateTable, spec: StudySpec) -> PoolPlan:
    """The plan of a pool without any legal candidate."""
    baseline = predict(Columns.of(table.workload, spec.baseline), machines)
    return PoolPlan(pool.name, machines.gpu.name, table, baseline, np.zeros(0, dtype=np.intp), {}, nodes=pool.nodes)


def plan_one(
    spec: StudySpec,
    pool: PoolSpec,
    config: TrialConfig,
    machines: Machines | None = None,
    megatron: MegatronVersion | None = None,
    launcher: Launcher | None = None,
) -> PlannedOne:
    """Predict one configuration on a pool, as `plan_pool` does.

    Args:
        spec: The study.
        pool: One of its pools, at one node count.
        config: The configuration.
        machines: What the pool is made of; none = the shipped figures of its GPU.
        megatron: Version whose rules hold; none = the installed megatron-core's.
        launcher: What would run it, asked where Megatron accepts it, as `autotune check` does; none = nobody is asked.

    Raises:
        SpecError: the pool's GPU is unknown.
    """
    machines, workload = machines or machines_of(pool, spec.hardware), spec.workload(pool, megatron)
    title = pool_title(spec, pool)
    refused = check(workload, config) or (launcher.refusals(workload, config) if launcher else [])
    violations = refused + device_violations(machines.gpu, workload, config)
    if violations:
        return PlannedOne(title, config, tuple(violations), None)
    own = normalise(workload, config)
    return PlannedOne(title, own, (), predict(Columns.of(workload, own), machines).row(0))


def launcher_caution(plan: PoolPlan, launcher: Launcher, top: int) -> tuple[str, ...]:
    """What the launcher refuses of the configurations that a plan shows, which only Megatron's rules were asked about."""
    shown = plan.best(top)
    reasons = (launcher.refusals(plan.table.workload, planned.config) for planned in shown)
    refused = [found[0].message for found in reasons if found]
    if not refused:
        return ()
    told = "; ".join(dict.fromkeys(refused))
    return (f"{len(refused)} of the {len(shown)} shown are refused by the {launcher.name} launcher: {told}.",)


def model_study(
    model: Path, gpu: str, num_gpus: int, gpus_per_node: int | None, global_batch_size: int, seq_length: int
) -> StudySpec:
    """A study of everything worth trying for a Hugging Face model on GPUs of one kind: in bf16, or fp16 where they have no bf16.

    Raises:
        SpecError: the model cannot be read, or the numbers do not go together.
    """
    shapes = shapes_of(model, "--model")
    per_node = gpus_per_node or min(num_gpus, 8)
    if num_gpus % per_node:
        raise SpecError("--gpus", num_gpus, f"is no multiple of {per_node} GPUs per node", "give --gpus-per-node")
    precision = "fp16" if lacks_bf16(find_gpu(gpu, "--gpu")) else "bf16"
    pool = {"name": "pool", "gpu": gpu, "nodes": num_gpus // per_node, "gpus_per_node": per_node}
    fields: dict[str, Any] = {"global_batch_size": global_batch_size, "seq_length": seq_length, "search": "auto"}
    fields["baseline"] = {"precision": precision}
    try:
        return StudySpec.model_validate({"name": "plan", "model": shapes, "pools": [pool], **fields})
    except ValidationError as error:
        found = spec_error(error, StudySpec)
        options = {"nodes": "--gpus", "gpus_per_node": "--gpus-per-node"} | {
            name: f"--{name.replace('_', '-')}" for name in _NUMBERS
        }
        named = next((option for name, option in options.items() if found.field.endswith(name)), "plan")
        given = num_gpus if named == "--gpus" else found.value
        raise SpecError(named, given, found.problem, "see `autotune plan --help`") from None
