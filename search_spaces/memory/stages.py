"""What each pipeline stage holds, and how many micro-batches of it are in flight: the part of memory that the schedule decides.

A stage is described by counts of `FEATURES`; bytes per feature come from the other modules. Stages that another stage exceeds in
every count can never be the fullest and are left out where only the fullest is asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from search_spaces.columns import Columns, Floats, Places
from search_spaces.distinct import distinct, distinct_rows
from search_spaces.model import ModelSpec
from search_spaces.pipeline_stages import PIPELINE_KNOBS, Chunk, Split, chunks, chunks_per_rank, splits

FEATURES = (
    "one",
    "dense_layers",
    "moe_layers",
    "embeddings",
    "outputs",
    "last",
    "final_norms",
    "mtp_layers",
    "dense_in_flight",
    "moe_in_flight",
    "inputs_in_flight",
    "embeddings_in_flight",
    "mtp_in_flight",
    "work_dense",
    "work_moe",
    "work_both",
    "head_dense",
    "head_moe",
    "head_both",
)
"""Counts that describe a stage: what it holds (one of everything, layers, embedding and output matrices, the loss, the final norm,
MTP layers), what of it is in flight (layers kept whole, layers of which only the input is kept, embeddings, MTP layers), and,
exactly one of six, which working set it needs (layers with or without experts or both, with or without the loss)."""

INDEX = {name: place for place, name in enumerate(FEATURES)}

KNOBS = (
    *PIPELINE_KNOBS,
    "tensor_model_parallel_size",
    "context_parallel_size",
    "micro_batch_size",
    "microbatch_group_size_per_virtual_pipeline_stage",
    "recompute_granularity",
    "recompute_method",
    "recompute_num_layers",
    "cpu_offloading_num_layers",
    "overlap_moe_expert_parallel_comm",
)

NOTHING, UNIFORM, BLOCK = 0, 1, 2


class Pipeline(NamedTuple):
    """One way to cut a model into stages and to run micro-batches through them.

    Attributes:
        split: How the model is cut.
        micro_batches: Micro-batches per step.
        group: Micro-batches that a chunk runs in a row.
        recompute: NOTHING, or whole layers in UNIFORM units or in a BLOCK at the start of each chunk.
        recompute_layers: Layers per recomputed unit or per chunk.
        offloaded: Layers whose activations go to the host.
        extra_warm_up: Micro-batches in flight beyond the schedule's own.
    """

    split: Split
    micro_batches: int
    group: int
    recompute: int
    recompute_layers: int
    offloaded: int
    extra_warm_up: int


def pipelines(columns: Columns) -> tuple[list[Pipeline], Places]:
    """The distinct pipelines of a table, and which of them each row has; one place where all rows are alike."""
    table = distinct(columns, KNOBS)
    cut = distinct(table.columns, PIPELINE_KNOBS)
    fields = [np.broadcast_to(field, (table.size,)) for field in (cut.rows, *_schedule(table.columns))]
    first, places = distinct_rows(fields)
    cuts = splits(cut.columns)
    found = [Pipeline(cuts[place], *rest) for place, *rest in np.stack(fields, axis=1)[first].tolist()]
    return found, places[table.rows]


def _schedule(columns: Columns) -> list[Any]:
    """The fields of `Pipeline` after the split, one array each."""
    pp, chunk_count = columns.pp, chunks_per_rank(columns)
    group = columns.number("microbatch_group_size_per_virtual_pipeline_stage")
    group = np.where((group > 0) & (chunk_count > 1), group, pp)
    most = np.where(chunk_count > 1, chunk_count * group + 2 * pp + group, pp)
    full = columns.equals("recompute_granularity", "full")
    return [
        np.minimum(np.maximum(columns.micro_batches, 1), most),
        group,
        np.where(full, np.where(columns.equals("recompute_method", "block"), BLOCK, UNIFORM), NOTHING),
        np.where(full, np.maximum(columns.number("recompute_num_layers"), 1), 1),
        columns.number("cpu_offloading_num_layers"),
        columns.flag("overlap_moe_expert_parallel_comm"),
    ]


@lru_cache(maxsize=65536)
def stage_counts(model: ModelSpec, pipeline: Pipeline) -> Floats:
    """Counts of every feature in every stage, (features, stages)."""
    held, pp = chunks(model, pipeline.split), pipeline.split.pp
    columns = [_stage(model, pipeline, held[stage::pp], in_flight(pipeline, stage), stage) for stage in range(pp)]
    return np.stack(columns, axis=1)


@lru_cache(maxsize=65536)
def fullest_counts(model: ModelSpec, pipeline: Pipeline) -> tuple[Floats, tuple[int, ...]]:
    """Counts of the stages that may be the fullest, and which stages they are."""
    counts = stage_counts(model, pipeline)
    kept: list[int] = []
    for stage in range(counts.shape[1]):
        if not any((counts[:, other] >= counts[:, stage]).all() for other in kept):
            kept.append(stage)
    return np.ascontiguousarray(counts[:, kept]), tuple(kept)


def in_flight(pipeline: Pipeline, stage: int) -> list[int]:
    """Forward passes of each chunk whose activations a stage holds at most (pipeline_parallel/schedules.py).

    Without interleaving a stage runs PP - stage - 1 forward passes before its first backward pass; with it, twice as many and
    those of all chunks but one (get_pp_rank_microbatches, get_schedule_table).
    """
    pp, per_rank, group = pipeline.split.pp, pipeline.split.vpp, pipeline.group
    if pp == 1:
        return [1]
    ahead = pp - stage - 1
    if per_rank == 1:
        return [min(pipeline.micro_batches, ahead + 1 + pipeline.extra_warm_up)]
    total = pipeline.micro_batches * per_rank
    warm = 2 * ahead + (per_rank - 1) * group + pipeline.extra_warm_up
    forward = np.arange(min(warm + 1, total))
    block = forward // (group * per_rank)
    size = np.minimum(group, pipeline.micro_batches - block * group)
    chunk = (forward - block * group * per_rank) // np.maximum(size, 1)
    counts: list[int] = np.bincount(chunk, minlength=per_rank).tolist()
    return counts


def _stage(model: ModelSpec, pipeline: Pipeline, own: Sequence[Chunk], flights: list[int], stage: int) -> Floats:
    """The counts of one stage."""
    counts = np.zeros(len(FEATURES))
    counts[INDEX["one"]] = 1
    for chunk, flying in zip(own, flights, strict=True):
        moe, dense = sum(chunk.layers), len(chunk.layers) - sum(chunk.layers)
        counts[INDEX["moe_layers"]] += moe
        counts[INDEX["dense_layers"]] += dense
        counts[INDEX["mtp_layers"]] += chunk.mtp
        counts[INDEX["embeddings"]] += chunk.embedding or (chunk.mtp > 0 and stage > 0)
        counts[INDEX["embeddings_in_flight"]] += chunk.embedding * flying
        counts[INDEX["last"]] += chunk.loss
        counts[INDEX["final_norms"]] += chunk.norm
        untied = model.untie_embeddings_and_output_weights
        counts[INDEX["outputs"]] += chunk.loss and (untied or pipeline.split.pp > 1)
        counts[INDEX["mtp_in_flight"]] += chunk.mtp * flying
        kept, inputs = _kept(pipeline, chunk.layers)
        counts[INDEX["moe_in_flight"]] += sum(kept) * flying
        counts[INDEX["dense_in_flight"]] += (len(kept) - sum(kept)) * flying
        counts[INDEX["inputs_in_flight"]] += inputs * flying
    _choose_working_set(model, counts)
    return counts


def _kept(pipeline: Pipeline, layers: tuple[bool, ...]) -> tuple[tuple[bool, ...], int]:
    """Layers kept whole, and how many inputs of recomputed units (transformer_block.py _checkpointed_forward)."""
    if pipeline.recompute == UNIFORM:
        return (), -(-len(layers) // pipeline.recompute_layers)
    if pipeline.recompute == BLOCK:
        return layers[pipeline.recompute_layers :], min(pipeline.recompute_layers, len(layers))
    return layers[min(pipeline.offloaded, len(layers)) :], 0


def _choose_working_set(model: ModelSpec, counts: Floats) -> None:
    """Mark the one working set that the stage needs at its fullest moment."""
    moe = counts[INDEX["moe_layers"]] + (counts[INDEX["mtp_layers"]] if model.moe_layers[-1] else 0) > 0
    dense = counts[INDEX["dense_layers"]] > 0
    where = "head" if counts[INDEX["last"]] else "work"
    kind = "both" if moe and dense else "moe" if moe else "dense"
    counts[INDEX[f"{where}_{kind}"]] = 1
