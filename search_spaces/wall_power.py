"""Watts at the wall of a pool's nodes from the watts of their boards: what a feed, a rack or a room has to carry.

    wall = boards / PSU efficiency + nodes x overhead

An estimate where no meter is read. A node's overhead is its processors, memory, fans, network cards and switches; the usual figures
and their source are in hardware.yaml.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from search_spaces.gpus import GpuSpec, node_defaults
from search_spaces.hardware import PoolSpec

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
        usual = node_defaults()
        usual_w = usual["overhead_over_tdp"] * gpu.tdp_w * pool.gpus_per_node / gpu.dies_per_package
        return cls(
            overhead_w=usual_w if pool.node_overhead_w is None else pool.node_overhead_w,
            psu_efficiency=usual["psu_efficiency"] if pool.psu_efficiency is None else pool.psu_efficiency,
        )

    def wall_w(self, boards_w: Watts, nodes: int) -> Watts:
        """Watts at the wall of `nodes` nodes whose boards draw `boards_w` together."""
        return boards_w / self.psu_efficiency + nodes * self.overhead_w
