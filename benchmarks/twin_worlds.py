"""Worlds to search in: a twin of 32 H200 GPUs, with the truth about every candidate that no study gets to see."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from autotune.candidates import candidate_table
from autotune.machines import machines_of
from autotune.proposal import Proposal
from autotune.records import Phase, TrialResult
from autotune.simulation import twin_launcher
from autotune.spec import StudySpec
from autotune.telemetry.series import NodeTelemetry, reported_series
from autotune.telemetry_summary import TrialTelemetry
from launchers.outcome import Outcome
from launchers.simulated import NodeLostError, OutOfMemoryError, play
from launchers.soak import Demand, Gpus, Soak, soak
from launchers.twins import Kind, SimulatedLauncher, demand
from search_spaces.candidates import CandidateTable
from search_spaces.config import TrialConfig

Floats = npt.NDArray[np.float64]

METRIC = "pool_gpu_mean_power_w"
LEVELS: Mapping[str, float] = {"loose": 0.75, "middle": 0.5, "tight": 0.2}
"""Where the cap lies among the true watts of the candidates that run."""
GUARDED, GUARD_W = "guarded", 500.0
"""A fourth level: the middle cap, and a guard on every GPU, which the launches have to keep as well."""

CLOSE = 0.0025
"""No cap lies nearer to what a candidate draws: two standard deviations of a confirming run, so that nobody could tell from runs on
which side it lies. A power limit holds many candidates at nearly the same watts."""

CONFIDENCE = 0.999
"""Surer than a study's usual 0.95, with which one in twenty would rightly end with a gain left."""

_STEPS, _WARMUP = 12, 2
_STUDY = {
    "name": "twin",
    "model": {
        "num_layers": 48,
        "hidden_size": 6144,
        "ffn_hidden_size": 16384,
        "num_attention_heads": 48,
        "num_query_groups": 8,
        "vocab_size": 64000,
    },
    "pools": [{"name": "pool", "gpu": "h200", "nodes": 4, "gpus_per_node": 8}],
    "global_batch_size": 128,
    "seq_length": 4096,
    "baseline": {
        "tensor_model_parallel_size": 8,
        "pipeline_model_parallel_size": 2,
        "use_distributed_optimizer": True,
        "gpu_power_limit_w": 300,
    },
    "search": {
        "tensor_model_parallel_size": [1, 2, 4, 8],
        "pipeline_model_parallel_size": [1, 2, 4],
        "micro_batch_size": [1, 2, 4],
        "sequence_parallel": [False, True],
        "recompute": ["none", "selective", "full"],
        "gpu_power_limit_w": ["none", 300, 400, 500],
    },
    "objective": {"tokens_per_s_per_gpu": 1.0},
    "measurement": {"steps": _STEPS, "warmup_steps": _WARMUP},
}


