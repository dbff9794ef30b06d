"""MegatronCoreLauncher: runs trials with our own training program on megatron-core."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from launchers.base import Command
from launchers.megatron_core.job import Job
from search_spaces.config import TrialConfig, knobs
from search_spaces.legality import Violation
from search_spaces.model import ModelSpec, Workload

_NEEDS_GROUPED_GEMM = "needs grouped expert matrices, which Transformer Engine has for CUDA only"


class MegatronCoreLauncher:
    """One trial is one run of `launchers.megatron_core.trial` on all ranks."""

    name = "megatron_core"
    program = "launchers.megatron_core.trial"
    preload: tuple[str, ...] = ("torch._dynamo", "launchers.megatron_core.trial")

    def refusals(self, workload: Workload, config: TrialConfig) -> list[Violation]:
        """What the workload's device cannot run, each with its reason."""
        found = _unsupported_knobs(workload, config)
        found += [violation for rule in _RULES if (violation := rule(workload, config))]
        return found

    def job(self, workload: Workload, config: TrialConfig, *, steps: int, seed: int) -> dict[str, Any]:
        """The plain values that the trial program reads; see `Job`."""
        return Job(
            model=_shapes(workload.model),
            knobs=config.model_dump(mode="json"),
            padded_vocab_size=workload.model.padded_vocab_size(config.tensor_model_parallel_size),
            world_size=workload.world_size,
            global_batch_size=workload.global_batch_size,
            seq_length=workload.seq_length,
            device=workload.device,
            steps=steps,
            seed=seed,
            learning_rate=_learning_rate(workload.model),
        ).to_dict()

    def command(self, workload: Workload, config: TrialConfig, folder: Path, *, steps: int, seed: int) -> Command:
        """A torchrun command line for one node; writes the job into `folder`."""
        folder.mkdir(parents=True, exist_ok=True)
        job_file = folder / "job.json"
        job_file.write_text(json.dumps(self.job(workload, config, steps=steps, seed=seed), indent=1))
        program = Path(__file__).resolve().parent / "trial.py"
        ranks = f"--nproc-per-node={workload.world_size}"
        argv = ("torchrun", "--standalone", ranks, str(program), str(job_file))
        return Command(argv, {"OMP_NUM_THREADS": "1"} if workload.device == "cpu" else _CUDA_ENV)


# Megatron orders communication before computation by the order of launches, which holds for one connection only.
_CUDA_ENV = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}


def _shapes(model: ModelSpec) -> dict[str, Any]:
    derived = {"ffn_hidden_size": model.ffn_size, "num_query_groups": model.query_groups}
    return {**model.model_dump(mode="json"), **derived}


def _learning_rate(model: ModelSpec) -> float:
    """High enough for the loss to fall within five steps, and shrinking with the width so that wide models stay stable."""
    return min(3e-3, 3e-3 * 128 / model.hidden_size)


def _unsupported_knobs(workload: Workload, config: TrialConfig) -> list[Violation]:
    """Changed knobs whose own description leaves the device out."""
    described = knobs()
    return [
        _refusal(name, f"{name}={value} does not run on {workload.device}: {described[name].why_not}")
        for name, value in config.changed().items()
        if workload.device not in described[name].devices
    ]


def _refusal(name: str, message: str) -> Violation:
    return Violation(f"unsupported_{name}", 1.0, message)


def _recompute_modules(workload: Workload, config: TrialConfig) -> Violation | None:
    """Only where it differs from Megatron's own rules: moe_act asks for grouped expert matrices."""
    if workload.device != "cpu" or "moe_act" not in (config.recompute_modules or ()):
        return None
    return _refusal("recompute_modules", f"recompute_modules=moe_act does not run on cpu: it {_NEEDS_GROUPED_GEMM}")


_RULES: tuple[Callable[[Workload, TrialConfig], Violation | None], ...] = (_recompute_modules,)
