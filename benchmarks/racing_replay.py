"""What racing saves, and whether it costs the winner: recorded step traces replayed through the study loop, with and without it.

    python benchmarks/racing_replay.py exhaustive_cpu.json [--study benchmarks/exhaustive_cpu.yaml] [--seeds 20] [--trials N]
                                       [--startup-s 0.5] [--output FILE]

`benchmarks/exhaustive_cpu.py` records the traces: every legal configuration of a small space, several runs of each, in turns. Each
seed draws an order of the configurations (Optuna's random sampler) and which run of a configuration is the exploring one; its other
runs are the confirming ones. A trial ends after the step at which a real one would. The same seed is replayed with `racing: false`:
what is saved is the difference of the seconds of all steps, the baseline's and the confirming runs' included.

A winner counts as found where its median over all recorded runs is inside the interval of all runs of the fastest configuration.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from optuna.storages import InMemoryStorage
from pydantic import ValidationError
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from autotune.errors import SpecError  # noqa: E402  the repository is no package
from autotune.pool_study import PoolStudy  # noqa: E402
from autotune.proposal import Proposal  # noqa: E402
from autotune.racing import SAVED, enough  # noqa: E402
from autotune.records import Phase, TrialResult, short  # noqa: E402
from autotune.refit import Refit  # noqa: E402
from autotune.run_spread import RunSpread  # noqa: E402
from autotune.spec import StudySpec, load_study  # noqa: E402
from benchmarks.exhaustive_cpu import STUDY, best_first  # noqa: E402
from benchmarks.table_launcher import TableLauncher  # noqa: E402
from launchers.base import StepRecord  # noqa: E402
from launchers.outcome import Outcome  # noqa: E402
from search_spaces.config import TrialConfig  # noqa: E402

LEAST_SAVED = 0.30
LEAST_FOUND = 0.95
FEWEST_CONFIGURATIONS = 40
FEWEST_RUNS = 3

Traces = Mapping[TrialConfig, Sequence[Sequence[float]]]
"""Step seconds of each run of each configuration, in the order in which they ran."""


def read(file: Path) -> Traces:
    """Traces of a file that `exhaustive_cpu.py` has written.

    Raises:
        SpecError: where it is not such a file, or holds too few runs, or runs of different lengths.
    """
    hint = "record it with `python benchmarks/exhaustive_cpu.py --output exhaustive_cpu.json`"
    try:
        rows = json.loads(file.read_text(encoding="utf-8"))
        traces = {TrialConfig(**row["config"]): row["step_s"] for row in rows}
        runs = [run for recorded in traces.values() for run in recorded]
        lengths, fewest = {len(run) for run in runs}, min(len(recorded) for recorded in traces.values())
    except (OSError, ValueError, KeyError, TypeError, ValidationError) as error:
        raise SpecError("TRACES", str(file), f"cannot be read as step traces: {str(error).splitlines()[0]}", hint) from None
    if fewest < FEWEST_RUNS:
        raise SpecError("TRACES", str(file), f"a configuration has {fewest} runs, {FEWEST_RUNS} are needed", hint)
    if len(lengths) != 1:
        raise SpecError("TRACES", str(file), f"runs have different numbers of steps: {sorted(lengths)}", hint)
    return traces


def study_of(spec: StudySpec, traces: Traces, seed: int, trials: int, racing: bool) -> StudySpec:
    """The study that is replayed: random order, as many steps as were recorded, one confirming run per other recorded run."""
    steps = len(next(iter(traces.values()))[0])
    data = spec.model_dump(exclude={"measurement", "confirm"}) | {
        "sampler": "random",
        "seed": seed,
        "budget": {"trials": trials},
        "measurement": spec.measurement.model_dump() | {"steps": steps, "racing": racing},
        "confirm": spec.confirm.model_dump() | {"steps": steps, "repeats": min(map(len, traces.values())) - 1},
    }
    return StudySpec.model_validate(data)


class Recorded:
    """Hands out the recorded runs: one of each configuration to explore with, drawn by the seed, the others to confirm with."""

    def __init__(self, spec: StudySpec, traces: Traces) -> None:
        draw = random.Random(spec.seed)
        self._left = {config: draw.sample(list(runs), len(runs)) for config, runs in traces.items()}
        self._spec = spec

    def run(self, proposal: Proposal, spread: RunSpread) -> TrialResult:
        """The next run of the proposal's configuration, up to the step after which a real trial would have been ended."""
        trace = self._left[proposal.config].pop(0)
        measurement = self._spec.measurement_of(proposal.phase is Phase.CONFIRM)
        for count in range(1, len(trace) + 1):
            if found := enough(trace[:count], measurement, proposal.beaten_s, spread):
                return TrialResult(Outcome.COMPLETED, found.why, _steps(trace[:count]), raced_out=found.raced_out)
        return TrialResult(Outcome.COMPLETED, "", _steps(trace))