@dataclass(frozen=True)
class World:
    """One twin.

    Attributes:
        kind: Which.
        seed: Of all that it hides.
        trials: Budget of a study.
    """

    kind: Kind
    seed: int
    trials: int

    @cached_property
    def spec(self) -> StudySpec:
        """The study without limits."""
        own = {"launcher": f"simulated:{self.kind}", "seed": self.seed, "budget": {"trials": self.trials, "confidence": CONFIDENCE}}
        return StudySpec.model_validate({**_STUDY, **own})

    @cached_property
    def table(self) -> CandidateTable:
        """Its candidates."""
        return candidate_table(self.spec, self.spec.pools[0])

    @cached_property
    def rows(self) -> dict[TrialConfig, int]:
        """The table's row of every candidate."""
        return {self.table.config(row): row for row in range(len(self.table))}

    @cached_property
    def truth(self) -> Truth:
        """What every candidate does without scatter, flaky nodes and faults."""
        pool = self.spec.pools[0]
        machines = machines_of(pool)
        job = self.launcher().job(self.table.workload, self.table.config(0), steps=self.spec.confirm_steps, seed=0)
        gpus = Gpus.of(job["gpu"], pool.nodes, pool.gpus_per_node, self.seed)
        loads: dict[Any, Demand] = {}
        speed, watts = np.zeros(len(self.table)), np.full(len(self.table), np.nan)
        for row in range(len(self.table)):
            config = self.table.config(row)
            free = config.model_copy(update={"gpu_power_limit_w": None})
            if free not in loads:
                loads[free] = demand(self.kind, self.table.workload, free, machines, self.seed)
            if loads[free].memory_gib <= job["gpu"]["memory_gib"]:
                run = soak(loads[free], gpus, self.spec.confirm_steps, None, config.gpu_power_limit_w)
                speed[row], watts[row] = _shown(run, self.table.workload.tokens_per_step)
        return Truth(speed, watts)

    def launcher(self) -> SimulatedLauncher:
        """What stands for the pool; it counts the runs of each configuration, so every study needs its own."""
        return twin_launcher(self.spec, self.spec.pools[0])

    def study_spec(self, level: str, method: str) -> StudySpec:
        """The study under a cap."""
        cap_w = self.truth.cap_w(LEVELS["middle" if level == GUARDED else level])
        guard = {"gpu_power_guard_w": GUARD_W} if level == GUARDED else {}
        own = {"limits": {METRIC: {"max": cap_w}}, "sampler": method, **guard}
        return StudySpec.model_validate({**self.spec.model_dump(), **own})


@dataclass(frozen=True, slots=True)
class Truth:
    """What a world's candidates really do.

    Attributes:
        tokens_per_s: Of the pool, (rows,); 0 where a candidate runs out of memory.
        watts: Mean of the sum over all boards, (rows,); NaN where it does.
    """

    tokens_per_s: Floats
    watts: Floats

    def cap_w(self, quantile: float) -> float:
        """Watts that this share of the candidates that run stays below, moved to the nearest that none of them comes close to."""
        watts, wanted = np.unique(self.watts[np.isfinite(self.watts)]), float(np.nanquantile(self.watts, quantile))
        edges = np.concatenate([[wanted], watts * (1.0 - 1.001 * CLOSE), watts * (1.0 + 1.001 * CLOSE)])
        clear = edges[np.abs(edges[:, None] / watts - 1.0).min(axis=1) >= CLOSE]
        return float(clear[np.abs(clear - wanted).argmin()])

    def within(self, cap_w: float, launchable: npt.NDArray[np.bool_]) -> float:
        """Tokens per second of the best that may be launched and keeps the cap; 0 where there is none."""
        return float(self.tokens_per_s[launchable & (self.watts <= cap_w)].max(initial=0.0))


def _shown(run: Soak, tokens: int) -> tuple[float, float]:
    """Tokens per second and mean watts of all boards after the warm-up."""
    seconds = np.array(run.step_s[_WARMUP:])
    watts = np.array(run.mean_w[_WARMUP:]).sum(axis=1)
    return tokens / float(np.median(seconds)), float(watts @ seconds / seconds.sum())


def played(launcher: SimulatedLauncher, spec: StudySpec, proposal: Proposal) -> TrialResult:
    """What an agent would return of a trial on the twin, with the fewest readings that tell its watts."""
    pool = spec.pools[0]
    steps = spec.confirm_steps if proposal.phase is Phase.CONFIRM else spec.measurement.steps
    job = launcher.job(spec.workload(pool), proposal.config, steps=steps, seed=spec.seed)
    try:
        shown = play(job, proposal.proposed_s, most_samples=0)
    except OutOfMemoryError as error:
        return TrialResult(Outcome.OOM, str(error))
    except NodeLostError as error:
        return TrialResult(Outcome.LOST, str(error))
    telemetry = TrialTelemetry((NodeTelemetry(series=reported_series(list(shown.samples), 0)),))
    return replace(TrialResult(Outcome.COMPLETED, "", shown.steps), telemetry=telemetry)
