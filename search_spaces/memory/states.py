"""Bytes that one parameter costs on a rank: its weight, its gradient and its share of the optimiser state.

Megatron's own table (docs, distributed optimizer; training/theoretical_memory_usage.py): bf16 with fp32 gradients takes 18 bytes,
or 6 + 12/d with the distributed optimiser over d ranks; fp16 with fp16 gradients 20, or 4 + 16/d; fp32 16, or 8 + 8/d.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from search_spaces.columns import Bools, Columns, Floats, Ints
from search_spaces.memory.sizes import NVFP4_BYTES
from search_spaces.software import Software

BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1}

HOST_BYTES = 16.0
"""Parameter, both moments and gradient in fp32 (optimizer/cpu_offloading/hybrid_optimizer.py HybridDeviceOptimizer)."""

KNOBS = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "context_parallel_size",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
    "precision",
    "fp8_format",
    "fp8_recipe",
    "fp4_format",
    "fp8_param_gather",
    "use_distributed_optimizer",
    "num_distributed_optimizer_instances",
    "use_megatron_fsdp",
    "data_parallel_sharding_strategy",
    "use_torch_fsdp2",
    "optimizer_cpu_offload",
    "optimizer_offload_fraction",
    "use_precision_aware_optimizer",
    "main_grads_dtype",
    "main_params_dtype",
    "exp_avg_dtype",
    "exp_avg_sq_dtype",
)


class States(NamedTuple):
    """Bytes per parameter, one number per row of a table.

    Attributes:
        weight: Of a matrix inside a layer; in NVFP4 two copies, one transposed, stand beside the 16-bit weight
            (Transformer Engine, module/base.py get_weight_workspace).
        plain_weight: Of everything that is never kept in 8 or 4 bits: embeddings, output, norms.
        gradient: Of its gradient.
        optimizer: Of its optimiser state.
        step: What the optimiser step holds for a moment.
        host: What the host holds of it where the optimiser is offloaded.
        unsharded: Of a parameter of the layers that FSDP has gathered.
    """

    weight: Floats
    plain_weight: Floats
    gradient: Floats
    optimizer: Floats
    step: Floats
    host: Floats
    unsharded: Floats


def states(columns: Columns, software: Software, *, experts: bool) -> States:
    """Bytes per parameter of the attention mesh, or with `experts` of the expert mesh.

    Sources: distributed/param_and_grad_buffer.py (buffers), optimizer/distrib_optimizer.py (shards), fsdp/ (sharding strategies),
    optimizer/cpu_offloading/hybrid_optimizer.py (offload).
    """
    replicas = _replicas(columns, experts)
    plain = _number(columns, "precision", BYTES)
    weight = np.where(columns.given("fp8_format"), _eight_bit_weight(columns, software, plain), plain)
    weight = np.where(columns.given("fp4_format"), plain + 2 * NVFP4_BYTES, weight)
    gradient = _gradient(columns, software)
    shards = _optimizer_shards(columns, replicas)
    optimizer, step = _optimizer(columns) / shards, _step(columns, software, gradient) / shards
    if not software.separate_main_parameters:
        optimizer = np.maximum(optimizer - plain / shards, 0)
    weights_sharded, gradients_sharded = _fully_sharded(columns)
    share = np.where(weights_sharded, replicas, 1)
    if not software.trained:
        gradient, optimizer, step = 0 * gradient, 0 * optimizer, 0 * step
    return States(
        weight=weight / share,
        plain_weight=plain / share,
        gradient=gradient / np.where(gradients_sharded, replicas, 1),
        optimizer=optimizer * _kept_on_gpu(columns),
        step=step * _kept_on_gpu(columns),
        host=HOST_BYTES * (1 - _kept_on_gpu(columns)) / shards,
        unsharded=np.where(weights_sharded, plain, 0) + np.where(gradients_sharded, gradient, 0),
    )


def _replicas(columns: Columns, experts: bool) -> Ints:
    """Ranks that hold the same parameters; context parallel ranks count (parallel_state.py, data parallel groups with CP)."""
    ranks = columns.expert_ranks if experts else columns.tp * columns.pp
    return np.maximum(columns.workload.world_size // ranks, 1)


def _number(columns: Columns, knob: str, numbers: dict[str, int]) -> Floats:
    return columns.derive(knob, lambda value: numbers[value]).astype(np.float64)


def _eight_bit_weight(columns: Columns, software: Software, plain: Floats) -> Floats:
    """Bytes of an FP8 weight: one, and another for the transposed copy, which MXFP8 always has.

    Without fp8_param_gather they are copies beside the bf16 weight (Transformer Engine, module/base.py get_weight_workspace).
    """
    both = columns.equals("fp8_recipe", "mxfp8", "blockwise") | software.fp8_transpose_cache
    copies = 1.0 + both
    return np.where(columns.flag("fp8_param_gather"), copies, plain + copies)


def _gradient(columns: Columns, software: Software) -> Floats:
    """Bytes of a gradient in the buffer (distributed/param_and_grad_buffer.py; bf16 gradients where the optimiser takes them)."""
    small = columns.equals("precision", "fp16") | columns.equals("main_grads_dtype", "bf16")
    kept = 4.0 if software.grad_reduce_in_fp32 else _number(columns, "precision", BYTES)
    return np.where(small, 2.0, kept)


def _optimizer(columns: Columns) -> Floats:
    """Bytes of Adam's state for one parameter before sharding (optimizer/optimizer.py).

    The precision-aware optimiser has its own types (optimizer_config.py), and of an fp32 main parameter keeps only the half that
    the bf16 weight lacks (store_param_remainders).
    """
    aware = columns.flag("use_precision_aware_optimizer")
    moments = _number(columns, "exp_avg_dtype", BYTES) + _number(columns, "exp_avg_sq_dtype", BYTES)
    mixed = ~columns.equals("precision", "fp32")
    remainder = (
        columns.equals("precision", "bf16") & columns.equals("main_params_dtype", "fp32") & ~columns.flag("fp8_param_gather")
    )
    main = np.where(remainder, 2.0, _number(columns, "main_params_dtype", BYTES))
    main_gradient = np.where(columns.equals("precision", "fp16"), 4.0, 0.0)
    return np.where(aware, moments + main, 8.0 + np.where(mixed, 4.0 + main_gradient, 0.0))


def _step(columns: Columns, software: Software, gradient: Floats) -> Floats:
    """Bytes per parameter that the step makes before sharding.

    They are fp32 copies of moments in other types (Transformer Engine, optimizers/fused_adam.py get_unscaled_state), or of the
    gradients where the optimiser takes fp32 ones.
    """
    aware = columns.flag("use_precision_aware_optimizer")
    copies = 4.0 * (~columns.equals("exp_avg_dtype", "fp32")) + 4.0 * (~columns.equals("exp_avg_sq_dtype", "fp32"))
    small = (gradient < 4) & columns.equals("precision", "bf16")
    return np.where(aware, copies, np.where(small, software.step_gradient_bytes, 0.0))


def _optimizer_shards(columns: Columns, replicas: Ints) -> Ints:
    """Ranks that share the optimiser state."""
    instances = np.maximum(columns.number("num_distributed_optimizer_instances"), 1)
    strategy = columns.flag("use_megatron_fsdp") & ~columns.equals("data_parallel_sharding_strategy", "no_shard")
    sharded = columns.flag("use_distributed_optimizer") & ~columns.flag("use_megatron_fsdp")
    shared = sharded | strategy | columns.flag("use_torch_fsdp2")
    return np.where(shared, np.maximum(replicas // np.where(sharded, instances, 1), 1), 1)


def _fully_sharded(columns: Columns) -> tuple[Bools, Bools]:
    """Where weights and where gradients are sharded over the replicas."""
    megatron, torch_fsdp = columns.flag("use_megatron_fsdp"), columns.flag("use_torch_fsdp2")
    strategy = columns.equals("data_parallel_sharding_strategy", "optim_grads_params")
    gradients = strategy | columns.equals("data_parallel_sharding_strategy", "optim_grads")
    return (megatron & strategy) | torch_fsdp, (megatron & gradients) | torch_fsdp


def _kept_on_gpu(columns: Columns) -> Floats:
    """Share of the optimiser state that stays on the GPU."""
    column = columns.column("optimizer_offload_fraction")
    fraction = np.array([float(value) for value in column.values]).take(column.codes)
    answer: Any = 1.0 - np.where(columns.flag("optimizer_cpu_offload"), fraction, 0.0)
    return np.asarray(answer)
