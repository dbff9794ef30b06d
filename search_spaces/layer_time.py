"""Seconds of a dense transformer layer, the embedding and the head, by kind of work, for one micro-batch on one rank.

Products as in Narayanan et al. 2021 (SC21, appendix); element-wise bytes counted per kernel of Megatron's fused layers; tensor,
sequence and context parallel exchanges as in Korthikanti et al. 2022 and Megatron's context parallel guide.
"""

from __future__ import annotations

import numpy as np

from search_spaces.kernels import OLD_FLASH, Floats, fused_attention, linear, softmax_apart, unfused_attention
from search_spaces.parameters import attention_weights, feed_forward_weights
from search_spaces.software import FLASH_ATTENTION_ARCH
from search_spaces.work import NONE, Piece, Shapes, Work, work

_BACKWARD_HOST = 1.3  # launches of the backward pass come from C++: more kernels, less time for each


def attention_piece(s: Shapes) -> Piece:
    """The attention block: norm, projections, core attention, residual."""
    model = s.model
    first, ups, last = _projections(s)
    core_forward, core_backward, core_host = _core(s)
    around = s.moved(s.tokens * model.hidden_size * 5.5 / s.split)
    rope = s.moved(s.tokens * 2.0 * (model.num_attention_heads + model.query_groups) * _head(s)[0] / s.tp)
    rope = rope * float(model.position_embedding_type == "rope")
    forward = [first[0] + ups[0] + last[0], *_gradients(first, ups, last)]
    casts = s.casts(s.tokens * (model.hidden_size / s.split + model.num_attention_heads * _head(s)[1] / s.tp))
    cp_forward, cp_backward = _context(s, core_forward)
    ahead = work(
        gemm=forward[0],
        attention=core_forward,
        elementwise=around + rope + casts,
        tp=s.tp_exposed(),
        cp=cp_forward,
        host=s.host(18.0 + core_host + s.tp_launches),
    )
    back = work(
        gemm=forward[1] + forward[2],
        attention=core_backward,
        elementwise=1.5 * (around + rope) + casts + s.accumulation(attention_weights(model, s.tp)),
        tp=s.tp_exposed_backward(first[1], first[2]),
        cp=cp_backward,
        host=s.host(_BACKWARD_HOST * (18.0 + core_host) + s.tp_launches),
    )
    core_again = work(attention=core_forward, host=s.host(core_host)).times(s.recomputes("core_attn"))
    up_again = work(gemm=ups[0], elementwise=rope).times(s.recomputes("mla_up_proj"))
    norm_again = work(elementwise=0.35 * around).times(s.recomputes("layernorm"))
    again = _whole(s, ahead).plus(core_again).plus(up_again).plus(norm_again)
    return Piece(ahead, back, again)


def mlp_piece(s: Shapes, ffn: int, shared: bool = False) -> Piece:
    """A dense MLP block: norm, two products, activation, residual; `shared` leaves out what the experts' block already has."""
    model = s.model
    wide = 2 if model.swiglu else 1
    up = linear(s.machine, s.rate, s.tokens, model.hidden_size, wide * ffn / s.tp)
    down = linear(s.machine, s.rate, s.tokens, ffn / s.tp, model.hidden_size)
    around = s.moved(s.tokens * model.hidden_size * (0.0 if shared else 5.5) / s.split)
    middle = s.moved(s.tokens * ffn / s.tp * (wide + 1.0))
    casts = s.casts(s.tokens * (model.hidden_size / s.split + ffn / s.tp))
    back_casts = s.casts(s.tokens * (model.hidden_size / s.split + wide * ffn / s.tp))
    kernels = 7.0 if shared else 14.0
    ahead = work(gemm=up[0] + down[0], elementwise=around + middle + casts, tp=s.tp_exposed(), host=s.host(kernels + s.tp_launches))
    back = work(
        gemm=up[1] + up[2] + down[1] + down[2],
        elementwise=1.5 * (around + middle) + back_casts + s.accumulation(feed_forward_weights(model, ffn, s.tp)),
        tp=s.tp_exposed_backward(up[1], up[2]),
        host=s.host(_BACKWARD_HOST * kernels + s.tp_launches),
    )
    module = "shared_experts" if shared else "mlp"
    again = _whole(s, ahead).plus(ahead.times(s.recomputes(module)))
    return Piece(ahead, back, again.plus(work(elementwise=0.35 * around).times(s.recomputes("layernorm"))))


def embedding_piece(s: Shapes) -> Piece:
    """The embedding: a look-up, and its exchange over the TP ranks."""
    seconds = s.moved(s.tokens * s.model.hidden_size * 3.0)
    ahead = work(elementwise=seconds, tp=s.tp_exchange() / np.where(s.split > 1, 2.0, 1.0), host=s.host(4.0))
    return Piece(ahead, work(elementwise=2.0 * seconds, host=s.host(4.0)), NONE)


def head_piece(s: Shapes) -> Piece:
    """The last norm, the logits' product and the vocabulary-parallel cross-entropy (16-bit logits, 32-bit passes over them)."""
    vocabulary = s.columns.derive("tensor_model_parallel_size", s.model.padded_vocab_size) / s.tp
    forward, dgrad, wgrad = linear(s.machine, _wide_rate(s), s.tokens, s.model.hidden_size, vocabulary)
    logits = s.tokens * vocabulary / s.machine.bandwidth
    small = np.where(s.tp > 1, 3.0 * s.group(s.tp, 1.0).reduce(4.0 * s.tokens), 0.0)
    gather = np.where(s.split > 1, s.tp_exchange() / 2.0, 0.0)
    ahead = work(gemm=forward, elementwise=14.0 * logits, tp=small + gather, host=s.host(15.0))
    main = s.accumulation(s.model.hidden_size * vocabulary)
    exposed = s.tp_exposed_backward(dgrad, wgrad, whole=False)
    back = work(gemm=dgrad + wgrad, elementwise=8.0 * logits + main, tp=exposed, host=s.host(10.0))
    return Piece(ahead, back, NONE)


