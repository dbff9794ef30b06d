"""What a trial costs beside its own steps: warm, through the whole path, against a cold `torchrun` of the same program.

    python benchmarks/overhead.py [--trials 21] [--output overhead.json]

Runs the quickstart study for real. A trial's start is the time from the last step of the trial before it to the end of its own
first step, less its own second step: tear-down, telling Optuna and MLflow, Ray Tune, agent, supervisor, forking four ranks, joining
them, and building the model are all inside. The cold figure is `torchrun`'s: from its start to the end of the first step, less the
second step.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

from autotune.progress import Progress
from autotune.records import TrialRecord
from autotune.results import read_results
from autotune.spec import StudySpec, load_study, override, study_file
from autotune.state_folder import StateFolder
from autotune.study import load_launcher, run_study

STEPS = 4
COLD_RUNS = 3
LIMIT_MEDIAN_S, LIMIT_P95_S = 0.8, 1.5


def warm_starts_s(spec: StudySpec, folder: StateFolder, console: Console) -> list[float]:
    """Run the study and take every warm trial's start from its records."""
    with Progress(console, spec.budget) as progress:
        run_study(spec, folder, progress)
    records = [record for record in read_results(spec, folder)[0].records if len(record.steps) == STEPS]
    return [start_s(before, record) for before, record in zip(records, records[1:], strict=False)]


def start_s(before: TrialRecord, record: TrialRecord) -> float:
    """From the last step of the trial before to the end of the first step, less the second step."""
    return record.steps[0].time_s - before.steps[-1].time_s - record.steps[1].step_s


def cold_start_s(spec: StudySpec, folder: Path) -> float:
    """The baseline through torchrun, in fresh processes."""
    command = load_launcher(spec.launcher).command(spec.workload(spec.pools[0]), spec.baseline, folder, steps=2, seed=0)
    argv = (str(Path(sys.executable).parent / command.argv[0]), *command.argv[1:])
    begin_s = time.time()
    shown = subprocess.run(argv, env={**os.environ, **command.env}, capture_output=True, text=True, check=False, timeout=300)
    if shown.returncode:
        raise RuntimeError(f"torchrun ended with {shown.returncode}: {shown.stderr[-2000:]}")
    steps = [json.loads(line) for line in shown.stdout.splitlines() if line.startswith("{")]
    return float(steps[0]["time_s"] - begin_s - steps[1]["step_s"])


def summary(values: list[float]) -> dict[str, float]:
    """Median, 95th percentile and extremes, in seconds."""
    ordered = sorted(values)
    p95 = statistics.quantiles(ordered, n=20, method="inclusive")[-1] if len(ordered) > 1 else ordered[0]
    return {
        "runs": float(len(ordered)),
        "median_s": statistics.median(ordered),
        "p95_s": p95,
        "min_s": ordered[0],
        "max_s": ordered[-1],
    }


def main() -> int:
    """Print the table, write JSON; exit code 1 where a limit is passed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=21)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    spec = override(
        load_study(study_file("quickstart")),
        {"budget": {"trials": options.trials, "wall_time_s": 900}, "measurement": {"steps": STEPS, "warmup_steps": 1}},
    )
    with tempfile.TemporaryDirectory() as scratch:
        warm = warm_starts_s(spec, StateFolder(Path(scratch) / spec.name), Console(stderr=True))
        cold = [cold_start_s(spec, Path(scratch) / "cold") for _ in range(COLD_RUNS)]
    rows = {"warm trial": summary(warm), "cold torchrun": summary(cold)}
    ratio = rows["cold torchrun"]["median_s"] / rows["warm trial"]["median_s"]
    table = Table("start of a trial", *next(iter(rows.values())), title=f"cold / warm: {ratio:.1f}")
    for name, row in rows.items():
        table.add_row(name, *(f"{value:.3g}" for value in row.values()))
    Console().print(table)
    if options.output:
        options.output.write_text(json.dumps({**rows, "cold_over_warm": ratio}, indent=2) + "\n", encoding="utf-8")
    return int(rows["warm trial"]["median_s"] > LIMIT_MEDIAN_S or rows["warm trial"]["p95_s"] > LIMIT_P95_S)


if __name__ == "__main__":
    sys.exit(main())
