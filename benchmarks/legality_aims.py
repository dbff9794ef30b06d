"""How the legality benchmark breaks a rule: what an aim is, and settings that bring one feature into a legal case."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from benchmarks.legality_options import CONNECTIONS, Case

Value = Callable[[Case, random.Random], Any]


class Aim(NamedTuple):
    """How one rule is broken.

    Attributes:
        given: Fields that bring the rule's feature into a legal case. Values may be functions of the case and the generator.
        breaks: The one field that then breaks the rule.
    """

    given: Mapping[str, Any]
    breaks: Mapping[str, Any]


def one_of(*values: Any) -> Value:
    """One of several values."""
    return lambda _, rng: rng.choice(values)


def layout(change: Callable[[list[str]], list[str]], stages: int = 0) -> Value:
    """A layout of the case's layers over its stages and `stages` more, changed."""

    def value(case: Case, _: random.Random) -> str:
        number = max(case["pp"] + stages, 1)
        layers = case["num_layers"]
        counts = [layers // number + (position < layers % number) for position in range(number)]
        parts = ["t" * count for count in counts]
        parts[0] = "E" + parts[0]
        parts[-1] += "m" * (case.get("mtp_num_layers") or 0) + "L"
        return "|".join(change(parts))

    return value


def scope(*modules: str) -> list[str]:
    """Extra arguments that capture some modules in CUDA graphs."""
    return ["--cuda-graph-scope", *modules]


def per_step(batches: Callable[[Case], int]) -> Value:
    """The global batch of a number of micro-batches per step."""
    return lambda case, _: case["mbs"] * max(case["world_size"] // (case["tp"] * case["pp"] * case["cp"]), 1) * batches(case)


EVEN: Case = dict(
    decoder_first_pipeline_num_layers=None,
    decoder_last_pipeline_num_layers=None,
    account_for_embedding_in_pipeline_split=False,
    account_for_loss_in_pipeline_split=False,
    pipeline_model_parallel_layout=None,
    num_layers_per_virtual_pipeline_stage=None,
)
ONE_CHUNK: Case = EVEN | dict(vpp=None, microbatch_group_size_per_vp_stage=None, overlap_param_gather_with_optimizer_step=False)
ONE_STAGE: Case = ONE_CHUNK | dict(pp=1)
KEEP_ALL: Case = dict(
    recompute_granularity=None,
    recompute_method=None,
    recompute_num_layers=None,
    recompute_modules=None,
    distribute_saved_activations=False,
    cpu_offloading_num_layers=0,
    cuda_graph_impl="none",
)
FULL: Case = KEEP_ALL | dict(recompute_granularity="full", recompute_method=one_of("uniform", "block"), recompute_num_layers=1)
SELECTIVE: Case = KEEP_ALL | dict(recompute_granularity="selective")
OFFLOADED: Case = KEEP_ALL | ONE_STAGE | dict(cpu_offloading_num_layers=one_of(1, 4, 7))
FP8: Case = dict(precision="bf16+fp8", fp8_recipe=one_of("tensorwise", "mxfp8", "blockwise"), first_last_layers_bf16=False)
FP4: Case = dict(precision="bf16", extra=["--fp4-format", "e2m1"], fp8_param_gather=False, moe_router_padding_for_fp8=False)
DELAYED: Case = FP8 | dict(fp8_recipe="delayed")
PLAIN_OPTIMIZER: Case = dict(
    use_distributed_optimizer=False,
    overlap_grad_reduce=False,
    overlap_param_gather=False,
    overlap_param_gather_with_optimizer_step=False,
    use_megatron_fsdp=False,
    use_torch_fsdp2=False,
    use_precision_aware_optimizer=False,
    optimizer_cpu_offload=False,
    exp_avg_dtype=None,
    main_grads_dtype=None,
    num_distributed_optimizer_instances=None,
    fp8_param_gather=False,
    ckpt_format="torch_dist",
)
DISTRIBUTED: Case = PLAIN_OPTIMIZER | dict(use_distributed_optimizer=True)
FSDP: Case = PLAIN_OPTIMIZER | dict(use_megatron_fsdp=True, ckpt_format="fsdp_dtensor", env={CONNECTIONS: None})
TORCH_FSDP: Case = (
    PLAIN_OPTIMIZER | ONE_STAGE | dict(use_torch_fsdp2=True, ckpt_format="torch_dist", ep=1, etp=None, env={CONNECTIONS: None})
)
INTERLEAVED: Case = EVEN | dict(
    vpp=2,
    num_layers=lambda case, rng: case["pp"] * rng.choice((2, 4, 6)),
    moe_layer_freq=None,
    microbatch_group_size_per_vp_stage=None,
    cpu_offloading_num_layers=0,
    use_torch_fsdp2=False,
    gbs=per_step(lambda case: 2 * case["pp"]),
)
STEP_OVERLAP: Case = (
    INTERLEAVED
    | DISTRIBUTED
    | dict(overlap_grad_reduce=True, overlap_param_gather=True, ckpt_format="torch", overlap_param_gather_with_optimizer_step=True)
)
EXPERT_OVERLAP: Case = (
    KEEP_ALL
    | ONE_STAGE
    | dict(
        overlap_moe_expert_parallel_comm=True,
        moe_token_dispatcher_type="alltoall",
        moe_shared_expert_overlap=False,
        mtp_num_layers=None,
        ep=one_of(2, 4),
        etp=1,
        precision="bf16",
    )
)
GRAPHS: Case = KEEP_ALL | dict(cuda_graph_impl="transformer_engine", moe_router_padding_for_fp8=False, extra=scope("attn"))
LOCAL_GRAPHS: Case = GRAPHS | dict(cuda_graph_impl="local", ep=1)
NO_DROPS: Case = dict(moe_expert_capacity_factor=None, moe_pad_expert_input_to_capacity=False)
UNTIERED_CONTEXT: Case = dict(cp_comm_type=None, hierarchical_context_parallel_sizes=None)
MTP_LAYOUT: Case = EVEN | dict(vpp=None, mtp_num_layers=2, num_layers=8, moe_layer_freq=None)
