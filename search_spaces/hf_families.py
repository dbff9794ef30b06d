"""What the fields of a Hugging Face config.json mean under Megatron's names, family by family. Only names are translated here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from search_spaces.hf_fields import Fields, UnknownModelError

Shapes = dict[str, Any]

# Families whose class has a head size of its own where the file says none: hidden size over heads would be a guess.
_OWN_HEAD_SIZE = frozenset({"gemma2", "gemma3", "gemma3_text", "glm4_moe", "qwen3", "qwen3_moe", "gpt_oss"})


def _base(f: Fields, tied: bool = False, **more: Any) -> Shapes:
    """Fields that all families have. `tied` is the family's default for tied embeddings."""
    shapes: Shapes = {
        "num_layers": f.need("num_hidden_layers", "n_layer"),
        "hidden_size": f.need("hidden_size", "n_embd"),
        "num_attention_heads": f.need("num_attention_heads", "n_head"),
        "vocab_size": f.need("vocab_size"),
        "untie_embeddings_and_output_weights": not f.get("tie_word_embeddings", default=tied),
    }
    groups = f.get("num_key_value_heads")
    if groups is not None and groups != shapes["num_attention_heads"]:
        shapes["num_query_groups"] = groups
    if f.kind in _OWN_HEAD_SIZE or f.get("head_dim") is not None:
        head, heads = f.whole("head_dim"), f.whole("num_attention_heads", "n_head")
        if head * heads != shapes["hidden_size"]:
            shapes["kv_channels"] = head
    return shapes | more


def _gated(f: Fields, tied: bool = False, **more: Any) -> Shapes:
    """RMSNorm, rotary positions and a gated feed-forward network."""
    return _base(f, tied, ffn_hidden_size=f.need("intermediate_size")) | more


def _biases(f: Fields) -> Shapes:
    """Biases where the config asks for them. Megatron has them in all linear layers or in queries, keys and values only.

    The nearest that has at least those of the config is what is trained; `biased` counts the model's own parameters.
    """
    attention, mlp = (bool(f.get(name, default=False)) for name in ("attention_bias", "mlp_bias"))
    built = {"add_bias_linear": mlp, "add_qkv_bias": attention and not mlp}
    return built if attention == mlp else built | {"biased": ("attention",) if attention else ("mlp",)}


def _llama(f: Fields) -> Shapes:
    """Llama 2 and 3, Mistral, Granite."""
    return _gated(f) | _biases(f)


def _qwen2(f: Fields) -> Shapes:
    """Qwen 2 and 2.5: biases on queries, keys and values."""
    return _gated(f, add_qkv_bias=True)


def _qwen3(f: Fields) -> Shapes:
    """Qwen 3: norms on queries and keys in place of biases."""
    return _gated(f, qk_layernorm=True) | _biases(f)


def _mixtral(f: Fields) -> Shapes:
    """Mixtral: every layer has experts of the dense width."""
    return _gated(f, num_experts=f.need("num_local_experts", "num_experts"), moe_router_topk=f.need("num_experts_per_tok"))


def _qwen_moe(f: Fields) -> Shapes:
    """Experts of Qwen: every decoder_sparse_step-th layer, but not those of mlp_only_layers."""
    step, dense = f.whole("decoder_sparse_step", default=1), set(f.get("mlp_only_layers", default=()))
    pattern = tuple(int((layer + 1) % step == 0 and layer not in dense) for layer in range(f.layers))
    return {
        "num_experts": f.need("num_experts", "num_local_experts"),
        "moe_router_topk": f.need("num_experts_per_tok"),
        "moe_ffn_hidden_size": f.need("moe_intermediate_size"),
        "moe_layer_freq": 1 if all(pattern) else pattern,
    }


def _qwen2_moe(f: Fields) -> Shapes:
    """Qwen 2 MoE: shared experts with a gate."""
    shared = f.need("shared_expert_intermediate_size")
    return _qwen2(f) | _qwen_moe(f) | {"moe_shared_expert_intermediate_size": shared, "moe_shared_expert_gate": True}


def _qwen3_moe(f: Fields) -> Shapes:
    """Qwen 3 MoE."""
    return _qwen3(f) | _qwen_moe(f)


