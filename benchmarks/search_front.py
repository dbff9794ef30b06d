"""How much of the true Pareto front studies with `pareto: true` find on the two twins, by sampler.

    python benchmarks/search_front.py [--studies 8] [--trials 25] [--methods LIST] [--json FILE]

The terms are tokens/s per GPU, more is better, and mean watts of the pool, less is better; a GPU power limit is one of the knobs.
The figure is the hypervolume of what a study tried over that of the true front, both by what the candidates really do.
Simulated: nothing here is measured.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from optuna._hypervolume import compute_hypervolume
from optuna.storages import InMemoryStorage
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from autotune.pareto import WORSE  # noqa: E402  the repository is no package
from autotune.pool_study import PoolStudy  # noqa: E402
from autotune.spec import StudySpec  # noqa: E402
from benchmarks.twin_worlds import METRIC, World, played  # noqa: E402
from launchers.outcome import Outcome  # noqa: E402
from launchers.twins import KINDS  # noqa: E402

METHODS = ("residual", "tpe", "nsga2", "random")


def tried(world: World, method: str) -> list[int]:
    """Rows of the configurations that a study measured, the baseline first where it completed."""
    own = {
        "sampler": method,
        "pareto": True,
        "objective": {"tokens_per_s_per_gpu": 1.0, METRIC: -1.0},
        "confirm": {"top": 0},
        "recipes": False,
    }
    spec = StudySpec.model_validate({**world.spec.model_dump(), **own})
    launcher = world.launcher()
    study = PoolStudy(spec, spec.pools[0], launcher, InMemoryStorage(), lambda study, record: None)
    while (proposal := study.propose()) is not None:
        study.finish(proposal, played(launcher, spec, proposal))
    return [world.rows[record.config] for record in study.records if record.outcome is Outcome.COMPLETED]


def covered(world: World, rows: Sequence[int]) -> float:
    """Hypervolume of some rows in what they really do, relative to the baseline."""
    base = world.table.find(world.spec.baseline)
    tokens, watts = (np.log(values[rows] / values[base]) for values in (world.truth.tokens_per_s, world.truth.watts))
    losses = np.stack([-tokens, watts], axis=1)
    counted = losses[(losses < WORSE).all(axis=1)]
    return float(compute_hypervolume(counted, np.full(2, WORSE))) if len(counted) else 0.0


def study(world: World, method: str) -> dict[str, Any]:
    """One line of the result."""
    runs = np.flatnonzero(world.truth.tokens_per_s > 0).tolist()
    share = covered(world, tried(world, method)) / covered(world, runs)
    return {"kind": world.kind, "seed": world.seed, "method": method, "share": share}


def show(entries: Sequence[dict[str, Any]]) -> None:
    """Print the table."""
    table = Table("twin", "sampler", "studies", "share of the true hypervolume: mean", "lowest")
    for kind, method in dict.fromkeys((entry["kind"], entry["method"]) for entry in entries):
        shares = [entry["share"] for entry in entries if (entry["kind"], entry["method"]) == (kind, method)]
        table.add_row(kind, method, str(len(shares)), f"{np.mean(shares):.3f}", f"{min(shares):.3f}")
    Console(width=140).print(table)


def main() -> int:
    """Run the studies."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--studies", type=int, default=8, help="seeds per twin")
    parser.add_argument("--trials", type=int, default=25)
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    worlds = (World(kind, seed, options.trials) for kind in KINDS for seed in range(options.studies))
    # A baseline that runs out of memory leaves nothing to relate to.
    usable = (world for world in worlds if world.truth.tokens_per_s[world.table.find(world.spec.baseline)] > 0)
    entries = [study(world, method) for world in usable for method in options.methods.split(",")]
    show(entries)
    if options.json:
        options.json.write_text(json.dumps(entries, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
