"""Pipeline stages: how many layers of each kind a stage holds, for every way in which a table cuts the model.

A cut is asked for in two forms: chunk by chunk (`chunks`; memory needs to know which layers are in flight), and as kinds of stages
(`stage_table`; step time needs what a stage holds). A pipeline has few different stages (first, middle, last, a remainder), so a
table keeps one entry per *kind* of stage and how often it occurs, never one per stage.
"""

from __future__ import annotations

from collections import Counter
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from search_spaces.columns import Columns, Floats, Ints, Places
from search_spaces.distinct import distinct
from search_spaces.layout import parse_layout
from search_spaces.model import ModelSpec

PIPELINE_KNOBS = (
    "pipeline_model_parallel_size",
    "num_virtual_stages_per_pipeline_rank",
    "num_layers_per_virtual_pipeline_stage",
    "decoder_first_pipeline_num_layers",
    "decoder_last_pipeline_num_layers",
    "pipeline_model_parallel_layout",
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
)


class StageKind(NamedTuple):
    """What one stage (one pipeline rank, all of its chunks) holds."""

    dense: int
    moe: int
    embedding: int
    head: int
    mtp: int


class Chunk(NamedTuple):
    """What one virtual stage holds.

    Attributes:
        layers: Whether each of its layers has experts.
        embedding: Whether it has the embedding.
        loss: Whether it has the output layer and the loss.
        norm: Whether it has the final norm.
        mtp: Multi-token prediction layers.
    """

    layers: tuple[bool, ...]
    embedding: bool
    loss: bool
    norm: bool
    mtp: int


class Split(NamedTuple):
    """One way of cutting the model: the settings that decide it."""

    pp: int
    vpp: int
    first: int
    last: int
    layout: str | None
    embedding_counts: bool
    loss_counts: bool


class StageTable(NamedTuple):
    """Kinds of stages by row: `numbers[kind, field, split[row]]`, fields as in `StageKind`, then how often the kind occurs."""

    numbers: Floats
    rows: Places


def stage_table(columns: Columns) -> StageTable:
    """The kinds of stages of every row."""
    found = distinct(columns, PIPELINE_KNOBS)
    kinds = [Counter(stages(columns.model, split)) for split in splits(found.columns)]
    most = max(len(counts) for counts in kinds)
    numbers = np.zeros((most, len(StageKind._fields) + 1, found.size))
    for position, counts in enumerate(kinds):
        for kind, (stage, times) in enumerate(counts.items()):
            numbers[kind, :, position] = (*stage, times)
    return StageTable(numbers, found.rows)


def splits(columns: Columns) -> list[Split]:
    """The settings of each row of a small table."""
    layouts = columns.column("pipeline_model_parallel_layout")
    parts = [
        columns.pp,
        chunks_per_rank(columns),
        columns.number("decoder_first_pipeline_num_layers"),
        columns.number("decoder_last_pipeline_num_layers"),
        layouts.codes,
        columns.flag("account_for_embedding_in_pipeline_split"),
        columns.flag("account_for_loss_in_pipeline_split"),
    ]
    rows = np.stack([np.broadcast_to(part, (len(columns),)) for part in parts], axis=1).tolist()
    return [Split(pp, vpp, first, last, layouts.values[code], bool(e), bool(loss)) for pp, vpp, first, last, code, e, loss in rows]


def chunks_per_rank(columns: Columns) -> Ints:
    """Model chunks of a pipeline rank, 1 without interleaving; also where they are given as layers per chunk (validate_args)."""
    per_chunk = columns.number("num_layers_per_virtual_pipeline_stage")
    by_layers = np.where(per_chunk > 0, columns.model.num_layers // np.maximum(columns.pp * per_chunk, 1), 0)
    return np.where(columns.pp > 1, np.maximum(np.maximum(columns.vpp, by_layers), 1), 1)


@lru_cache(maxsize=4096)
def stages(model: ModelSpec, split: Split) -> tuple[StageKind, ...]:
    """What every pipeline rank holds."""
    held = [StageKind(0, 0, 0, 0, 0)] * split.pp
    for position, chunk in enumerate(chunks(model, split)):
        moe = sum(chunk.layers)
        new = (len(chunk.layers) - moe, moe, int(chunk.embedding), int(chunk.loss), chunk.mtp)
        rank = position % split.pp
        held[rank] = StageKind(*(old + more for old, more in zip(held[rank], new, strict=True)))
    return tuple(held)


@lru_cache(maxsize=4096)
def chunks(model: ModelSpec, split: Split) -> tuple[Chunk, ...]:
    """Virtual stages in the order of the layers (transformer_block.py get_num_layers_to_build, get_transformer_layer_offset)."""
    kinds, end = model.moe_layers, split.pp * split.vpp - 1
    if split.layout is not None:
        texts = parse_layout(split.layout).stages
        counts, mtp, end = [text.count("t") for text in texts], [text.count("m") for text in texts], len(texts) - 1
    else:
        counts, mtp = _layer_counts(model.num_layers, split), [0] * end + [model.mtp_num_layers or 0]
    starts = list(accumulate(counts, initial=0))
    # With prediction layers the final norm follows the last decoder layer (transformer_block.py has_final_layernorm_in_this_stage).
    norm = max(place for place, count in enumerate(counts) if count) if model.mtp_num_layers else end
    return tuple(
        Chunk(kinds[starts[place] : starts[place + 1]], place == 0, place == end, place == norm, mtp[place])
        for place in range(end + 1)
    )


def _layer_counts(layers: int, split: Split) -> list[int]:
    """Layers of every chunk in the order of the model; what does not divide goes to the first stages."""
    ends = {0: split.first} if split.first else {}
    if split.last:
        ends[split.pp - 1] = split.last
    units = layers + int(split.embedding_counts) + int(split.loss_counts) - sum(ends.values())
    others = [rank for rank in range(split.pp) if rank not in ends] or [0]
    per_rank = dict(ends)
    for place, rank in enumerate(others):
        per_rank[rank] = per_rank.get(rank, 0) + units // len(others) + int(place < units % len(others))
    counts = [
        per_rank[rank] // split.vpp + int(chunk < per_rank[rank] % split.vpp)
        for chunk in range(split.vpp)
        for rank in range(split.pp)
    ]
    counts[0] -= int(split.embedding_counts)
    counts[-1] -= int(split.loss_counts)
    return counts
