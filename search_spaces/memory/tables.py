"""Bytes per unit of every feature of a stage: one table for what a rank holds, one for what a micro-batch adds.

The bytes of a stage are the sum over features of its count (`stages`) times these bytes; both tables keep the parts apart by
component.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from search_spaces.columns import Column, Columns, Floats, Ints
from search_spaces.memory import local_layer, working
from search_spaces.memory.layer import layer_bytes
from search_spaces.memory.sizes import Sizes, sizes
from search_spaces.memory.stages import FEATURES, INDEX
from search_spaces.memory.states import States, states
from search_spaces.parameters import RankParameters, rank_parameters
from search_spaces.software import Software

GIB = 2**30

CUBLAS_WORKSPACE_GIB = 0.07
"""What torch allocates besides tensors of the model: cuBLAS and Transformer Engine workspaces of 32 MiB each (Transformer Engine,
module/base.py get_cublas_workspace_size_bytes on architecture 9), masks and scalars."""

IMBALANCE_UPPER = 1.5
"""Tokens of the fullest expert rank over the mean where nothing balances them: measured peaks grow by 19 to 26 % over a run."""


COMPONENTS = (
    "weights",
    "gradients",
    "optimizer",
    "activations",
    "logits",
    "working",
    "communication",
    "workspace",
    "optimizer_step",
    "host",
)
"""Parts of what torch allocates. `working` is what one layer's backward pass needs for a moment, `optimizer_step` what the step
needs when there are no activations: a stage's peak has one or the other. `host` is memory of the host, not of the GPU."""

FP32 = 4.0
PLACE = {name: place for place, name in enumerate(COMPONENTS)}
MOMENTS = np.array(
    [
        [name not in {"optimizer_step", "host"} for name in COMPONENTS],
        [name not in {"activations", "logits", "working", "host"} for name in COMPONENTS],
    ]
)
"""Which components there are while activations are fullest, and while the optimiser steps, (2, components)."""


HELD_ALWAYS = np.array([name in {"weights", "gradients", "optimizer"} for name in COMPONENTS])
"""Which components are held all the time, (components,)."""

ON_HOST = np.array([name == "host" for name in COMPONENTS])
"""Which component is memory of the host, (components,)."""


def held_bytes(columns: Columns, software: Software) -> Floats:
    """Bytes of weights, gradients and optimiser state per feature, (components, rows, features)."""
    table = np.zeros((len(COMPONENTS), len(columns), len(FEATURES)))
    count = rank_parameters(columns, transformer_engine=software.transformer_engine)
    attention, expert = states(columns, software, experts=False), states(columns, software, experts=True)
    _hold(table, "dense_layers", count.dense_layer, attention, attention.weight)
    _hold(table, "moe_layers", count.moe_layer, attention, attention.weight)
    _hold(table, "moe_layers", count.experts, expert, expert.weight)
    _hold(table, "embeddings", count.embedding, attention, attention.plain_weight)
    _hold(table, "outputs", count.output, attention, attention.plain_weight)
    _hold(table, "final_norms", count.final_norm, attention, attention.plain_weight)
    _hold(table, "mtp_layers", count.mtp_layer, attention, attention.weight)
    _hold(table, "mtp_layers", count.mtp_experts, expert, expert.weight)
    table[PLACE["communication"], :, INDEX["one"]] = _gathered(columns, count, attention, expert)
    return table


def _hold(table: Floats, feature: str, count: Ints, state: States, weight: Floats) -> None:
    place = INDEX[feature]
    table[PLACE["weights"], :, place] += count * weight
    table[PLACE["gradients"], :, place] += count * state.gradient
    table[PLACE["optimizer"], :, place] += count * state.optimizer
    table[PLACE["optimizer_step"], :, place] += count * state.step
    table[PLACE["host"], :, place] += count * state.host


def _gathered(columns: Columns, count: RankParameters, attention: States, expert: States) -> Floats:
    """Whole parameters and gradients of the two largest units in use where FSDP shards them (fsdp/src, double buffers)."""
    moe = count.moe_layer * attention.unsharded + count.experts * expert.unsharded
    kinds = {False: count.dense_layer * attention.unsharded, True: moe}
    layer = np.max([kinds[kind] for kind in _kinds(columns)], axis=0)
    return np.asarray(np.maximum(2 * layer, layer + count.output * attention.unsharded))


