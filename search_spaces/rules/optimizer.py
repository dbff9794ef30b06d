"""Optimiser, gradient overlap, both FSDP kinds and what they need of each other."""

from __future__ import annotations

from search_spaces.columns import Bools, Columns
from search_spaces.rules.base import Finding, Rule, finding


def parameter_gather_optimizer(c: Columns) -> Finding:
    """Overlapped parameter gather needs sharded parameters (arguments.py validate_args)."""
    return finding(
        c.flag("overlap_param_gather") & ~distributed(c) & ~c.flag("use_megatron_fsdp"),
        "overlap_param_gather needs use_distributed_optimizer or use_megatron_fsdp",
    )


def parameter_gather_gradients(c: Columns) -> Finding:
    """Overlapped parameter gather needs overlapped gradients (arguments.py validate_args)."""
    return finding(
        c.flag("overlap_param_gather") & ~c.flag("overlap_grad_reduce"), "overlap_param_gather needs overlap_grad_reduce"
    )


def step_overlap_gather(c: Columns) -> Finding:
    """Gathering during the optimiser step needs the distributed optimiser and parameter overlap (arguments.py validate_args)."""
    return finding(
        step_overlap(c) & ~(distributed(c) & c.flag("overlap_param_gather")),
        "overlap_param_gather_with_optimizer_step needs use_distributed_optimizer and overlap_param_gather",
    )


def step_overlap_interleaving(c: Columns) -> Finding:
    """Gathering during the optimiser step needs virtual stages (arguments.py validate_args)."""
    return finding(step_overlap(c) & (c.vpp == 0), "overlap_param_gather_with_optimizer_step needs virtual stages")


def step_overlap_checkpoint(c: Columns) -> Finding:
    """Gathering during the optimiser step excludes distributed checkpoints (arguments.py validate_args)."""
    return finding(
        step_overlap(c) & ~c.equals("ckpt_format", "torch"),
        "overlap_param_gather_with_optimizer_step needs ckpt_format=torch",
    )


def fsdp_checkpoint(c: Columns) -> Finding:
    """Megatron-FSDP and the checkpoint format fsdp_dtensor go together (arguments.py validate_args)."""
    return finding(
        c.flag("use_megatron_fsdp") != c.equals("ckpt_format", "fsdp_dtensor"),
        "use_megatron_fsdp and ckpt_format=fsdp_dtensor need each other",
    )


def fsdp_optimizer(c: Columns) -> Finding:
    """Megatron-FSDP knows Adam and SGD (arguments.py validate_args, 0.19)."""
    other = c.workload.settings.optimizer not in ("adam", "sgd")
    return finding(c.flag("use_megatron_fsdp") & other & c.v19, "use_megatron_fsdp needs optimizer adam or sgd")


def torch_fsdp_parallelism(c: Columns) -> Finding:
    """PyTorch's FSDP has no pipeline, no experts and no distributed optimiser (arguments.py validate_args)."""
    return finding(
        torch_fsdp(c) & ((c.pp > 1) | (c.ep > 1) | distributed(c)),
        "use_torch_fsdp2 excludes pipeline parallelism, expert parallelism and use_distributed_optimizer",
    )


def torch_fsdp_checkpoint(c: Columns) -> Finding:
    """PyTorch's FSDP writes torch_dist or torch_dcp (arguments.py validate_args)."""
    return finding(
        torch_fsdp(c) & ~c.equals("ckpt_format", "torch_dist", "torch_dcp"),
        "use_torch_fsdp2 needs ckpt_format torch_dist or torch_dcp",
    )


def torch_fsdp_model(c: Columns) -> Finding:
    """PyTorch's FSDP needs untied embeddings, no fp16 and no fused gradient accumulation (arguments.py validate_args)."""
    tied = not c.model.untie_embeddings_and_output_weights
    fused = c.workload.settings.gradient_accumulation_fusion
    return finding(
        torch_fsdp(c) & (c.equals("precision", "fp16") | tied | fused),
        "use_torch_fsdp2 needs untied embeddings, bf16 or fp32, and gradient_accumulation_fusion off",
    )


def torch_dcp_checkpoint(c: Columns) -> Finding:
    """The checkpoint format torch_dcp is for PyTorch's FSDP without TP and PP (arguments.py validate_args)."""
    return finding(
        c.equals("ckpt_format", "torch_dcp") & (~torch_fsdp(c) | (c.tp > 1) | (c.pp > 1)),
        "ckpt_format=torch_dcp needs use_torch_fsdp2 without tensor or pipeline parallelism",
    )


def optimizer_offload(c: Columns) -> Finding:
    """Optimiser offload runs through the precision-aware optimiser (arguments.py validate_args)."""
    return finding(
        c.flag("optimizer_cpu_offload") & ~c.flag("use_precision_aware_optimizer"),
        "optimizer_cpu_offload needs use_precision_aware_optimizer",
    )


def optimizer_offload_fp8(c: Columns) -> Finding:
    """Optimiser offload with FP8 parameters needs delayed scaling (arguments.py validate_args)."""
    return finding(
        c.flag("optimizer_cpu_offload") & c.flag("fp8_param_gather") & ~c.equals("fp8_recipe", "delayed"),
        "optimizer_cpu_offload with fp8_param_gather needs fp8_recipe=delayed",
    )


def precision_aware_optimizer(c: Columns) -> Finding:
    """The precision-aware optimiser is a distributed Adam (optimizer/optimizer_config.py OptimizerConfig.__post_init__)."""
    sharded = distributed(c) | (c.flag("use_megatron_fsdp") & c.v19)
    return finding(
        c.flag("use_precision_aware_optimizer") & (~sharded | (c.workload.settings.optimizer != "adam")),
        "use_precision_aware_optimizer needs use_distributed_optimizer and Adam",
    )


def optimizer_state_types(c: Columns) -> Finding:
    """Only the precision-aware optimiser has state other than fp32 (optimizer/optimizer_config.py __post_init__)."""
    names = ("main_grads_dtype", "main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")
    other = ~c.equals(names[0], "fp32")
    for name in names[1:]:
        other = other | ~c.equals(name, "fp32")
    return finding(
        other & ~c.flag("use_precision_aware_optimizer"),
        "main_grads_dtype, main_params_dtype, exp_avg_dtype, exp_avg_sq_dtype: others than fp32 need use_precision_aware_optimizer",
    )


def distributed(c: Columns) -> Bools:
    """Where optimiser state is sharded."""
    return c.flag("use_distributed_optimizer")


def step_overlap(c: Columns) -> Bools:
    """Where parameters are gathered during the optimiser step."""
    return c.flag("overlap_param_gather_with_optimizer_step")


def torch_fsdp(c: Columns) -> Bools:
    """Where PyTorch's FSDP is on."""
    return c.flag("use_torch_fsdp2")


RULES: tuple[Rule, ...] = (
    parameter_gather_optimizer,
    parameter_gather_gradients,
    step_overlap_gather,
    step_overlap_interleaving,
    step_overlap_checkpoint,
    fsdp_checkpoint,
    fsdp_optimizer,
    torch_fsdp_parallelism,
    torch_fsdp_checkpoint,
    torch_fsdp_model,
    torch_dcp_checkpoint,
    optimizer_offload,
    optimizer_offload_fp8,
    precision_aware_optimizer,
    optimizer_state_types,
)
