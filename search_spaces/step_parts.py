"""A step put together from its layers: slowest stage, hand-over between stages, bubble, step's ends. One array per part."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from search_spaces.columns import Bools, Columns
from search_spaces.communication import Group
from search_spaces.kernels import Floats, Machine
from search_spaces.pipeline_stages import StageKind, StageTable
from search_spaces.step_ends import SAVED_ELEMENTS, Ends, Parameters, StepEnds, held_parameters, step_ends

Rows = npt.NDArray[np.intp]


class Finish(NamedTuple):
    """Seconds by part in the order of `step_time.PARTS`, seconds of hidden communication, and micro-batches."""

    parts: list[Floats]
    hidden: Floats
    micro_batches: Floats


class _Slowest(NamedTuple):
    """The slowest stage: what it holds, its seconds per micro-batch, and all stages' seconds together."""

    holds: list[Floats]
    seconds: Floats
    all_stages: Floats


def finish(machine: Machine, columns: Columns, stages: StageTable, seconds: Floats, again: Floats, rows: Rows) -> Finish:
    """The step of every row.

    Args:
        machine: The device.
        columns: Candidates.
        stages: Kinds of stages by row.
        seconds: Seconds of one micro-batch [kind of layer, part, combination].
        again: Seconds of recomputation [kind of layer, combination].
        rows: Each row's combination.
    """
    count = np.maximum(columns.workload.global_batch_size / (columns.mbs * columns.dp), 1.0)
    hand_over = _hand_over(machine, columns)
    base = seconds.sum(axis=1)
    slow = _slowest(stages, base, again, rows, columns, hand_over)
    layer = [_weigh(slow.holds, seconds[:, part], rows) * count for part in range(seconds.shape[1])]
    share = _covered(columns, slow.holds[0] + slow.holds[1])
    recompute = _weigh(slow.holds, again, rows) * share * count
    chunks = np.maximum(columns.vpp, 1)
    bubble = (slow.all_stages - slow.seconds) / chunks
    own = machine.coefficients
    schedule = own.micro_batch_ms * 1e-3 * count * np.where(columns.pp > 1, chunks, 1)
    ends = step_ends(machine, columns)
    dp, hidden, update, host = _ends_of(machine, columns, stages, ends, slow, count)
    offload = host + _activations(machine, columns, slow, count)
    overhead = np.asarray(own.step_ms * 1e-3) + schedule
    parts = [*layer, recompute, hand_over * count, dp, bubble, update, offload, overhead]
    return Finish(parts, hidden, count)


def _weigh(holds: list[Floats], table: Floats, rows: Rows) -> Floats:
    """Sum over the kinds of layers of how many the stage holds x the table's value for the row."""
    total: Floats = np.zeros(1)
    for kind, number in enumerate(holds):
        if table[kind].any():
            total = total + number * table[kind].take(rows)
    return total