def flowing_bytes(columns: Columns, software: Software, *, upper: bool = False) -> Floats:
    """Bytes of activations and of passing needs per feature, (components, rows, features).

    Args:
        columns: The table.
        software: The software.
        upper: Whether the fullest expert rank is meant, not the mean one.
    """
    size = sizes(columns)
    if upper and not software.balanced_experts:
        size = replace(size, routed=size.routed * IMBALANCE_UPPER)
    table = np.zeros((len(COMPONENTS), len(columns), len(FEATURES)))
    layer = {moe: _layer(columns, size, software, moe) for moe in _kinds(columns)}
    activations = table[PLACE["activations"]]
    activations[:, INDEX["dense_in_flight"]] = layer.get(False, 0.0)
    activations[:, INDEX["moe_in_flight"]] = layer.get(True, 0.0)
    activations[:, INDEX["inputs_in_flight"]] = _input(columns, size)
    activations[:, INDEX["embeddings_in_flight"]] = _embedding(size, software)
    activations[:, INDEX["mtp_in_flight"]] = _mtp(columns, size, software, layer[columns.model.moe_layers[-1]])
    activations[:, INDEX["last"]] = _head(columns, size, software)
    if not software.transformer_engine:
        activations[:, INDEX["one"]] = local_layer.angle_bytes(columns, size)
    table[PLACE["communication"], :, INDEX["one"]] = working.overlap_bytes(columns, size)
    table[PLACE["workspace"], :, INDEX["one"]] = CUBLAS_WORKSPACE_GIB * GIB if software.transformer_engine else 0.0
    _fill_working(table, columns, size, software)
    return table


def _kinds(columns: Columns) -> set[bool]:
    return set(columns.model.moe_layers)


def _layer(columns: Columns, size: Sizes, software: Software, moe: bool) -> Floats:
    if software.transformer_engine:
        return layer_bytes(columns, size, software, moe=moe)
    return local_layer.local_layer_bytes(columns, size, moe=moe)


def _input(columns: Columns, size: Sizes) -> Floats:
    """The input of a recomputed unit, sharded where saved activations are distributed (tensor_parallel/random.py)."""
    shards = np.where(columns.flag("distribute_saved_activations"), size.tp, 1)
    return size.local * size.hidden * size.element / shards


def _embedding(size: Sizes, software: Software) -> Floats:
    """Which tokens belong to other ranks' rows (tensor_parallel/layers.py VocabParallelEmbedding), and the dropout mask."""
    return np.where(size.tp > 1, 9.0 * size.tokens, 0.0) + (size.local * size.hidden if software.hidden_dropout else 0.0)


def _head(columns: Columns, size: Sizes, software: Software) -> Floats:
    """What is kept between the last layer and the loss, but for the logits where they are only passing."""
    if not software.transformer_engine:
        vocabulary = columns.derive("tensor_model_parallel_size", columns.model.padded_vocab_size) / size.tp
        return local_layer.head_bytes(size, vocabulary)
    return 2 * size.local * size.hidden * size.element


def _mtp(columns: Columns, size: Sizes, software: Software, layer: Floats) -> Floats:
    """A prediction layer: a layer, both its inputs and their norms, and a head (transformer/multi_token_prediction.py)."""
    hidden = size.local * size.hidden * size.element
    logits = size.tokens * columns.derive("tensor_model_parallel_size", columns.model.padded_vocab_size) / size.tp
    kept = np.full_like(size.element, FP32)
    if software.cross_entropy in ("te", "chunked"):
        kept = size.element if software.cross_entropy == "te" else 0 * kept
    return layer + 6 * hidden + _head(columns, size, software) + (logits * kept if software.transformer_engine else 0.0)


def _fill_working(table: Floats, columns: Columns, size: Sizes, software: Software) -> None:
    """The working set at a stage's fullest moment: the loss, or the backward pass of a layer with what is recomputed for it."""
    if not software.transformer_engine:
        return
    need, dummy = {}, {}
    for moe in _kinds(columns):
        need[moe] = working.layer_working_bytes(size, moe=moe) + _rebuilt(columns, size, software, moe)
        dummy[moe] = working.dummy_gradient_bytes(size, software, moe=moe)
    head = working.head_working_bytes(columns, size, software)
    both = np.maximum(need.get(False, 0.0), need.get(True, 0.0))
    for kind, work, empty in (
        ("dense", need.get(False, 0.0), dummy.get(False, 0.0)),
        ("moe", need.get(True, 0.0), dummy.get(True, 0.0)),
        ("both", both, np.maximum(dummy.get(False, 0.0), dummy.get(True, 0.0))),
    ):
        table[PLACE["workspace"], :, INDEX[f"work_{kind}"]] = empty
        table[PLACE["workspace"], :, INDEX[f"head_{kind}"]] = empty
        table[PLACE["working"], :, INDEX[f"work_{kind}"]] = work
        table[PLACE["logits"], :, INDEX[f"head_{kind}"]] = np.where(head >= work, head, 0.0)
        table[PLACE["working"], :, INDEX[f"head_{kind}"]] = np.where(head >= work, 0.0, work)


def _rebuilt(columns: Columns, size: Sizes, software: Software, moe: bool) -> Floats:
    """What recomputation brings back while one unit runs backward: whole layers, or the recomputed modules of one."""
    kept_whole = {**columns.columns, "recompute_granularity": Column((None,), np.zeros(1, dtype=np.intp))}
    whole = _layer(columns.with_columns(kept_whole), size, software, moe)
    full = columns.equals("recompute_granularity", "full")
    uniform = columns.equals("recompute_method", "uniform")
    per_unit = np.where(uniform, np.maximum(columns.number("recompute_num_layers"), 1), 1)
    modules = whole - _layer(columns, size, software, moe)
    return np.where(full, whole * np.minimum(per_unit, columns.model.num_layers), modules)
