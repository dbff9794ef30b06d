"""The trial program: joins the ranks, builds the model, trains a few steps and reports each.

It needs torch, megatron-core and the standard library only. `main` runs in a process that a warm one forked; by hand it is
`torchrun --nproc-per-node N .../launchers/megatron_core/trial.py job.json`, which prints one JSON line per step.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

if not __package__:
    # Run by path. Only our own package becomes importable: neither this folder, whose modules have common names, nor the folder
    # around the package, which may be a site-packages that holds another torch.
    _folder = Path(__file__).resolve().parent
    sys.path[:] = [entry for entry in sys.path if Path(entry).resolve() != _folder]
    sys.modules["launchers"] = ModuleType("launchers")
    sys.modules["launchers"].__path__ = [str(_folder.parent)]

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from launchers.base import RankContext, Rendezvous, StepRecord
from launchers.megatron_core import build, cpu
from launchers.megatron_core.job import Job
from launchers.megatron_core.loop import Device, train


def main(job: dict[str, Any], context: RankContext) -> None:
    """Runs one rank of a trial; the last rank, which holds the loss, emits one "step" event per optimiser step."""
    spec = Job.from_dict(job)
    device = join(spec.device, context)
    build.initialise_groups(spec)
    training = build.build(spec)
    if spec.device == "cuda":
        torch.cuda.reset_peak_memory_stats()  # weights were drawn whole
    train(spec, training, device, _reporter(context))
    dist.destroy_process_group()


def join(kind: str, context: RankContext) -> Device:
    """Prepares the backend of "cuda" or "cpu" and meets the other ranks."""
    rendezvous = context.rendezvous
    device = cpu.install(rendezvous.master_addr) if kind == "cpu" else _cuda(context.local_rank)
    backend = "gloo" if kind == "cpu" else "nccl"
    dist.init_process_group(backend, store=_store(rendezvous, context.rank), world_size=rendezvous.world_size, rank=context.rank)
    return device


def _store(rendezvous: Rendezvous, rank: int) -> TCPStore:
    """Where the ranks find each other, as behind `tcp://...`; but rank 0 listens on that one address, not on all that there are."""
    address, port = rendezvous.master_addr, rendezvous.master_port
    limit = dist.default_pg_timeout
    if rank or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":  # torchrun listens itself
        return TCPStore(address, port, rendezvous.world_size, False, limit)
    family = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0][0]
    listener = socket.create_server((address, port), family=family)
    descriptor = listener.detach()  # the store closes it
    return TCPStore(address, port, rendezvous.world_size, True, limit, wait_for_workers=False, master_listen_fd=descriptor)


def _cuda(local_rank: int) -> Device:
    # Megatron orders communication before computation by the order of launches, which holds for one connection only.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    torch.cuda.set_device(local_rank)
    return Device(torch.device("cuda", local_rank), torch.cuda.synchronize, torch.cuda.max_memory_allocated)


def _reporter(context: RankContext) -> Any:
    reports = context.rank == context.rendezvous.world_size - 1

    def report(record: StepRecord) -> None:
        if reports:
            context.emit({"event": "step", **record.to_dict()})

    return report


def _print_event(event: dict[str, Any]) -> None:
    print(json.dumps(event), flush=True)


def _context_of_torchrun() -> RankContext:
    rendezvous = Rendezvous(
        master_addr=os.environ["MASTER_ADDR"],
        master_port=int(os.environ["MASTER_PORT"]),
        world_size=int(os.environ["WORLD_SIZE"]),
        node_rank=int(os.environ["GROUP_RANK"]),
        ranks_per_node=int(os.environ["LOCAL_WORLD_SIZE"]),
    )
    return RankContext(int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"]), rendezvous, _print_event)


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()), _context_of_torchrun())
    sys.stdout.flush()
    sys.stderr.flush()
    # Leave as a forked rank does: unloading torch with gloo's threads still around now and then aborts the process.
    os._exit(0)
