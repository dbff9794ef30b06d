"""How many candidates a second memory, step time and power are predicted for, on one core.

    python benchmarks/prediction_speed.py [--json prediction_speed.json]

The tables are those of `legality_space.py`: every legal candidate of two workloads. CPU seconds, the best of three, so that other
work on the machine does not count.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.legality_space import WORKLOADS  # noqa: E402  the repository is no package
from search_spaces import memory, power, step_time  # noqa: E402
from search_spaces.choices import AUTO_SPACE  # noqa: E402
from search_spaces.clock_power import shipped_power  # noqa: E402
from search_spaces.gpus import gpu  # noqa: E402
from search_spaces.model import Workload  # noqa: E402
from search_spaces.prediction import Machines, predict  # noqa: E402
from search_spaces.space import SearchSpace  # noqa: E402

REPEATS = 3
PROMISED_PER_S = 200_000
GPU = "h100"


def best_cpu_s(work: Callable[[], object]) -> float:
    """Least CPU seconds of a few runs."""
    found = []
    for _ in range(REPEATS):
        started = time.process_time()
        work()
        found.append(time.process_time() - started)
    return min(found)


def measure(name: str, workload: Workload) -> dict[str, Any]:
    """Candidates per second of each prediction on one workload's table."""
    columns = SearchSpace(workload, dict.fromkeys(AUTO_SPACE, "auto")).table().columns
    machines = Machines.shipped(gpu(GPU), workload.gpus_per_node or 8)
    times = step_time.estimate(columns, machines.gpu, machines.links, machines.coefficients)
    seconds = {
        "memory": best_cpu_s(lambda: memory.estimate(columns)),
        "time": best_cpu_s(lambda: step_time.estimate(columns, machines.gpu, machines.links, machines.coefficients)),
        "power": best_cpu_s(lambda: power.estimate(times, columns, shipped_power(machines.gpu))),
        "together": best_cpu_s(lambda: predict(columns, machines)),
    }
    rows = len(times.step_time_s)
    return {"workload": name, "rows": rows, "candidates_per_s": {part: round(rows / spent) for part, spent in seconds.items()}}


def main() -> int:
    """Measure both workloads, print a line each and write JSON; exit code 1 below the promise."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="file to write")
    options = parser.parse_args()
    found = [measure(name, workload) for name, workload in WORKLOADS.items()]
    for entry in found:
        rates = ", ".join(f"{part} {rate:,}/s" for part, rate in entry["candidates_per_s"].items())
        print(f"{entry['workload']}: {entry['rows']:,} candidates; {rates}")
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return int(any(entry["candidates_per_s"]["together"] < PROMISED_PER_S for entry in found))


if __name__ == "__main__":
    sys.exit(main())
