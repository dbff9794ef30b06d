"""Replays published tables of measurements through the real study loop and counts trials until the best is found.

    python benchmarks/search_replay.py FOLDER [--seeds 20] [--most-trials N] [--methods LIST] [--misled] [--json FILE]

A space is one model, GPU count and global batch with at least 11 measured configurations; only these can be run. Every method by
name of a sampler goes through `PoolStudy.propose` and `finish` with a launcher that looks the seconds up; the orders (`prediction`,
`rule`: fewest TP x PP, then the largest micro-batch) are fixed lists. No coefficient was fitted on rows of the replayed source.
`residual`, `grid` and the orders are deterministic on tables of this size and run once; the others run once per seed.

`transfer` is `residual` after studies of other spaces of the same machines and model ended in its storage, `transfer-model` after
studies of other models; with one of them all methods search only those spaces that have such neighbours.

`recipes` is `residual` that starts from recipes of other models, worked out as the shipped ones, from the replayed tables too;
`recipes-apart` from those of other numbers of GPUs only.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any, get_args

import numpy as np
from optuna.storages import InMemoryStorage
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from autotune.pool_study import PoolStudy  # noqa: E402  the repository is no package
from autotune.records import TrialResult  # noqa: E402
from autotune.refit import Refit  # noqa: E402
from autotune.spec import SamplerName  # noqa: E402
from autotune.starts import Starts  # noqa: E402
from benchmarks.replay_recipes import FROM_OTHERS, starts_of  # noqa: E402
from benchmarks.replay_spaces import Space, neighbours, spaces  # noqa: E402
from benchmarks.table_launcher import TableLauncher  # noqa: E402
from launchers.base import StepRecord  # noqa: E402
from launchers.outcome import Outcome  # noqa: E402

ORDERS = {"prediction": Space.by_prediction, "rule": Space.by_rule}
AFTER_OTHERS = {"transfer": True, "transfer-model": False}
DETERMINISTIC = ("residual", "grid", *AFTER_OTHERS, *FROM_OTHERS, *ORDERS)
METHODS = ("residual", "prediction", "rule", "grid", "random", "tpe", "gp")
AFTER = (1, 2, 3, 5, 10)
BEFORE_TRIALS = 12
_STEPS = 4


def result(seconds: float) -> TrialResult:
    """A trial with the measured seconds."""
    steps = (StepRecord(step + 1, step * seconds, seconds, 1.0, 1.0, 0, None) for step in range(_STEPS))
    return TrialResult(Outcome.COMPLETED, "", tuple(steps))


def walk(
    space: Space, method: str, seed: int, most_trials: int, before: Sequence[Space] = (), starts: Starts | None = None
) -> list[float]:
    """Measured seconds of the configurations that a method tries, in its order.

    Args:
        space: The space.
        method: The method.
        seed: Of its sampler.
        most_trials: Where it ends.
        before: Spaces whose studies ended in its storage.
        starts: What it tries first.
    """
    if method in ORDERS:
        return [space.seconds[config] for config in ORDERS[method](space)][:most_trials]
    storage = InMemoryStorage()
    for other in before:
        _tried(other, "residual", seed, BEFORE_TRIALS, storage)
    sampler = "residual" if method in (*AFTER_OTHERS, *FROM_OTHERS) else method
    return _tried(space, sampler, seed, most_trials, storage, starts)


def _tried(
    space: Space, sampler: str, seed: int, most_trials: int, storage: InMemoryStorage, starts: Starts | None = None
) -> list[float]:
    """Measured seconds of the trials of a study, in its order."""
    budget = {"trials": min(most_trials, len(space.seconds)), "confidence": None}
    spec = space.spec.model_validate({**space.spec.model_dump(), "sampler": sampler, "seed": seed, "budget": budget})
    launcher = TableLauncher(space.seconds)
    study = PoolStudy(spec, spec.pools[0], launcher, storage, lambda study, record: None, predictor=space.predict)
    study.refit = Refit(study.name, study.table, None, ("", ""), None)  # of no use to what starts from given predictions
    study.starts = starts or study.starts
    tried = []
    while (proposal := study.propose()) is not None:
        tried.append(space.seconds[proposal.config])
        study.finish(proposal, result(tried[-1]))
    return tried


def entry(
    space: Space, method: str, seed: int, most_trials: int, before: Sequence[Space] = (), starts: Starts | None = None
) -> dict[str, Any]:
    """One line of the result."""
    regrets = np.array(walk(space, method, seed, most_trials, before, starts)) / space.best_s - 1.0
    lowest = np.minimum.accumulate(regrets)
    return {
        "space": space.name,
        "n": len(space.seconds),
        "method": method,
        "seed": seed,
        "starts": len(starts or ()),
        "trials_to_5pct": _first(lowest <= 0.05),
        "trials_to_2pct": _first(lowest <= 0.02),
        "trials_to_best": _first(lowest <= 0.0),
        "regret_after": {str(after): float(lowest[min(after, len(lowest)) - 1]) for after in AFTER},
    }


def _first(reached: np.ndarray) -> int | None:
    """Number of the first trial that reached it; None where none did."""
    return int(reached.argmax()) + 1 if reached.any() else None


def summary(entries: Sequence[dict[str, Any]], method: str) -> dict[str, float]:
    """Means over spaces of means over seeds, in percent, with the half width of their 95 % interval; trials to 2 %."""
    own = [entry for entry in entries if entry["method"] == method]
    found: dict[str, float] = {}
    for after in map(str, AFTER):
        means = np.array(list(_by_space(own, lambda entry, after=after: entry["regret_after"][after]).values()))
        found[f"regret_{after}"] = 100 * float(means.mean())
        found[f"regret_{after}_pm"] = 100 * _half_width(means)
    trials = [_trials(entry) for entry in own]
    return {**found, "median": float(np.median(trials)), "p90": float(np.percentile(trials, 90)), "most": float(max(trials))}


def _by_space(entries: Sequence[dict[str, Any]], value: Any) -> dict[str, float]:
    every: dict[str, list[float]] = {}
    for item in entries:
        every.setdefault(item["space"], []).append(value(item))
    return {name: float(np.mean(values)) for name, values in every.items()}


def show(entries: Sequence[dict[str, Any]], methods: Sequence[str], top5: float) -> None:
    """Print the table."""
    names = {entry["space"] for entry in entries}
    title = f"{len(names)} spaces; top 5 of the prediction within 3 % of the best in {top5:.0%}"
    table = Table("method", *(f"regret after {after}, %" for after in AFTER), "trials to 2 %: median", "p90", "most", title=title)
    for method in methods:
        row = summary(entries, method)
        regrets = (f"{row[f'regret_{after}']:.2f} ±{row[f'regret_{after}_pm']:.2f}" for after in AFTER)
        table.add_row(method, *regrets, *(f"{row[name]:.0f}" for name in ("median", "p90", "most")))
    Console(width=140).print(table)


def show_differences(entries: Sequence[dict[str, Any]], methods: Sequence[str]) -> None:
    """Print the first method's regret and trials minus each other's, paired by space, with the 95 % interval."""
    first, *others = methods
    titles = (*(f"regret after {after}, %" for after in AFTER), "trials to 2 %")
    spaces_in = len({entry["space"] for entry in entries})
    table = Table(f"{first} minus", *titles, "spaces worse after 5", title=f"{spaces_in} spaces")
    for method in others:
        cells = [
            100 * paired(entries, first, method, lambda entry, after=after: entry["regret_after"][str(after)]) for after in AFTER
        ]
        worse = int((cells[AFTER.index(5)] > 0).sum())
        cells.append(paired(entries, first, method, _trials))
        table.add_row(method, *(f"{cell.mean():+.2f} ±{_half_width(cell):.2f}" for cell in cells), str(worse))
    if others and spaces_in:
        Console(width=140).print(table)


def show_started(entries: Sequence[dict[str, Any]], methods: Sequence[str]) -> None:
    """Print the same for the spaces alone that recipes point into."""
    for method in (method for method in methods if method in FROM_OTHERS):
        into = {entry["space"] for entry in entries if entry["method"] == method and entry["starts"]}
        print(f"{method}: {len(into)} of {len({entry['space'] for entry in entries})} spaces have a start")
        others = [other for other in methods if other not in FROM_OTHERS]
        show_differences([entry for entry in entries if entry["space"] in into], (method, *others))


def paired(entries: Sequence[dict[str, Any]], first: str, second: str, value: Callable[..., float]) -> np.ndarray:
    """Difference of two methods' means of a value in each space."""
    own, other = (_by_space([entry for entry in entries if entry["method"] == method], value) for method in (first, second))
    return np.array([own[name] - other[name] for name in own])


