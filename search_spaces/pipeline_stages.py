"""Pipeline stages: how many layers of each kind a stage holds, for every way in which a table cuts the model.

A pipeline has few different stages (first, middle, last, a remainder), so a table keeps one entry per *kind* of stage and how
often it occurs, never one per stage.
"""

from __future__ import annotations

from collections import Counter
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from search_spaces.columns import Columns
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

    numbers: npt.NDArray[np.float64]
    rows: npt.NDArray[np.intp]


def stage_table(columns: Columns) -> StageTable:
    """The kinds of stages of every row."""
    found = distinct(columns, PIPELINE_KNOBS)
    kinds = [Counter(stages(columns.model, split)) for split in _splits(found.columns, found.size)]
    most = max(len(counts) for counts in kinds)
    numbers = np.zeros((most, len(StageKind._fields) + 1, found.size))
    for position, counts in enumerate(kinds):
        for kind, (stage, times) in enumerate(counts.items()):
            numbers[kind, :, position] = (*stage, times)
    return StageTable(numbers, found.rows)


def _splits(columns: Columns, size: int) -> list[Split]:
    """The settings of each row of a small table."""
    layouts = columns.column("pipeline_model_parallel_layout")
    parts = [
        columns.pp,
        np.maximum(columns.vpp, 1),
        columns.number("decoder_first_pipeline_num_layers"),
        columns.number("decoder_last_pipeline_num_layers"),
        layouts.codes,
        columns.flag("account_for_embedding_in_pipeline_split"),
        columns.flag("account_for_loss_in_pipeline_split"),
    ]
    rows = np.stack([np.broadcast_to(part, (size,)) for part in parts], axis=1).tolist()
    return [
        Split(int(pp), int(vpp), int(first), int(last), layouts.values[code], bool(e), bool(loss))
        for pp, vpp, first, last, code, e, loss in rows
    ]


@lru_cache(maxsize=4096)
def stages(model: ModelSpec, split: Split) -> tuple[StageKind, ...]:
    """What every pipeline rank holds (Megatron's get_num_layers_to_build and get_transformer_layer_offset)."""
    mtp = model.mtp_num_layers or 0
    if split.layout is not None:
        chunks = parse_layout(split.layout).stages
        counts = [chunk.count("t") for chunk in chunks]
        heads = [("E" in chunk, "L" in chunk, chunk.count("m")) for chunk in chunks]
    else:
        counts = _chunks(model.num_layers, split)
        last = len(counts) - 1
        heads = [(position == 0, position == last, mtp if position == last else 0) for position in range(len(counts))]
    flags, layer = model.moe_layers, 0
    held = [StageKind(0, 0, 0, 0, 0)] * split.pp
    for position, count in enumerate(counts):
        moe = sum(flags[layer : layer + count])
        layer += count
        embedding, head, extra = heads[position]
        new = (count - moe, moe, int(embedding), int(head), extra)
        rank = position % split.pp
        held[rank] = StageKind(*(old + more for old, more in zip(held[rank], new, strict=True)))
    return tuple(held)


def _chunks(layers: int, split: Split) -> list[int]:
    """Layers of every chunk in the order of the model; what does not divide goes to the first stages."""
    ends = {0: split.first} if split.first else {}
    if split.last:
        ends[split.pp - 1] = split.last
    units = layers + int(split.embedding_counts) + int(split.loss_counts) - sum(ends.values())
    others = [rank for rank in range(split.pp) if rank not in ends] or [0]
    per_rank = dict(ends)
    for place, rank in enumerate(others):
        per_rank[rank] = per_rank.get(rank, 0) + units // len(others) + int(place < units % len(others))
    chunks = [
        per_rank[rank] // split.vpp + int(chunk < per_rank[rank] % split.vpp)
        for chunk in range(split.vpp)
        for rank in range(split.pp)
    ]
    chunks[0] -= int(split.embedding_counts)
    chunks[-1] -= int(split.loss_counts)
    return chunks
