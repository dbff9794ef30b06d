"""Hands a configuration over: as Megatron-LM arguments, and as a command that runs the same trial by hand."""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autotune.errors import AutotuneError, SpecError
from autotune.records import TrialRecord
from autotune.results import PoolResults, read_results
from autotune.spec import StudySpec, pool_key, pool_title
from autotune.state_folder import StateFolder
from autotune.study import check_runnable, launcher_of
from launchers.base import Command
from search_spaces.config import TrialConfig
from search_spaces.hardware import PoolSpec
from search_spaces.normalise import normalise


@dataclass(frozen=True, slots=True)
class Exported:
    """A winner, ready to use.

    Attributes:
        pool: The pool it was measured on; elsewhere it may be slower or not fit.
        record: The trial that measured it.
        megatron_args: Arguments for Megatron-LM's pretrain script: model, batch and knobs.
        command: Runs the trial program with it.
    """

    pool: PoolSpec
    record: TrialRecord
    megatron_args: tuple[str, ...]
    command: Command

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "pool": self.pool.name,
            "nodes": self.pool.nodes,
            "gpu": self.pool.gpu,
            "world_size": self.pool.world_size,
            "trial": self.record.number,
            "config": self.record.config.changed(),
            "metrics": dict(self.record.metrics),
            "megatron_args": list(self.megatron_args),
            "command": {"argv": list(self.command.argv), "env": dict(self.command.env)},
        }

    def text(self) -> str:
        """For a person, and for a shell: comments begin with #."""
        tokens = self.record.metrics["tokens_per_s_per_gpu"]
        measured = f"# trial {self.record.number} of {self.record.study}: {tokens:,.0f} tokens/s per GPU measured"
        where = f"# on {self.pool.world_size} x {self.pool.gpu} ({self.pool.name}); other machines may need another configuration"
        return "\n".join(
            [
                measured,
                where,
                *_machine(self.record.config),
                "# Megatron-LM arguments:",
                _wrapped(self.megatron_args),
                "# the same trial by hand:",
                shell(self.command),
            ]
        )


def export_winner(folder: StateFolder, pool_name: str | None, nodes: int | None, output: Path | None) -> Exported:
    """The best trial of a pool and node count, or of all; writes `winner.json` and the command's files into `output`.

    Raises:
        SpecError: where the study has no such pool or node count.
        AutotuneError: where nothing completed there.
    """
    spec = folder.read_spec()
    result = _choose(read_results(spec, folder), spec, pool_name, nodes)
    if result.best is None:
        raise AutotuneError("no trial has completed yet, so there is no winner", f"`autotune status {spec.name}` shows why")
    target = output or folder.path / "export"
    exported = Exported(
        pool=result.pool,
        record=result.best,
        megatron_args=megatron_args(spec, result.best.config),
        command=_command(spec, result.pool, result.best.config, target),
    )
    (target / "winner.json").write_text(json.dumps(exported.to_dict(), indent=2) + "\n", encoding="utf-8")
    return exported


def megatron_args(spec: StudySpec, config: TrialConfig) -> tuple[str, ...]:
    """Model, batch and knobs as arguments of Megatron-LM's pretrain script."""
    batch = ("--global-batch-size", str(spec.global_batch_size), "--seq-length", str(spec.seq_length))
    positions = ("--max-position-embeddings", str(spec.seq_length))
    return (*spec.model.argv(), *batch, *positions, *config.argv())


def first_command(spec: StudySpec, folder: StateFolder) -> str:
    """The exact command of trial 1 (the baseline) on every pool at each node count, for a shell."""
    check_runnable(spec)
    lines = []
    for pool in spec.studied_pools:
        command = _command(spec, pool, spec.baseline, folder.path / "first-trial" / pool_key(spec, pool))
        lines.append(f"# pool {pool.name}, {pool.nodes} node(s), on each:\n{shell(command)}")
    return "\n".join(lines)


def _machine(config: TrialConfig) -> list[str]:
    """What must be set on the machines before, because Megatron does not."""
    watts = config.gpu_power_limit_w
    return [f"# before: a power limit of {watts} W on every GPU (nvidia-smi -pl {watts}, amd-smi set -o {watts})"] if watts else []


def shell(command: Command) -> str:
    """A command as a shell takes it."""
    return " ".join([*(f"{name}={shlex.quote(value)}" for name, value in command.env.items()), shlex.join(command.argv)])


def _command(spec: StudySpec, pool: PoolSpec, config: TrialConfig, folder: Path) -> Command:
    launcher, workload = launcher_of(spec, pool), spec.workload(pool)
    return launcher.command(workload, normalise(workload, config), folder.resolve(), steps=spec.measurement.steps, seed=spec.seed)


def _choose(results: list[PoolResults], spec: StudySpec, pool_name: str | None, nodes: int | None) -> PoolResults:
    hint = f"pools of {spec.name}: {'; '.join(pool_title(spec, pool) for pool in spec.studied_pools)}"
    named = [result for result in results if pool_name in (None, result.pool.name)]
    if not named:
        raise SpecError("pool", pool_name, "the study has no results on such a pool", hint)
    counted = [result for result in named if nodes in (None, result.pool.nodes)]
    if not counted:
        raise SpecError("nodes", nodes, "the study has no results at such a node count", hint)
    return max(counted, key=lambda result: result.best_tokens_per_s)


def _wrapped(arguments: tuple[str, ...]) -> str:
    """One flag with its values a line, continued for a shell."""
    lines: list[str] = []
    for argument in arguments:
        if argument.startswith("--") or not lines:
            lines.append(shlex.quote(argument))
        else:
            lines[-1] += f" {shlex.quote(argument)}"
    return " \\\n".join(lines)
