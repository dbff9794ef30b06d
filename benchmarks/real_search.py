"""The real thing: studies of a space that was measured whole, run for real, and compared with the truth about it.

    python benchmarks/real_search.py exhaustive_cpu.json [--study benchmarks/exhaustive_cpu.yaml] [--runs 3] [--output FILE]

`benchmarks/exhaustive_cpu.py` records the truth. Each run is `autotune tune` as a user starts it, with a seed and a state folder of
its own: the baseline, real trials, confirming runs. Its answer counts as found where its recorded median is inside the interval of
all recorded runs of the fastest configuration.

Beside that, what the refit does while tuning: the error of a trial's seconds as predicted before it ran, after the trials so far,
against the error of the first prediction of the same trial, before anything was measured.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from optuna.storages import InMemoryStorage
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from autotune.pool_study import PoolStudy  # noqa: E402  the repository is no package
from autotune.racing import SAVED  # noqa: E402
from autotune.records import Phase, TrialRecord, short  # noqa: E402
from autotune.results import PoolResults, read_results  # noqa: E402
from autotune.spec import StudySpec, load_study  # noqa: E402
from autotune.state_folder import StateFolder  # noqa: E402
from benchmarks.exhaustive_cpu import STUDY  # noqa: E402
from benchmarks.racing_replay import study_and_traces, within_best  # noqa: E402
from benchmarks.table_launcher import TableLauncher  # noqa: E402
from launchers.outcome import Outcome  # noqa: E402
from search_spaces.config import TrialConfig  # noqa: E402

MOST_TRIALS = 12
LEARNED_AFTER = 5
"""Measured trials from which on a prediction counts as refitted (`prediction.CALIBRATING_TRIALS`)."""
_LIMIT_S = 1800.0


def tune(study: Path, seed: int, root: Path) -> PoolResults:
    """One study through the command line.

    Raises:
        RuntimeError: where it does not end as it should.
    """
    seeded = root / "study.yaml"
    seeded.write_text(study.read_text(encoding="utf-8") + f"\nseed: {seed}\n", encoding="utf-8")
    argv = ["-m", "autotune.cli", "tune", str(seeded), "--trials", str(MOST_TRIALS), "--state", str(root / "studies")]
    shown = subprocess.run([sys.executable, *argv], capture_output=True, text=True, timeout=_LIMIT_S, check=False)
    if shown.returncode:
        raise RuntimeError(f"autotune tune ended with {shown.returncode}: {shown.stdout[-1000:]} {shown.stderr[-2000:]}")
    spec = load_study(seeded)
    return read_results(spec, StateFolder(root / "studies" / spec.name))[0]


def first_predictions_s(spec: StudySpec, configs: Sequence[TrialConfig]) -> list[float]:
    """Step seconds with the shipped coefficients, before anything was measured."""
    study = PoolStudy(spec, spec.pools[0], TableLauncher(dict.fromkeys(configs, ())), InMemoryStorage(), lambda study, record: None)
    found = [study.refit.predict(config) for config in configs]
    return [prediction.step_time_s if prediction else float("nan") for prediction in found]


def entry(spec: StudySpec, seed: int, result: PoolResults, near: Sequence[TrialConfig]) -> dict[str, Any]:
    """One run's line of the result."""
    tried = [record for record in result.records if record.phase is not Phase.CONFIRM and record.outcome is not Outcome.REFUSED]
    best = result.best
    return {
        "seed": seed,
        "trials": len(tried),
        "confirming": sum(record.phase is Phase.CONFIRM for record in result.records),
        "end": result.end_reason,
        "winner": short(best.config) if best else None,
        "found": bool(best and best.config in near),
        "met_at": next((place for place, record in enumerate(tried, 1) if record.config in near), None),
        "disturbed": sum(bool(record.contaminated) for record in result.records),
        "raced_out": sum(SAVED in record.metrics for record in tried),
        "racing_saved_s": sum(record.metrics.get(SAVED, 0.0) for record in tried),
        **_learned(spec, tried),
    }


def _learned(spec: StudySpec, tried: Sequence[TrialRecord]) -> dict[str, Any]:
    """Mean absolute error of the later trials, first and as predicted right before each."""
    later = [
        record
        for record in tried
        if record.outcome is Outcome.COMPLETED and record.metrics.get("predicted_from_trials", 0.0) >= LEARNED_AFTER
    ]
    if not later:
        return {"later_trials": 0}
    seconds = np.array([record.metrics["step_time_s"] for record in later])
    before = np.array(first_predictions_s(spec, [record.config for record in later]))
    after = np.array([record.metrics["predicted_step_time_s"] for record in later])
    return {
        "later_trials": len(later),
        "error_first": float(np.abs(before / seconds - 1).mean()),
        "error_refitted": float(np.abs(after / seconds - 1).mean()),
    }


def show(entries: Sequence[Mapping[str, Any]], near: Sequence[TrialConfig]) -> None:
    """Print the table."""
    names = ("seed", "trials", "met at", "winner", "among the best", "raced out, saved s", "disturbed", "error: first, refitted")
    table = Table(*names, title=f"{len(near)} configurations are inside the best's interval")
    for item in entries:
        errors = f"{item['error_first']:.0%}, {item['error_refitted']:.0%}" if item["later_trials"] else "-"
        raced = f"{item['raced_out']}, {item['racing_saved_s']:.1f}"
        found = "yes" if item["found"] else "NO"
        row = (item["seed"], item["trials"], item["met_at"], item["winner"], found, raced, item["disturbed"], errors)
        table.add_row(*map(str, row))
    Console(width=180).print(table)


def main() -> int:
    """Print the table, write JSON; exit code 1 where a run did not find one of the best within its trials."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", type=Path)
    parser.add_argument("--study", type=Path, default=STUDY)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    spec, traces = study_and_traces(parser, options)
    near, entries = within_best(traces, spec.measurement.warmup_steps), []
    for seed in range(options.runs):
        with tempfile.TemporaryDirectory() as scratch:
            entries.append(entry(spec, seed, tune(options.study, seed, Path(scratch)), near))
    show(entries, near)
    if options.output:
        told = {"within_best": [short(config) for config in near], "runs": entries}
        options.output.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
    return int(not all(item["found"] and item["trials"] <= MOST_TRIALS for item in entries))


if __name__ == "__main__":
    sys.exit(main())
