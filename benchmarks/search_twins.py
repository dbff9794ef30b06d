"""Searches two twins of a pool under a cap on its watts, and compares what is returned with the truth about every candidate.

    python benchmarks/search_twins.py [--studies 50] [--kind physics|table|both] [--methods residual,random,tpe] [--levels LIST]
                                      [--trials 120] [--first-seed 0] [--workers 1] [--json FILE]

Every study is `PoolStudy`'s own loop, driven in this process without Ray: baseline, exploring, confirming. A twin plays each trial
in virtual time, its steps and GPU readings go through the same measurement as a real trial's. The cap, on the mean watts of all
boards, lies near three quantiles of the true watts of the candidates that run, where none is so close that runs could not tell on
which side it lies (`twin_worlds.CLOSE`); a fourth level adds a guard on every GPU. Nothing here is measured on a machine: the
figures say how the search deals with a world that is not as predicted.

Exit code 1 where `residual` misses a promise: the returned configuration keeps the cap in every study that has one, is within 3 %
of the best that does, at most 10 % of the trials launched after the first five pass the cap, and no launch crosses a guard.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, get_args

import numpy as np
from optuna.storages import InMemoryStorage
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from autotune.pool_study import PoolStudy  # noqa: E402  the repository is no package
from autotune.records import Phase, TrialRecord  # noqa: E402
from autotune.spec import SamplerName, StudySpec  # noqa: E402
from benchmarks.twin_worlds import GUARDED, LEVELS, METRIC, World, played  # noqa: E402
from launchers.outcome import Outcome  # noqa: E402
from launchers.twins import KINDS, Kind  # noqa: E402

METHODS = ("residual", "random", "tpe")
REGRET, OVER = 0.03, 0.10
_FREE = 5


def study(world: World, level: str, method: str) -> dict[str, Any]:
    """One line of the result."""
    spec = world.study_spec(level, method)
    launcher = world.launcher()
    pool = PoolStudy(spec, spec.pools[0], launcher, InMemoryStorage(), lambda study, record: None)
    launchable = np.isin(np.arange(len(world.table)), pool.candidates.open_rows())
    launched: list[TrialRecord] = []
    while (proposal := pool.propose()) is not None:
        launched.append(pool.finish(proposal, played(launcher, spec, proposal)))
    return {
        "kind": world.kind,
        "level": level,
        "method": method,
        "seed": world.seed,
        "end": pool.end_reason,
        "explored": sum(record.phase is not Phase.CONFIRM for record in launched),
        **_launches(world, spec, launched),
        **_answer(world, spec, pool, world.truth.within(_cap_w(spec), launchable)),
    }


def _launches(world: World, spec: StudySpec, launched: Sequence[TrialRecord]) -> dict[str, Any]:
    """What the launches did to the cap, the memory and the guard."""
    cap_w, guard_w = _cap_w(spec), spec.gpu_power_guard_w
    explored = [record for record in launched if record.phase is not Phase.CONFIRM]
    return {
        "launched_later": len(launched[_FREE:]),
        "over_later": sum(_true_watts(world, record) > cap_w for record in launched[_FREE:]),
        "explored_later": len(explored[_FREE:]),
        "explored_over_later": sum(_true_watts(world, record) > cap_w for record in explored[_FREE:]),
        "oom": sum(record.outcome is Outcome.OOM for record in launched),
        "guard_crossings": sum(record.metrics.get("gpu_peak_power_w_1s", 0.0) > guard_w for record in launched) if guard_w else 0,
    }


def _answer(world: World, spec: StudySpec, pool: PoolStudy, feasible: float) -> dict[str, Any]:
    """What is returned, against the tokens per second of the best that the world has under the cap."""
    best = pool.best
    if best is None:
        return {"feasible": feasible > 0, "returned": False, "keeps": feasible == 0, "shown": feasible == 0, "regret": 1.0}
    row = _row(world, best)
    return {
        "feasible": feasible > 0,
        "returned": True,
        "keeps": bool(world.truth.watts[row] <= _cap_w(spec)),
        "over_cap": float(world.truth.watts[row] / _cap_w(spec) - 1.0),
        "shown": best.phase is Phase.CONFIRM and not best.violations,
        "regret": float(1.0 - world.truth.tokens_per_s[row] / feasible) if feasible else 0.0,
    }


def _cap_w(spec: StudySpec) -> float:
    return spec.limits[METRIC].max or 0.0


def _row(world: World, record: TrialRecord) -> int:
    return world.rows[record.config]


def _true_watts(world: World, record: TrialRecord) -> float:
    """NaN for a trial that ran out of memory: it draws nothing that counts."""
    return float(world.truth.watts[_row(world, record)])


def summary(entries: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Shares and quantiles over the studies of one row."""
    possible = [entry for entry in entries if entry["feasible"]]
    regrets = np.array([entry["regret"] for entry in possible])
    return {
        "studies": len(entries),
        "feasible": len(possible),
        "keeps": _mean(entry["keeps"] for entry in possible),
        "shown": _mean(entry["shown"] for entry in possible),
        "within": _mean(regrets <= REGRET),
        "regret_median": float(np.median(regrets)),
        "regret_p90": float(np.percentile(regrets, 90)),
        "regret_most": float(regrets.max()),
        "over": _share(entries, "over_later", "launched_later"),
        "explored_over": _share(entries, "explored_over_later", "explored_later"),
        "explored": _mean(entry["explored"] for entry in entries),
        "oom": _share(entries, "oom", "explored"),
        "guard_crossings": sum(entry["guard_crossings"] for entry in entries),
    }


