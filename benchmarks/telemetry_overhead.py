"""What telemetry costs: the sampler's own CPU time for 8 GPUs at 50 ms, and step times with and without it.

    python benchmarks/telemetry_overhead.py [--seconds 60] [--pairs 120] [--steps 24] [--ranks 2] [--output telemetry_overhead.json]

Eight scripted H100s are read by the real binding; a real driver's own time per call comes on top. CPU time is that of the
sampler's threads, writing and the columns at the end included. Step times come from one trial of the Megatron program on CPU: the
sampler is switched on and off in turn, every `--steps` steps, in an order that alternates from pair to pair; the first two steps
after a switch do not count. A pair's difference is that of the medians of its two blocks, the interval that of its median.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.table import Table

from autotune.steady_state import median_interval
from autotune.telemetry import open_gpus
from autotune.telemetry.sampler import Sampler
from launchers.base import Rendezvous, StepRecord
from launchers.megatron_core.launcher import MegatronCoreLauncher
from launchers.process import LaunchRequest, Limits, Supervised, run_trial
from search_spaces.config import TrialConfig
from search_spaces.hardware import RankEnvironment
from search_spaces.model import ModelSpec, Workload

GPUS, PERIOD_S, SETTLING_STEPS = 8, 0.05, 2
LIMIT_CORE_FRACTION, LIMIT_HALF_WIDTH, MIN_PAIRS = 0.02, 0.01, 20
MODEL = ModelSpec(num_layers=4, hidden_size=128, num_attention_heads=4, vocab_size=256)


def sampler_cost(seconds: float) -> dict[str, float]:
    """The sampler alone."""
    sampler = Sampler(open_gpus("nvidia"), PERIOD_S)
    sampler.start()
    time.sleep(seconds)
    series, cost = sampler.stop(frozenset())
    if len(series) != GPUS:
        raise RuntimeError(f"{len(series)} GPUs instead of {GPUS}")
    return {**asdict(cost), "core_fraction": cost.core_fraction, "us_per_reading": 1e6 * cost.cpu_s / cost.readings}


def trial_steps(ranks: int, folder: Path, wanted: int) -> Iterator[StepRecord]:
    """Steps of one trial."""
    workload = Workload(model=MODEL, world_size=ranks, global_batch_size=4 * ranks, seq_length=64, device="cpu")
    launcher = MegatronCoreLauncher()
    supervised = Supervised(RankEnvironment(env={"OMP_NUM_THREADS": "1"}), preload=launcher.preload)
    job = launcher.job(workload, TrialConfig(precision="fp32"), steps=wanted, seed=1)
    launch = LaunchRequest(
        "overhead", launcher.program, job, Rendezvous("127.0.0.1", 29_871, ranks, 0, ranks), tuple(range(ranks)), folder
    )
    try:
        for item in run_trial(supervised, launch, Limits(300.0, 120.0, 3600.0)):
            if isinstance(item, StepRecord):
                yield item
    finally:
        supervised.close()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def paired_differences(pairs: int, block: int, ranks: int, folder: Path) -> list[float]:
    """Relative differences of step times, sampler on less off, one per pair of blocks."""
    steps = trial_steps(ranks, folder, (2 * pairs + 1) * block)
    gpus = open_gpus("nvidia")
    for _ in range(block):
        next(steps)
    differences = []
    for pair in range(pairs):
        medians: dict[bool, float] = {}
        for measured in (pair % 2 == 0, pair % 2 == 1):
            sampler = Sampler(gpus, PERIOD_S)
            if measured:
                sampler.start()
            values = [next(steps).step_s for _ in range(block)]
            sampler.halt()
            medians[measured] = statistics.median(values[SETTLING_STEPS:])
        differences.append(medians[True] / medians[False] - 1.0)
    steps.close()  # type: ignore[attr-defined]
    return differences


def measure(options: argparse.Namespace) -> int:
    """In the process that sees the devices: print the table, write JSON; exit code 1 where a limit is passed."""
    cost = sampler_cost(options.seconds)
    with tempfile.TemporaryDirectory() as folder:
        differences = paired_differences(options.pairs, options.steps, options.ranks, Path(folder))
    interval = median_interval(differences)
    half_width = (interval.high - interval.low) / 2.0
    table = Table("what", "measured", "limit", title=f"load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    table.add_row(f"sampler, {GPUS} GPUs at 50 ms", f"{cost['core_fraction']:.2%} of a core", f"{LIMIT_CORE_FRACTION:.0%}")
    shown = f"{interval.median:+.2%} [{interval.low:+.2%}, {interval.high:+.2%}] over {len(differences)} pairs"
    table.add_row("step time with less without", shown, f"holds 0, +-{LIMIT_HALF_WIDTH:.0%}")
    Console().print(table)
    if options.output:
        values = {"cost": cost, "difference": asdict(interval), "pairs": differences, "load_average": os.getloadavg()[0]}
        options.output.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
    holds = interval.low <= 0.0 <= interval.high and half_width <= LIMIT_HALF_WIDTH and len(differences) >= MIN_PAIRS
    return int(cost["core_fraction"] > LIMIT_CORE_FRACTION or not holds)


def main() -> int:
    """Start this file again in a process that sees the scripted devices."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--pairs", type=int, default=120)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    if "SCRIPTED_NVIDIA" in os.environ:
        return measure(options)
    root = Path(__file__).resolve().parent.parent
    sys.path.insert(0, str(root))
    from tests.telemetry.devices import H100, Scenario, environment

    with tempfile.TemporaryDirectory() as folder:
        devices = environment(Scenario(H100, GPUS), folder=Path(folder))
        values = {**os.environ, "PYTHONPATH": str(root), **devices}
        return subprocess.run([sys.executable, *sys.argv], env=values, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
