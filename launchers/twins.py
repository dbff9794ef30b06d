"""Two twins of a pool: worlds that answer what a trial would show, in virtual time, and differ from every prediction on purpose.

`physics` takes the predictions of `search_spaces` times what they leave out: a hidden factor for every part of a step, an
interaction that no part has a term for, fragmentation, differences between GPUs. `table` knows none of those formulas: smooth
random effects of every knob and of pairs of knobs. Both are drawn from a seed and answer the same question the same way.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict
from itertools import combinations
from pathlib import Path
from typing import Any, Literal

from launchers.base import Command
from launchers.megatron_core.launcher import MegatronCoreLauncher
from launchers.soak import Demand, generator
from search_spaces.columns import Columns
from search_spaces.config import TrialConfig
from search_spaces.gpus import Precision
from search_spaces.legality import Violation
from search_spaces.model import Workload
from search_spaces.model_flops import model_flops_per_token
from search_spaces.prediction import Machines, predict

Kind = Literal["physics", "table"]
KINDS: tuple[Kind, ...] = ("physics", "table")

PART_SIGMA = 0.25
"""Spread of the hidden factor of each part, as the standard deviation of its logarithm."""

BEST_SHARE = 0.65
"""Most of a device's dense peak that a step's model operations reach. The most published for whole steps is 0.63 (MPT-3B, bf16,
A100, LLM Foundry's benchmarking tables)."""

_NEAR = 1.1
_INTERACTION = 0.06
_MEMORY_SIGMA = 0.04
_FRAGMENTED_SHARE = 0.2
_FRAGMENTATION = (0.1, 0.3)
_BURST = 1.05
_CLOCKED = ("gemm", "attention", "recompute")
_EFFECT = 0.12
_PAIR_EFFECT = 0.05
_TABLE_STEP_S, _TABLE_SLOWER = 2.0, 3.0
_TABLE_FULL = 0.75


def demand(kind: Kind, workload: Workload, config: TrialConfig, machines: Machines, seed: int) -> Demand:
    """What the twin of that seed says of a configuration."""
    free = config.model_copy(update={"gpu_power_limit_w": None, "sm_clock_limit_mhz": None})
    return (_physics if kind == "physics" else _table)(workload, free, machines, seed)


def fastest_step_s(workload: Workload, config: TrialConfig, machines: Machines) -> float:
    """Seconds that no step of a configuration can undercut: its model operations at `BEST_SHARE` of the peak; 0 on CPU.

    A CPU's peak depends on the machine, and no figure of it is a bound.
    """
    if workload.device == "cpu":
        return 0.0
    precision: Precision = "tf32" if config.precision == "fp32" else config.precision
    if config.fp8_format or config.fp4_format:
        precision = "fp4" if config.fp4_format else "fp8"
    operations = model_flops_per_token(workload.model, workload.seq_length) * workload.tokens_per_step / workload.world_size
    return operations / (BEST_SHARE * machines.gpu.peak(precision))


def bounded(step_s: float, fastest_s: float) -> float:
    """Seconds of a step that does not undercut the fastest; untouched from a tenth above it, and in the same order below."""
    near_s = _NEAR * fastest_s
    if step_s >= near_s:
        return step_s
    return fastest_s + (near_s - fastest_s) * math.exp((step_s - near_s) / (near_s - fastest_s))


def _physics(workload: Workload, config: TrialConfig, machines: Machines, seed: int) -> Demand:
    said = predict(Columns.of(workload, config), machines).row(0)
    parts = {part: seconds * _hidden(seed, part) for part, seconds in said.time_by_part_s.items()}
    free_s = sum(parts.values()) * math.exp(_interaction(config, seed))
    step_s = bounded(free_s, fastest_step_s(workload, config, machines))
    busier = said.step_time_s / step_s
    dies = machines.gpu.dies_per_package
    idle, said_mean_w, said_peak_w = machines.gpu.idle_w / dies, said.mean_power_w / dies, said.peak_power_w / dies
    watts = _hidden(seed, "watts") ** 0.2
    mean_w = idle + (said_mean_w - idle) * watts * min(busier, 1.2)
    return Demand(
        step_s=step_s,
        clocked=sum(parts.get(part, 0.0) for part in _CLOCKED) / sum(parts.values()),
        mean_w=mean_w,
        peak_w=max(idle + (said_peak_w - idle) * watts, _BURST * mean_w),
        memory_gib=said.device_gib * _fragmentation(config, seed),
    )


def _hidden(seed: int, part: str) -> float:
    return math.exp(PART_SIGMA * float(generator(seed, "part", part).standard_normal()))


def _interaction(config: TrialConfig, seed: int) -> float:
    """Deep pipelines with wide tensor parallelism and large micro-batches: faster or slower together than by themselves."""
    depth = math.log2(config.pipeline_model_parallel_size * config.tensor_model_parallel_size)
    return _INTERACTION * float(generator(seed, "interaction").standard_normal()) * depth * math.log2(2 * config.micro_batch_size)


def _fragmentation(config: TrialConfig, seed: int) -> float:
    """Memory beyond what is predicted; some configurations fragment badly, and nothing tells which."""
    numbers = generator(seed, "memory", sorted(config.changed().items()))
    usual = math.exp(_MEMORY_SIGMA * float(numbers.standard_normal()))
    return usual * (1.0 + numbers.uniform(*_FRAGMENTATION)) if numbers.random() < _FRAGMENTED_SHARE else usual


def _table(workload: Workload, config: TrialConfig, machines: Machines, seed: int) -> Demand:
    knobs = config.model_dump(mode="json")
    effects = {what: _effects(seed, what, knobs) for what in ("step", "watts", "burst", "memory")}
    gpu = machines.gpu
    span = gpu.tdp_w - gpu.idle_w
    fastest_s = fastest_step_s(workload, config, machines)
    usual_s = max(_TABLE_STEP_S, _TABLE_SLOWER * fastest_step_s(workload, TrialConfig(), machines))
    mean_w = gpu.idle_w + span * 0.75 * _squash(effects["watts"])
    return Demand(
        step_s=bounded(usual_s * math.exp(effects["step"]), fastest_s),
        clocked=0.6,
        mean_w=mean_w / gpu.dies_per_package,
        peak_w=(mean_w + span * 0.35 * _squash(effects["burst"])) / gpu.dies_per_package,
        memory_gib=gpu.memory_gib * _TABLE_FULL * math.exp(effects["memory"]),
    )


def _squash(effect: float) -> float:
    return 1.0 / (1.0 + math.exp(-2.0 * effect))


def _effects(seed: int, what: str, knobs: Mapping[str, object]) -> float:
    """The sum of an effect of every changed knob's value, steady from one number to the next, and of effects of pairs."""
    usual = TrialConfig().model_dump(mode="json")
    changed = {name: value for name, value in knobs.items() if value != usual[name]}
    alone = sum(_EFFECT * _value_effect(seed, what, name, value) for name, value in changed.items())
    together = sum(
        _PAIR_EFFECT * float(generator(seed, what, one, changed[one], other, changed[other]).standard_normal())
        for one, other in combinations(sorted(changed), 2)
    )
    return alone + together


def _value_effect(seed: int, what: str, name: str, value: object) -> float:
    """One knob's: a random slope and bend over the logarithm of a number, a random height for anything else."""
    numbers = generator(seed, what, name)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return float(generator(seed, what, name, value).standard_normal())
    place = math.log2(max(value, 0.5))
    slope, bend = numbers.standard_normal(2)
    return float(slope) * place + 0.4 * float(bend) * (place - 1.5) ** 2 - 0.4 * float(bend) * 2.25


class SimulatedLauncher:
    """Runs trials on a twin of one pool.

    Attributes:
        name: Name in records.
        program: The rank program.
        preload: Modules that the warm process imports once.
    """

    name = "simulated"
    program = "launchers.simulated"
    preload: tuple[str, ...] = ("launchers.simulated",)

    def __init__(self, machines: Machines, nodes: int, kind: Kind = "physics", seed: int = 0) -> None:
        """Stand for a pool.

        Args:
            machines: What it is made of.
            nodes: How many nodes.
            kind: Which twin.
            seed: Of everything that the twin hides.
        """
        self._machines = machines
        self._nodes = nodes
        self._kind = kind
        self._seed = seed
        self._runs: Counter[TrialConfig] = Counter()

    def refusals(self, workload: Workload, config: TrialConfig) -> list[Violation]:
        """None: the twin runs whatever Megatron accepts."""
        return []

    def job(self, workload: Workload, config: TrialConfig, *, steps: int, seed: int) -> dict[str, Any]:
        """What the program reads: the load is worked out here, the run of it there."""
        load = demand(self._kind, workload, config, self._machines, self._seed)
        self._runs[config] += 1
        gpu = self._machines.gpu
        return {
            "load": asdict(load),
            "gpu": {
                "name": gpu.name,
                "vendor": gpu.vendor,
                "idle_w": gpu.idle_w / gpu.dies_per_package,
                "tdp_w": gpu.tdp_w / gpu.dies_per_package,
                "dies_per_package": gpu.dies_per_package,
                "lowest_clock": gpu.clock_mhz.low / gpu.clock_mhz.boost,
                "clock_mhz": gpu.clock_mhz.boost,
                "memory_gib": gpu.memory_gib,
            },
            "nodes": self._nodes,
            "gpus_per_node": workload.gpus_per_node,
            "limit_w": config.gpu_power_limit_w and config.gpu_power_limit_w / gpu.dies_per_package,
            "clock": min(1.0, (config.sm_clock_limit_mhz or gpu.clock_mhz.boost) / gpu.clock_mhz.boost),
            "tokens": workload.tokens_per_step,
            "pool_seed": self._seed,
            "run_seed": f"{self._seed} {seed} {sorted(config.changed().items())} {self._runs[config]}",
            "steps": steps,
        }

    def command(self, workload: Workload, config: TrialConfig, folder: Path, *, steps: int, seed: int) -> Command:
        """The real trial that this one stands for, as the Megatron-Core launcher runs it."""
        return MegatronCoreLauncher().command(workload, config, folder, steps=steps, seed=seed)
