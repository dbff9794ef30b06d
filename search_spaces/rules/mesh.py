"""The two meshes: attention TP x PP x CP x DP and experts ETP x EP x PP x EDP, and the order of ranks in them."""

from __future__ import annotations

import numpy as np

from search_spaces.columns import Columns
from search_spaces.rules.base import Finding, Rule, finding, near_divisors


def world_over_attention_mesh(c: Columns) -> Finding:
    """TP x PP x CP divides the world size (arguments.py validate_args; parallel_state.py initialize_model_parallel)."""
    world = c.workload.world_size
    return finding(
        world % c.model_ranks,
        "world_size={world} is not divisible by tensor {tp} x pipeline {pp} x context {cp} = {ranks} parallel ranks;"
        " nearest products that divide it: {legal}",
        world=world,
        tp=c.tp,
        pp=c.pp,
        cp=c.cp,
        ranks=c.model_ranks,
        legal=near_divisors(world, c.model_ranks),
    )


def world_over_expert_mesh(c: Columns) -> Finding:
    """ETP x EP x PP divides the world size; DP and CP do not enter (parallel_state.py initialize_model_parallel)."""
    world = c.workload.world_size
    return finding(
        world % c.expert_ranks,
        "world_size={world} is not divisible by expert tensor {etp} x expert {ep} x pipeline {pp} = {ranks} parallel ranks;"
        " nearest products that divide it: {legal}",
        world=world,
        etp=c.etp,
        ep=c.ep,
        pp=c.pp,
        ranks=c.expert_ranks,
        legal=near_divisors(world, c.expert_ranks),
    )


def rank_order(c: Columns) -> Finding:
    """With pipeline ranks not outermost both meshes need one data parallel size (parallel_state.py initialize_model_parallel)."""
    differs = c.tp * c.cp != c.etp * c.ep
    return finding(
        c.flag("use_tp_pp_dp_mapping") & (c.pp > 1) & differs,
        "use_tp_pp_dp_mapping with pipeline_model_parallel_size={pp} needs tensor x context = {dense} ranks to equal"
        " expert tensor x expert = {expert} ranks; drop the mapping or make them equal",
        pp=c.pp,
        dense=c.tp * c.cp,
        expert=c.etp * c.ep,
    )


def optimizer_instances(c: Columns) -> Finding:
    """Optimiser instances divide DP x CP (parallel_state.py initialize_model_parallel)."""
    instances = c.number("num_distributed_optimizer_instances")
    ranks = c.dp * c.cp
    return finding(
        ranks % instances,
        "num_distributed_optimizer_instances={instances} does not divide data x context parallel = {ranks}; nearest: {legal}",
        instances=instances,
        ranks=ranks,
        legal=near_divisors(ranks, instances),
    )


def expert_optimizer_instances(c: Columns) -> Finding:
    """Optimiser instances divide the experts' data parallel size (parallel_state.py initialize_model_parallel)."""
    instances = c.number("num_distributed_optimizer_instances")
    ranks = c.workload.world_size // c.expert_ranks
    return finding(
        ranks % instances,
        "num_distributed_optimizer_instances={instances} does not divide expert data parallel = {ranks}; nearest: {legal}",
        instances=instances,
        ranks=ranks,
        legal=near_divisors(ranks, instances),
    )


def batch_over_replicas(c: Columns) -> Finding:
    """Micro-batch x DP divides the global batch (num_microbatches_calculator.py; arguments.py validate_args)."""
    batch, per_pass = c.workload.global_batch_size, c.mbs * c.dp
    cut_down = c.workload.settings.decrease_batch_size_if_needed and not c.v19
    return finding(
        np.where(cut_down & (batch >= per_pass), 0, batch % per_pass),
        "global_batch_size={batch} is {how} micro_batch_size={mbs} x data parallel {dp} = {per_pass};"
        " nearest micro_batch_size x data parallel: {legal}",
        batch=batch,
        how=lambda: "not divisible by" if batch >= int(per_pass.reshape(-1)[0]) else "smaller than",
        mbs=c.mbs,
        dp=c.dp,
        per_pass=per_pass,
        legal=near_divisors(batch, per_pass),
    )


def device_connections(c: Columns) -> Finding:
    """Before Blackwell TP and CP need CUDA_DEVICE_MAX_CONNECTIONS=1, FSDP must not have it (arguments.py validate_args)."""
    value = c.variable("CUDA_DEVICE_MAX_CONNECTIONS")
    exempt = c.flag("use_torch_fsdp2") | c.flag("use_megatron_fsdp") | c.flag("overlap_moe_expert_parallel_comm")
    needs_one = ((c.tp > 1) | (c.cp > 1)) & ~exempt & (c.workload.settings.gpu_arch_major < 10) & (c.workload.device == "cuda")
    return finding(
        needs_one & np.not_equal(value, "1") & np.not_equal(value, "auto"),
        "tensor_model_parallel_size={tp}, context_parallel_size={cp} on compute capability {arch} need"
        " CUDA_DEVICE_MAX_CONNECTIONS=1, but it is {value}",
        tp=c.tp,
        cp=c.cp,
        arch=c.workload.settings.gpu_arch_major,
        value=value,
    )


def fsdp_connections(c: Columns) -> Finding:
    """Both FSDP kinds refuse CUDA_DEVICE_MAX_CONNECTIONS=1 (arguments.py validate_args)."""
    fsdp = c.flag("use_torch_fsdp2") | c.flag("use_megatron_fsdp")
    return finding(
        fsdp & np.equal(c.variable("CUDA_DEVICE_MAX_CONNECTIONS"), "1"),
        "FSDP needs CUDA_DEVICE_MAX_CONNECTIONS unset or above 1, but it is 1",
    )


RULES: tuple[Rule, ...] = (
    world_over_attention_mesh,
    world_over_expert_mesh,
    rank_order,
    batch_over_replicas,
    optimizer_instances,
    expert_optimizer_instances,
    device_connections,
    fsdp_connections,
)