def _whole(s: Shapes, forward: Work) -> Work:
    """The forward pass again where recomputation is full."""
    return forward.times(s.recompute_full)


def _wide_rate(s: Shapes) -> Floats:
    """The head stays in 16 bits when the layers run in 8."""
    nothing = np.bool_(False)
    return s.machine.gemm_rate(nothing, s.element > 2)


def _gradients(*products: tuple[Floats, Floats, Floats]) -> tuple[Floats, Floats]:
    """Seconds of the gradients of inputs and of weights."""
    return sum((p[1] for p in products), np.zeros(1)), sum((p[2] for p in products), np.zeros(1))


def _head(s: Shapes) -> tuple[int, int]:
    """Head dimension of queries and keys, and of values."""
    model = s.model
    if model.multi_latent_attention:
        return model.qk_head_dim + model.qk_pos_emb_head_dim, model.v_head_dim
    size = model.kv_channels or model.hidden_size // model.num_attention_heads
    return size, size


def _projections(s: Shapes) -> tuple[tuple[Floats, Floats, Floats], tuple[Floats, Floats, Floats], tuple[Floats, Floats, Floats]]:
    """Seconds (forward, input and weight gradient) of the products into attention, MLA's up-projections, the product out of it."""
    model, heads = s.model, s.model.num_attention_heads / s.tp
    qk, v = _head(s)

    def product(tokens: Floats, inner: Floats | int, outer: Floats | int) -> tuple[Floats, Floats, Floats]:
        return linear(s.machine, s.rate, tokens, inner, outer)

    last = product(s.tokens, heads * v, model.hidden_size)
    if not model.multi_latent_attention:
        keys = np.maximum(model.query_groups / s.tp, 1.0)
        zero = np.zeros(1)
        return product(s.tokens, model.hidden_size, (heads + 2 * keys) * qk), (zero, zero, zero), last
    down = product(s.tokens / s.split, model.hidden_size, model.kv_lora_rank + model.qk_pos_emb_head_dim)
    up = product(s.tokens, model.kv_lora_rank, heads * (model.qk_head_dim + v))
    if model.q_lora_rank is None:
        return _sum(down, product(s.tokens, model.hidden_size, heads * qk)), up, last
    down = _sum(down, product(s.tokens / s.split, model.hidden_size, model.q_lora_rank))
    return down, _sum(up, product(s.tokens, model.q_lora_rank, heads * qk)), last


def _sum(a: tuple[Floats, Floats, Floats], b: tuple[Floats, Floats, Floats]) -> tuple[Floats, Floats, Floats]:
    return a[0] + b[0], a[1] + b[1], a[2] + b[2]


def _core(s: Shapes) -> tuple[Floats, Floats, Floats]:
    """Seconds of core attention forward and backward, and its launches."""
    heads = s.model.num_attention_heads / s.tp
    qk, v = _head(s)
    hopper = s.machine.gpu.vendor == "nvidia" and "fp8" in s.machine.gpu.peak_tflops
    slow = np.where(s.columns.equals("attention_backend", "flash") & np.bool_(hopper), 1.0 / OLD_FLASH, 1.0)
    fused = [slow * seconds for seconds in fused_attention(s.machine, s.tokens, float(s.seq_length), heads, qk, v)]
    wide = _wide_rate(s)
    apart = softmax_apart(s.columns.mbs * heads, s.seq_length)
    plain = unfused_attention(s.machine, wide, s.tokens, float(s.seq_length), heads, qk, v, apart)
    old = s.columns.workload.settings.gpu_arch_major < FLASH_ATTENTION_ARCH
    stored = s.columns.equals("attention_backend", "unfused", "local") | np.bool_(old)
    return np.where(stored, plain[0], fused[0]), np.where(stored, plain[1], fused[1]), np.where(stored, 10.0 + 4.0 * apart, 3.0)


def _context(s: Shapes, beside: Floats) -> tuple[Floats, Floats]:
    """Seconds of context parallel exchange that attention does not hide, forward and backward."""
    cp = s.columns.cp.astype(np.float64)
    group = s.group(cp, s.tp)
    qk, v = _head(s)
    keys = s.tokens * np.maximum(s.model.query_groups / s.tp, 1.0) * (qk + v) * s.element
    both = keys + s.tokens * s.model.num_attention_heads / s.tp * (qk + v) * s.element
    ring, hidden = (cp - 1) * group.send(keys, float(s.machine.links.domain)), s.machine.coefficients.overlap
    left = ring - hidden * np.minimum(ring, beside)
    left_back = 2.0 * ring - hidden * np.minimum(2.0 * ring, 2.5 * beside)
    swap, gather = group.exchange(both), group.gather(keys * cp)
    used = [s.columns.holds("cp_comm_type", kind) for kind in ("a2a", "all_gather", "a2a+p2p")]
    forward = np.select(used, [swap, gather, swap], left)
    backward = np.select(used, [swap, 2.0 * gather, swap], left_back)
    return np.where(cp > 1, forward, 0.0), np.where(cp > 1, backward, 0.0)
