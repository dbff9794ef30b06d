"""MegatronCoreLauncher: runs trials with our own training program on megatron-core."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from launchers.base import Command
from launchers.megatron_core.job import Job
from search_spaces.config import Knob, TrialConfig, knobs
from search_spaces.legality import Violation
from search_spaces.model import ModelSpec, Workload

MASTER_PORT = 29500
"""Where the ranks of a command for several nodes meet; torchrun's own default."""

_NEEDS_GROUPED_GEMM = "needs grouped expert matrices, which Transformer Engine has for CUDA only"


class MegatronCoreLauncher:
    """One trial is one run of `launchers.megatron_core.trial` on all ranks."""

    name = "megatron_core"
    program = "launchers.megatron_core.trial"
    figures_program = "launchers.megatron_core.figures"
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
            knobs=_set_knobs(workload, config),
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
        """A torchrun command line, the same on every node; writes the job into `folder`, which all nodes must see."""
        folder.mkdir(parents=True, exist_ok=True)
        job_file = folder / "job.json"
        job_file.write_text(json.dumps(self.job(workload, config, steps=steps, seed=seed), indent=1))
        program = Path(__file__).resolve().parent / "trial.py"
        argv = ("torchrun", *_nodes(workload), str(program), str(job_file))
        return Command(argv, {"OMP_NUM_THREADS": "1"} if workload.device == "cpu" else {})


def _nodes(workload: Workload) -> tuple[str, ...]:
    """Torchrun's options for how many nodes and ranks there are, and where they meet.

    Of several nodes the static rendezvous is used: with the others torchrun ignores `--node-rank` (its help says so).
    """
    per_node = min(workload.gpus_per_node or workload.world_size, workload.world_size)
    ranks = f"--nproc-per-node={per_node}"
    if per_node == workload.world_size:
        return "--standalone", ranks
    meeting = f"--rdzv-endpoint=$MASTER_ADDR:{MASTER_PORT}"
    return f"--nnodes={workload.world_size // per_node}", ranks, "--node-rank=$NODE_RANK", "--rdzv-backend=static", meeting


def _shapes(model: ModelSpec) -> dict[str, Any]:
    derived = {"ffn_hidden_size": model.ffn_size, "num_query_groups": model.query_groups}
    return {**model.model_dump(mode="json"), **derived}


def _set_knobs(workload: Workload, config: TrialConfig) -> dict[str, Any]:
    """All knobs that this launcher sets, with VPP in one of its two spellings only."""
    described = knobs()
    values = {name: value for name, value in config.model_dump(mode="json").items() if _sets(described[name])}
    if layers_per_chunk := values.pop("num_layers_per_virtual_pipeline_stage", None):
        chunk = config.pipeline_model_parallel_size * layers_per_chunk
        values["num_virtual_stages_per_pipeline_rank"] = workload.model.num_layers // chunk
    return values


def _sets(knob: Knob) -> bool:
    return MegatronCoreLauncher.name in getattr(knob, "launchers", (MegatronCoreLauncher.name,))


def _learning_rate(model: ModelSpec) -> float:
    """High enough for the loss to fall within five steps, and shrinking with the width so that wide models stay stable."""
    return min(3e-3, 3e-3 * 128 / model.hidden_size)


def _unsupported_knobs(workload: Workload, config: TrialConfig) -> list[Violation]:
    """Changed knobs whose own description leaves the device or this launcher out."""
    described = knobs()
    found = []
    for name, value in config.changed().items():
        if workload.device not in described[name].devices:
            found.append(_refusal(name, f"{name}={value} does not run on {workload.device}: {described[name].why_not}"))
        elif not _sets(described[name]):
            found.append(_refusal(name, f"{name}={value} is not set by the {MegatronCoreLauncher.name} launcher"))
    return found


def _refusal(name: str, message: str) -> Violation:
    return Violation(f"unsupported_{name}", 1.0, message)


def _moe_act(workload: Workload, config: TrialConfig) -> Violation | None:
    if workload.device == "cuda" or "moe_act" not in (config.recompute_modules or ()):
        return None
    return _refusal("recompute_modules", f"recompute_modules=moe_act does not run on {workload.device}: it {_NEEDS_GROUPED_GEMM}")


def _recomputed_bias(workload: Workload, config: TrialConfig) -> Violation | None:
    """Megatron's checkpoint of the MLP returns fc2's bias: autograd then takes the checkpoint itself for the bias' origin."""
    if not (workload.model.add_bias_linear and "mlp" in (config.recompute_modules or ())):
        return None
    return _refusal(
        "recompute_modules",
        "recompute_modules=mlp with add_bias_linear makes Megatron's backward pass recurse without end; drop mlp",
    )


def _needs_einops(workload: Workload, config: TrialConfig) -> Violation | None:
    for name in ("num_distributed_optimizer_instances", "hierarchical_context_parallel_sizes"):
        if name in config.changed():
            return _refusal(name, f"{name} makes Megatron split its groups with einops, which the ranks' Python need not have")
    return None


def _unbuilt_model(workload: Workload, config: TrialConfig) -> Violation | None:
    for shape in ("multi_latent_attention", "mtp_num_layers"):
        if getattr(workload.model, shape, None):
            return _refusal(shape, f"{shape} is not built by the {MegatronCoreLauncher.name} launcher")
    return None


_RULES: tuple[Callable[[Workload, TrialConfig], Violation | None], ...] = (
    _moe_act,
    _recomputed_bias,
    _needs_einops,
    _unbuilt_model,
)
