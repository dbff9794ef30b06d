"""Does the reported interval hold the other runs, and is a disturbed run flagged?

    python benchmarks/repeatability.py [--runs 10] [--ranks 2] [--steps 300] [--interval 0.002] [--output repeatability.json]

Runs one configuration of the quickstart model again and again on this machine's CPU, each run for about a minute, over which the
speed of a virtual machine's memory wanders by a percent or two, then twice more: beside one process that computes on every core,
and beside none. A run's interval says where 95 % of other runs' medians are; counted are the ordered pairs of runs (i, j) whose
interval i holds median j. The spread from run to run comes from the runs themselves, as from the repeats of a study, and beside it
the default alone is shown. Promised on a quiet machine, which the load and the foreign share of the cores tell: 90 % of pairs, a
half-width of at most 3 %, no run flagged but the one beside the hog.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from socket import create_server

from rich.console import Console
from rich.table import Table

from autotune.contamination import Witness, contamination, foreign_cpu
from autotune.host_load import HostWatch
from autotune.run_spread import RunSpread, other_runs, run_spread
from autotune.spec import load_study, study_file
from autotune.steady_state import Interval, is_measured, steady, steady_interval, steady_window
from launchers.base import Rendezvous, StepRecord
from launchers.megatron_core.launcher import MegatronCoreLauncher
from launchers.process import LaunchRequest, Limits, Supervised, TrialEnd, run_trial
from search_spaces.config import TrialConfig
from search_spaces.hardware import RankEnvironment
from search_spaces.model import Workload

WARMUP_STEPS = 2
LIMIT_SHARE, LIMIT_HALF_WIDTH = 0.90, 0.03
LIMITS = Limits(startup_s=300, step_s=120, trial_s=900)
HOG = [sys.executable, "-c", "while True: pass"]


@dataclass(frozen=True)
class Run:
    """One run of the configuration."""

    within: Interval
    steps: int
    foreign: float
    contaminated: str


class Machine:
    """Runs trials of one configuration in one process tree, as a study's agent does."""

    def __init__(self, workload: Workload, steps: int, interval: float, folder: Path) -> None:
        self._launcher = MegatronCoreLauncher()
        config = TrialConfig(precision="fp32")
        self._job = self._launcher.job(workload, config, steps=steps, seed=0)
        self._ranks, self._interval, self._folder = workload.world_size, interval, folder
        environment = RankEnvironment(env={"OMP_NUM_THREADS": "1"})
        self._supervised = Supervised(environment, preload=self._launcher.preload)
        self._count = 0

    def run(self) -> Run:
        """One trial, ended where it is measured well enough."""
        steps: list[StepRecord] = []
        self._count += 1
        roots = lambda: {pid for pid in (os.getpid(), self._supervised.guardian_pid) if pid}  # noqa: E731
        with HostWatch(roots) as watch:
            stop = lambda: is_measured([s.step_s for s in steps], WARMUP_STEPS, self._interval)  # noqa: E731
            for item in run_trial(self._supervised, self._request(), LIMITS, stop=stop):
                if isinstance(item, TrialEnd):
                    end = item
                else:
                    steps.append(item)
        if not steps:
            raise RuntimeError(f"the trial ended as {end.outcome}: {end.detail}")
        witnesses, window = (Witness(0, tuple(watch.loads)),), steady_window(steps, WARMUP_STEPS)
        return Run(
            within=steady_interval(steady([step.step_s for step in steps], WARMUP_STEPS)),
            steps=len(steps),
            foreign=foreign_cpu(witnesses, window)[0],
            contaminated=contamination(witnesses, window, on_cpu=True),
        )

    def _request(self) -> LaunchRequest:
        with create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        return LaunchRequest(
            trial=f"run-{self._count}",
            program=self._launcher.program,
            job=self._job,
            rendezvous=Rendezvous("127.0.0.1", port, self._ranks, 0, self._ranks),
            ranks=tuple(range(self._ranks)),
            log_folder=self._folder / f"run-{self._count}",
        )

    def close(self) -> None:
        """End the process tree."""
        self._supervised.close()


@contextmanager
def hogs() -> Iterator[None]:
    """One process that computes, per core; orphans, because what hangs below this process counts as the trial's own."""
    start = [shlex.join(HOG) + " >/dev/null 2>&1 & echo $!"]
    pids = [int(subprocess.check_output(["sh", "-c", *start], text=True)) for _ in os.sched_getaffinity(0)]
    try:
        yield
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)


def share_of_pairs(runs: Sequence[Run], spread: RunSpread) -> tuple[float, float]:
    """Share of ordered pairs whose interval holds the other median, and the median half-width over the median."""
    intervals = [other_runs(run.within, spread) for run in runs]
    pairs = [(one, other) for one in range(len(runs)) for other in range(len(runs)) if one != other]
    held = sum(intervals[one].low <= runs[other].within.median <= intervals[one].high for one, other in pairs)
    return held / len(pairs), statistics.median(interval.half_width for interval in intervals)


def measure(options: argparse.Namespace) -> dict[str, object]:
    """Run everything; figures by name."""
    spec = load_study(study_file("quickstart"))
    pool = spec.pools[0].model_copy(update={"gpus_per_node": options.ranks})
    load_before = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as scratch:
        machine = Machine(spec.workload(pool), options.steps, options.interval, Path(scratch))
        try:
            machine.run()  # the first one pays for imports and page caches
            runs = [machine.run() for _ in range(options.runs)]
            with hogs():
                hogged = machine.run()
            after = machine.run()
        finally:
            machine.close()
    pooled = run_spread([[(run.within.median, run.within.half_width) for run in runs]])
    rows = {"repeats": share_of_pairs(runs, pooled), "default": share_of_pairs(runs, RunSpread())}
    medians = [run.within.median for run in runs]
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "cores": len(os.sched_getaffinity(0)),
        "load_1min_before": load_before,
        "foreign_share": [run.foreign for run in runs],
        "median_step_s": medians,
        "half_width_within": [run.within.half_width for run in runs],
        "steps": [run.steps for run in runs],
        "spread_of_medians": statistics.stdev(medians) / statistics.fmean(medians),
        "spread_between_runs": pooled.relative,
        **{f"pairs_held_{name}": row[0] for name, row in rows.items()},
        **{f"half_width_{name}": row[1] for name, row in rows.items()},
        "flagged": sum(bool(run.contaminated) for run in runs),
        "hogged_flagged": hogged.contaminated,
        "hogged_foreign_share": hogged.foreign,
        "hogged_over_median": hogged.within.median / statistics.median(medians),
        "after_flagged": after.contaminated,
    }


def main() -> int:
    """Print the table, write JSON; exit code 1 where a promise does not hold."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--interval", type=float, default=0.002)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    figures = measure(options)
    table = Table("figure", "value", title="repeatability on CPU")
    for name, value in figures.items():
        shown = [f"{item:.4g}" for item in value] if isinstance(value, list) else [str(value)]
        table.add_row(name, " ".join(shown))
    Console().print(table)
    if options.output:
        options.output.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    held = figures["pairs_held_repeats"] >= LIMIT_SHARE and figures["half_width_repeats"] <= LIMIT_HALF_WIDTH
    return int(not (held and figures["hogged_flagged"] and not figures["flagged"]))


if __name__ == "__main__":
    sys.exit(main())
