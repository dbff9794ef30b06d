"""Memory per GPU of every candidate, before a GPU is used: by pipeline stage and component, with an upper bound.

`estimate` answers for a whole table at once; a single configuration is a table of one row (`Columns.of`). The bytes of a stage
are counts of what it holds and has in flight (`stages`) times bytes per unit (`tables`).
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from search_spaces.columns import Columns
from search_spaces.memory import sizes, stages, states
from search_spaces.memory.factor import project
from search_spaces.memory.kernels import (
    CONTEXT_GIB,
    FRAGMENTATION,
    FRAGMENTATION_UPPER,
    FRAGMENTATION_UPPER_EXPANDABLE,
    FRAGMENTATION_UPPER_INTERLEAVED,
    GIB,
    MODEL_ERROR_UPPER,
    NCCL_GIB_PER_GROUP,
    Kernels,
)
from search_spaces.memory.stages import Pipeline, fullest_counts
from search_spaces.memory.table import MemoryTable, Parts, Verdict
from search_spaces.memory.tables import COMPONENTS, HELD_ALWAYS, MOMENTS, ON_HOST, flowing_bytes, held_bytes

__all__ = ["COMPONENTS", "Kernels", "MemoryTable", "Verdict", "estimate"]

Floats = npt.NDArray[np.float64]
Codes = npt.NDArray[np.intp]


def estimate(columns: Columns, kernels: Kernels | None = None) -> MemoryTable:
    """The memory of every row.

    Args:
        columns: Configurations of one workload; they should be legal.
        kernels: The software of the run; none = what the workload's device gets by default.
    """
    kernels = kernels or Kernels.of(columns.workload)
    held, flowing = project(columns, states.KNOBS), project(columns, sizes.KNOBS)
    cut = project(columns, stages.KNOBS)
    pipelines, places = stages.pipelines(cut.columns)
    codes = np.broadcast_to(places, (cut.size,))[cut.codes]
    held_parts = Parts(held_bytes(held.columns, kernels, held.size), held.codes)
    flowing_parts = Parts(flowing_bytes(flowing.columns, kernels, flowing.size), flowing.codes)
    memory, stage, passing = _fullest(columns, pipelines, codes, held_parts, flowing_parts)
    highest = memory
    if columns.model.is_moe and not kernels.balanced_experts:
        uneven = Parts(flowing_bytes(flowing.columns, kernels, flowing.size, upper=True), flowing.codes)
        highest, _, passing = _fullest(columns, pipelines, codes, held_parts, uneven)
    context, margin = _outside(columns)
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
    columns: Columns, pipelines: list[Pipeline], codes: Codes, held: Parts, flowing: Parts
) -> tuple[Floats, Codes, Floats]:
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


def _host(columns: Columns, pipelines: list[Pipeline], codes: Codes, held: Parts) -> Floats:
    """GiB that a rank keeps in the host's memory, on the stage that keeps most."""
    offloaded, found = _sum(held, ON_HOST), np.zeros(len(codes))
    if offloaded.any():
        for place, rows in _groups(codes, len(pipelines)):
            counts, _ = fullest_counts(columns.model, pipelines[place])
            found[rows] = _times(offloaded, counts, held.codes[rows]).max(axis=1)
    return found


def _times(table: Floats, counts: Floats, rows: Codes) -> Floats:
    """Rows of table x counts; products that no row needs are left out."""
    return np.asarray(table[rows] @ counts if len(rows) < len(table) else (table @ counts)[rows])


def _sum(parts: Parts, moment: npt.NDArray[np.bool_]) -> Floats:
    """GiB per feature of the components that there are at a moment, (combinations, features)."""
    return np.asarray(parts.bytes[:, moment].sum(axis=1) / GIB)


def _groups(codes: Codes, count: int) -> Iterator[tuple[int, Codes]]:
    """Each code with its rows."""
    order = np.argsort(codes, kind="stable")
    ends = np.cumsum(np.bincount(codes, minlength=count))
    for code, end in enumerate(ends):
        start = ends[code - 1] if code else 0
        if end > start:
            yield code, order[start:end]


_OUTSIDE_KNOBS = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "context_parallel_size",
    "expert_model_parallel_size",
    "num_virtual_stages_per_pipeline_rank",
    "pipeline_model_parallel_layout",
    "environment",
)


def _outside(columns: Columns) -> tuple[Floats, Floats]:
    """GiB that torch's allocator does not know of, and the share that it may hold unused at most."""
    factor = project(columns, _OUTSIDE_KNOBS)
    own = factor.columns
    groups = sum((ranks > 1).astype(float) for ranks in (own.tp, own.pp, own.cp, own.ep, own.dp))
    cuda = own.workload.device == "cuda"
    context = (CONTEXT_GIB + NCCL_GIB_PER_GROUP * groups) * cuda
    expandable = own.where("environment", lambda values: any("expandable_segments:True" in value for _, value in values))
    fixed = np.where(own.vpp > 1, FRAGMENTATION_UPPER_INTERLEAVED, FRAGMENTATION_UPPER)
    margin = np.where(expandable, FRAGMENTATION_UPPER_EXPANDABLE, fixed)
    length = (factor.size,)
    return np.broadcast_to(context, length)[factor.codes], np.broadcast_to(margin, length)[factor.codes]
