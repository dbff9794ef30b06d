"""Seconds of a training step by part, for every row of a table of candidates. No GPU, no torch.

A layer's seconds are worked out once per combination of the knobs that decide them (`layer_time`, `expert_time`), then a step is
put together per row: the slowest stage runs all micro-batches, the others' fill and drain is the bubble (1F1B: Narayanan et al.
2021, section 2.2; interleaving divides it by the chunks), and the step's ends follow (`step_ends`). The same code serves one
configuration: a table of one row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from search_spaces.coefficients import Coefficients
from search_spaces.columns import Bools, Columns
from search_spaces.distinct import distinct
from search_spaces.expert_time import expert_piece
from search_spaces.gpus import GpuSpec, Links
from search_spaces.kernels import Floats, Machine
from search_spaces.layer_time import attention_piece, embedding_piece, head_piece, mlp_piece
from search_spaces.model import ModelSpec
from search_spaces.pipeline_stages import StageKind, stage_table
from search_spaces.step_parts import Finish, finish
from search_spaces.work import LAYER_KNOBS, NONE, Piece, Shapes, work

PARTS = (
    "gemm",
    "attention",
    "elementwise",
    "moe_routing",
    "tp_comm",
    "cp_comm",
    "ep_comm",
    "launch",
    "recompute",
    "pp_comm",
    "dp_comm",
    "bubble",
    "optimizer",
    "offload",
    "overhead",
)
KINDS = len(StageKind._fields)


@dataclass(frozen=True, slots=True)
class TimeTable:
    """Seconds of a step of every row.

    Attributes:
        parts: Seconds by part (`PARTS`), arrays of length `rows` or 1; they add up to `step_time_s`.
        hidden_s: Seconds of communication that run beside compute, not part of the sum.
        step_time_s: Seconds of one optimiser step, length `rows`.
        micro_batches: Micro-batches of one replica, length `rows` or 1.
        tokens: Tokens of one micro-batch on one rank, length `rows` or 1.
        stages: Pipeline stages, length `rows` or 1.
        machine: The device that was assumed.
    """

    parts: dict[str, Floats]
    hidden_s: Floats
    step_time_s: Floats
    micro_batches: Floats
    tokens: Floats
    stages: Floats
    machine: Machine

    def row(self, row: int) -> dict[str, float]:
        """One row's seconds by part."""
        return {name: float(part[row if len(part) > 1 else 0]) for name, part in self.parts.items()}


def estimate(
    columns: Columns,
    gpu: GpuSpec,
    links: Links,
    coefficients: Coefficients,
    routing: Literal["balanced", "real"] = "balanced",
) -> TimeTable:
    """Seconds of a step of every row of a table.

    Args:
        columns: Candidates of one workload (`Columns.of(workload, config)` for one).
        gpu: The device.
        links: How the devices are joined.
        coefficients: What real kernels reach on it (`coefficients.shipped(gpu.name)`, or a refit).
        routing: Whether experts get equal shares (forced balance, as in benchmarks) or the router's own.
    """
    machine = Machine(gpu, links, coefficients)
    seconds, again, rows = layer_seconds(machine, columns, routing == "balanced")
    ends: Finish = finish(machine, columns, stage_table(columns), seconds, again, rows)
    return TimeTable(
        parts=dict(zip(PARTS, ends.parts, strict=True)),
        hidden_s=ends.hidden,
        step_time_s=sum(ends.parts, np.zeros(1)),
        micro_batches=ends.micro_batches,
        tokens=columns.mbs * columns.workload.seq_length / columns.cp,
        stages=columns.pp.astype(np.float64),
        machine=machine,
    )


def layer_seconds(machine: Machine, columns: Columns, balanced: bool) -> tuple[Floats, Floats, npt.NDArray[np.intp]]:
    """Seconds of one micro-batch in each kind of layer.

    Returns:
        Seconds [kind of layer, first eight parts, combination], seconds of recomputation [kind, combination], and the combination
        of each row.
    """
    found = distinct(columns, LAYER_KNOBS)
    shapes = Shapes.of(machine, found.columns, balanced)
    pieces = _pieces(shapes, columns.model)
    blocking = found.columns.variable("CUDA_LAUNCH_BLOCKING") == "1"
    seconds = np.zeros((KINDS, 8, found.size))
    again = np.zeros((KINDS, found.size))
    for kind, piece in enumerate(pieces):
        seconds[kind], again[kind] = _visible(piece, found.size, blocking)
    return seconds, again, found.rows


def _pieces(s: Shapes, model: ModelSpec) -> list[Piece]:
    """The kinds of layers in the order of `StageKind`."""
    nothing = Piece(NONE, NONE, NONE)
    attention = attention_piece(s)
    dense = attention.plus(mlp_piece(s, model.ffn_size)) if model.has_dense_layers else nothing
    moe = attention.plus(expert_piece(s, (attention.forward.device + attention.backward.device) / 2.0)) if model.is_moe else nothing
    head = head_piece(s)
    return [
        dense,
        moe,
        embedding_piece(s),
        head,
        (moe if model.moe_layers[-1] else dense).plus(head) if model.mtp_num_layers else nothing,
    ]


def _visible(piece: Piece, size: int, blocking: Bools) -> tuple[Floats, Floats]:
    """Device seconds by part, the host's where the device waits for it, and recomputation as one part."""
    both = piece.forward.plus(piece.backward)
    waits = piece.forward.waits(blocking) + piece.backward.waits(blocking)
    parts = np.stack([np.broadcast_to(part, (size,)) for part in (*both[:7], waits)])
    return parts, np.broadcast_to(piece.again.device + piece.again.waits(blocking), (size,))


__all__ = ["PARTS", "TimeTable", "estimate", "layer_seconds", "work"]
