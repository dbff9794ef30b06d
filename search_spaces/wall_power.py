"""Watts at the wall of a pool's nodes from the watts of their boards: what a feed, a rack or a room has to carry.

    wall = boards / PSU efficiency + nodes x overhead

An estimate where no meter is read. A node's overhead is its processors, memory, fans, network cards and switches.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from search_spaces.gpus import GpuSpec
from search_spaces.hardware import PoolSpec

OVERHEAD_OVER_TDP = 0.44
"""Watts at the wall of a node besides its GPUs, over the TDP of its GPUs: an 8-GPU H100 node was measured to draw at most 8.4 kW
under training loads (Latif et al. 2024, arXiv:2412.08602), and 8 x 700 W take 5.96 kW of them at the efficiency below."""

PSU_EFFICIENCY = 0.94
"""Power supplies of 80 PLUS Titanium: 94 % at 20 % load, 96 % at half load, 91 % at full load (CLEAResult)."""

Watts = Any  # a float or an array of them


@dataclass(frozen=True, slots=True)
class NodePower:
    """What a node adds to the watts of its boards.

    Attributes:
        overhead_w: Watts at the wall besides the boards.
        psu_efficiency: Watts given over watts taken.
    """

    overhead_w: float
    psu_efficiency: float

    @classmethod
    def of(cls, pool: PoolSpec, gpu: GpuSpec) -> NodePower:
        """The figures of a pool's nodes, its own where it gives them."""
        packages = pool.gpus_per_node / gpu.dies_per_package
        usual_w = OVERHEAD_OVER_TDP * gpu.tdp_w * packages
        return cls(
            overhead_w=usual_w if pool.node_overhead_w is None else pool.node_overhead_w,
            psu_efficiency=PSU_EFFICIENCY if pool.psu_efficiency is None else pool.psu_efficiency,
        )

    def wall_w(self, boards_w: Watts, nodes: int) -> Watts:
        """Watts at the wall of `nodes` nodes whose boards draw `boards_w` together."""
        return boards_w / self.psu_efficiency + nodes * self.overhead_w
