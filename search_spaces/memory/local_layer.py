"""What one layer keeps for its backward pass with megatron-core's local layers on a CPU, tensor by tensor.

What differs from fused kernels (`layer`), each seen in what autograd saves:

* Attention is not fused: it keeps the fp32 softmax, the same in bf16, and keys and values repeated for every query head
  (transformer/dot_product_attention.py, fusions/fused_softmax.py forward_torch_softmax).
* RMSNorm is composed of single operations and keeps its input and its normalised input in fp32; LayerNorm keeps its input.
* Rotary embedding keeps sine and cosine once for queries and once for keys (models/common/embeddings/rope_utils.py).
* SwiGLU keeps both halves, the activation of one, the shifted other and the product (mlp.py glu); experts the weighted product.
* The loss keeps an fp32 softmax of the logits (tensor_parallel/cross_entropy.py).
"""

from __future__ import annotations

import numpy as np

from search_spaces.columns import Bools, Columns, Floats
from search_spaces.memory.sizes import Sizes

STATISTIC = 4


def local_layer_bytes(columns: Columns, size: Sizes, *, moe: bool) -> Floats:
    """Bytes that one local layer keeps of one micro-batch; the arguments are those of `layer.layer_bytes`."""
    hidden = size.local * size.hidden * size.element
    attention = _latent_attention if size.model.multi_latent_attention else _attention
    kept = attention(columns, size)
    recomputed = columns.recomputes("layernorm")
    norms = 2 * np.where(recomputed, hidden, hidden + norm_bytes(size, size.local, size.hidden))
    if moe:
        return np.asarray(kept + norms + _experts(columns, size))
    products = _products(size, size.tokens, size.model.ffn_size / size.tp)
    return np.asarray(kept + norms + products * ~columns.recomputes("mlp"))


def norm_bytes(size: Sizes, tokens: Floats, width: int) -> Floats:
    """What a norm keeps: its input in fp32 twice with RMSNorm, once in its own type with LayerNorm, and statistics."""
    if size.model.normalization == "RMSNorm":
        return tokens * (2 * STATISTIC * width + STATISTIC)
    return tokens * (size.element * width + 2 * size.element)


def head_bytes(size: Sizes, vocabulary: Floats) -> Floats:
    """Final norm, input of the output layer, fp32 softmax of the logits, and targets."""
    norm = norm_bytes(size, size.local, size.hidden) + size.local * size.hidden * size.element
    return norm + size.tokens * (STATISTIC * vocabulary + 9)


def angle_bytes(columns: Columns, size: Sizes) -> Floats:
    """Angles of the rotary embedding, which recomputed layers share (tensor_parallel/random.py CheckpointFunction)."""
    rotary = size.model.position_embedding_type == "rope" and not size.model.multi_latent_attention
    kept = columns.equals("recompute_granularity", "full") & rotary
    return np.where(kept, STATISTIC * size.sequence * size.query / size.heads, 0.0)


def _attention(columns: Columns, size: Sizes) -> Floats:
    """Queries, keys and values, the scores, the output, and sines and cosines."""
    model, token = size.model, size.tokens * size.element
    grouped, rotary = size.heads > size.groups, model.position_embedding_type == "rope"
    fresh = rotary or model.qk_layernorm  # queries and keys are no longer views of the projection
    core = columns.recomputes("core_attn")
    normed, views = _query_key_norms(size, grouped)
    whole = token * _projection(size)
    in_place = grouped & (size.groups <= 1) & (size.batch == 1) & (not fresh)  # heads of one group lie side by side
    queries = np.where(in_place, 0.0, token * size.query)
    repeated = queries + np.where(core, token * size.keys * fresh, 2 * token * size.query)
    repeated = repeated + np.where(core | views | in_place, whole, 0.0)
    kept = np.where(grouped, repeated, whole + token * (size.query + size.keys) * fresh)
    waves = 4 * size.sequence * size.element * (size.query / size.heads) if rotary else 0.0
    return kept + normed + waves + _scores(size) * ~core + token * size.query


