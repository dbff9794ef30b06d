"""Seconds of collectives on a two-level network: alpha-beta per level (Hockney 1994; Thakur et al. 2005; NCCL's rings).

A group of ranks is a stride and a size in the order of ranks, so it lies inside a domain as far as stride x size does, and the
rest of it is joined by the network.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from search_spaces.kernels import Floats, Machine, Number

START_S = 10e-6
"""Seconds before the first step of a collective, at a latency coefficient of 1.

All-reduces of up to 64 MiB on A100: 30 us and 8 us more with every rank beyond the first (vTrain, trace/a100, of 2, 4 and 8 GPUs);
eight take 100 us on another machine, 40 to 50 us on H200 and B200 (ml-engineering, "Network": all_reduce_perf, all_reduce_bench).
"""


@dataclass(frozen=True, slots=True)
class Group:
    """Ranks that communicate: how many share a domain and how many domains they span."""

    machine: Machine
    local: Floats
    spans: Floats

    @classmethod
    def of(cls, machine: Machine, size: Number, stride: Number) -> Group:
        """The group of `size` ranks that are `stride` apart."""
        local = np.clip(machine.links.domain // np.maximum(stride, 1), 1, size)
        return cls(machine, np.asarray(local, dtype=np.float64), np.maximum(size / local, 1.0))

    @property
    def size(self) -> Floats:
        """Ranks of the group."""
        return self.local * self.spans

    @property
    def _inside(self) -> float:
        return self.machine.links.inside.bytes_per_s * self.machine.coefficients.inside

    @property
    def _between(self) -> Floats:
        """Bytes/s of one rank between domains; without rails a group's local ranks share one port's worth less well."""
        between = self.machine.links.between
        rate = between.bytes_per_s * self.machine.coefficients.between
        return np.asarray(rate if between.rail_optimised else rate / 1.3)

    @property
    def _steps(self) -> Floats:
        """Seconds of latency of one pass around the group: its start, local steps in a ring, domains in a tree."""
        links, scale = self.machine.links, self.machine.coefficients.latency
        local = START_S * (self.size > 1) + (self.local - 1) * links.inside.latency_s
        return scale * (local + np.ceil(np.log2(np.maximum(self.spans, 1.0))) * links.between.latency_s)

    def gather(self, size: Number) -> Floats:
        """Seconds to gather `size` bytes from all ranks, or to reduce and scatter them."""
        local = size * (self.local - 1) / self.local / self._inside
        outer = size / self.local * (self.spans - 1) / self.spans / self._between
        return np.asarray(local + outer + self._steps)

    @property
    def slope(self) -> Floats:
        """Seconds per byte of a large gather or reduce-scatter, latency apart."""
        big = 1e9
        return (self.gather(np.float64(big)) - self.gather(np.float64(0.0))) / big

    def reduce(self, size: Number) -> Floats:
        """Seconds of an all-reduce of `size` bytes: reduce-scatter and gather."""
        return 2.0 * self.gather(size)

    def exchange(self, size: Number, outer_size: Number | None = None) -> Floats:
        """Seconds of an all-to-all in which every rank holds `size` bytes.

        Args:
            size: Bytes of one rank.
            outer_size: Bytes of which the part for other domains crosses the network; none = the same.
        """
        count = self.local * self.spans
        inside = size * (self.local - 1) / count / self._inside
        outer = (size if outer_size is None else outer_size) * (count - self.local) / count / self._between
        return np.asarray(np.maximum(inside, outer) + self._steps)

    def send(self, size: Number, senders: Number) -> Floats:
        """Seconds to hand `size` bytes to the next rank; the slowest pair of neighbours decides.

        Args:
            size: Bytes.
            senders: Ranks of a domain that send over the network at once; a port that they share is shared by them alone.
        """
        crosses = self.spans > 1
        links, c = self.machine.links, self.machine.coefficients
        port = links.between.bytes_per_s * links.between.devices_per_port * c.between
        outer = port / np.clip(senders, 1.0, links.between.devices_per_port)
        rate = np.where(crosses, outer, self._inside)
        latency = np.where(crosses, links.between.latency_s, links.inside.latency_s) * c.latency
        return np.where(self.size > 1, size / rate + latency, 0.0)
