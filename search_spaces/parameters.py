"""Parameters from shapes alone: of a model by part, as model cards count them, and of a rank, as megatron-core builds it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from search_spaces.columns import Columns, Ints
from search_spaces.model import ModelSpec

Number = Any  # an int or an array of them

_AS_BUILT = {"layer_norms": 2, "parametric_norms": True, "qk_layernorm_per_head": True, "biased": None}
"""Shapes that only count a model's parameters, as megatron-core's own layers have them."""

COUNT_KNOBS = ("tensor_model_parallel_size", "expert_model_parallel_size", "expert_tensor_parallel_size")
"""What the parameters of a rank depend on, by kind of layer."""


@dataclass(frozen=True, slots=True)
class ParameterCount:
    """Parameters of a model by part.

    Attributes:
        embedding: Token (and learned position) embeddings.
        output: Output layer; 0 where it is the embedding again.
        attention: Projections of all layers, with their biases and query/key norms.
        dense: Feed-forward networks of the layers without experts.
        experts: Routed experts of all layers.
        shared: Shared experts of all layers.
        router: Routers of all layers.
        norms: Norms of all layers, and the last one.
        mtp: Multi-token prediction layers; not in `total`, as model cards do not count them.
        idle: Parameters of routed experts that a token does not use.
    """

    embedding: int
    output: int
    attention: int
    dense: int
    experts: int
    shared: int
    router: int
    norms: int
    mtp: int
    idle: int

    @property
    def total(self) -> int:
        """Parameters of the model without multi-token prediction."""
        layers = self.attention + self.dense + self.experts + self.shared + self.router + self.norms
        return self.embedding + self.output + layers

    @property
    def active(self) -> int:
        """Parameters that one token uses."""
        return self.total - self.idle


class RankParameters(NamedTuple):
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


def count_parameters(model: ModelSpec) -> ParameterCount:
    """Count a model's parameters. Vocabulary is counted as it is, without Megatron's padding."""
    expert_layers, experts = sum(model.moe_layers), model.num_experts or 0
    per_expert = _feed_forward(model, model.expert_ffn_size)
    positions = (model.max_position_embeddings or 0) if model.position_embedding_type == "learned_absolute" else 0
    attention, norms, router = _attention(model), _layer_norms(model), _router(model)
    inner = router + _shared(model) + experts * per_expert if model.moe_layers[-1] else _feed_forward(model, model.ffn_size)
    return ParameterCount(
        embedding=(model.vocab_size + positions) * model.hidden_size,
        output=model.vocab_size * model.hidden_size if model.untie_embeddings_and_output_weights else 0,
        attention=model.num_layers * attention,
        dense=(model.num_layers - expert_layers) * _feed_forward(model, model.ffn_size),
        experts=expert_layers * experts * per_expert,
        shared=expert_layers * _shared(model),
        router=expert_layers * router,
        norms=model.num_layers * norms + _norm(model, model.hidden_size),
        mtp=(model.mtp_num_layers or 0) * (attention + norms + inner + _mtp_ends(model)),
        idle=expert_layers * max(experts - model.moe_router_topk, 0) * per_expert,
    )


def rank_parameters(columns: Columns, *, transformer_engine: bool = True) -> RankParameters:
    """Parameters of one rank by kind of layer, exactly as megatron-core builds them (transformer/, models/gpt/gpt_model.py).

    Args:
        columns: Configurations of one workload.
        transformer_engine: Whether the layers are Transformer Engine's, else megatron-core's local ones.
    """
    model, tp = columns.model.model_copy(update=_AS_BUILT), columns.tp
    around = _attention(model, tp, 1 if transformer_engine else tp) + _layer_norms(model)
    dense, moe = around + _feed_forward(model, model.ffn_size, tp), around + _router(model) + _shared(model, tp)
    held = (model.num_experts or 0) // columns.ep * _feed_forward(model, model.expert_ffn_size, columns.etp)
    output = columns.derive("tensor_model_parallel_size", model.padded_vocab_size) // tp * model.hidden_size
    positions = model.max_position_embeddings or columns.workload.seq_length
    last_moe = model.moe_layers[-1]
    return RankParameters(
        dense_layer=dense,
        moe_layer=moe,
        experts=held,
        embedding=output + (positions * model.hidden_size if model.position_embedding_type == "learned_absolute" else 0),
        output=output,
        final_norm=_norm(model, model.hidden_size) + 0 * tp,
        mtp_layer=_mtp_ends(model, tp) + (moe if last_moe else dense),
        mtp_experts=held if last_moe else 0 * held,
    )


def attention_weights(model: ModelSpec, tp: Number = 1, latent_shards: Number = 1) -> Number:
    """Weights of the projections of one layer (attention.py SelfAttention; multi_latent_attention.py MLASelfAttention).

    Args:
        model: The shapes.
        tp: Tensor parallel size, one or one per row.
        latent_shards: Ranks that share the down projections of multi-latent attention: 1 with Transformer Engine's, which are the
            same on all tensor parallel ranks, `tp` with the local ones.
    """
    hidden, heads, ranks = model.hidden_size, model.num_attention_heads, model.q_lora_rank
    if not model.multi_latent_attention:
        return 2 * hidden * model.head_size * (heads + model.query_groups) // tp
    query = heads * (model.qk_head_dim + model.qk_pos_emb_head_dim)
    count = hidden * ((model.kv_lora_rank + model.qk_pos_emb_head_dim) // latent_shards)
    count = count + model.kv_lora_rank * heads * (model.qk_head_dim + model.v_head_dim) // tp
    count = count + heads * model.v_head_dim * hidden // tp
    return count + (hidden * query // tp if ranks is None else hidden * (ranks // latent_shards) + ranks * query // tp)


def _attention(model: ModelSpec, tp: Number = 1, latent_shards: Number = 1) -> Number:
    """Projections, biases and query/key norms of one layer."""
    biased = model.add_bias_linear if model.biased is None else "attention" in model.biased
    count = attention_weights(model, tp, latent_shards) + (model.hidden_size if biased else 0)
    if model.multi_latent_attention:
        latents = (model.kv_lora_rank, model.q_lora_rank or 0)
        return count + sum(_norm(model, size) for size in latents if model.qk_layernorm)
    query, keys = model.head_size * model.num_attention_heads, model.head_size * model.query_groups
    if biased or (model.add_qkv_bias and model.biased is None):
        count = count + (query + 2 * keys) // tp
    if not model.qk_layernorm:
        return count
    sizes = (model.head_size, model.head_size) if model.qk_layernorm_per_head else (query, keys)
    return count + sum(_norm(model, size) for size in sizes)


def feed_forward_weights(model: ModelSpec, width: int, shards: Number = 1) -> Number:
    """Weights of one feed-forward network, with the gate where there is one (mlp.py MLP; moe/experts.py)."""
    return model.hidden_size * ((2 * width if model.swiglu else width) // shards + width // shards)


def _feed_forward(model: ModelSpec, width: int, shards: Number = 1) -> Number:
    """The same with its biases."""
    count = feed_forward_weights(model, width, shards)
    biased = model.add_bias_linear if model.biased is None else "mlp" in model.biased
    return count + ((2 * width if model.swiglu else width) // shards + model.hidden_size if biased else 0)


def _shared(model: ModelSpec, tp: Number = 1) -> Number:
    """The shared experts of one layer (moe/shared_experts.py SharedExpertMLP)."""
    width = model.moe_shared_expert_intermediate_size
    gate = model.hidden_size if model.moe_shared_expert_gate else 0
    return _feed_forward(model, width, tp) + gate if width else 0


def _router(model: ModelSpec) -> int:
    """The router of one layer (moe/router.py Router)."""
    return (model.num_experts or 0) * (model.hidden_size + (1 if model.add_bias_linear else 0))


def _norm(model: ModelSpec, size: int) -> int:
    """Weights, and for layer norms biases, of one norm."""
    if not model.parametric_norms:
        return 0
    return size if model.normalization == "RMSNorm" else 2 * size


def _layer_norms(model: ModelSpec) -> int:
    """Norms of the hidden size in one layer."""
    return model.layer_norms * _norm(model, model.hidden_size)


def _mtp_ends(model: ModelSpec, tp: Number = 1) -> Number:
    """What a prediction layer has besides its transformer layer: a projection of two hidden states, and three norms."""
    return 2 * model.hidden_size * model.hidden_size // tp + 3 * _norm(model, model.hidden_size)
