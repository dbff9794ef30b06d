"""NodeFigures: what a pool's nodes reach in short measurements, and the coefficients that follow from it.

They seed the priors where nothing was fitted on published measurements: on CPUs, on a user's own GPUs, and for the network between
nodes. Not for the kernels of shipped GPUs: their coefficients hold heat, clocks and contention of whole training steps, which a
short measurement does not see.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Self

from search_spaces.calibration import LIMITS
from search_spaces.coefficients import Coefficients, is_fitted
from search_spaces.gpus import GpuSpec, Links


@dataclass(frozen=True, slots=True)
class NodeFigures:
    """Medians over all ranks, which measured at the same time; None where it was not measured.

    Attributes:
        gemm_flops_per_s: Operations/s of a large matrix product: 16-bit on GPUs, 32-bit on CPU.
        memory_bytes_per_s: Bytes/s of memory, read and written.
        inside_bytes_per_s: Bytes/s of a rank in a ring over the ranks of a node.
        inside_latency_s: Seconds of one step of that ring.
        between_bytes_per_s: Bytes/s of a rank in a ring over the nodes.
        between_latency_s: Seconds of one step of that ring.
    """

    gemm_flops_per_s: float | None = None
    memory_bytes_per_s: float | None = None
    inside_bytes_per_s: float | None = None
    inside_latency_s: float | None = None
    between_bytes_per_s: float | None = None
    between_latency_s: float | None = None

    @classmethod
    def of_ranks(cls, ranks: Sequence[Mapping[str, Any]]) -> Self:
        """The medians over what the ranks reported; anything that is no positive number is left out."""
        found = {field.name: [float(rank[field.name]) for rank in ranks if _measured(rank, field.name)] for field in fields(cls)}
        return cls(**{name: statistics.median(values) for name, values in found.items() if values})

    def seed(self, gpu: GpuSpec, links: Links, prior: Coefficients) -> Coefficients:
        """The prior with the shares that were measured in place of those that nobody fitted."""
        peak = gpu.peak("fp32" if gpu.vendor == "cpu" else "bf16")
        measured = {"between": _share(self.between_bytes_per_s, links.between.bytes_per_s)}
        if not is_fitted(gpu.name):
            measured |= {
                "gemm": _share(self.gemm_flops_per_s, peak),
                "memory": _share(self.memory_bytes_per_s, gpu.memory_bandwidth_gb_s * 1e9),
                "inside": _share(self.inside_bytes_per_s, links.inside.bytes_per_s),
                "latency": _share(self.inside_latency_s, links.inside.latency_s),
            }
        given = {name: share for name, share in measured.items() if share is not None}
        if gpu.vendor != "cpu":
            given = {name: min(max(share, LIMITS[name][0]), LIMITS[name][1]) for name, share in given.items()}
        return prior.model_copy(update=given)


def _share(measured: float | None, stated: float) -> float | None:
    return None if measured is None else measured / stated


def _measured(rank: Mapping[str, Any], name: str) -> bool:
    value = rank.get(name)
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0
