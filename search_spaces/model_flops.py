"""Floating point operations that a model asks for, whatever the machine recomputes: the convention behind TFLOP/s and MFU."""

from __future__ import annotations

from search_spaces.model import ModelSpec
from search_spaces.parameters import count_parameters


def model_flops_per_token(model: ModelSpec, seq_length: int) -> float:
    """Operations of forward and backward pass per trained token.

        6 x (parameters in matrix products that a token uses) + 6 x layers x sequence length x heads x (key + value size) / 2

    A parameter of a matrix product costs two operations forward and four backward; a token attends to half of the sequence in the
    mean, because attention is causal. Recomputation, norms and the look-up of embeddings do not count (Chowdhery et al. 2022, PaLM,
    appendix B, which counts attention without the mask; Megatron-LM's `num_floating_point_operations` halves it as here).

    Args:
        model: The shapes.
        seq_length: Tokens per sequence.
    """
    count = count_parameters(model)
    output = count.output or model.vocab_size * model.hidden_size
    products = count.attention + count.dense + count.experts + count.shared + count.router - count.idle + output
    key = value = model.head_size
    if model.multi_latent_attention:
        key, value = model.qk_head_dim + model.qk_pos_emb_head_dim, model.v_head_dim
    attention = model.num_layers * seq_length * model.num_attention_heads * (key + value) / 2
    return 6.0 * (products + attention)
