"""Hugging Face `config.json` -> shapes under Megatron's names, family by family.

Only names are translated here. An architecture that is not in `FAMILIES`, or a field that a family needs and the file lacks, is
an error that says so: a guessed shape would make every later number wrong.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

Shapes = dict[str, Any]


# Families whose class has a head size of its own where the file says none: hidden size over heads would be a guess.
_OWN_HEAD_SIZE = frozenset({"gemma2", "gemma3", "gemma3_text", "qwen3", "qwen3_moe", "gpt_oss"})


class UnknownModelError(ValueError):
    """A config.json whose shapes cannot be read, with what is missing."""


def read_hf(config: Mapping[str, Any] | str | Path) -> Shapes:
    """Fields of a `ModelSpec` from a config.json.

    Raises:
        UnknownModelError: the architecture is unknown, or fields that it needs are missing.
    """
    raw = dict(config) if isinstance(config, Mapping) else _load(Path(config))
    kind = str(raw.get("model_type", ""))
    if kind not in FAMILIES:
        raise UnknownModelError(f"unknown model_type {kind!r}; known: {', '.join(sorted(FAMILIES))}. Give the shapes by hand.")
    text = raw.get("text_config")
    return FAMILIES[kind](_Fields(kind, _with_defaults({**raw, **text} if isinstance(text, Mapping) else raw)))


def _load(path: Path) -> Shapes:
    """The content of a config.json, given the file or its folder."""
    file = path / "config.json" if path.is_dir() else path
    content = json.loads(file.read_text())
    if not isinstance(content, dict):
        raise UnknownModelError("no JSON object: a config.json holds fields and their values")
    return content


def _with_defaults(raw: Shapes) -> Shapes:
    """The config with the defaults of its class, where transformers is installed."""
    try:
        from transformers import AutoConfig  # noqa: PLC0415  an extra
    except ImportError:
        return raw
    kind = raw["model_type"]
    known = {key: value for key, value in raw.items() if key != "model_type"}
    try:
        return {**AutoConfig.for_model(kind, **known).to_dict(), **raw}
    except (ValueError, TypeError):
        return raw


class _Fields:
    """A config's fields, by any of several names; missing ones are named together with the family."""

    def __init__(self, kind: str, raw: Mapping[str, Any]) -> None:
        self.kind = kind
        self.raw = raw

    def need(self, *names: str) -> Any:
        """The first of these fields that is given."""
        value = self.get(*names)
        if value is None:
            raise UnknownModelError(f"config.json of model_type {self.kind!r} lacks {' or '.join(names)}")
        return value

    def get(self, *names: str, default: Any = None) -> Any:
        """The first of these fields that is given, else the default."""
        return next((self.raw[name] for name in names if self.raw.get(name) is not None), default)


def _base(f: _Fields, tied: bool = False, **more: Any) -> Shapes:
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
    head = f.need("head_dim") if f.kind in _OWN_HEAD_SIZE else f.get("head_dim")
    if head is not None and head * shapes["num_attention_heads"] != shapes["hidden_size"]:
        shapes["kv_channels"] = head
    return shapes | more


def _gated(f: _Fields, tied: bool = False, **more: Any) -> Shapes:
    """RMSNorm, rotary positions and a gated feed-forward network."""
    return _base(f, tied, ffn_hidden_size=f.need("intermediate_size")) | more


def _llama(f: _Fields) -> Shapes:
    """Llama 2 and 3, Mistral: biases only where the config asks for them."""
    return _gated(f, add_qkv_bias=bool(f.get("attention_bias", default=False)))


def _qwen2(f: _Fields) -> Shapes:
    """Qwen 2 and 2.5: biases on queries, keys and values."""
    return _gated(f, add_qkv_bias=True)


def _qwen3(f: _Fields) -> Shapes:
    """Qwen 3: norms on queries and keys in place of biases."""
    return _gated(f, qk_layernorm=True)


def _mixtral(f: _Fields) -> Shapes:
    """Mixtral: every layer has experts of the dense width."""
    return _gated(f, num_experts=f.need("num_local_experts", "num_experts"), moe_router_topk=f.need("num_experts_per_tok"))


def _qwen_moe(f: _Fields) -> Shapes:
    """Experts of Qwen: every decoder_sparse_step-th layer, but not those of mlp_only_layers."""
    layers, step = f.need("num_hidden_layers"), f.get("decoder_sparse_step", default=1)
    dense = set(f.get("mlp_only_layers", default=()))
    pattern = tuple(int((layer + 1) % step == 0 and layer not in dense) for layer in range(layers))
    return {
        "num_experts": f.need("num_experts", "num_local_experts"),
        "moe_router_topk": f.need("num_experts_per_tok"),
        "moe_ffn_hidden_size": f.need("moe_intermediate_size"),
        "moe_layer_freq": 1 if all(pattern) else pattern,
    }


def _qwen2_moe(f: _Fields) -> Shapes:
    """Qwen 2 MoE: shared experts with a gate."""
    shared = f.need("shared_expert_intermediate_size")
    return _qwen2(f) | _qwen_moe(f) | {"moe_shared_expert_intermediate_size": shared, "moe_shared_expert_gate": True}


def _qwen3_moe(f: _Fields) -> Shapes:
    """Qwen 3 MoE."""
    return _qwen3(f) | _qwen_moe(f)


