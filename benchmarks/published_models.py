"""Shapes of published models that the tables of measurements leave out, each from the model's own card or configuration file.

The tables state layers, hidden size, heads, feed-forward size, vocabulary and experts; what is here are the kinds of layers.
"""

from __future__ import annotations

import re
from typing import Any

_LLAMA: dict[str, Any] = {}
_GPT = {
    "swiglu": False,
    "normalization": "LayerNorm",
    "add_bias_linear": True,
    "untie_embeddings_and_output_weights": False,
    "position_embedding_type": "learned_absolute",
}
_ALIBI = {**_GPT, "position_embedding_type": "none"}
_MPT = {**_ALIBI, "add_bias_linear": False}
# nvidia/nemotron-3-8b-base-4k model card: SentencePiece vocabulary of 256,000
_NEMOTRON = {"swiglu": False, "normalization": "LayerNorm", "vocab_size": 256000}
_QWEN3 = {"kv_channels": 128, "qk_layernorm": True}
_MLA = {
    "multi_latent_attention": True,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_head_dim": 128,
    "qk_pos_emb_head_dim": 64,
    "v_head_dim": 128,
}
_DEEPSEEK_V3 = {**_MLA, "qk_layernorm": True, "moe_shared_expert_intermediate_size": 2048, "moe_router_score_function": "sigmoid"}

MODELS: tuple[tuple[str, dict[str, Any]], ...] = (
    # deepseek-ai/DeepSeek-V2-Lite config.json: q_lora_rank null, first_k_dense_replace 1, n_shared_experts 2 of 1408
    (
        r"deepseek-?v2-lite",
        {**_MLA, "q_lora_rank": None, "qk_layernorm": True, "moe_shared_expert_intermediate_size": 2816, "dense_layers": 1},
    ),
    # deepseek-ai/DeepSeek-V2 config.json: first_k_dense_replace 1, n_shared_experts 2 of 1536
    (r"deepseek-?v2", {**_MLA, "qk_layernorm": True, "moe_shared_expert_intermediate_size": 3072, "dense_layers": 1}),
    # deepseek-ai/DeepSeek-V3 config.json: first_k_dense_replace 3, num_nextn_predict_layers 1
    (r"deepseek-?v3.*w/o-mtp", {**_DEEPSEEK_V3, "dense_layers": 3}),
    (r"deepseek-?v3", {**_DEEPSEEK_V3, "dense_layers": 3, "mtp_num_layers": 1}),
    # moonshotai/Kimi-K2-Base config.json
    (r"kimi-?k2", {**_DEEPSEEK_V3, "dense_layers": 1}),
    # moonshotai/Moonlight-16B-A3B config.json: q_lora_rank null, n_shared_experts 2 of 1408
    (
        r"moonlight",
        {**_DEEPSEEK_V3, "q_lora_rank": None, "moe_shared_expert_intermediate_size": 2816, "dense_layers": 1},
    ),
    # Qwen/Qwen3-0.6B, Qwen3-1.7B, Qwen3-4B config.json: tie_word_embeddings
    (r"qwen3-(0\.6|1\.7|4)b", {**_QWEN3, "untie_embeddings_and_output_weights": False}),
    # Qwen/Qwen3-8B, -14B, -32B, -30B-A3B, -235B-A22B config.json: head_dim 128
    (r"qwen3-(8|14|32|30|235)b", _QWEN3),
    # Qwen/Qwen2-7B, -72B, Qwen2.5-7B, -14B, -32B, -72B: QKV bias (modeling_qwen2.py)
    (r"qwen2(\.5)?-(7|14|32|72)b", {"add_qkv_bias": True}),
    # openai/gpt-oss-20b, gpt-oss-120b config.json: head_dim 64, biases everywhere
    (r"gpt-?oss", {"kv_channels": 64, "add_bias_linear": True, "add_qkv_bias": True}),
    (r"mixtral", _LLAMA),
    (r"internlm", {"add_qkv_bias": True}),
    # nvidia/Nemotron-4-340B-Base model card: squared ReLU, vocabulary of 256,000
    (r"nemotron-(4-)?(8|15|22|340)b", _NEMOTRON),
    # Megatron-LM tests/functional_tests/test_cases/gpt/gpt3_7b_*/model_config.yaml: GELU, biases, rotary embedding
    (
        r"gpt/llama-like-7b",
        {**_GPT, "untie_embeddings_and_output_weights": True, "position_embedding_type": "rope", "ffn_hidden_size": 16384},
    ),
    (r"llama-like", {}),
    # meta-llama/Llama-3.2-1B, -3B config.json: tie_word_embeddings
    (r"llama-?3\.2-(1|3)b", {"untie_embeddings_and_output_weights": False}),
    (r"llama", _LLAMA),
    (r"mistral-7b", _LLAMA),
    (r"bloom", _ALIBI),  # ALiBi, tied embeddings: bigscience-workshop/bigscience train/tr11-176B-ml
    (r"mpt", _MPT),  # mosaicml/llm-foundry: ALiBi, no biases, tied embeddings
    (r"gpt", _GPT),
)
UNLIKE = r"llama-?4|nemotron-(nano|super|ultra|h)|llama.*nemotron|gpt-(j|neo)"
"""Models with layers of other kinds than their names' first words say."""


def kinds(model: str) -> dict[str, Any] | None:
    """The fields of `ModelSpec` for a model's name, and `dense_layers` before the first with experts; None = not known here."""
    name = re.sub(r"[\s_-]+", "-", model.lower())
    if re.search(UNLIKE, name):
        return None
    return next((dict(fields) for pattern, fields in MODELS if re.search(pattern, name)), None)
