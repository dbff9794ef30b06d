"""Floods its log and the pipe with everything but steps, and reports one step at its end."""

from __future__ import annotations

import os

from launchers.base import RankContext


def main(job, context: RankContext):
    for number in range(job["events"]):
        context.emit({"event": "note", "number": number, "text": "x" * 1000})
        print("y" * 200)
    os.write(1, b"no end of line" * 1000)
    if context.rank == 1:
        step = {"event": "step", "iteration": 1, "time_s": 0.0, "step_s": 0.05, "loss": 1.0}
        context.emit(step | {"grad_norm": None, "tokens": 8, "peak_memory_gib": None})
