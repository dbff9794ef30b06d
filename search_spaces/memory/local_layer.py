"""What one layer keeps for its backward pass with megatron-core's local layers on a CPU, tensor by tensor.

What differs from fused kernels (`layer`), each seen in what autograd saves:

* Attention is not fused: it keeps the fp32 softmax, the same in bf16, and keys and values repeated for every query head
  (transformer/dot_product_attention.py, fusions/fused_softmax.py forward_torch_softmax).
* RMSNorm is composed of single operations and keeps its input and its normalised input in fp32; LayerNorm keeps its input.
* Rotary embedding keeps sine and cosine once for queries and once for keys (models/common/embeddings/rope_utils.py).
* SwiGLU keeps both halves, their activation, the shifted second half and the product (mlp.py glu), experts the weighted product, too.
* The loss keeps an fp32 softmax of the logits (tensor_parallel/cross_entropy.py).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from search_spaces.columns import Bools, Columns
from search_spaces.memory.sizes import Sizes

Floats = npt.NDArray[np.float64]
STATISTIC = 4


def local_layer_bytes(columns: Columns, size: Sizes, *, moe: bool, recompute: bool = True) -> Floats:
    """Bytes that one local layer keeps of one micro-batch; the arguments are those of `layer.layer_bytes`."""
    keep_norm = 1 - _recomputed(columns, "layernorm", recompute)
    hidden = size.local * size.hidden * size.element
    attention = _latent_attention if size.model.multi_latent_attention else _attention
    kept = attention(columns, size, recompute)
    recomputed = _recomputed(columns, "layernorm", recompute)
    norms = 2 * np.where(recomputed, hidden, hidden + norm_bytes(size, size.local, size.hidden))
    if moe:
        return kept + norms + _experts(columns, size, recompute)
    return kept + norms + _products(size, size.tokens, size.model.ffn_size / size.tp) * (
        1 - _recomputed(columns, "mlp", recompute)
    ) * (keep_norm >= 0)


def norm_bytes(size: Sizes, tokens: Floats, width: int) -> Floats:
    """What a norm keeps: its input in fp32 twice with RMSNorm, once in its own type with LayerNorm, and statistics."""
    if size.model.normalization == "RMSNorm":
        return tokens * (2 * STATISTIC * width + STATISTIC)
    return tokens * (size.element * width + 2 * size.element)


def head_bytes(size: Sizes, vocabulary: Floats) -> Floats:
    """Final norm, input of the output layer, fp32 softmax of the logits, and targets."""
    norm = norm_bytes(size, size.local, size.hidden) + size.local * size.hidden * size.element
    return norm + size.tokens * (STATISTIC * vocabulary + 9)


def _recomputed(columns: Columns, module: str, recompute: bool) -> Bools:
    selective = columns.equals("recompute_granularity", "selective")
    named = columns.holds("recompute_modules", module)
    if module == "core_attn":
        named = named | ~columns.given("recompute_modules")
    return selective & named & recompute


def _attention(columns: Columns, size: Sizes, recompute: bool) -> Floats:
    """Queries, keys and values, the scores, the output, and sines and cosines."""
    model, token = size.model, size.tokens * size.element
    grouped, rotary = model.query_groups != model.num_attention_heads, model.position_embedding_type == "rope"
    projected = size.query + size.keys + size.values
    fresh = rotary or model.qk_layernorm
    core = _recomputed(columns, "core_attn", recompute)
    normed = 0.0 * token
    if model.qk_layernorm:
        channels = int(model.kv_channels or model.hidden_size // model.num_attention_heads)
        normed = norm_bytes(size, size.tokens * size.heads, channels) + norm_bytes(size, size.tokens * size.groups, channels)
        if model.normalization == "LayerNorm":  # keys are a view of the whole projection, queries too without groups
            normed = normed - token * (size.keys + (0 if grouped else size.query)) + token * projected
    if grouped:
        kept_whole = token * projected if not (model.qk_layernorm and model.normalization == "LayerNorm") else 0.0
        narrow = token * (size.query + (size.keys if fresh else 0.0)) + kept_whole
        wide = 3 * token * size.query
        kept = np.where(core, narrow, wide)
    else:
        already = model.qk_layernorm and model.normalization == "LayerNorm"
        kept = token * ((0.0 if already else projected) + (size.query + size.keys if fresh else 0.0))
    waves = 4 * size.sequence * size.element * (size.query / size.heads) if rotary else 0.0
    return kept + normed + waves + _scores(size) * (1 - core) + token * size.query + token_input(size)


def token_input(size: Sizes) -> Floats:
    """The input of the projections: the norm's output."""
    return size.local * size.hidden * size.element


def _scores(size: Sizes) -> Floats:
    """Softmax in fp32, and in the activations' type where that is another."""
    rows = size.heads * size.sequence * size.tokens
    return rows * (STATISTIC + np.where(size.element < STATISTIC, size.element, 0.0))


def _latent_attention(columns: Columns, size: Sizes, recompute: bool) -> Floats:
    """Latents before and after their norms, queries, keys, values, the scores, the output, and sines and cosines."""
    model = size.model
    combined, ranks = model.kv_lora_rank + model.qk_pos_emb_head_dim, model.q_lora_rank or 0
    latents = size.local * size.element * (model.kv_lora_rank + ranks)
    if model.qk_layernorm:
        latents = latents + norm_bytes(size, size.local, model.kv_lora_rank)
        latents = latents + (norm_bytes(size, size.local, ranks) if ranks else 0.0)
        if model.normalization == "LayerNorm":
            latents = latents + size.local * size.element * model.qk_pos_emb_head_dim
    else:
        latents = latents + size.local * size.element * (combined - model.kv_lora_rank)
    expanded = size.tokens * size.element * (size.query + size.keys + size.values)
    waves = 4 * size.sequence * size.element * model.qk_pos_emb_head_dim
    core = _scores(size) * (1 - _recomputed(columns, "core_attn", recompute))
    up = 1 - _recomputed(columns, "mla_up_proj", recompute)
    output = size.tokens * size.element * size.values
    return latents + (expanded + waves) * up + core + output + token_input(size)


def _products(size: Sizes, tokens: Floats, width: Floats, weighted: int = 0) -> Floats:
    """The first product's output, what the activation function keeps, and the second product's input."""
    tensors = (5 if size.model.swiglu else 2) + weighted
    return tokens * width * size.element * tensors


def _experts(columns: Columns, size: Sizes, recompute: bool) -> Floats:
    """Router, permuted tokens, experts and shared experts."""
    model = size.model
    experts, top = model.num_experts or 0, model.moe_router_topk
    router = size.local * (experts * (1 + size.element) + top * (8 + 4 + 8 + size.element))
    inputs = size.routed * size.hidden * size.element
    products = _products(size, size.routed, model.expert_ffn_size / size.etp, weighted=1)
    shared = model.moe_shared_expert_intermediate_size
    beside = 0.0
    if shared:
        beside = _products(size, size.tokens, shared / size.tp) * (1 - _recomputed(columns, "shared_experts", recompute))
    return (router + inputs + products + beside) * (1 - _recomputed(columns, "moe", recompute))
