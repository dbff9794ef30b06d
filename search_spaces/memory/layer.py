"""What one layer keeps for its backward pass with Transformer Engine on a GPU, tensor by tensor.

After Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models" (2022), equations 1 to 6, with what has
changed since: grouped queries, SwiGLU, fused attention and norms, experts, multi-latent attention, FP8. A storage counts once.
The forward passes are megatron-core's transformer_layer.py, attention.py, multi_latent_attention.py, mlp.py and moe/, and
Transformer Engine's layernorm_linear.py, linear.py and grouped_linear.py. The local layers of a CPU are in `local_layer`.
"""

from __future__ import annotations

import numpy as np

from search_spaces.columns import Columns, Floats
from search_spaces.memory.sizes import Sizes
from search_spaces.software import Software

STATISTIC = 4


def layer_bytes(columns: Columns, size: Sizes, software: Software, *, moe: bool) -> Floats:
    """Bytes that one layer keeps of one micro-batch.

    Args:
        columns: The table.
        size: Its sizes.
        software: The software.
        moe: Whether the layer has experts.
    """
    attention = _latent_attention if size.model.multi_latent_attention else _attention
    kept = attention(columns, size, software) + _norms(columns, size, software, moe)
    if moe:
        return kept + _experts(columns, size)
    return kept + _mlp(size, size.model.ffn_size) * ~columns.recomputes("mlp")


def _norms(columns: Columns, size: Sizes, software: Software, moe: bool) -> Floats:
    """Both norms' inputs (the residual stream) and outputs (inputs of the next product), their statistics and dropout masks.

    In FP8 a product keeps its input in one byte, but multi-latent projections and the router share the norm's own output.
    """
    model = size.model
    inputs = 2 * size.local * (size.hidden * size.element + STATISTIC * (2 if model.normalization == "LayerNorm" else 1))
    attention_output = size.element if model.multi_latent_attention else size.stored
    mlp_output = size.stored
    if moe:
        shared = (size.stored < size.element) & (model.moe_shared_expert_intermediate_size is not None)
        mlp_output = size.element + size.stored * shared
    outputs = size.local * size.hidden * (attention_output + mlp_output)
    masks = 2 * size.local * size.hidden if software.hidden_dropout else 0.0
    return inputs + outputs * ~columns.recomputes("layernorm") + masks


def _attention(columns: Columns, size: Sizes, software: Software) -> Floats:
    """Queries, keys, values and the output, which the output projection shares; scores where no kernel is fused."""
    model, projected = size.model, size.query + size.keys + size.values
    kept = size.tokens * size.element * (projected + size.query)
    if model.qk_layernorm:
        kept = kept + size.tokens * (size.element * projected + STATISTIC * (size.heads + size.groups))
    return kept + _core(columns, size, software)


def _core(columns: Columns, size: Sizes, software: Software) -> Floats:
    """What the attention kernel keeps besides its inputs and output.

    A fused kernel keeps one fp32 number per row of scores (Dao et al., FlashAttention-2). An unfused one keeps the softmax, and
    with dropout its mask and result: 5 a s^2 b (Korthikanti et al., section 4). Exchanging heads over context parallel ranks keeps
    the output of the kernel beside that of the exchange (context_parallel.py AttnFuncWithCPAndQKVOA2A).
    """
    rows = size.heads * size.sequence * size.tokens
    scores = rows * (size.element + ((1 + size.element) if software.attention_dropout else 0))
    expanded = 2 * size.tokens * size.element * np.maximum(size.query - size.keys, 0)
    unfused = columns.equals("attention_backend", "unfused", "local") | (not software.flash_attention)
    fused = STATISTIC * size.heads * size.tokens
    kept = np.where(unfused, scores + expanded, fused) * ~columns.recomputes("core_attn")
    exchanged = (columns.cp > 1) & columns.holds("cp_comm_type", "a2a")
    doubled = columns.equals("fp8_recipe", "delayed") & columns.given("fp8_format")
    output = size.values if size.model.multi_latent_attention else size.query
    return np.asarray(kept + size.tokens * output * (size.element * exchanged + doubled))


def _latent_attention(columns: Columns, size: Sizes, software: Software) -> Floats:
    """Latents before and after their norms, then queries, keys, values and the output."""
    model = size.model
    latents = model.kv_lora_rank + (model.q_lora_rank or 0)
    compressed = size.local * (size.element * (latents + model.qk_pos_emb_head_dim) + 2 * STATISTIC)
    normed = size.local * latents * size.stored * (1 if model.qk_layernorm else 0)
    expanded = size.tokens * size.element * (size.query + size.keys + size.values)
    kept = compressed + normed + expanded * ~columns.recomputes("mla_up_proj")
    return kept + size.tokens * size.element * size.values + _core(columns, size, software)


def _mlp(size: Sizes, width: int) -> Floats:
    """The first product's output and the activation function's, which the second product keeps."""
    return _first(size) * size.tokens * width / size.tp + size.tokens * width / size.tp * size.stored


def _first(size: Sizes) -> Floats:
    """Bytes of the first product's output per unit of width; gated layers have two halves."""
    return size.element * (2 if size.model.swiglu else 1)


def _experts(columns: Columns, size: Sizes) -> Floats:
    """Router, permuted tokens, experts and shared experts of one layer (moe_layer.py MoELayer.forward)."""
    model = size.model
    width, experts = model.expert_ffn_size / size.etp, model.num_experts or 0
    router = size.local * (experts * (2 * STATISTIC + 1) + model.moe_router_topk * 12)
    inputs = size.routed * (size.hidden * size.stored + STATISTIC)
    products = size.routed * width * _first(size)
    activated = size.routed * width * size.stored * ~columns.recomputes("moe_act")
    shared = model.moe_shared_expert_intermediate_size
    beside = (_mlp(size, shared) + size.gate) * ~columns.recomputes("shared_experts") if shared else 0.0
    return (router + inputs + products + activated + beside) * ~columns.recomputes("moe")
