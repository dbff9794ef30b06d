"""Hands a configuration over: as Megatron-LM arguments, and as a command that runs the same trial by hand."""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autotune.baseline import baseline_cautions
from autotune.errors import AutotuneError, SpecError
from autotune.machines import machines_of
from autotune.records import TrialRecord
from autotune.report import nothing_best
from autotune.results import PoolResults, read_results
from autotune.simulation import note
from autotune.spec import StudySpec, node_words, pool_key, pool_title
from autotune.state_folder import StateFolder
from autotune.study import check_runnable, launcher_of
from launchers.base import PER_NODE, Command
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
        machine_commands: What sets the winner's limits on every node before, because Megatron does not.
        command: Runs the trial program with it; the same on every node.
        simulated: What says that nothing was measured, a line each, where trials were simulated; empty for a real study.
    """

    pool: PoolSpec
    record: TrialRecord
    megatron_args: tuple[str, ...]
    machine_commands: tuple[str, ...]
    command: Command
    simulated: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "pool": self.pool.name,
            "nodes": self.pool.nodes,
            "gpu": self.pool.gpu,
            "world_size": self.pool.world_size,
            "simulated": bool(self.simulated),
            "notes": list(self.simulated),
            "trial": self.record.number,
            "config": self.record.config.changed(),
            "metrics": dict(self.record.metrics),
            "megatron_args": list(self.megatron_args),
            "machine_commands": list(self.machine_commands),
            "command": {"argv": list(self.command.argv), "env": dict(self.command.env)},
        }

    def text(self) -> str:
        """For a person, and for a shell: comments begin with #."""
        tokens, how = self.record.metrics["tokens_per_s_per_gpu"], "simulated" if self.simulated else "measured"
        where = f"# on {self.pool.world_size} x {self.pool.gpu} ({self.pool.name}); other machines may need another configuration"
        return "\n".join(
            [
                *(f"# {line}" for line in self.simulated),
                f"# trial {self.record.number} of {self.record.study}: {tokens:,.0f} tokens/s per GPU {how}",
                where,
                *(f"# before, on every node: {command}" for command in self.machine_commands),
                "# Megatron-LM arguments:",
                _wrapped(self.megatron_args),
                f"# the same trial by hand{_on_each(self.pool)}:",
                shell(self.command),
            ]
        )


def export_winner(folder: StateFolder, pool_name: str | None, nodes: int | None, output: Path | None) -> Exported:
    """The best trial of a pool and node count, or of all; writes `winner.json` and the command's files into `output`.

    Raises:
        SpecError: where the study has no such pool or node count.
        AutotuneError: where nothing completed there, or nothing keeps the limits.
    """
    spec = folder.read_spec()
    result = _choose(read_results(spec, folder), spec, pool_name, nodes)
    if result.best is None:
        raise AutotuneError(f"there is no winner: {nothing_best(result)}", f"`autotune status {spec.name}` shows all trials")
    target = output or folder.path / "export"
    exported = Exported(
        pool=result.pool,
        record=result.best,
        megatron_args=megatron_args(spec, result.best.config),
        machine_commands=machine_commands(spec, result.pool, result.best.config),
        command=_command(spec, result.pool, result.best.config, target),
        simulated=tuple(note(spec)),
    )
    (target / "winner.json").write_text(json.dumps(exported.to_dict(), indent=2) + "\n", encoding="utf-8")
    return exported


def megatron_args(spec: StudySpec, config: TrialConfig) -> tuple[str, ...]:
    """Model, batch and knobs as arguments of Megatron-LM's pretrain script."""
    batch = ("--global-batch-size", str(spec.global_batch_size), "--seq-length", str(spec.seq_length))
    positions = ("--max-position-embeddings", str(spec.seq_length))
    return (*spec.model.argv(), *batch, *positions, *config.argv())


def first_command(spec: StudySpec, folder: StateFolder) -> str:
    """The exact command of trial 1 (the baseline) on every pool at each node count, for a shell; or why there is none."""
    check_runnable(spec)
    lines = [f"# {words}" for words in note(spec)]
    for pool in spec.studied_pools:
        if cautions := baseline_cautions(spec, pool):
            lines += [f"# pool {pool.name}, {node_words(pool)}: {words}" for words in cautions]
            continue
        command = _command(spec, pool, spec.baseline, folder.path / "first-trial" / pool_key(spec, pool))
        lines.append(f"# pool {pool.name}, {node_words(pool)}{_on_each(pool)}:")
        lines += [f"# before, on every node: {before}" for before in machine_commands(spec, pool, spec.baseline)]
        lines.append(shell(command))
    return "\n".join(lines)


def machine_commands(spec: StudySpec, pool: PoolSpec, config: TrialConfig) -> tuple[str, ...]:
    """What sets a configuration's power and clock limits on all GPUs of a node; empty where it has none.

    Source: the help of `nvidia-smi` (`--power-limit`, `--lock-gpu-clocks`) and of `amd-smi set`.
    """
    watts, mhz = config.gpu_power_limit_w, config.sm_clock_limit_mhz
    found = []
    if watts and pool.power_limit_command:
        found.append(f"{pool.power_limit_command.replace('{watts}', str(watts))} (for each GPU)")
    elif watts:
        found.append(_by_vendor(spec, pool, f"nvidia-smi -pl {watts}", f"amd-smi set --gpu all --power-cap {watts}"))
    if mhz:
        found.append(_by_vendor(spec, pool, f"nvidia-smi -lgc 0,{mhz}", f"amd-smi set --gpu all --clk-limit sclk max {mhz}"))
    return tuple(found)


def _by_vendor(spec: StudySpec, pool: PoolSpec, nvidia: str, amd: str) -> str:
    """The command for a pool's GPUs; both where nothing is known of them."""
    try:
        vendor = machines_of(pool, spec.hardware).gpu.vendor
    except SpecError:
        return f"sudo {nvidia} (NVIDIA), sudo {amd} (AMD)"
    return f"sudo {amd if vendor == 'amd' else nvidia}"


def _on_each(pool: PoolSpec) -> str:
    """How the command of several nodes is run; empty for one node."""
    if pool.nodes == 1:
        return ""
    told = f"NODE_RANK 0 to {pool.nodes - 1} and MASTER_ADDR the address of node 0"
    return f"; run it on each of the {pool.nodes} nodes, with {told}; all must see its files"


def shell(command: Command) -> str:
    """A command as a shell takes it."""
    return " ".join([*(f"{name}={shlex.quote(value)}" for name, value in command.env.items()), *map(_word, command.argv)])


def _word(word: str) -> str:
    """A word for a shell, which fills in what is set on each node."""
    return f'"{word}"' if any(variable in word for variable in PER_NODE) else shlex.quote(word)


def _command(spec: StudySpec, pool: PoolSpec, config: TrialConfig, folder: Path) -> Command:
    launcher, workload = launcher_of(spec, pool), spec.workload(pool)
    return launcher.command(workload, normalise(workload, config), folder.resolve(), steps=spec.measurement.steps, seed=spec.seed)


def _choose(results: list[PoolResults], spec: StudySpec, pool_name: str | None, nodes: int | None) -> PoolResults:
    known = dict.fromkeys(pool_title(spec, result.pool) for result in results)
    hint = f"pools of {spec.name}: {'; '.join(known) or 'none has results yet'}"
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