def _llama4(f: Fields) -> Shapes:
    """Llama 4: one shared and routed experts in every interleave_moe_layer_step-th layer."""
    step = f.whole("interleave_moe_layer_step")
    pattern = tuple(int((layer + 1) % step == 0) for layer in range(f.layers))
    expert = f.need("intermediate_size")
    return _base(
        f,
        ffn_hidden_size=f.need("intermediate_size_mlp"),
        num_experts=f.need("num_local_experts", "num_experts"),
        moe_router_topk=f.need("num_experts_per_tok"),
        moe_ffn_hidden_size=expert,
        moe_shared_expert_intermediate_size=expert,
        moe_layer_freq=1 if all(pattern) else pattern,
        moe_router_score_function="sigmoid",
        **_biases(f),
    )


def _gemma(f: Fields) -> Shapes:
    """Gemma 2: norms before and after attention and feed-forward; tied embeddings."""
    return _gated(f, tied=True, layer_norms=4) | _biases(f)


def _gemma3(f: Fields) -> Shapes:
    """Gemma 3: as Gemma 2, with norms on queries and keys."""
    return _gemma(f) | {"qk_layernorm": True}


def _phi(f: Fields) -> Shapes:
    """Phi 1 and 2: attention and feed-forward beside each other under one norm, with biases."""
    return _plain(f, f.need("intermediate_size"), layer_norms=1)


def _phi3(f: Fields) -> Shapes:
    """Phi 3 and 4: as Llama."""
    return _gated(f)


def _plain(f: Fields, width: int, tied: bool = False, **more: Any) -> Shapes:
    """LayerNorm, biases and a feed-forward network without gate."""
    return _base(f, tied, ffn_hidden_size=width, swiglu=False, normalization="LayerNorm", add_bias_linear=True) | more


def _gpt_neox(f: Fields) -> Shapes:
    """GPT-NeoX and Pythia."""
    return _plain(f, f.need("intermediate_size"))


def _gpt2(f: Fields) -> Shapes:
    """GPT-2: learned positions, tied embeddings."""
    width = f.get("n_inner", default=4 * f.whole("n_embd"))
    positions = f.need("n_positions")
    return _plain(f, width, tied=True, position_embedding_type="learned_absolute", max_position_embeddings=positions)


def _falcon(f: Fields) -> Shapes:
    """Falcon: no biases; attention and feed-forward share one norm or have one each; one or a few key/value heads."""
    if f.get("alibi", default=False):
        raise UnknownModelError("config.json of model_type 'falcon' with alibi: Megatron-LM has no such positions")
    new = f.get("new_decoder_architecture", default=False)
    norms = 2 if new or not f.get("parallel_attn", default=True) else 1
    shapes = _plain(f, f.get("ffn_hidden_size", default=4 * f.whole("hidden_size")), tied=True, layer_norms=norms)
    groups = f.need("num_kv_heads") if new else 1 if f.get("multi_query", default=True) else None
    return shapes | {"add_bias_linear": bool(f.get("bias", default=False)), "num_query_groups": groups}


def _nemotron(f: Fields) -> Shapes:
    """Nemotron 3 and 4: LayerNorm, squared ReLU without gate, no biases."""
    return _plain(f, f.need("intermediate_size")) | _biases(f)


def _olmo(f: Fields) -> Shapes:
    """OLMo: norms without weights."""
    return _gated(f, normalization="LayerNorm", parametric_norms=False) | _biases(f)


def _olmo2(f: Fields) -> Shapes:
    """OLMo 2: norms after attention and feed-forward, and on all queries and keys together."""
    return _gated(f, qk_layernorm=True, qk_layernorm_per_head=False) | _biases(f)


def _olmoe(f: Fields) -> Shapes:
    """OLMoE."""
    return _olmo2(f) | {
        "num_experts": f.need("num_experts", "num_local_experts"),
        "moe_router_topk": f.need("num_experts_per_tok"),
        "moe_ffn_hidden_size": f.need("intermediate_size"),
    }


def _gpt_oss(f: Fields) -> Shapes:
    """gpt-oss: experts in every layer, biases everywhere."""
    return _gated(
        f,
        add_bias_linear=True,
        num_experts=f.need("num_local_experts", "num_experts"),
        moe_router_topk=f.need("num_experts_per_tok"),
    )


def _starcoder2(f: Fields) -> Shapes:
    """StarCoder 2: biases everywhere."""
    return _plain(f, f.need("intermediate_size"), tied=True, add_bias_linear=bool(f.get("use_bias", default=True)))


def _cohere(f: Fields) -> Shapes:
    """Command R: attention and gated feed-forward beside each other under one norm; tied embeddings."""
    return _gated(f, tied=True, normalization="LayerNorm", layer_norms=1) | _biases(f)


