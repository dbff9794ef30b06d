"""Seconds of an experts' block (mixture of experts) by kind of work, for one micro-batch on one rank.

Tokens, permutation and dispatch as in Megatron-Core's MoE layer (token_dispatcher.py): every rank of the attention mesh sends its
tokens, split over TP, to the ranks that hold the chosen experts, and gets them back.
"""

from __future__ import annotations

import numpy as np

from search_spaces.columns import Bools
from search_spaces.kernels import Floats, linear
from search_spaces.layer_time import mlp_piece
from search_spaces.parameters import feed_forward_weights
from search_spaces.work import Piece, Shapes, Work, work

_LAUNCHES = 150.0  # routing, sorting, exchange and their bookkeeping, one direction


def expert_piece(s: Shapes, attention: Floats) -> Piece:
    """Norm, router, dispatch, experts, combine, shared experts, residual.

    Args:
        s: The shapes.
        attention: Seconds of the attention block, mean of both directions; the exchange of another micro-batch can run beside it.
    """
    own = s.tokens / s.tp
    routed = own * s.model.moe_router_topk * s.columns.etp * _load(s)
    grouped = s.columns.flag("moe_grouped_gemm")
    products = _products(s, routed, grouped)
    routing = _routing(s, own, routed)
    around = s.moved(s.tokens * s.model.hidden_size * 5.5 / s.split)
    middle = s.moved(routed * s.model.expert_ffn_size / s.columns.etp * (3.0 if s.model.swiglu else 2.0))
    casts = s.casts(routed * (s.model.hidden_size + s.model.expert_ffn_size / s.columns.etp))
    weights = (s.model.num_experts or 1) / s.columns.ep * feed_forward_weights(s.model, s.model.expert_ffn_size, s.columns.etp)
    exchange = _exposed(s, _exchange(s, own, routed), attention + (products[0] + products[1]) / 2.0)
    kernels = _launches(s, grouped)
    ahead = work(gemm=products[0], elementwise=around + middle + casts, routing=routing, ep=exchange, host=s.host(kernels))
    back = work(
        gemm=products[1],
        elementwise=1.5 * (around + middle + casts) + s.accumulation(weights),
        routing=routing,
        ep=exchange,
        host=s.host(1.3 * kernels),
    )
    again = ahead.times(s.recompute_full | s.recomputes("moe"))
    again = again.plus(work(elementwise=middle).times(s.recomputes("moe_act")))
    piece = Piece(ahead, back, again.plus(work(elementwise=0.35 * around).times(s.recomputes("layernorm"))))
    return piece.plus(_shared(s, exchange)) if s.model.moe_shared_expert_intermediate_size else piece


def _launches(s: Shapes, grouped: Bools) -> Floats:
    """Launches of one direction; grouped products and their casts are launched from C++, a fraction of Python's for each expert."""
    local = (s.model.num_experts or 1) / s.columns.ep
    return np.asarray(_LAUNCHES + local * np.where(grouped, 1.0 + s.low, 8.0 + 12.0 * s.low))


def _load(s: Shapes) -> Floats:
    """Tokens of the busiest rank over the mean: the capacity's where experts are padded to it, else the routing's imbalance."""
    capacity = s.columns.column("moe_expert_capacity_factor")
    factors = np.array([value if value else np.inf for value in capacity.values])[capacity.codes]
    imbalance = 1.0 if s.balanced else s.machine.coefficients.imbalance
    load = np.minimum(np.where(s.columns.ep > 1, imbalance, 1.0), factors)
    return np.asarray(np.where(s.columns.flag("moe_pad_expert_input_to_capacity") & np.isfinite(factors), factors, load))


def _products(s: Shapes, routed: Floats, grouped: Bools) -> tuple[Floats, Floats]:
    """Seconds of the experts' products, forward and backward: one grouped launch, or one launch for each local expert."""
    experts = (s.model.num_experts or 1) / s.columns.ep
    tokens, ffn = routed / experts, s.model.expert_ffn_size / s.columns.etp
    wide = 2 if s.model.swiglu else 1
    together, repeats = np.where(grouped, experts, 1.0), np.where(grouped, 1.0, experts)
    up = linear(s.machine, s.rate, tokens, s.model.hidden_size, wide * ffn, together)
    down = linear(s.machine, s.rate, tokens, ffn, s.model.hidden_size, together)
    return (up[0] + down[0]) * repeats, (up[1] + up[2] + down[1] + down[2]) * repeats


def _routing(s: Shapes, own: Floats, routed: Floats) -> Floats:
    """Seconds of the router and of sorting tokens by expert and back.

    Two reads and writes on both sides of the exchange; flex dispatchers sort while they send, which leaves one side.
    """
    experts, hidden = s.model.num_experts or 1, s.model.hidden_size
    router = 2.0 * own * hidden * experts / s.machine.gemm_rate(np.bool_(False), np.bool_(True))
    scores = own * experts * 4.0 * 8.0 / s.machine.bandwidth
    passes = np.where(s.columns.equals("moe_token_dispatcher_type", "flex"), 4.0, 8.0)
    return router + scores + s.moved(passes * routed * hidden)


def _exchange(s: Shapes, own: Floats, routed: Floats) -> Floats:
    """Seconds of dispatch and combine in one direction of the pass."""
    c = s.columns
    etp, ep = c.etp.astype(np.float64), c.ep.astype(np.float64)
    group, inner = s.group(ep, etp), s.group(etp, 1.0)
    token = s.model.hidden_size * s.element
    size = routed / etp * token
    copies = group.exchange(size)
    once = group.exchange(size * _once(group.size, s.model.moe_router_topk), size * _once(group.spans, s.model.moe_router_topk))
    flex = c.equals("moe_token_dispatcher_type", "flex")
    all_to_all = 2.0 * np.where(flex, once, copies) + np.where(etp > 1, 2.0 * inner.gather(routed * token), 0.0)
    gather = 2.0 * s.group(ep * etp, 1.0).gather(own * ep * etp * token)
    seconds = np.where(c.equals("moe_token_dispatcher_type", "allgather"), gather, all_to_all)
    return np.where(ep * etp > 1, seconds, 0.0)


def _once(places: Floats, topk: int) -> Floats:
    """Distinct places over the copies of a token whose `topk` experts fall evenly on them: flex dispatchers send once to each."""
    return np.asarray(places * (1.0 - (1.0 - 1.0 / places) ** topk) / topk)


def _exposed(s: Shapes, exchange: Floats, beside: Floats) -> Floats:
    """Seconds of dispatch and combine that nothing hides."""
    hidden = s.machine.coefficients.overlap * np.minimum(exchange, beside)
    return np.where(s.columns.flag("overlap_moe_expert_parallel_comm"), exchange - hidden, exchange)


def _shared(s: Shapes, exchange: Floats) -> Piece:
    """Shared experts; beside the exchange where that overlap is on."""
    piece = mlp_piece(s, s.model.moe_shared_expert_intermediate_size or 0, shared=True)
    overlapped = s.columns.flag("moe_shared_expert_overlap")

    def left(part: Work) -> Work:
        hidden = s.machine.coefficients.overlap * np.minimum(exchange, part.gemm)
        return part._replace(gemm=part.gemm - np.where(overlapped, hidden, 0.0))

    return Piece(left(piece.forward), left(piece.backward), piece.again)
