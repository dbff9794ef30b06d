"""What the ranks of a fault test do: the job names one of the behaviours below."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

CONTROL = Path(os.environ["FAULTS"])
TOKENS = 64 * 32  # of a step of `STUDY`


class OutOfMemoryError(RuntimeError):
    """Named as torch's."""


def report(context, iteration, loss=1.0):
    if context.rank == context.rendezvous.world_size - 1:
        step = {"event": "step", "iteration": iteration, "time_s": time.time(), "step_s": 0.01, "loss": loss}
        context.emit(step | {"grad_norm": None, "tokens": TOKENS, "peak_memory_gib": None})


def complete(job, context):
    for iteration in range(1, job["steps"] + 1):
        report(context, iteration)


def slow(job, context):
    """As `complete`, in two seconds; tells which GPUs each rank sees."""
    for iteration in range(1, job["steps"] + 1):
        report(context, iteration)
        time.sleep(2.0 / job["steps"])
    print("visible:", os.environ.get("CUDA_VISIBLE_DEVICES"), flush=True)


def daemonise():
    """A grandchild in its own session whose parent has ended."""
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
                signal.signal(number, signal.SIG_IGN)
            time.sleep(300)
        os._exit(0)


def escape(job, context):
    """Steps for ever, and tries everything to outlive the trial."""
    if context.local_rank == 0:
        os.setsid()
    subprocess.Popen(["sh", "-c", "trap '' TERM HUP; sleep 300 & wait"], start_new_session=True)
    daemonise()
    present = [CONTROL / f"rank{rank}.{context.rendezvous.master_port}" for rank in range(context.rendezvous.world_size)]
    present[context.rank].touch()
    while not all(path.exists() for path in present):
        time.sleep(0.02)
    for iteration in itertools.count(1):
        report(context, iteration)
        (CONTROL / "mid_trial").touch()
        time.sleep(0.1)


def out_of_memory(job, context):
    report(context, 1)
    if context.rank == 0:
        raise OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
    threading.Event().wait()


def fill_host_memory(job, context):
    """Steps while it takes 200 MiB at a time, up to 4 GiB, until somebody ends it."""
    taken = []
    for iteration in itertools.count(1):
        report(context, iteration)
        if len(taken) < 20 and context.rank == 0:
            taken.append(b"1" * (200 << 20))
        time.sleep(0.1)


def leave(job, context):
    report(context, 1)
    if context.rank == 1:
        sys.exit(1)
    threading.Event().wait()


def not_a_number(job, context):
    report(context, 1)
    report(context, 2, float("nan"))
    threading.Event().wait()


def silent(job, context):
    threading.Event().wait()


def hang(job, context):
    """Two real all-reduces over gloo; at the third, rank 0 sleeps and the others wait inside the collective."""
    import torch
    import torch.distributed as dist

    meeting = f"tcp://{context.rendezvous.master_addr}:{context.rendezvous.master_port}"
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=meeting, rank=context.rank, world_size=context.rendezvous.world_size)
    for iteration in range(1, 4):
        if iteration == 3 and context.rank == 0:
            time.sleep(300)
        dist.all_reduce(torch.ones(4))
        report(context, iteration)


def main(job, context):
    globals()[job["behaviour"]](job, context)
