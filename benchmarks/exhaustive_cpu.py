"""The truth about a small space: every legal configuration run for real, several times, in turns.

    python benchmarks/exhaustive_cpu.py [--study benchmarks/exhaustive_cpu.yaml] [--repeats 3] [--output exhaustive_cpu.json]

Turns are shuffled, so that slow drift of the machine hits all configurations alike. The JSON holds every step's seconds, for
replaying races and for judging what a search has found.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table

from autotune.candidates import candidate_table
from autotune.launchable import accepted
from autotune.records import short
from autotune.spec import StudySpec, load_study
from autotune.steady_state import median_interval, steady
from autotune.time_limits import limits_of
from launchers.base import Rendezvous, StepRecord, free_port
from launchers.megatron_core.launcher import MegatronCoreLauncher
from launchers.process import LaunchRequest, Supervised, run_trial
from search_spaces.config import TrialConfig
from search_spaces.hardware import RankEnvironment

STUDY = Path(__file__).with_suffix(".yaml")


def configurations(spec: StudySpec) -> list[TrialConfig]:
    """Everything legal that the launcher runs."""
    table = candidate_table(spec, spec.pools[0])
    allowed, _ = accepted(table, MegatronCoreLauncher())
    return [table.config(row) for row in range(len(table)) if allowed[row]]


def run_once(tree: Supervised, spec: StudySpec, config: TrialConfig, name: str, folder: Path) -> list[float]:
    """Seconds of every step of one run.

    Raises:
        RuntimeError: where it did not complete: a legal configuration must.
    """
    launcher, pool, measurement = MegatronCoreLauncher(), spec.pools[0], spec.measurement
    request = LaunchRequest(
        trial=name,
        program=launcher.program,
        job=launcher.job(spec.workload(pool), config, steps=measurement.steps, seed=spec.seed),
        rendezvous=Rendezvous("127.0.0.1", free_port("127.0.0.1"), pool.world_size, 0, pool.world_size),
        ranks=tuple(range(pool.world_size)),
        log_folder=folder / name,
    )
    limits = limits_of(measurement, 0.0, steps=measurement.steps, exploring_steps=measurement.steps, first=False)
    *steps, end = run_trial(tree, request, limits)
    seconds = [step.step_s for step in steps if isinstance(step, StepRecord)]
    if len(seconds) != measurement.steps:
        raise RuntimeError(f"{short(config)}: {end}")
    return seconds


def measure(spec: StudySpec, repeats: int, seed: int) -> list[dict[str, Any]]:
    """Every configuration with the step traces of its runs."""
    configs = configurations(spec)
    traces: list[list[list[float]]] = [[] for _ in configs]
    order = random.Random(seed)
    turns = [place for _ in range(repeats) for place in order.sample(range(len(configs)), len(configs))]
    with tempfile.TemporaryDirectory() as scratch:
        tree = Supervised(RankEnvironment(env={"CUDA_VISIBLE_DEVICES": ""}), preload=MegatronCoreLauncher.preload)
        for number, place in enumerate(track(turns, f"{len(configs)} configurations", console=Console(stderr=True))):
            traces[place].append(run_once(tree, spec, configs[place], f"run-{number}", Path(scratch)))
        tree.close()
    return [
        {"config": config.changed(), "name": short(config), "step_s": runs} for config, runs in zip(configs, traces, strict=True)
    ]


def best_first(rows: list[dict[str, Any]], warmup_steps: int) -> list[dict[str, Any]]:
    """Rows with the median over all steady steps and its interval, fastest first."""
    for row in rows:
        interval = median_interval([value for run in row["step_s"] for value in steady(run, warmup_steps)])
        medians = [statistics.median(steady(run, warmup_steps)) for run in row["step_s"]]
        row |= {"median_s": interval.median, "low_s": min(interval.low, *medians), "high_s": max(interval.high, *medians)}
    return sorted(rows, key=lambda row: float(row["median_s"]))


def main() -> int:
    """Print the fastest, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--study", type=Path, default=STUDY)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=Path("exhaustive_cpu.json"))
    options = parser.parse_args()
    spec = load_study(options.study)
    rows = best_first(measure(spec, options.repeats, options.seed), spec.measurement.warmup_steps)
    table = Table("configuration", "median s", "interval of all runs", title=f"{len(rows)} configurations, the fastest ten")
    for row in rows[:10]:
        table.add_row(row["name"], f"{row['median_s']:.4f}", f"{row['low_s']:.4f} - {row['high_s']:.4f}")
    Console(width=140).print(table)
    options.output.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
