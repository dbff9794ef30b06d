"""Parameters of each kind of layer on one rank, exactly as megatron-core builds them."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from search_spaces.columns import Columns, Ints
from search_spaces.memory.kernels import Kernels
from search_spaces.model import ModelSpec


class Parameters(NamedTuple):
    """Parameters on one rank, one number per row of a table.

    Attributes:
        dense_layer: A layer with an MLP.
        moe_layer: A layer with experts, without those.
        experts: The experts of such a layer that this rank holds.
        embedding: Word and position embeddings.
        output: The output matrix.
        final_norm: The norm after the last decoder layer.
        mtp_layer: A multi-token prediction layer, without the experts of its transformer layer.
        mtp_experts: Those experts.
    """

    dense_layer: Ints
    moe_layer: Ints
    experts: Ints
    embedding: Ints
    output: Ints
    final_norm: Ints
    mtp_layer: Ints
    mtp_experts: Ints


def parameters(columns: Columns, kernels: Kernels) -> Parameters:
    """Parameters by kind of layer (megatron.core.transformer and models/gpt/gpt_model.py, named at each part below)."""
    model, tp = columns.model, columns.tp
    around = _attention(columns, kernels) + 2 * _norm(model, model.hidden_size)
    dense = around + _mlp(model, model.ffn_size, tp)
    moe, experts = around + _router_and_shared(model, tp), _experts(columns)
    embedding = _vocabulary(columns)
    positions = model.max_position_embeddings or columns.workload.seq_length
    learned = positions * model.hidden_size if model.position_embedding_type == "learned_absolute" else 0
    last_moe = model.moe_layers[-1]
    projection = 2 * model.hidden_size * model.hidden_size // tp
    return Parameters(
        dense_layer=dense,
        moe_layer=moe,
        experts=experts,
        embedding=embedding + learned,
        output=embedding,
        final_norm=_norm(model, model.hidden_size) + 0 * tp,
        mtp_layer=projection + 3 * _norm(model, model.hidden_size) + (moe if last_moe else dense),
        mtp_experts=experts if last_moe else 0 * experts,
    )


def _norm(model: ModelSpec, size: int) -> int:
    """A norm's weight, and its bias with LayerNorm."""
    return size * (2 if model.normalization == "LayerNorm" else 1)


def _attention(columns: Columns, kernels: Kernels) -> Ints:
    """Projections, biases and query/key norms of one attention layer (attention.py SelfAttention)."""
    model, tp = columns.model, columns.tp
    bias = model.hidden_size if model.add_bias_linear else 0
    if model.multi_latent_attention:
        return _latent_attention(model, tp, kernels) + bias
    channels = model.kv_channels or model.hidden_size // model.num_attention_heads
    query, keys = channels * model.num_attention_heads, channels * model.query_groups
    projected = query + 2 * keys
    count = model.hidden_size * (projected + query) // tp + bias
    if model.add_bias_linear or model.add_qkv_bias:
        count = count + projected // tp
    return count + (2 * _norm(model, channels) if model.qk_layernorm else 0)


def _latent_attention(model: ModelSpec, tp: Ints, kernels: Kernels) -> Ints:
    """Multi-latent attention without its output bias (multi_latent_attention.py MLASelfAttention).

    Transformer Engine's down projections are the same on all tensor parallel ranks, the local ones are sharded.
    """
    hidden, heads = model.hidden_size, model.num_attention_heads
    shards = np.ones_like(tp) if kernels.transformer_engine else tp
    head = model.qk_head_dim + model.qk_pos_emb_head_dim
    count = hidden * ((model.kv_lora_rank + model.qk_pos_emb_head_dim) // shards)
    count = count + model.kv_lora_rank * heads * (model.qk_head_dim + model.v_head_dim) // tp
    count = count + heads * model.v_head_dim * hidden // tp
    if model.qk_layernorm:
        count = count + _norm(model, model.kv_lora_rank)
    if model.q_lora_rank is None:
        return count + hidden * heads * head // tp
    count = count + hidden * (model.q_lora_rank // shards) + model.q_lora_rank * heads * head // tp
    return count + (_norm(model, model.q_lora_rank) if model.qk_layernorm else 0)


def _mlp(model: ModelSpec, size: int, shards: Ints) -> Ints:
    """Two matrices, the first twice as wide when gated, and their biases (mlp.py MLP)."""
    wide = size * (2 if model.swiglu else 1)
    count = model.hidden_size * (wide // shards) + model.hidden_size * (size // shards)
    return count + (wide // shards + model.hidden_size if model.add_bias_linear else 0)


def _router_and_shared(model: ModelSpec, tp: Ints) -> Ints:
    """Router and shared experts (moe/router.py Router, moe/shared_experts.py SharedExpertMLP)."""
    if model.num_experts is None:
        return 0 * tp
    router = model.num_experts * (model.hidden_size + (1 if model.add_bias_linear else 0))
    shared = model.moe_shared_expert_intermediate_size
    return router + (_mlp(model, shared, tp) if shared else 0 * tp)


def _experts(columns: Columns) -> Ints:
    """The experts of one layer that a rank holds (moe/experts.py SequentialMLP, TEGroupedMLP)."""
    model = columns.model
    if model.num_experts is None:
        return 0 * columns.tp
    return model.num_experts // columns.ep * _mlp(model, model.expert_ffn_size, columns.etp)


def _vocabulary(columns: Columns) -> Ints:
    """One matrix over the padded vocabulary (tensor_parallel/layers.py VocabParallelEmbedding)."""
    padded = columns.derive("tensor_model_parallel_size", columns.model.padded_vocab_size)
    return padded // columns.tp * columns.model.hidden_size