def _trials(entry: dict[str, Any]) -> float:
    """Trials to 2 %; all where none came so near."""
    return float(entry["trials_to_2pct"] or entry["n"])


def _half_width(values: np.ndarray) -> float:
    """Half of the 95 % interval of a mean; not known from a single value."""
    return 1.96 * float(values.std(ddof=1)) / len(values) ** 0.5 if len(values) > 1 else float("nan")


def top5_share(found: Sequence[Space]) -> float:
    """Share of the spaces in which one of the five fastest predicted is within 3 % of the best."""
    return float(np.mean([min(space.seconds[c] for c in space.by_prediction()[:5]) <= 1.03 * space.best_s for space in found]))


def _run(folder: Path, job: tuple[str, str, int], most_trials: int, misled: bool, before: int) -> dict[str, Any]:
    name, method, seed = job
    space = _spaces(folder)[name]
    others = [replace(other, misled=misled) for other in _before(folder, space, method)[:before]]
    space = replace(space, misled=misled)
    starts = starts_of(space, folder, apart=FROM_OTHERS[method]) if method in FROM_OTHERS else None
    return entry(space, method, seed, most_trials, others, starts)


def _before(folder: Path, space: Space, method: str) -> list[Space]:
    """What can be searched before a space by a method that begins with other spaces."""
    same_model = AFTER_OTHERS.get(method)
    return [] if same_model is None else neighbours(space, list(_spaces(folder).values()), same_model=same_model)