def _steps(step_s: Sequence[float]) -> tuple[StepRecord, ...]:
    times = [sum(step_s[: count + 1]) for count in range(len(step_s))]
    return tuple(
        StepRecord(number, time_s, seconds, 1.0, 1.0, 0, None)
        for number, (time_s, seconds) in enumerate(zip(times, step_s, strict=True), 1)
    )


@dataclass(slots=True)
class Replayed:
    """What one study took.

    Attributes:
        seconds: Of the steps that were run, by phase.
        trials: By phase.
        raced_out: Trials that racing ended.
        counted_s: Seconds that the study itself says racing saved.
        winner: Its answer.
    """

    seconds: dict[Phase, float] = field(default_factory=lambda: dict.fromkeys(Phase, 0.0))
    trials: dict[Phase, int] = field(default_factory=lambda: dict.fromkeys(Phase, 0))
    raced_out: int = 0
    counted_s: float = 0.0
    winner: TrialConfig | None = None


def replay(spec: StudySpec, traces: Traces) -> Replayed:
    """Run one study to its end."""
    study = PoolStudy(spec, spec.pools[0], TableLauncher(traces), InMemoryStorage(), lambda study, record: None)
    # Predictions decide nothing in a random order, and fitting them to every trial would take most of the time.
    study.refit = Refit(study.name, study.table, machines=None, key=("", ""), store=None)
    recorded, found = Recorded(spec, traces), Replayed()
    while (proposal := study.propose()) is not None:
        result = recorded.run(proposal, study.run_spread)
        record = study.finish(proposal, result)
        found.seconds[proposal.phase] += sum(step.step_s for step in result.steps)
        found.trials[proposal.phase] += 1
        found.raced_out += result.raced_out
        found.counted_s += record.metrics.get(SAVED, 0.0)
    found.winner = study.best.config if study.best else None
    return found


def entry(spec: StudySpec, traces: Traces, trials: int, startup_s: float, seed: int) -> dict[str, Any]:
    """One seed's line of the result: the study with racing, beside the same one without."""
    raced, whole = (replay(study_of(spec, traces, seed, trials, racing), traces) for racing in (True, False))
    return {
        "seed": seed,
        "trials": sum(raced.trials.values()),
        "raced_out": raced.raced_out,
        "seconds": sum(raced.seconds.values()),
        "seconds_without": sum(whole.seconds.values()),
        "exploring_seconds": raced.seconds[Phase.EXPLORE],
        "exploring_seconds_without": whole.seconds[Phase.EXPLORE],
        "seconds_with_startup": sum(raced.seconds.values()) + startup_s * sum(raced.trials.values()),
        "seconds_with_startup_without": sum(whole.seconds.values()) + startup_s * sum(whole.trials.values()),
        "counted_saved_s": raced.counted_s,
        "winner": short(raced.winner) if raced.winner else None,
        "found": raced.winner in within_best(traces, spec.measurement.warmup_steps),
        "found_without": whole.winner in within_best(traces, spec.measurement.warmup_steps),
    }


def within_best(traces: Traces, warmup_steps: int) -> list[TrialConfig]:
    """The fastest configuration, and those whose median over all runs is inside the interval of all of its runs."""
    rows = best_first([{"config": config, "step_s": runs} for config, runs in traces.items()], warmup_steps)
    return [row["config"] for row in rows if row["median_s"] <= rows[0]["high_s"]]


