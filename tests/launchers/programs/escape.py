"""Steps as the job says, while its ranks try all to outlive the trial: sessions, grandchildren, daemons, ignored signals."""

from __future__ import annotations

import os
import signal
import subprocess
import time


def daemonise(seconds):
    """A grandchild in its own session whose parent has ended."""
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            signal.signal(signal.SIGHUP, signal.SIG_IGN)
            time.sleep(seconds)
        os._exit(0)


def main(job, context):
    if context.local_rank == 0:
        os.setsid()
    subprocess.Popen(["sh", "-c", "trap '' TERM HUP; sleep 300 & wait"], start_new_session=True)
    daemonise(300)
    time.sleep(0.3)  # until all of them are there
    for iteration in range(1, job.get("steps", 1_000_000) + 1):
        step = {"event": "step", "iteration": iteration, "time_s": 0.0, "step_s": 0.05, "loss": 1.0}
        if context.rank == context.rendezvous.world_size - 1:
            context.emit(step | {"grad_norm": None, "tokens": 8, "peak_memory_gib": None})
        time.sleep(0.05)
