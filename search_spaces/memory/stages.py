"""What each pipeline stage holds, and how many micro-batches of it are in flight: the part of memory that the schedule decides.

A stage is described by counts of `FEATURES`; bytes per feature come from the other modules. Stages that another stage exceeds in
every count can never be the fullest and are left out where only the fullest is asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from search_spaces.columns import Columns, Ints
from search_spaces.layout import parse_layout
from search_spaces.memory.factor import distinct_rows, rows_of
from search_spaces.model import ModelSpec

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
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "context_parallel_size",
    "micro_batch_size",
    "num_virtual_stages_per_pipeline_rank",
    "num_layers_per_virtual_pipeline_stage",
    "microbatch_group_size_per_virtual_pipeline_stage",
    "decoder_first_pipeline_num_layers",
    "decoder_last_pipeline_num_layers",
    "pipeline_model_parallel_layout",
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
    "recompute_granularity",
    "recompute_method",
    "recompute_num_layers",
    "cpu_offloading_num_layers",
    "overlap_moe_expert_parallel_comm",
)

NOTHING, UNIFORM, BLOCK = 0, 1, 2

Counts = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Pipeline:
    """One way to cut a model into stages and to run micro-batches through them.

    Attributes:
        stages: Pipeline ranks.
        chunks: Model chunks per rank.
        micro_batches: Micro-batches per step.
        group: Micro-batches that a chunk runs in a row.
        layout: The pattern of layers; none = by the counts below.
        first: Layers of the first stage; 0 = even.
        last: Layers of the last stage; 0 = even.
        embedding_counts: 1 where the embedding counts as a layer.
        loss_counts: 1 where the loss counts as a layer.
        recompute: NOTHING, or whole layers in UNIFORM units or in a BLOCK at the start of each chunk.
        recompute_layers: Layers per recomputed unit or per chunk.
        offloaded: Layers whose activations go to the host.
        extra_warm_up: Micro-batches in flight beyond the schedule's own.
    """

    stages: int
    chunks: int
    micro_batches: int
    group: int
    layout: str | None
    first: int
    last: int
    embedding_counts: int
    loss_counts: int
    recompute: int
    recompute_layers: int
    offloaded: int
    extra_warm_up: int


def pipelines(columns: Columns) -> tuple[list[Pipeline], Ints]:
    """The distinct pipelines of a table, and which of them each row has."""
    layout = columns.column("pipeline_model_parallel_layout")
    length = (rows_of(columns),)
    spread = {name: np.broadcast_to(field, length) for name, field in _fields(columns).items()}
    layouts = np.broadcast_to(layout.codes, length)
    first, codes = distinct_rows([layouts, *spread.values()])
    found = []
    for row in first:
        numbers = {name: int(field[row]) for name, field in spread.items()}
        found.append(Pipeline(layout=layout.values[layouts[row]], **numbers))
    return found, codes


def _fields(columns: Columns) -> dict[str, Any]:
    """The fields of `Pipeline` that are whole numbers, one array each."""
    pp, per_chunk = columns.pp, columns.number("num_layers_per_virtual_pipeline_stage")
    by_layers = np.where(per_chunk > 0, columns.model.num_layers // np.maximum(pp * per_chunk, 1), 0)
    chunks = np.where(pp > 1, np.maximum(np.maximum(columns.vpp, by_layers), 1), 1)
    group = columns.number("microbatch_group_size_per_virtual_pipeline_stage")
    group = np.where((group > 0) & (chunks > 1), group, pp)
    most = np.where(chunks > 1, chunks * group + 2 * pp + group, pp)
    full = columns.equals("recompute_granularity", "full")
    method = np.where(full, np.where(columns.equals("recompute_method", "block"), BLOCK, UNIFORM), NOTHING)
    return {
        "stages": pp,
        "chunks": chunks,
        "micro_batches": np.minimum(np.maximum(columns.micro_batches, 1), most),
        "group": group,
        "first": columns.number("decoder_first_pipeline_num_layers"),
        "last": columns.number("decoder_last_pipeline_num_layers"),
        "embedding_counts": columns.flag("account_for_embedding_in_pipeline_split"),
        "loss_counts": columns.flag("account_for_loss_in_pipeline_split"),
        "recompute": method,
        "recompute_layers": np.where(full, np.maximum(columns.number("recompute_num_layers"), 1), 1),
        "offloaded": columns.number("cpu_offloading_num_layers"),
        "extra_warm_up": columns.flag("overlap_moe_expert_parallel_comm"),
    }


@lru_cache(maxsize=65536)
def stage_counts(model: ModelSpec, pipeline: Pipeline) -> Counts:
    """Counts of every feature in every stage, (features, stages)."""
    chunks = virtual_stages(model, pipeline)
    counts = np.zeros((len(FEATURES), pipeline.stages))
    for stage in range(pipeline.stages):
        own = chunks[stage :: pipeline.stages]
        counts[:, stage] = _stage(model, pipeline, own, in_flight(pipeline, stage), stage)
    return counts


@lru_cache(maxsize=65536)
def fullest_counts(model: ModelSpec, pipeline: Pipeline) -> tuple[Counts, tuple[int, ...]]:
    """Counts of the stages that may be the fullest, and which stages they are."""
    counts = stage_counts(model, pipeline)
    kept: list[int] = []
    for stage in range(counts.shape[1]):
        if not any((counts[:, other] >= counts[:, stage]).all() for other in kept):
            kept.append(stage)
    return np.ascontiguousarray(counts[:, kept]), tuple(kept)


@dataclass(frozen=True, slots=True)
class Chunk:
    """The layers of one virtual stage: whether each has experts; and what else it holds."""

    layers: tuple[bool, ...]
    embedding: bool
    loss: bool
    norm: bool
    mtp: int


def virtual_stages(model: ModelSpec, pipeline: Pipeline) -> list[Chunk]:
    """The model chunks in the order of the layers (transformer_block.py get_num_layers_to_build, get_transformer_layer_offset)."""
    kinds, total = model.moe_layers, pipeline.stages * pipeline.chunks
    if pipeline.layout is not None:
        stages = parse_layout(pipeline.layout).stages
        sizes, mtp = [text.count("t") for text in stages], [text.count("m") for text in stages]
    else:
        sizes, mtp = _sizes(model, pipeline), [0] * total
        mtp[-1] = model.mtp_num_layers or 0
    starts = np.cumsum([0, *sizes]).tolist()
    # With prediction layers the final norm follows the last decoder layer (transformer_block.py has_final_layernorm_in_this_stage).
    norm = max(place for place, count in enumerate(sizes) if count) if model.mtp_num_layers else total - 1
    return [
        Chunk(kinds[starts[place] : starts[place + 1]], place == 0, place == total - 1, place == norm, mtp[place])
        for place in range(total)
    ]


def _sizes(model: ModelSpec, pipeline: Pipeline) -> list[int]:
    """Layers of each virtual stage without a layout."""
    pp, vpp = pipeline.stages, pipeline.chunks
    if pipeline.first or pipeline.last:
        middle = pp - bool(pipeline.first) - bool(pipeline.last)
        rest = model.num_layers - pipeline.first - pipeline.last
        per_rank = [rest // max(middle, 1)] * pp
        per_rank[0] = pipeline.first or per_rank[0]
        per_rank[-1] = pipeline.last or per_rank[-1]
        return [per_rank[place % pp] // vpp for place in range(pp * vpp)]
    sizes = [(model.num_layers + pipeline.embedding_counts + pipeline.loss_counts) // (pp * vpp)] * (pp * vpp)
    sizes[0] -= pipeline.embedding_counts
    sizes[-1] -= pipeline.loss_counts
    return sizes


def in_flight(pipeline: Pipeline, stage: int) -> list[int]:
    """Forward passes of each chunk whose activations a stage holds at most (pipeline_parallel/schedules.py).

    Without interleaving a stage runs PP - stage - 1 forward passes before its first backward pass; with it, twice as many and
    those of all chunks but one (get_pp_rank_microbatches, get_schedule_table).
    """
    if pipeline.stages == 1:
        return [1]
    ahead = pipeline.stages - stage - 1
    if pipeline.chunks == 1:
        return [min(pipeline.micro_batches, ahead + 1 + pipeline.extra_warm_up)]
    total = pipeline.micro_batches * pipeline.chunks
    warm = 2 * ahead + (pipeline.chunks - 1) * pipeline.group + pipeline.extra_warm_up
    forward = np.arange(min(warm + 1, total))
    block = forward // (pipeline.group * pipeline.chunks)
    size = np.minimum(pipeline.group, pipeline.micro_batches - block * pipeline.group)
    chunk = (forward - block * pipeline.group * pipeline.chunks) // np.maximum(size, 1)
    counts: list[int] = np.bincount(chunk, minlength=pipeline.chunks).tolist()
    return counts


def _stage(model: ModelSpec, pipeline: Pipeline, chunks: Sequence[Chunk], flights: list[int], stage: int) -> Counts:
    """The counts of one stage."""
    counts = np.zeros(len(FEATURES))
    counts[INDEX["one"]] = 1
    for chunk, flying in zip(chunks, flights, strict=True):
        moe, dense = sum(chunk.layers), len(chunk.layers) - sum(chunk.layers)
        counts[INDEX["moe_layers"]] += moe
        counts[INDEX["dense_layers"]] += dense
        counts[INDEX["mtp_layers"]] += chunk.mtp
        counts[INDEX["embeddings"]] += chunk.embedding or (chunk.mtp > 0 and stage > 0)
        counts[INDEX["embeddings_in_flight"]] += chunk.embedding * flying
        counts[INDEX["last"]] += chunk.loss
        counts[INDEX["final_norms"]] += chunk.norm
        untied = model.untie_embeddings_and_output_weights
        counts[INDEX["outputs"]] += chunk.loss and (untied or pipeline.stages > 1)
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


def _choose_working_set(model: ModelSpec, counts: Counts) -> None:
    """Mark the one working set that the stage needs at its fullest moment."""
    moe = counts[INDEX["moe_layers"]] + (counts[INDEX["mtp_layers"]] if model.moe_layers[-1] else 0) > 0
    dense = counts[INDEX["dense_layers"]] > 0
    where = "head" if counts[INDEX["last"]] else "work"
    kind = "both" if moe and dense else "moe" if moe else "dense"
    counts[INDEX[f"{where}_{kind}"]] = 1
