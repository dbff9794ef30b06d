"""Heads, feed-forward width and sequence against the ranks that share them."""

from __future__ import annotations

import numpy as np

from search_spaces.columns import Columns
from search_spaces.rules.base import Finding, Rule, always, finding, near_divisors, near_multiples_or_divisors


def heads_over_tensor_ranks(c: Columns) -> Finding:
    """Attention heads divide among the tensor ranks (transformer_config.py TransformerConfig.__post_init__)."""
    heads = c.model.num_attention_heads
    return finding(
        heads % c.tp,
        "num_attention_heads={heads} is not divisible by tensor_model_parallel_size={tp}; nearest: {legal}",
        heads=heads,
        tp=c.tp,
        legal=near_divisors(heads, c.tp),
    )


def query_groups_over_tensor_ranks(c: Columns) -> Finding:
    """TP is a multiple or a divisor of the query groups (transformer_config.py TransformerConfig.__post_init__)."""
    groups = c.model.query_groups
    return finding(
        np.minimum(groups % c.tp, c.tp % groups),
        "num_query_groups={groups} is neither a multiple nor a divisor of tensor_model_parallel_size={tp}; nearest: {legal}",
        groups=groups,
        tp=c.tp,
        legal=near_multiples_or_divisors(groups, c.tp),
    )


def ffn_over_tensor_ranks(c: Columns) -> Finding:
    """Dense feed-forward width divides among the tensor ranks (tensor_parallel/layers.py RowParallelLinear, utils.divide)."""
    ffn = c.model.ffn_size if c.model.has_dense_layers else 0
    return finding(
        ffn % c.tp,
        "ffn_hidden_size={ffn} is not divisible by tensor_model_parallel_size={tp}; nearest: {legal}",
        ffn=ffn,
        tp=c.tp,
        legal=near_divisors(ffn, c.tp),
    )


def expert_ffn_over_expert_tensor_ranks(c: Columns) -> Finding:
    """Each expert's width divides among the expert tensor ranks (moe/experts.py, tensor_parallel/layers.py, utils.divide)."""
    ffn = c.model.expert_ffn_size if c.model.num_experts else 0
    return finding(
        ffn % c.etp,
        "moe_ffn_hidden_size={ffn} is not divisible by expert_tensor_parallel_size={etp}; nearest: {legal}",
        ffn=ffn,
        etp=c.etp,
        legal=near_divisors(ffn, c.etp),
    )


def shared_expert_over_tensor_ranks(c: Columns) -> Finding:
    """The shared experts' width divides among the tensor ranks (moe/shared_experts.py SharedExpertMLP, utils.divide)."""
    ffn = (c.model.moe_shared_expert_intermediate_size or 0) if c.model.num_experts else 0
    return finding(
        ffn % c.tp,
        "moe_shared_expert_intermediate_size={ffn} is not divisible by tensor_model_parallel_size={tp}; nearest: {legal}",
        ffn=ffn,
        tp=c.tp,
        legal=near_divisors(ffn, c.tp),
    )


def position_table(c: Columns) -> Finding:
    """Positions cover the sequence (arguments.py validate_args); none = as many as the sequence."""
    positions, seq = c.model.max_position_embeddings, c.workload.seq_length
    return always(
        positions is not None and positions < seq,
        "max_position_embeddings={positions} is less than seq_length={seq}",
        positions=positions,
        seq=seq,
    )


def sequence_over_context_ranks(c: Columns) -> Finding:
    """Sequences are cut into 2 x CP chunks (arguments.py validate_args)."""
    seq = c.workload.seq_length
    return finding(
        np.where(c.cp > 1, seq % (2 * c.cp), 0),
        "seq_length={seq} is not divisible by 2 x context_parallel_size={cp}; nearest 2 x context: {legal}",
        seq=seq,
        cp=c.cp,
        legal=near_divisors(seq, 2 * c.cp),
    )


def sequence_over_tensor_ranks(c: Columns) -> Finding:
    """With SP a context rank's tokens divide among the tensor ranks (tensor_parallel/mappings.py _split_along_first_dim)."""
    local = c.workload.seq_length // c.cp
    return finding(
        np.where(c.sp, local % c.tp, 0),
        "sequence_parallel: seq_length={seq} / context_parallel_size={cp} = {local} tokens are not divisible by"
        " tensor_model_parallel_size={tp}; nearest: {legal}",
        seq=c.workload.seq_length,
        cp=c.cp,
        local=local,
        tp=c.tp,
        legal=near_divisors(local, c.tp),
    )


def tensor_overlap_needs_sequence_parallel(c: Columns) -> Finding:
    """tp_comm_overlap overlaps the collectives of SP (arguments.py validate_args)."""
    return finding(
        c.flag("tp_comm_overlap") & ~c.sp,
        "tp_comm_overlap needs sequence_parallel with tensor_model_parallel_size > 1 (it is {tp})",
        tp=c.tp,
    )


def hierarchical_context_sizes(c: Columns) -> Finding:
    """The levels of hierarchical CP multiply to CP (arguments.py validate_args)."""
    knob = "hierarchical_context_parallel_sizes"
    product = c.derive(knob, lambda sizes: int(np.prod(sizes)) if sizes else 0)
    return finding(
        (product > 0) & (product != c.cp),
        "hierarchical_context_parallel_sizes multiply to {product}, not to context_parallel_size={cp}",
        product=product,
        cp=c.cp,
    )


def hierarchical_context_needed(c: Columns) -> Finding:
    """cp_comm_type a2a+p2p needs the sizes of its levels (arguments.py validate_args)."""
    return finding(
        c.holds("cp_comm_type", "a2a+p2p") & ~c.given("hierarchical_context_parallel_sizes"),
        "cp_comm_type=a2a+p2p needs hierarchical_context_parallel_sizes whose product is context_parallel_size={cp}",
        cp=c.cp,
    )


def context_exchange_per_layer(c: Columns) -> Finding:
    """cp_comm_type is one for all layers or one per layer (transformer_config.py TransformerConfig.__post_init__)."""
    layers = c.model.num_layers
    entries = c.derive("cp_comm_type", lambda kinds: len(kinds) if kinds else 1)
    return finding(
        (c.cp > 1) & (entries != 1) & (entries != layers),
        "cp_comm_type has {entries} entries; legal: 1, or one for each of num_layers={layers}",
        entries=entries,
        layers=layers,
    )


def latent_attention_excludes_groups(c: Columns) -> Finding:
    """Multi-latent attention has no query groups (arguments.py validate_args)."""
    model = c.model
    grouped = model.multi_latent_attention and model.num_query_groups is not None
    return always(
        grouped,
        "multi_latent_attention excludes num_query_groups={groups}; drop one of them",
        groups=model.num_query_groups,
    )


RULES: tuple[Rule, ...] = (
    heads_over_tensor_ranks,
    query_groups_over_tensor_ranks,
    ffn_over_tensor_ranks,
    expert_ffn_over_expert_tensor_ranks,
    shared_expert_over_tensor_ranks,
    position_table,
    sequence_over_context_ranks,
    sequence_over_tensor_ranks,
    tensor_overlap_needs_sequence_parallel,
    hierarchical_context_sizes,
    hierarchical_context_needed,
    context_exchange_per_layer,
    latent_attention_excludes_groups,
)