def summary(entries: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Shares of seconds saved over all seeds together, and how often the winner was found."""

    def saved(seconds: str) -> float:
        return 1.0 - sum(item[seconds] for item in entries) / sum(item[f"{seconds}_without"] for item in entries)

    return {
        "saved_share": saved("seconds"),
        "saved_share_exploring": saved("exploring_seconds"),
        "saved_share_with_startup": saved("seconds_with_startup"),
        "saved_share_lowest_seed": min(1.0 - item["seconds"] / item["seconds_without"] for item in entries),
        "raced_out_share": sum(item["raced_out"] for item in entries) / sum(item["trials"] for item in entries),
        "seconds_median": statistics.median(item["seconds"] for item in entries),
        "seconds_without_median": statistics.median(item["seconds_without"] for item in entries),
        "found": sum(item["found"] for item in entries),
        "found_without": sum(item["found_without"] for item in entries),
        "seeds": len(entries),
    }


def is_shown(figures: Mapping[str, Any], configurations: int) -> bool:
    """Whether the promise holds: 30 % saved, the winner found in 19 of 20, over at least 40 configurations."""
    found = figures["found"] >= LEAST_FOUND * figures["seeds"]
    return bool(configurations >= FEWEST_CONFIGURATIONS and figures["saved_share"] >= LEAST_SAVED and found)


def show(figures: Mapping[str, Any], configurations: int, near: int, startup_s: float) -> None:
    """Print the table."""
    table = Table("figure", "value", title=f"{configurations} configurations, {figures['seeds']} seeds")
    table.add_row(f"seconds of all steps saved (promised: {LEAST_SAVED:.0%})", f"{figures['saved_share']:.1%}")
    table.add_row("  lowest of one seed", f"{figures['saved_share_lowest_seed']:.1%}")
    table.add_row("  of exploring trials' steps", f"{figures['saved_share_exploring']:.1%}")
    table.add_row(f"  with {startup_s:g} s of start-up per trial", f"{figures['saved_share_with_startup']:.1%}")
    medians = f"{figures['seconds_median']:.1f} / {figures['seconds_without_median']:.1f}"
    table.add_row("seconds of a study, median: with / without racing", medians)
    table.add_row("trials that racing ended", f"{figures['raced_out_share']:.1%}")
    counts = f"{figures['found']} / {figures['found_without']} of {figures['seeds']}"
    table.add_row(f"winner among the {near} inside the best's interval: with / without", counts)
    Console(width=140).print(table)


def study_and_traces(parser: argparse.ArgumentParser, options: argparse.Namespace) -> tuple[StudySpec, Traces]:
    """What `--study` and the traces' file hold; the program ends with exit code 2 where one of them cannot be read."""
    try:
        return load_study(options.study), read(options.traces)
    except SpecError as error:
        parser.error(f"{error} ({error.hint})")


def main() -> int:
    """Print the table, write JSON; exit code 1 where the promise does not hold, 2 where the traces cannot be used."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", type=Path)
    parser.add_argument("--study", type=Path, default=STUDY)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--trials", type=int, help="exploring trials per study; none = every configuration")
    parser.add_argument("--startup-s", type=float, default=0.0, help="seconds that each trial takes before its first step")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    spec, traces = study_and_traces(parser, options)
    if spec.baseline not in traces:
        parser.error(f"{options.traces} holds no runs of the baseline of {options.study}: {short(spec.baseline)}")
    trials = min(options.trials or len(traces), len(traces))
    with ProcessPoolExecutor(options.workers) as pool:
        entries = list(pool.map(partial(entry, spec, traces, trials, options.startup_s), range(options.seeds)))
    figures = summary(entries)
    near = within_best(traces, spec.measurement.warmup_steps)
    show(figures, len(traces), len(near), options.startup_s)
    if options.output:
        told = {"configurations": len(traces), "trials": trials, "within_best": [short(config) for config in near]}
        options.output.write_text(json.dumps(told | figures | {"by_seed": entries}, indent=1) + "\n", encoding="utf-8")
    return int(not is_shown(figures, len(traces)))


if __name__ == "__main__":
    sys.exit(main())
