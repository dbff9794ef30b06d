"""Which per-GPU power limit gives the most tokens/s under the limits of the power domains, for a pool at one node count.

Every limit that the device takes is tried on every candidate that fits. What a domain has to give is an estimate (`wall_power`): a
step's mean where the domain's window holds a step, else the boards' peaks, all at the same time. Several pools in one domain are
judged one by one, each as if the others were switched off.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

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
from search_spaces.kernels import Floats
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
        wall_at_limits_w: The same with every GPU at its limit; peaks shorter than a second may pass it.
        domain: The power domain with the least to spare; empty without domains.
        margin_w: What it has to spare; None without domains.
        margin_by: Which watts of the boards that is worked out from: "mean" where the domain's window holds a step, else "peak";
            empty without domains.
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
    margin_by: Literal["mean", "peak", ""]


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
    asked = _Asked(pool, table, predictions, rows, feeds)
    found = (asked.under(limit_w) for limit_w in power_limits(predictions.machines.gpu))
    return sorted((choice for choice in found if choice), key=lambda choice: (-choice.tokens_per_s, choice.wall_w))


@dataclass(frozen=True, slots=True)
class _Asked:
    """What does not change from limit to limit."""

    pool: PoolSpec
    table: CandidateTable
    predictions: Predictions
    rows: npt.NDArray[np.intp]
    feeds: Sequence[Feed]

    def under(self, limit_w: int) -> PowerChoice | None:
        """The fastest row under one limit; None where no row keeps all domains under theirs."""
        seconds, mean_w, peak_w = self._watts(limit_w)
        by_mean = [seconds <= feed.domain.window_s for feed in self.feeds]
        spare_w = [self._spare_w(feed, np.where(held, mean_w, peak_w)) for feed, held in zip(self.feeds, by_mean, strict=True)]
        allowed = np.flatnonzero(np.all(np.asarray(spare_w) >= 0, axis=0)) if spare_w else np.arange(len(self.rows))
        if not len(allowed):
            return None
        best = int(allowed[np.lexsort((mean_w[allowed], seconds[allowed]))[0]])
        tightest = min(range(len(spare_w)), key=lambda place: float(spare_w[place][best]), default=None)
        pool, row, dies = self.pool, int(self.rows[best]), self.predictions.machines.gpu.dies_per_package
        return PowerChoice(
            nodes=pool.nodes,
            limit_w=limit_w,
            row=row,
            config=self.table.config(row).model_copy(update={_KNOB: limit_w}),
            tokens_per_s=self.table.workload.tokens_per_step / float(seconds[best]),
            step_time_s=float(seconds[best]),
            wall_w=float(self._node.wall_w(mean_w[best] * pool.world_size, pool.nodes)),
            wall_at_limits_w=float(self._node.wall_w(limit_w / dies * pool.world_size, pool.nodes)),
            domain=self.feeds[tightest].domain.name if tightest is not None else "",
            margin_w=float(spare_w[tightest][best]) if tightest is not None else None,
            margin_by="" if tightest is None else "mean" if by_mean[tightest][best] else "peak",
        )

    @property
    def _node(self) -> NodePower:
        return NodePower.of(self.pool, self.predictions.machines.gpu)

    def _watts(self, limit_w: int) -> tuple[Floats, Floats, Floats]:
        """Seconds of a step, mean and peak watts per device of the rows that may fit."""
        columns = self.table.columns
        held = columns.with_columns({**columns.columns, _KNOB: Column((limit_w,), np.zeros(1, dtype=np.intp))})
        found = power.estimate(self.predictions.times, held, shipped_power(self.predictions.machines.gpu))
        seconds, mean_w, peak_w = (
            np.broadcast_to(values, (len(self.table),))[self.rows] for values in (found.step_time_s, found.mean_w, found.peak_w)
        )
        return seconds, mean_w, peak_w

    def _spare_w(self, feed: Feed, device_w: Floats) -> Floats:
        """Watts that a domain has left."""
        boards_w = device_w * self.pool.gpus_per_node * feed.nodes
        return np.asarray(feed.domain.limit_w - self._node.wall_w(boards_w, feed.nodes))