def _hand_over(machine: Machine, columns: Columns) -> Floats:
    """Seconds per micro-batch for sending activations on and gradients back (slices with sequence parallelism, else all).

    The links are full duplex: 1F1B sends one way while it receives the other (Megatron-Core's send_forward_recv_backward), so that
    the two messages of a micro-batch take the time of one.
    """
    workload, overlap = columns.workload, machine.coefficients.overlap
    stride = np.where(columns.flag("use_tp_pp_dp_mapping"), columns.tp * columns.cp, workload.world_size // columns.pp)
    size = columns.mbs * workload.seq_length / columns.cp * workload.model.hidden_size * 2.0 / np.where(columns.sp, columns.tp, 1)
    send = Group.of(machine, columns.pp.astype(np.float64), stride).send(size, np.minimum(stride, machine.links.domain))
    chunks = np.maximum(columns.vpp, 1)
    hidden = np.where((chunks > 1) & columns.flag("overlap_p2p_comm"), overlap, 0.0)
    return send * chunks * (1.0 - hidden)


def _slowest(stages: StageTable, base: Floats, again: Floats, rows: Rows, columns: Columns, hand_over: Floats) -> _Slowest:
    """The slowest stage of every row."""
    kinds = len(StageKind._fields)
    holds: list[Floats] = [np.zeros(1)] * kinds
    longest, together = np.full(1, -1.0), np.zeros(1)
    for numbers in stages.numbers:
        fields = [numbers[field].take(stages.rows) for field in range(kinds)]
        times = numbers[kinds].take(stages.rows)
        share = _covered(columns, fields[0] + fields[1])
        mine = _weigh(fields, base, rows) + _weigh(fields, again, rows) * share + hand_over
        mine = np.where(times > 0, mine, 0.0)
        together = together + mine * times
        longer = mine > longest
        holds = [np.where(longer, new, old) for new, old in zip(fields, holds, strict=True)]
        longest = np.maximum(mine, longest)
    return _Slowest(holds, longest, together)


def _covered(columns: Columns, layers: Floats) -> Floats:
    """Share of a stage's layers that recomputation covers: all, or the stated number per chunk (method block)."""
    block = columns.equals("recompute_method", "block") & columns.equals("recompute_granularity", "full")
    if not block.any():
        return np.ones(1)
    covered = columns.number("recompute_num_layers") * np.maximum(columns.vpp, 1)
    return np.where(block, np.minimum(covered / np.maximum(layers, 1.0), 1.0), 1.0)


def _ends_of(
    machine: Machine, columns: Columns, stages: StageTable, ends: StepEnds, slow: _Slowest, count: Floats
) -> tuple[Floats, Floats, Floats, Floats]:
    """Exposed and hidden seconds of the data parallel exchange, of the optimiser and of its state on the host."""
    plain, expert = _largest(stages, held_parameters(columns))

    def both(of: str) -> Floats:
        return np.asarray(plain * _take(ends.plain, of, ends.rows) + expert * _take(ends.expert, of, ends.rows))

    reduce, gather = both("reduce"), both("gather")
    alone = (columns.dp * columns.cp > 1) * _take(ends.plain, "fixed", ends.rows)
    overlap = machine.coefficients.overlap
    tail = slow.seconds * np.where(columns.pp > 1, 1.0, count)
    late = np.where(columns.flag("overlap_grad_reduce"), overlap * np.minimum(reduce, slow.seconds * 0.6), 0.0)
    early = np.where(columns.flag("overlap_param_gather"), overlap * np.minimum(gather, np.minimum(tail, slow.seconds) * 0.3), 0.0)
    whole = ends.sharded_parameters.take(ends.rows) if len(ends.sharded_parameters) > 1 else ends.sharded_parameters
    exposed, hidden = reduce + gather - late - early + alone, late + early
    if whole.any():
        every = (2.0 * gather + reduce) * count
        beside = overlap * np.minimum(every, slow.seconds * count)
        exposed, hidden = np.where(whole, every - beside + alone, exposed), np.where(whole, beside, hidden)
    return exposed, hidden, both("update"), both("host")


def _take(ends: Ends, name: str, rows: Rows) -> Floats:
    """One cost of the step's end, spread over the rows."""
    values: Floats = getattr(ends, name)
    return values.take(rows) if len(values) > 1 else values


def _largest(stages: StageTable, held: dict[str, Parameters]) -> tuple[Floats, Floats]:
    """Parameters of the stage that has most."""
    plain, expert = np.zeros(1), np.zeros(1)
    for numbers in stages.numbers:
        fields = [numbers[field].take(stages.rows) for field in range(len(StageKind._fields))]
        here = sum((number * held[name].plain for number, name in zip(fields, StageKind._fields, strict=True)), np.zeros(1))
        there = sum((number * held[name].expert for number, name in zip(fields, StageKind._fields, strict=True)), np.zeros(1))
        more: Bools = here + there > plain + expert
        plain, expert = np.where(more, here, plain), np.where(more, there, expert)
    return plain, expert


def _activations(machine: Machine, columns: Columns, slow: _Slowest, count: Floats) -> Floats:
    """Seconds that offloaded activations add: their way to the host and back, as far as compute does not cover it."""
    layers = columns.number("cpu_offloading_num_layers")
    if not layers.any():
        return np.zeros(1)
    workload = columns.workload
    elements = columns.mbs * workload.seq_length / columns.cp * workload.model.hidden_size * SAVED_ELEMENTS / columns.tp
    way = 2.0 * layers * elements * 2.0 / machine.links.host.bytes_per_s
    return count * (way - machine.coefficients.overlap * np.minimum(way, slow.seconds))
