"""Which per-GPU power limit gives the most tokens/s under the limits of the power domains, for a pool at one node count.

Every limit that the device takes is tried on every candidate that fits. What a domain has to give is an estimate (`wall_power`): a
step's mean where the domain's window holds a step, else the boards' peaks, all at the same time. Several pools in one domain are
judged one by one, each as if the others were switched off.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from autotune.power_domains import nodes_fed
from autotune.spec_parts import PowerDomain
from search_spaces import power
from search_spaces.candidates import CandidateTable
from search_spaces.clock_power import shipped_power
from search_spaces.columns import Column
from search_spaces.config import TrialConfig
from search_spaces.gpus import GpuSpec
from search_spaces.hardware import PoolSpec
from search_spaces.power import PowerTable
from search_spaces.prediction import Predictions
from search_spaces.wall_power import NodePower

MOST_LIMITS = 14
_STEPS_W = (1, 2, 5, 10, 25, 50, 100, 250)
_KNOB = "gpu_power_limit_w"


@dataclass(frozen=True, slots=True)
class PowerChoice:
    """The fastest configuration of a pool under one per-GPU limit. Predicted.

    Attributes:
        nodes: Nodes of the trial.
        limit_w: Power limit per GPU (per package where two devices share one).
        row: Row of the candidate table.
        config: The configuration, the limit in it.
        tokens_per_s: Of all GPUs together.
        step_time_s: Seconds of a step.
        wall_w: Mean watts at the wall of all nodes.
        wall_at_limits_w: The same with every GPU at its limit.
        domain: The power domain with the least to spare; empty without domains.
        margin_w: What it has to spare; None without domains.
    """

    nodes: int
    limit_w: int
    row: int
    config: TrialConfig
    tokens_per_s: float
    step_time_s: float
    wall_w: float
    wall_at_limits_w: float
    domain: str
    margin_w: float | None


@dataclass(frozen=True, slots=True)
class Feed:
    """What a pool's nodes draw from a power domain.

    Attributes:
        domain: The domain.
        nodes: Nodes of the trial that it carries.
    """

    domain: PowerDomain
    nodes: int


def power_limits(gpu: GpuSpec) -> tuple[int, ...]:
    """Limits worth trying, in watts per package: from the highest that can be set downwards, in equal round steps."""
    low, high = gpu.power_limit_w
    step = next((step for step in _STEPS_W if (high - low) / step < MOST_LIMITS), _STEPS_W[-1])
    return tuple(range(int(high), int(np.ceil(low)) - 1, -step))


def power_choices(
    pool: PoolSpec,
    table: CandidateTable,
    predictions: Predictions,
    rows: npt.NDArray[np.intp],
    domains: Sequence[PowerDomain],
) -> list[PowerChoice]:
    """The fastest configuration under each per-GPU limit with which all domains stay under theirs, most tokens/s first.

    Args:
        pool: The pool at one node count.
        table: Its candidates.
        predictions: Of the table's rows, as `predict` made them.
        rows: Rows that may fit.
        domains: The study's power domains.
    """
    feeds = [Feed(domain, fed) for domain in domains if (fed := nodes_fed(domain, pool, domains))]
    found = (_choice(pool, table, limit_w, watts, rows, feeds) for limit_w, watts in _under_limits(table, predictions))
    return sorted((choice for choice in found if choice), key=lambda choice: (-choice.tokens_per_s, choice.wall_w))


def _under_limits(table: CandidateTable, predictions: Predictions) -> Iterator[tuple[int, tuple[GpuSpec, PowerTable]]]:
    """Watts and seconds of all rows under each limit."""
    gpu = predictions.machines.gpu
    columns = table.columns
    for limit_w in power_limits(gpu):
        held = columns.with_columns({**columns.columns, _KNOB: Column((limit_w,), np.zeros(1, dtype=np.intp))})
        yield limit_w, (gpu, power.estimate(predictions.times, held, shipped_power(gpu)))


def _choice(
    pool: PoolSpec,
    table: CandidateTable,
    limit_w: int,
    found: tuple[GpuSpec, PowerTable],
    rows: npt.NDArray[np.intp],
    feeds: Sequence[Feed],
) -> PowerChoice | None:
    """The fastest row under one limit; None where no row keeps all domains under theirs."""
    gpu, watts = found
    seconds, mean_w, peak_w = (
        np.broadcast_to(values, (len(table),))[rows] for values in (watts.step_time_s, watts.mean_w, watts.peak_w)
    )
    node = NodePower.of(pool, gpu)
    spare_w = [
        feed.domain.limit_w
        - node.wall_w(np.where(seconds <= feed.domain.window_s, mean_w, peak_w) * pool.gpus_per_node * feed.nodes, feed.nodes)
        for feed in feeds
    ]
    allowed = np.flatnonzero(np.all(np.asarray(spare_w) >= 0, axis=0)) if feeds else np.arange(len(rows))
    if not len(allowed):
        return None
    best = int(allowed[np.lexsort((mean_w[allowed], seconds[allowed]))[0]])
    tightest = min(range(len(feeds)), key=lambda place: float(spare_w[place][best]), default=None)
    row = int(rows[best])
    return PowerChoice(
        nodes=pool.nodes,
        limit_w=limit_w,
        row=row,
        config=table.config(row).model_copy(update={_KNOB: limit_w}),
        tokens_per_s=table.workload.tokens_per_step / float(seconds[best]),
        step_time_s=float(seconds[best]),
        wall_w=float(node.wall_w(mean_w[best] * pool.world_size, pool.nodes)),
        wall_at_limits_w=float(node.wall_w(limit_w / gpu.dies_per_package * pool.world_size, pool.nodes)),
        domain=feeds[tightest].domain.name if tightest is not None else "",
        margin_w=float(spare_w[tightest][best]) if tightest is not None else None,
    )
