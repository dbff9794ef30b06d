"""How many candidates a second the predictions answer for on one core: memory, and memory, step time and power together.

    python benchmarks/prediction_speed.py [--json prediction_speed.json]

Seconds of this process's CPU, the best of a few runs, over the whole table of legal candidates. Exit code 1: below the promise.
"""

from __future__ import annotations

import os

for _threads in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[_threads] = "1"  # before numpy is imported

import argparse  # noqa: E402
import json  # noqa: E402
import sys  # noqa: E402
import time  # noqa: E402
from collections.abc import Callable  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.legality_space import WORKLOADS  # noqa: E402  the repository is no package
from search_spaces import memory  # noqa: E402
from search_spaces.gpus import gpu  # noqa: E402
from search_spaces.prediction import Machines, predict  # noqa: E402
from search_spaces.space import SearchSpace  # noqa: E402

REPEATS = 5
PROMISED_PER_S = 200_000


def measure(workload: str) -> dict[str, Any]:
    """Candidates per second of one workload's table."""
    table = SearchSpace(WORKLOADS[workload], "auto").table()
    machines = Machines.shipped(gpu("h200"), 8)
    return {
        "workload": workload,
        "candidates": len(table),
        "memory_per_s": round(len(table) / _seconds(lambda: memory.estimate(table.columns))),
        "together_per_s": round(len(table) / _seconds(lambda: predict(table.columns, machines))),
    }


def _seconds(work: Callable[[], object]) -> float:
    """CPU seconds of the best of a few runs."""
    spent = []
    for _ in range(REPEATS):
        start = time.process_time()
        work()
        spent.append(time.process_time() - start)
    return min(spent)


def main() -> None:
    """Measure, print, judge."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, default=Path("prediction_speed.json"))
    options = parser.parse_args()
    found = [measure(workload) for workload in WORKLOADS]
    print(f"{'workload':32}{'candidates':>12}{'memory /s':>12}{'together /s':>13}")
    for row in found:
        print(f"{row['workload']:32}{row['candidates']:12,}{row['memory_per_s']:12,}{row['together_per_s']:13,}")
    options.json.write_text(json.dumps(found, indent=1))
    sys.exit(any(row["together_per_s"] < PROMISED_PER_S for row in found))


if __name__ == "__main__":
    main()