def _projection(size: Sizes) -> Floats:
    """Width of queries, keys and values together; gathered from all ranks where there are fewer groups than ranks."""
    projected = size.query + size.keys + size.values
    whole = (size.model.num_attention_heads + 2 * size.model.query_groups) * (size.query / size.heads)
    return np.where(size.model.query_groups < size.tp, whole, projected)


def _query_key_norms(size: Sizes, grouped: Bools) -> tuple[Floats, Bools]:
    """What the norms of queries and keys keep, and whether they keep views of the projection.

    A norm that does not convert its input keeps it as it is: keys are a view of the projection, queries unless there are groups.
    """
    model = size.model
    if not model.qk_layernorm:
        return 0.0 * size.local, np.zeros_like(size.sequence_parallel)
    channels = int(model.kv_channels or model.hidden_size // model.num_attention_heads)
    kept = norm_bytes(size, size.tokens * size.heads, channels) + norm_bytes(size, size.tokens * size.groups, channels)
    viewed = size.tokens * size.element * (size.keys + np.where(grouped & (size.groups > 1), 0.0, size.query))
    views = _keeps_input(size)
    return kept - np.where(views, viewed, 0.0), views


def _keeps_input(size: Sizes) -> Bools:
    """Where a norm keeps its input itself, not a copy in fp32."""
    return np.asarray((size.element == STATISTIC) | (size.model.normalization == "LayerNorm"))


def _scores(size: Sizes) -> Floats:
    """Softmax in fp32, and in the activations' type where that is another."""
    rows = size.heads * size.sequence * size.tokens
    return np.asarray(rows * (STATISTIC + np.where(size.element < STATISTIC, size.element, 0.0)))


def _latent_attention(columns: Columns, size: Sizes) -> Floats:
    """Latents before and after their norms, queries, keys, values, the scores, the output, and sines and cosines."""
    model = size.model
    ranks = model.q_lora_rank or 0
    gathered = np.where(size.sequence_parallel, (size.tokens - size.local) * size.element * ranks, 0.0)  # queries' are a view of it
    latents = size.local * size.element * (model.kv_lora_rank + ranks)
    positions = np.where(size.sequence_parallel, 0.0, size.local * size.element * model.qk_pos_emb_head_dim)
    if model.qk_layernorm:
        latents = latents + norm_bytes(size, size.local, model.kv_lora_rank)
        latents = latents + (norm_bytes(size, size.local, ranks) if ranks else 0.0)
        positions = np.where(_keeps_input(size), positions, 0.0)
        gathered = np.where(_keeps_input(size), gathered, 0.0)
    latents = latents + gathered + positions  # the first latents are a view that holds them, too
    expanded = size.tokens * size.element * (size.query + size.keys + size.values)
    waves = 4 * size.sequence * size.element * model.qk_pos_emb_head_dim
    core = _scores(size) * ~columns.recomputes("core_attn")
    up = ~columns.recomputes("mla_up_proj")
    output = size.tokens * size.element * size.values
    return latents + (expanded + waves) * up + core + output


def _products(size: Sizes, tokens: Floats, width: Floats, weighted: int = 0) -> Floats:
    """The first product's output, what the activation function keeps, and the second product's input."""
    tensors = (5 if size.model.swiglu else 2) + weighted
    return tokens * width * size.element * tensors


def _experts(columns: Columns, size: Sizes) -> Floats:
    """Router, permuted tokens, experts and shared experts."""
    model = size.model
    experts, top = model.num_experts or 0, model.moe_router_topk
    router = size.local * (experts * (1 + size.element) + top * (8 + 4 + 8 + size.element))
    inputs = size.routed * size.hidden * size.element
    products = _products(size, size.routed, model.expert_ffn_size / size.etp, weighted=1)
    shared = model.moe_shared_expert_intermediate_size
    beside = 0.0 * products
    if shared:
        beside = (_products(size, size.tokens, shared / size.tp) + size.gate) * ~columns.recomputes("shared_experts")
    return (router + inputs + products + beside) * ~columns.recomputes("moe")
