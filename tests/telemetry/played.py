"""Scripted devices read by the real bindings and our sampler for a few seconds; run as a program in a process of its own.

Its argument: {vendors, seconds, out} as JSON. Leaves {vendor: (series, problems)} as a pickle in `out`.
"""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import time
from pathlib import Path

from autotune.steady_state import Window
from autotune.telemetry import Gpu, TelemetryError, open_gpus
from autotune.telemetry.sampler import Sampler
from autotune.telemetry.series import NodeTelemetry
from autotune.telemetry_summary import TrialTelemetry, summarise_telemetry


def record(vendors, seconds, out):
    gpus: list[Gpu] = []
    problems = {}
    for vendor in vendors:
        try:
            gpus += open_gpus(vendor)
        except TelemetryError as error:
            problems[vendor] = str(error)
    Path(out + ".clock").write_text(repr(time.time()))
    sampler = Sampler(gpus)
    sampler.start()
    time.sleep(seconds)
    series, cost = sampler.stop(frozenset(gpu.info.uuid for gpu in gpus))
    Path(out).write_bytes(pickle.dumps((series, cost, problems)))


def play(folder: Path, values: dict[str, str], vendors, seconds: float):
    """Series by (vendor, index), what it cost, problems by vendor, and the Unix time of second 0."""
    out = folder / "played"
    arguments = json.dumps({"vendors": vendors, "seconds": seconds, "out": str(out)})
    command = [sys.executable, "-m", "tests.telemetry.played", arguments]
    environment = {**os.environ, "SCRIPTED_CLOCK": f"{out}.clock", **values}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=150, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    series, cost, problems = pickle.loads(out.read_bytes())
    return {(one.info.vendor, one.info.index): one for one in series}, cost, problems, float(Path(f"{out}.clock").read_text())


def summary(series, zero_s, start_s, end_s, tokens=1000):
    """What these GPUs tell about seconds `start_s` to `end_s` of the scenario."""
    return summarise_telemetry(TrialTelemetry((NodeTelemetry(0, tuple(series)),)), Window(zero_s + start_s, zero_s + end_s, tokens))


if __name__ == "__main__":
    record(**json.loads(sys.argv[1]))
