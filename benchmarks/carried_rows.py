"""Published step times carried in this repository, so that accuracy is tested without the collection they were chosen from.

    python benchmarks/carried_rows.py FOLDER

writes `tests/data/step_times.jsonl` anew: every row of the small sources, evenly spaced workloads of the large ones. One row a
line: its source, machine, model, workload, the knobs that are not Megatron's defaults, and the measured seconds.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.timed_rows import TimedRow, by_source, links_of_source, read  # noqa: E402  the repository is no package
from search_spaces.calibration import Measured  # noqa: E402
from search_spaces.config import TrialConfig  # noqa: E402
from search_spaces.gpus import gpu  # noqa: E402
from search_spaces.model import ModelSpec, Workload  # noqa: E402

CARRIED = ROOT / "tests" / "data" / "step_times.jsonl"
SOURCES = ("sc21-table1", "bigscience-bloom", "internevo", "simumax-b200", "nemo-launcher", "vtrain")
GROUPS, MANY = 8, 40


def carried(path: Path = CARRIED) -> list[TimedRow]:
    """The rows of the file."""
    return [_row(json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines()]


def _row(entry: dict[str, Any]) -> TimedRow:
    workload = Workload(model=ModelSpec.model_validate(entry["model"]), **entry["workload"])
    config = TrialConfig.model_validate(entry["config"])
    device = gpu(entry["gpu"])
    measured = Measured(workload, config, entry["step_time_s"], entry["routing"])
    links = links_of_source(device, entry["source"], entry["gpus_per_domain"])
    return TimedRow(entry["id"], entry["source"], device, links, measured, entry["software"])


def _entry(row: TimedRow) -> dict[str, Any]:
    w = row.measured.workload
    return {
        "id": row.id,
        "source": row.source,
        "gpu": row.gpu.name,
        "gpus_per_domain": row.links.domain,
        "software": row.software,
        "routing": row.measured.routing,
        "step_time_s": round(row.measured.step_time_s, 5),
        "workload": w.model_dump(mode="json", exclude={"model"}, exclude_defaults=True),
        "model": w.model.model_dump(mode="json", exclude_defaults=True),
        "config": row.measured.config.model_dump(mode="json", exclude_defaults=True),
    }


def chosen(rows: Iterable[TimedRow]) -> list[TimedRow]:
    """All rows of a source, or of evenly spaced workloads where it has many."""
    groups: dict[Any, list[TimedRow]] = {}
    for row in rows:
        groups.setdefault(row.group, []).append(row)
    kept = list(groups.values())
    count = GROUPS if len(kept) > MANY else len(kept)
    places = np.unique(np.linspace(0, len(kept) - 1, count).round().astype(int))
    return [row for place in places for row in kept[place]]


def main() -> None:
    """Write the file."""
    sources = by_source(read(Path(sys.argv[1])))
    lines = [json.dumps(_entry(row)) for name in SOURCES for row in chosen(sources[name])]
    CARRIED.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