def _mean(values: Any) -> float:
    return float(np.mean(list(values)))


def _share(entries: Sequence[dict[str, Any]], part: str, whole: str) -> float:
    return sum(entry[part] for entry in entries) / max(1, sum(entry[whole] for entry in entries))


def missed(row: dict[str, float]) -> list[str]:
    """Promises that these studies do not show."""
    found = {
        "a returned configuration is over the cap or not confirmed": row["keeps"] < 1.0 or row["shown"] < 1.0,
        f"a returned configuration is more than {REGRET:.0%} from the best": row["within"] < 1.0,
        f"more than {OVER:.0%} of the later launches are over the cap": row["over"] > OVER,
        "a guard was crossed": row["guard_crossings"] > 0,
    }
    return [text for text, wrong in found.items() if wrong]


def rows(entries: Sequence[dict[str, Any]]) -> Iterator[tuple[tuple[str, str, str], dict[str, float]]]:
    """The summaries by twin, level and method, in the order in which they came."""
    grouped: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for entry in entries:
        grouped.setdefault((entry["kind"], entry["level"], entry["method"]), []).append(entry)
    for key in sorted(grouped):
        yield key, summary(grouped[key])


def show(entries: Sequence[dict[str, Any]]) -> list[str]:
    """Print the table; what `residual` misses."""
    columns = ("studies", "keep", "in 3 %", "regret %: median", "p90", "most", "over %", "of new %", "trials", "OOM %", "guard")
    table = Table("twin", "cap", "method", *columns, title="simulated: nothing here was measured")
    misses = []
    for (kind, level, method), row in rows(entries):
        regrets = (f"{100 * row[name]:.1f}" for name in ("regret_median", "regret_p90", "regret_most"))
        shares = (f"{100 * row[name]:.1f}" for name in ("over", "explored_over"))
        counts = f"{row['explored']:.1f}", f"{100 * row['oom']:.0f}", f"{row['guard_crossings']:.0f}"
        kept = f"{row['keeps']:.0%}", f"{row['within']:.0%}"
        table.add_row(kind, level, method, f"{row['feasible']:.0f}", *kept, *regrets, *shares, *counts)
        misses += [f"{kind}, {level}: {text}" for text in missed(row)] if method == "residual" else []
    Console(width=150).print(table)
    return misses


def _world(job: tuple[Kind, int], trials: int, levels: Sequence[str], methods: Sequence[str]) -> list[dict[str, Any]]:
    world = World(*job, trials)
    return [study(world, level, method) for level in levels for method in methods]


def main() -> int:
    """Run the studies; exit code 1 where a promise is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--studies", type=int, default=50, help="seeds per twin")
    parser.add_argument("--kind", choices=(*KINDS, "both"), default="both")
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--levels", default=",".join((*LEVELS, GUARDED)))
    parser.add_argument("--trials", type=int, default=120)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    methods, levels = options.methods.split(","), options.levels.split(",")
    if unknown := {*methods, *levels} - {*get_args(SamplerName), *LEVELS, GUARDED}:
        parser.error(f"unknown methods or levels: {', '.join(sorted(unknown))}")
    kinds = KINDS if options.kind == "both" else (options.kind,)
    jobs = [(kind, options.first_seed + seed) for seed in range(options.studies) for kind in kinds]
    run = partial(_world, trials=options.trials, levels=levels, methods=methods)
    if options.workers > 1:
        with ProcessPoolExecutor(options.workers) as pool:
            entries = [entry for found in pool.map(run, jobs) for entry in found]
    else:
        entries = [entry for job in jobs for entry in run(job)]
    misses = show(entries)
    for text in misses:
        print(f"MISSED: {text}")
    if options.json:
        options.json.write_text(json.dumps(entries, indent=1) + "\n", encoding="utf-8")
    return int(bool(misses))


if __name__ == "__main__":
    sys.exit(main())