def _llama4(f: _Fields) -> Shapes:
    """Llama 4: one shared and routed experts in every interleave_moe_layer_step-th layer."""
    layers, step = f.need("num_hidden_layers"), f.need("interleave_moe_layer_step")
    pattern = tuple(int((layer + 1) % step == 0) for layer in range(layers))
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
    )


def _gemma(f: _Fields) -> Shapes:
    """Gemma 2: norms before and after attention and feed-forward; tied embeddings."""
    return _gated(f, tied=True, layer_norms=4)


def _gemma3(f: _Fields) -> Shapes:
    """Gemma 3: as Gemma 2, with norms on queries and keys."""
    return _gemma(f) | {"qk_layernorm": True}


def _phi(f: _Fields) -> Shapes:
    """Phi 1 and 2: attention and feed-forward beside each other under one norm, with biases."""
    return _plain(f, f.need("intermediate_size"), layer_norms=1)


def _phi3(f: _Fields) -> Shapes:
    """Phi 3 and 4: as Llama."""
    return _gated(f)


def _plain(f: _Fields, width: int, tied: bool = False, **more: Any) -> Shapes:
    """LayerNorm, biases and a feed-forward network without gate."""
    return _base(f, tied, ffn_hidden_size=width, swiglu=False, normalization="LayerNorm", add_bias_linear=True) | more


def _gpt_neox(f: _Fields) -> Shapes:
    """GPT-NeoX and Pythia."""
    return _plain(f, f.need("intermediate_size"))


def _gpt2(f: _Fields) -> Shapes:
    """GPT-2: learned positions, tied embeddings."""
    width = f.get("n_inner", default=4 * f.need("n_embd"))
    positions = f.need("n_positions")
    return _plain(f, width, tied=True, position_embedding_type="learned_absolute", max_position_embeddings=positions)


def _falcon(f: _Fields) -> Shapes:
    """Falcon: no biases; attention and feed-forward share one norm or have one each; one or a few key/value heads."""
    if f.get("alibi", default=False):
        raise UnknownModelError("config.json of model_type 'falcon' with alibi: Megatron-LM has no such positions")
    new = f.get("new_decoder_architecture", default=False)
    norms = 2 if new or not f.get("parallel_attn", default=True) else 1
    shapes = _plain(f, f.get("ffn_hidden_size", default=4 * f.need("hidden_size")), tied=True, layer_norms=norms)
    groups = f.need("num_kv_heads") if new else 1 if f.get("multi_query", default=True) else None
    return shapes | {"add_bias_linear": bool(f.get("bias", default=False)), "num_query_groups": groups}


def _nemotron(f: _Fields) -> Shapes:
    """Nemotron 3 and 4: LayerNorm, squared ReLU without gate, no biases."""
    return _plain(f, f.need("intermediate_size"), add_bias_linear=bool(f.get("mlp_bias", default=False)))


def _olmo(f: _Fields) -> Shapes:
    """OLMo: norms without weights."""
    return _gated(f, normalization="LayerNorm", parametric_norms=False)


def _olmo2(f: _Fields) -> Shapes:
    """OLMo 2: norms after attention and feed-forward, and on all queries and keys together."""
    return _gated(f, qk_layernorm=True, qk_layernorm_per_head=False)


def _olmoe(f: _Fields) -> Shapes:
    """OLMoE."""
    return _olmo2(f) | {
        "num_experts": f.need("num_experts", "num_local_experts"),
        "moe_router_topk": f.need("num_experts_per_tok"),
        "moe_ffn_hidden_size": f.need("intermediate_size"),
    }


def _gpt_oss(f: _Fields) -> Shapes:
    """gpt-oss: experts in every layer, biases everywhere."""
    return _gated(
        f,
        add_bias_linear=True,
        num_experts=f.need("num_local_experts", "num_experts"),
        moe_router_topk=f.need("num_experts_per_tok"),
    )


def _deepseek(f: _Fields) -> Shapes:
    """DeepSeek V2 and V3: latent attention, dense first layers, shared experts, multi-token prediction."""
    layers, dense = f.need("num_hidden_layers"), f.need("first_k_dense_replace")
    width, shared = f.need("moe_intermediate_size"), f.need("n_shared_experts")
    shapes = _gated(
        f,
        multi_latent_attention=True,
        q_lora_rank=f.get("q_lora_rank"),
        kv_lora_rank=f.need("kv_lora_rank"),
        qk_head_dim=f.need("qk_nope_head_dim"),
        qk_pos_emb_head_dim=f.need("qk_rope_head_dim"),
        v_head_dim=f.need("v_head_dim"),
        qk_layernorm=True,  # of the latents (kv_a_layernorm and q_a_layernorm in modeling_deepseek.py)
        num_experts=f.need("n_routed_experts"),
        moe_router_topk=f.need("num_experts_per_tok"),
        moe_ffn_hidden_size=width,
        moe_shared_expert_intermediate_size=shared * width,
        moe_layer_freq=(0,) * dense + (1,) * (layers - dense),
        moe_router_score_function=f.get("scoring_func", default="softmax"),
        mtp_num_layers=f.get("num_nextn_predict_layers"),
    )
    if f.get("topk_method", default="greedy") != "greedy":
        shapes |= {"moe_router_num_groups": f.need("n_group"), "moe_router_group_topk": f.need("topk_group")}
    shapes["num_query_groups"] = shapes["kv_channels"] = None
    return shapes


FAMILIES: dict[str, Callable[[_Fields], Shapes]] = {
    "llama": _llama,
    "mistral": _llama,
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
}
