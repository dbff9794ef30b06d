"""Its loss is not a number at the third step."""

from __future__ import annotations

import math


def main(job, context):
    for iteration in range(1, 6):
        loss = math.nan if iteration == 3 else 1.0
        step = {"event": "step", "iteration": iteration, "time_s": 0.0, "step_s": 0.01, "loss": loss}
        context.emit(step | {"grad_norm": None, "tokens": 8, "peak_memory_gib": None})
