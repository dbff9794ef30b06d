"""What a GPU holds besides tensors: CUDA's context, NCCL's buffers, and memory that the allocator keeps unused."""

from __future__ import annotations

import numpy as np

from search_spaces.columns import Columns, Floats
from search_spaces.distinct import distinct

CONTEXT_GIB = 0.6
"""CUDA context with loaded software, outside torch's allocator: 0.4 to 0.7 GiB (PyTorch documentation, CUDA semantics, memory)."""

NCCL_GIB_PER_GROUP = 0.2
"""Buffers of one NCCL communicator: 4 MiB for each of up to 24 channels and 2 directions (NCCL user guide, NCCL_BUFFSIZE)."""

FRAGMENTATION = 0.02
"""Reserved but unused share of what is allocated, expected."""

FRAGMENTATION_UPPER = 0.03
"""The same, at most, where activations are freed in the order in which they came."""

FRAGMENTATION_UPPER_INTERLEAVED = 0.35
"""The same with the interleaved schedule and fixed segments, where micro-batches of several chunks are freed between others: runs
with 59 GiB allocated fail on 80 GB boards and run with expandable segments (Megatron-Bridge). At most what comes and goes."""

FRAGMENTATION_UPPER_EXPANDABLE = 0.03
"""The same with PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True (PyTorch documentation, CUDA semantics, memory)."""

MODEL_ERROR_UPPER = 0.03
"""This model's own error on allocated bytes, from published peaks (docs/memory.md)."""

KNOBS = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "context_parallel_size",
    "expert_model_parallel_size",
    "num_virtual_stages_per_pipeline_rank",
    "pipeline_model_parallel_layout",
    "environment",
)


def outside(columns: Columns) -> tuple[Floats, Floats]:
    """GiB that torch's allocator does not know of, and the share that it may hold unused at most."""
    found = distinct(columns, KNOBS)
    own = found.columns
    groups = sum((ranks > 1).astype(float) for ranks in (own.tp, own.pp, own.cp, own.ep, own.dp))
    cuda = own.workload.device == "cuda"
    context = (CONTEXT_GIB + NCCL_GIB_PER_GROUP * groups) * cuda
    expandable = own.where("environment", lambda values: any("expandable_segments:True" in value for _, value in values))
    fixed = np.where(own.vpp > 1, FRAGMENTATION_UPPER_INTERLEAVED, FRAGMENTATION_UPPER)
    margin = np.where(expandable, FRAGMENTATION_UPPER_EXPANDABLE, fixed)
    rows = found.spread(len(columns))
    return np.broadcast_to(context, (found.size,))[rows], np.broadcast_to(margin, (found.size,))[rows]