@cache
def _spaces(folder: Path) -> dict[str, Space]:
    return {space.name: space for space in spaces(folder)}


def main() -> int:
    """Run all methods on all spaces."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--most-trials", type=int, default=10_000)
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--spaces", default="", help="only those whose name contains this")
    parser.add_argument("--misled", action="store_true", help="predict wrongly on purpose")
    parser.add_argument("--before", type=int, default=1, help="spaces that `transfer` and `transfer-model` search before")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    methods = options.methods.split(",")
    if unknown := set(methods) - {*get_args(SamplerName), *AFTER_OTHERS, *FROM_OTHERS, *ORDERS}:
        parser.error(f"unknown methods: {', '.join(sorted(unknown))}")
    found = {name: space for name, space in _spaces(options.folder).items() if options.spaces in name}
    for method in AFTER_OTHERS.keys() & set(methods):
        found = {name: space for name, space in found.items() if _before(options.folder, space, method)}
    if not found:
        parser.error(f"{options.folder}: no table with enough measured configurations")
    seeds = {method: range(1 if method in DETERMINISTIC else options.seeds) for method in methods}
    jobs = [(name, method, seed) for method in methods for name in found for seed in seeds[method]]
    with ProcessPoolExecutor(options.workers) as pool:
        run = partial(_run, options.folder, most_trials=options.most_trials, misled=options.misled, before=options.before)
        entries = list(pool.map(run, jobs, chunksize=4))
    show(entries, methods, top5_share([replace(space, misled=options.misled) for space in found.values()]))
    show_differences(entries, methods)
    show_started(entries, methods)
    if left_out := sum(space.left_out for space in found.values()):
        print(f"{left_out} measured rows are no legal candidates and were left out")
    if options.json:
        options.json.write_text(json.dumps(entries, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
