"""Rank program that measures a slot's nodes themselves in a few seconds: matrix products, memory, and all-reduce.

All ranks measure at the same time, as they train, so that what they share is shared. Every rank emits one "figures" event:
`gemm_flops_per_s`, `memory_bytes_per_s`, and for the ranks of its node (`inside`) and those of its position on all nodes
(`between`) `<where>_bytes_per_s` of a ring and `<where>_latency_s` of one of its steps; null where there are no others.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from launchers.base import RankContext
from launchers.megatron_core.loop import Device
from launchers.megatron_core.trial import join

_READINGS = 8
_GEMM_SIZE = {"cuda": 8192, "cpu": 512}
_COPY_BYTES = {"cuda": 1 << 30, "cpu": 1 << 26}
_REDUCE_BYTES = {"cuda": 1 << 28, "cpu": 1 << 22}
_SMALL_BYTES = 1 << 10
# How often in a row, so that ranks that share a core take turns within one reading.
_PRODUCTS, _COPIES, _SMALL_REDUCES, _LARGE_REDUCES = 16, 2, 8, 2


def main(job: dict[str, Any], context: RankContext) -> None:
    """Measure; the job holds `device`, "cuda" or "cpu"."""
    device = join(job["device"], context)
    nodes = [list(range(first, first + context.rendezvous.ranks_per_node)) for first in _first_ranks(context)]
    across = [list(ranks) for ranks in zip(*nodes, strict=True)]
    figures = {
        "gemm_flops_per_s": _gemm(device),
        "memory_bytes_per_s": _copy(device),
        **_all_reduce("inside", device, _own_group(nodes, context.rank), len(nodes[0])),
        **_all_reduce("between", device, _own_group(across, context.rank), len(nodes)),
    }
    context.emit({"event": "figures", **figures})
    dist.destroy_process_group()


def _first_ranks(context: RankContext) -> range:
    return range(0, context.rendezvous.world_size, context.rendezvous.ranks_per_node)


def _own_group(groups: Sequence[list[int]], rank: int) -> Any:
    """This rank's group; every rank makes all of them, as torch wants it."""
    made = [dist.new_group(ranks) for ranks in groups]
    return next(group for group, ranks in zip(made, groups, strict=True) if rank in ranks)


def _gemm(device: Device) -> float:
    """Operations/s of a large product: 2 n^3 of a square one; 16-bit on GPUs, 32-bit on CPU."""
    kind = device.torch.type
    size = _GEMM_SIZE[kind]
    half = torch.bfloat16 if kind == "cuda" and torch.cuda.is_bf16_supported() else torch.float16
    left, right = (torch.ones(size, size, dtype=half if kind == "cuda" else torch.float32, device=device.torch) for _ in range(2))
    return 2.0 * size**3 / _seconds(device, lambda: torch.mm(left, right), _PRODUCTS)


def _copy(device: Device) -> float:
    """Bytes/s of memory: a copy reads and writes each."""
    source = torch.ones(_COPY_BYTES[device.torch.type], dtype=torch.uint8, device=device.torch)
    target = torch.empty_like(source)
    return 2.0 * source.numel() / _seconds(device, lambda: target.copy_(source), _COPIES)


def _all_reduce(where: str, device: Device, group: Any, size: int) -> dict[str, float | None]:
    """Bytes/s of a ring of `size` ranks, 2 (n - 1) / n x bytes / seconds, and seconds of one of its 2 (n - 1) steps."""
    if size < 2:
        return {f"{where}_bytes_per_s": None, f"{where}_latency_s": None}

    def seconds(size_bytes: int, times: int) -> float:
        tensor = torch.zeros(size_bytes // 4, dtype=torch.float32, device=device.torch)
        return _seconds(device, lambda: dist.all_reduce(tensor, group=group), times)

    large, small = _REDUCE_BYTES[device.torch.type], seconds(_SMALL_BYTES, _SMALL_REDUCES)
    passed = max(seconds(large, _LARGE_REDUCES) - small, 1e-9)
    return {f"{where}_bytes_per_s": 2.0 * (size - 1) / size * large / passed, f"{where}_latency_s": small / (2.0 * (size - 1))}


def _seconds(device: Device, run: Callable[[], Any], times: int) -> float:
    """Seconds of a run, in the fastest of some readings: whatever else the node does makes it slower only.

    All ranks begin together and run equally often.
    """
    run()
    taken = []
    for _ in range(_READINGS):
        device.synchronize()
        dist.barrier()
        started_s = time.perf_counter()
        for _ in range(times):
            run()
        device.synchronize()
        taken.append((time.perf_counter() - started_s) / times)
    return min(taken)
