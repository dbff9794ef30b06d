"""Writes search_spaces/recipes.yaml: the fastest published configuration of each model, kind and number of GPUs and global batch.

    python benchmarks/write_recipes.py FOLDER

FOLDER holds `throughput.csv`. Only sources that train with Megatron's own kinds of parallelism and state the whole split, the batch
and the shapes; models that were cut down for a measurement are left out. Figures and where they are from: nothing else is taken.
"""

from __future__ import annotations

import argparse
import csv
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.published_method import whole  # noqa: E402  the repository is no package
from benchmarks.timed_rows import TimedRow, read  # noqa: E402
from search_spaces import recipes as product  # noqa: E402

Line = tuple[TimedRow, Mapping[str, str]]
"""A row with its line of the table."""
OUTPUT = Path(product.__file__).with_name("recipes.yaml")
SOURCES = ("megatron-bridge-perf", "megatron-bridge-skills", "nemo-launcher", "bigscience-bloom", "sc21-table1", "internevo")
KNOBS = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "context_parallel_size",
    "expert_model_parallel_size",
    "micro_batch_size",
    "sequence_parallel",
    "use_distributed_optimizer",
    "recompute_granularity",
    "recompute_method",
    "recompute_num_layers",
    "recompute_modules",
    "precision",
    "fp8_format",
    "fp8_recipe",
    "fp4_format",
)
_HEADER = """\
# Published recipes (search_spaces/recipes.py). Written by benchmarks/write_recipes.py; do not edit.
# Per model, kind and number of GPUs and global batch, the configuration that was measured fastest. Figures only; `source` says
# where they are from.
"""


def usable(folder: Path) -> list[Line]:
    """The rows that recipes are taken from, in the table's order."""
    with (folder / "throughput.csv").open(newline="") as file:
        raw = {line["id"]: line for line in csv.DictReader(file)}
    own = ((row, raw[row.id]) for row in read(folder) if row.source in SOURCES)
    return [(row, line) for row, line in own if "truncated" not in line["model"] and line["workload"] == "pre-training"]


def fastest(lines: Iterable[Line]) -> list[Line]:
    """The fastest of each model, kind and number of GPUs and global batch, in the table's order."""
    found: dict[tuple[str, str, int, int], Line] = {}
    for row, line in lines:
        workload = row.measured.workload
        key = line["model"], row.gpu.name, workload.world_size, workload.global_batch_size
        if key not in found or _speed(row) > _speed(found[key][0]):
            found[key] = row, line
    return list(found.values())


def entry(row: TimedRow, raw: Mapping[str, str]) -> dict[str, Any]:
    """One recipe as the file keeps it."""
    workload, config = row.measured.workload, row.measured.config
    knobs = config.model_dump(mode="json", include=set(KNOBS), exclude_defaults=True)
    if config.pipeline_model_parallel_size > 1 and (stages := whole(raw, "vpp", 1)) > 1:
        knobs["num_virtual_stages_per_pipeline_rank"] = stages
    return {
        "name": raw["model"],
        "model": workload.model.model_dump(mode="json", exclude_defaults=True),
        "gpu": row.gpu.name,
        "gpus": workload.world_size,
        "global_batch_size": workload.global_batch_size,
        "seq_length": workload.seq_length,
        "config": knobs,
        "source": raw["source"],
    }


def _speed(row: TimedRow) -> float:
    """Tokens per second and GPU."""
    workload = row.measured.workload
    return workload.tokens_per_step / row.measured.step_time_s / workload.world_size


def main() -> int:
    """Write the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--output", type=Path, default=OUTPUT)
    options = parser.parse_args()
    entries = [entry(row, raw) for row, raw in fastest(usable(options.folder))]
    text = yaml.safe_dump(entries, sort_keys=False, default_flow_style=None, width=130)
    options.output.write_text(_HEADER + text, encoding="utf-8")
    print(f"{len(entries)} recipes in {options.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