def _glm4(f: Fields) -> Shapes:
    """GLM 4: norms before and after attention and feed-forward; biases on queries, keys and values only."""
    return _gated(f, layer_norms=4, add_qkv_bias=bool(f.get("attention_bias", default=False)))


def _glm4_moe(f: Fields) -> Shapes:
    """GLM 4.5: dense first layers, shared experts, multi-token prediction; biases on queries, keys and values only."""
    shapes = _gated(f, add_qkv_bias=bool(f.get("attention_bias", default=False)), qk_layernorm=bool(f.get("use_qk_norm")))
    return shapes | _routed_after_dense(f) | {"moe_router_score_function": "sigmoid"}


def _routed_after_dense(f: Fields) -> Shapes:
    """Experts after the first dense layers, in every `moe_layer_freq`-th layer; shared experts; multi-token prediction."""
    dense, step = f.whole("first_k_dense_replace", least=0), f.whole("moe_layer_freq", default=1)
    width, shared = f.whole("moe_intermediate_size"), f.whole("n_shared_experts", least=0, default=0)
    return {
        "num_experts": f.need("n_routed_experts"),
        "moe_router_topk": f.need("num_experts_per_tok"),
        "moe_ffn_hidden_size": width,
        "moe_shared_expert_intermediate_size": shared * width or None,
        "moe_layer_freq": tuple(int(layer >= dense and layer % step == 0) for layer in range(f.layers)),
        "mtp_num_layers": f.get("num_nextn_predict_layers"),
    }


def _deepseek(f: Fields) -> Shapes:
    """DeepSeek V2 and V3, Kimi K2: latent attention, dense first layers, shared experts, multi-token prediction."""
    shapes = _gated(
        f,
        multi_latent_attention=True,
        q_lora_rank=f.get("q_lora_rank"),
        kv_lora_rank=f.need("kv_lora_rank"),
        qk_head_dim=f.need("qk_nope_head_dim"),
        qk_pos_emb_head_dim=f.need("qk_rope_head_dim"),
        v_head_dim=f.need("v_head_dim"),
        qk_layernorm=True,  # of the latents (kv_a_layernorm and q_a_layernorm in modeling_deepseek.py)
        moe_router_score_function=f.get("scoring_func", default="softmax"),
        **_routed_after_dense(f),
    )
    if f.get("topk_method", default="greedy") != "greedy":
        shapes |= {"moe_router_num_groups": f.need("n_group"), "moe_router_group_topk": f.need("topk_group")}
    shapes["num_query_groups"] = shapes["kv_channels"] = None
    return shapes


FAMILIES: dict[str, Callable[[Fields], Shapes]] = {
    "llama": _llama,
    "mistral": _llama,
    "mistral3": _llama,
    "granite": _llama,
    "mixtral": _mixtral,
    "llama4": _llama4,
    "llama4_text": _llama4,
    "qwen2": _qwen2,
    "qwen2_moe": _qwen2_moe,
    "qwen3": _qwen3,
    "qwen3_moe": _qwen3_moe,
    "gemma2": _gemma,
    "gemma3": _gemma3,
    "gemma3_text": _gemma3,
    "phi": _phi,
    "phi3": _phi3,
    "gpt_neox": _gpt_neox,
    "gpt2": _gpt2,
    "falcon": _falcon,
    "nemotron": _nemotron,
    "olmo": _olmo,
    "olmo2": _olmo2,
    "olmoe": _olmoe,
    "gpt_oss": _gpt_oss,
    "deepseek_v2": _deepseek,
    "deepseek_v3": _deepseek,
    "kimi_k2": _deepseek,
    "starcoder2": _starcoder2,
    "cohere": _cohere,
    "cohere2": _cohere,
    "glm4": _glm4,
    "glm4_moe": _glm4_moe,
    "olmo3": _olmo2,
}

_HYBRID = "it has layers other than attention (state space or linear attention), of which nothing is known here"
NOT_DESCRIBED = {
    "bloom": "its positions are alibi, which Megatron-LM does not have",
    "mpt": "its positions are alibi, which Megatron-LM does not have",
    **dict.fromkeys(("jamba", "bamba", "zamba2", "falcon_h1", "nemotron_h", "granitemoehybrid", "qwen3_next", "minimax"), _HYBRID),
    **dict.fromkeys(("minimax_text_01", "minimax_m1", "kimi_linear", "recurrent_gemma", "lfm2"), _HYBRID),
}
"""Architectures that shapes alone do not describe, and why."""
