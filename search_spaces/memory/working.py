"""Memory that is needed for a moment only: around the loss, and while one layer runs backward."""

from __future__ import annotations

import numpy as np

from search_spaces.columns import Columns, Floats
from search_spaces.memory.sizes import Sizes
from search_spaces.software import Software

LOSS_BYTES = {"unfused": 4, "native": 8, "te": 0, "torch": 12}
"""Bytes per logit that the loss holds beside the logits: one fp32 copy that becomes softmax and gradient in turn
(tensor_parallel/cross_entropy.py), two where compiled functions do not write into their input (fusions/fused_cross_entropy.py),
none in place (Transformer Engine, cross_entropy.py), or log-softmax and two gradients in fp32 (torch's cross_entropy)."""

PARALLEL_LOSS_BYTES = 4
"""The exponential that torch's loss makes besides where the vocabulary is sharded (torch.distributed.tensor.parallel.loss)."""


def head_working_bytes(columns: Columns, size: Sizes, software: Software) -> Floats:
    """The larger of two moments at the end of the model.

    The loss holds the logits in their own type and what `LOSS_BYTES` adds. The output layer's backward pass holds the logits'
    gradient and the weight's, which fused accumulation leaves empty but allocates. The buffer of the gathered input stays
    (tensor_parallel/layers.py LinearWithGradAccumulationAndAsyncCommunication, utils.py GlobalMemoryBuffer).
    """
    vocabulary = _vocabulary(columns)
    logits = size.tokens * vocabulary
    weight = vocabulary * size.hidden * size.element
    if software.cross_entropy == "chunked":
        return weight + _gathered(size)
    parallel = PARALLEL_LOSS_BYTES * (size.tp > 1) if software.cross_entropy == "torch" else 0
    loss = logits * (size.element + LOSS_BYTES[software.cross_entropy] + parallel)
    return np.maximum(loss, logits * size.element + weight) + _gathered(size)


def _vocabulary(columns: Columns) -> Floats:
    """Rows of the output matrix on a rank."""
    return columns.derive("tensor_model_parallel_size", columns.model.padded_vocab_size) / columns.tp


def _gathered(size: Sizes) -> Floats:
    """A whole sequence gathered from the sequence parallel ranks."""
    return np.where(size.sequence_parallel, size.tokens * size.hidden * size.element, 0.0)


def layer_working_bytes(size: Sizes, *, moe: bool) -> Floats:
    """Gradients alive while the widest part of a layer runs backward, less what it has freed.

    At the activation function these are the gradients of its output and input and of the residual stream, while the input of the
    second product is already free.
    """
    model = size.model
    gated = 2 if model.swiglu else 1
    width = model.ffn_size / size.tp
    tokens = size.tokens
    if moe:
        width, tokens = model.expert_ffn_size / size.etp, size.routed
    gradients = tokens * width * (size.element * (gated + 1) - size.stored)
    permuted = 2 * size.routed * size.hidden * size.element if moe else 0.0
    return gradients + 2 * size.local * size.hidden * size.element + _gathered(size) + permuted


def dummy_gradient_bytes(size: Sizes, software: Software, *, moe: bool) -> Floats:
    """One empty weight gradient per shape, kept by Transformer Engine with fused accumulation (module/base.py get_dummy_wgrad)."""
    if not (software.gradient_accumulation_fusion and software.transformer_engine):
        return 0.0 * size.element
    model = size.model
    gated = 2 if model.swiglu else 1
    attention = size.hidden * (size.query + size.keys + size.values + size.query)
    if model.multi_latent_attention:
        latents = model.kv_lora_rank * size.heads * (model.qk_head_dim + model.v_head_dim) + size.values * size.hidden
        latents = latents + size.hidden * (model.kv_lora_rank + model.qk_pos_emb_head_dim)
        rank = model.q_lora_rank
        attention = latents + (rank * (size.hidden + size.query) if rank else size.hidden * size.query)
    width = model.ffn_size / size.tp
    if moe:
        shared = (model.moe_shared_expert_intermediate_size or 0) / size.tp
        width = model.expert_ffn_size / size.etp + shared
    return size.element * (attention + size.hidden * width * (gated + 1))


def overlap_bytes(columns: Columns, size: Sizes) -> Floats:
    """Buffers of communication: what a pipeline rank receives, forward and backward (pipeline_parallel/p2p_communication.py)."""
    return np.where(columns.pp > 1, 2 * size.local * size.hidden * size.element, 0.0)
