"""Sizes: the lengths that every activation formula is written in, one number per row of a table."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from search_spaces.columns import Bools, Columns, Floats, Ints
from search_spaces.model import ModelSpec

KNOBS = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "context_parallel_size",
    "cp_comm_type",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
    "sequence_parallel",
    "micro_batch_size",
    "precision",
    "fp8_format",
    "fp8_recipe",
    "fp4_format",
    "attention_backend",
    "recompute_granularity",
    "recompute_method",
    "recompute_num_layers",
    "recompute_modules",
    "distribute_saved_activations",
    "moe_token_dispatcher_type",
    "moe_expert_capacity_factor",
    "moe_pad_expert_input_to_capacity",
    "moe_grouped_gemm",
    "environment",
)


NVFP4_BYTES = 0.5 + 1 / 16
"""Bytes of an element in NVFP4: four bits, and an 8-bit scale for sixteen of them (Transformer Engine, NVFP4BlockScaling)."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """Lengths of one micro-batch on one rank.

    Attributes:
        model: The model.
        sequence: Tokens of a sequence on a context parallel rank (s).
        batch: Sequences of a micro-batch (b).
        tokens: Tokens of a micro-batch, s x b.
        local: The same on a sequence parallel rank, s x b / TP; without sequence parallelism s x b.
        hidden: Hidden size (h).
        tp: Tensor parallel size.
        etp: Expert tensor parallel size.
        element: Bytes of an activation.
        stored: Bytes of an input that a matrix product keeps: 1 in FP8, `NVFP4_BYTES` in NVFP4.
        heads: Attention heads on a rank.
        groups: Key/value heads on a rank.
        query: Width of the queries on a rank.
        keys: Width of the keys on a rank.
        values: Width of the values on a rank.
        routed: Tokens that a rank's experts get, with balanced routing.
        sequence_parallel: Whether SP is on.
    """

    model: ModelSpec
    sequence: Ints
    batch: Ints
    tokens: Floats
    local: Floats
    hidden: int
    tp: Ints
    etp: Ints
    element: Floats
    stored: Floats
    heads: Floats
    groups: Floats
    query: Floats
    keys: Floats
    values: Floats
    routed: Floats
    sequence_parallel: Bools

    @property
    def gate(self) -> Floats:
        """Bytes that the gate of shared experts keeps: their output, and a score per token (moe/shared_experts.py forward)."""
        return self.local * (self.hidden + 1) * self.element * self.model.moe_shared_expert_gate


def sizes(columns: Columns) -> Sizes:
    """The sizes of each row of a table."""
    model, tp = columns.model, columns.tp
    sequence = columns.workload.seq_length // columns.cp
    tokens = (sequence * columns.mbs).astype(np.float64)
    parallel = columns.sp & (tp > 1)
    local = tokens / np.where(parallel, tp, 1)
    element = np.where(columns.equals("precision", "fp32"), 4.0, 2.0)
    heads = model.num_attention_heads / tp
    groups = np.maximum(model.query_groups / tp, 1.0)
    channels = model.kv_channels or model.hidden_size // model.num_attention_heads
    query_head = model.qk_head_dim + model.qk_pos_emb_head_dim if model.multi_latent_attention else channels
    value_head = model.v_head_dim if model.multi_latent_attention else channels
    key_heads = heads if model.multi_latent_attention else groups
    return Sizes(
        model=model,
        sequence=sequence,
        batch=columns.mbs,
        tokens=tokens,
        local=local,
        hidden=model.hidden_size,
        tp=tp,
        etp=columns.etp,
        element=element,
        stored=np.where(columns.given("fp8_format"), 1.0, np.where(columns.given("fp4_format"), NVFP4_BYTES, element)),
        heads=heads,
        groups=groups,
        query=heads * query_head,
        keys=key_heads * query_head,
        values=key_heads * value_head,
        routed=_routed(columns, local),
        sequence_parallel=parallel,
    )


def _routed(columns: Columns, local: Floats) -> Floats:
    """Tokens that arrive at a rank's experts.

    Each of its own goes to top-k experts, and as many come from others; expert tensor parallel ranks see each other's
    (moe/token_dispatcher.py). A capacity cuts or pads them (moe_utils.py get_capacity).
    """
    model = columns.model
    if model.num_experts is None:
        return 0.0 * local
    tokens = local * model.moe_router_topk
    column = columns.column("moe_expert_capacity_factor")
    factor = np.array([float(value) if value and value > 0 else np.inf for value in column.values]).take(column.codes)
    capacity = np.ceil(tokens / model.num_experts * np.where(np.isinf(factor), 1.0, factor)) * model.num_experts
    padded = columns.flag("moe_pad_expert_input_to_capacity")
    kept = np.where(np.isinf(factor), tokens, np.where(padded, capacity, np.minimum(capacity, tokens)))
    return kept * columns.etp
