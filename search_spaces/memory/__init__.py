"""Memory per GPU of every candidate, before a GPU is used: by pipeline stage and component, with an upper bound.

`estimate` answers for a whole table at once; a single configuration is a table of one row (`Columns.of`). The bytes of a stage
are counts of what it holds and has in flight (`stages`) times bytes per unit (`tables`).
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from search_spaces.columns import Bools, Columns, Floats, Places
from search_spaces.distinct import distinct
from search_spaces.memory import outside, sizes, stages, states
from search_spaces.memory.outside import FRAGMENTATION, MODEL_ERROR_UPPER
from search_spaces.memory.stages import Pipeline, fullest_counts
from search_spaces.memory.table import MemoryTable, Parts, Verdict
from search_spaces.memory.tables import COMPONENTS, GIB, HELD_ALWAYS, MOMENTS, ON_HOST, flowing_bytes, held_bytes
from search_spaces.software import Software

__all__ = ["COMPONENTS", "KNOBS", "MemoryTable", "Software", "Verdict", "estimate"]

KNOBS = tuple(dict.fromkeys((*states.KNOBS, *sizes.KNOBS, *stages.KNOBS, *outside.KNOBS)))
"""Knobs that memory depends on."""


def estimate(columns: Columns, software: Software | None = None) -> MemoryTable:
    """The memory of every row.

    Args:
        columns: Configurations of one workload; they should be legal.
        software: The software of the run; none = what the workload's device gets by default.
    """
    found = distinct(columns, KNOBS)
    return _estimate(found.columns, software or Software.of(columns.workload)).take(found.spread(len(columns)))


def _estimate(columns: Columns, software: Software) -> MemoryTable:
    """The memory of every row, all of them different."""
    held, flowing = distinct(columns, states.KNOBS), distinct(columns, sizes.KNOBS)
    pipelines, places = stages.pipelines(columns)
    codes = np.broadcast_to(places, (len(columns),))
    held_parts = Parts(held_bytes(held.columns, software), held.spread(len(columns)))
    flowing_parts = Parts(flowing_bytes(flowing.columns, software), flowing.spread(len(columns)))
    memory, stage, passing = _fullest(columns, pipelines, codes, held_parts, flowing_parts)
    highest = memory
    if columns.model.is_moe and not software.balanced_experts:
        uneven = Parts(flowing_bytes(flowing.columns, software, upper=True), flowing_parts.codes)
        highest, _, passing = _fullest(columns, pipelines, codes, held_parts, uneven)
    context, margin = outside.outside(columns)
    return MemoryTable(
        memory_gib=memory,
        device_gib=memory * (1 + FRAGMENTATION) + context,
        upper_gib=highest * (1 + MODEL_ERROR_UPPER) + np.minimum(highest * margin, passing) + context,
        stage=stage,
        host_gib=_host(columns, pipelines, codes, held_parts),
        context_gib=context,
        _model=columns.model,
        _pipelines=pipelines,
        _pipeline_codes=codes,
        _held=held_parts,
        _flowing=flowing_parts,
    )


def _fullest(
    columns: Columns, pipelines: list[Pipeline], codes: Places, held: Parts, flowing: Parts
) -> tuple[Floats, Places, Floats]:
    """Allocated GiB on the fullest stage of each row, that stage, and how much of it is not held all the time."""
    moments = [(_sum(held, moment), _sum(flowing, moment)) for moment in MOMENTS]
    steady = _sum(held, HELD_ALWAYS)
    memory, stage, passing = np.empty(len(codes)), np.empty(len(codes), dtype=np.intp), np.empty(len(codes))
    for place, rows in _groups(codes, len(pipelines)):
        counts, kept = fullest_counts(columns.model, pipelines[place])
        own_held, own_flowing = held.codes[rows], flowing.codes[rows]
        by_moment = [_times(still, counts, own_held) + _times(moving, counts, own_flowing) for still, moving in moments]
        by_stage = np.maximum(*by_moment)
        top = by_stage.argmax(axis=1)
        every = np.arange(len(top))
        memory[rows] = by_stage[every, top]
        stage[rows] = np.array(kept)[top]
        passing[rows] = memory[rows] - _times(steady, counts, own_held)[every, top]
    return memory, stage, passing


def _host(columns: Columns, pipelines: list[Pipeline], codes: Places, held: Parts) -> Floats:
    """GiB that a rank keeps in the host's memory, on the stage that keeps most."""
    offloaded, found = _sum(held, ON_HOST), np.zeros(len(codes))
    if offloaded.any():
        for place, rows in _groups(codes, len(pipelines)):
            counts, _ = fullest_counts(columns.model, pipelines[place])
            found[rows] = _times(offloaded, counts, held.codes[rows]).max(axis=1)
    return found


def _times(table: Floats, counts: Floats, rows: Places) -> Floats:
    """Rows of table x counts; products that no row needs are left out."""
    return np.asarray(table[rows] @ counts if len(rows) < len(table) else (table @ counts)[rows])


def _sum(parts: Parts, moment: Bools) -> Floats:
    """GiB per feature of the components that there are at a moment, (combinations, features)."""
    return np.asarray(sum(parts.bytes[place] for place in np.flatnonzero(moment)) / GIB)


def _groups(codes: Places, count: int) -> Iterator[tuple[int, Places]]:
    """Each code with its rows."""
    order = np.argsort(codes, kind="stable")
    ends = np.cumsum(np.bincount(codes, minlength=count))
    for code, end in enumerate(ends):
        start = ends[code - 1] if code else 0
        if end > start:
            yield code, order[start:end]
