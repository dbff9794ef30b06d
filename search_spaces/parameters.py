"""Parameters of a model by part, from its shapes alone."""

from __future__ import annotations

from dataclasses import dataclass

from search_spaces.model import ModelSpec


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


def count_parameters(model: ModelSpec) -> ParameterCount:
    """Count a model's parameters. Vocabulary is counted as it is, without Megatron's padding."""
    expert_layers = sum(model.moe_layers)
    per_expert = _feed_forward(model, model.expert_ffn_size)
    experts = model.num_experts or 0
    positions = (model.max_position_embeddings or 0) if model.position_embedding_type == "learned_absolute" else 0
    attention, norms = _attention(model), model.layer_norms * _norm(model, model.hidden_size)
    return ParameterCount(
        embedding=(model.vocab_size + positions) * model.hidden_size,
        output=model.vocab_size * model.hidden_size if model.untie_embeddings_and_output_weights else 0,
        attention=model.num_layers * attention,
        dense=(model.num_layers - expert_layers) * _feed_forward(model, model.ffn_size),
        experts=expert_layers * experts * per_expert,
        shared=expert_layers * _shared(model),
        router=expert_layers * experts * model.hidden_size,
        norms=model.num_layers * norms + _norm(model, model.hidden_size),
        mtp=(model.mtp_num_layers or 0) * _mtp_layer(model, attention + norms),
        idle=expert_layers * max(experts - model.moe_router_topk, 0) * per_expert,
    )


def _attention(model: ModelSpec) -> int:
    """Projections of one layer."""
    if model.multi_latent_attention:
        return _latent_attention(model)
    hidden, head, heads, groups = model.hidden_size, model.head_size, model.num_attention_heads, model.query_groups
    qkv = (heads + 2 * groups) * head
    weights = hidden * qkv + heads * head * hidden
    biases = (qkv if model.add_bias_linear or model.add_qkv_bias else 0) + (hidden if model.add_bias_linear else 0)
    sizes = (head, head) if model.qk_layernorm_per_head else (heads * head, groups * head)
    return weights + biases + (sum(_norm(model, size) for size in sizes) if model.qk_layernorm else 0)


def _latent_attention(model: ModelSpec) -> int:
    """Projections of one layer of multi-latent attention (core/transformer/multi_latent_attention.py)."""
    hidden, heads = model.hidden_size, model.num_attention_heads
    query = heads * (model.qk_head_dim + model.qk_pos_emb_head_dim)
    down = model.q_lora_rank
    queries = hidden * query if down is None else hidden * down + down * query + _norm(model, down)
    keys_values = hidden * (model.kv_lora_rank + model.qk_pos_emb_head_dim) + _norm(model, model.kv_lora_rank)
    keys_values += model.kv_lora_rank * heads * (model.qk_head_dim + model.v_head_dim)
    return queries + keys_values + heads * model.v_head_dim * hidden


def _feed_forward(model: ModelSpec, width: int) -> int:
    """One feed-forward network, with the gate where there is one."""
    inner = 2 * width if model.swiglu else width
    biases = inner + model.hidden_size if model.add_bias_linear else 0
    return model.hidden_size * (inner + width) + biases


def _shared(model: ModelSpec) -> int:
    """The shared experts of one layer."""
    width = model.moe_shared_expert_intermediate_size
    gate = model.hidden_size if model.moe_shared_expert_gate else 0
    return _feed_forward(model, width) + gate if width else 0


def _norm(model: ModelSpec, size: int) -> int:
    """Weights, and for layer norms biases, of one norm."""
    if not model.parametric_norms:
        return 0
    return size if model.normalization == "RMSNorm" else 2 * size


def _mtp_layer(model: ModelSpec, common: int) -> int:
    """One multi-token prediction layer: a transformer layer, a projection of two hidden states, three norms."""
    experts = model.num_experts or 0
    inner = experts * (_feed_forward(model, model.expert_ffn_size) + model.hidden_size) + _shared(model)
    inner = inner if experts else _feed_forward(model, model.ffn_size)
    return common + inner + 2 * model.hidden_size * model.hidden_size + 3 * _norm(model, model.hidden_size)
