"""Reports some steps, then waits for ever, as in a collective that one rank never joins."""

from __future__ import annotations

import threading

from launchers.base import RankContext


def wait_for_ever():
    threading.Event().wait()


def main(job, context: RankContext):
    for iteration in range(1, job.get("steps", 2) + 1):
        step = {"event": "step", "iteration": iteration, "time_s": 0.0, "step_s": 0.01, "loss": 1.0}
        context.emit(step | {"grad_norm": None, "tokens": 8, "peak_memory_gib": None})
    wait_for_ever()
