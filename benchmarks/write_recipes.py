"""Writes search_spaces/recipes.yaml: per model, kind and number of GPUs, the published configuration that was measured fastest.

    python benchmarks/write_recipes.py FOLDER

FOLDER holds `throughput.csv`. Only sources that train with Megatron's own kinds of parallelism and state the whole split, the batch
and the shapes; models that were cut down for a measurement are left out. Figures and where they are from: nothing else is taken.
"""

from __future__ import annotations

import argparse
import csv
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.published_method import whole  # noqa: E402  the repository is no package
from benchmarks.timed_rows import TimedRow, read  # noqa: E402
from search_spaces import recipes as product  # noqa: E402

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
)
_HEADER = """\
# Published recipes (search_spaces/recipes.py). Written by benchmarks/write_recipes.py; do not edit.
# Per model, kind and number of GPUs, the configuration that was measured fastest. Figures only; `source` says where they are from.
"""


def best(folder: Path) -> list[tuple[TimedRow, Mapping[str, str]]]:
    """The fastest row of each model, kind and number of GPUs, with its line of the table, in the table's order."""
    with (folder / "throughput.csv").open(newline="") as file:
        raw = {line["id"]: line for line in csv.DictReader(file)}
    found: dict[tuple[str, str, int], TimedRow] = {}
    for row in read(folder):
        if row.source not in SOURCES or "truncated" in raw[row.id]["model"] or raw[row.id]["workload"] != "pre-training":
            continue
        key = raw[row.id]["model"], row.gpu.name, row.measured.workload.world_size
        if key not in found or _speed(row) > _speed(found[key]):
            found[key] = row
    return [(row, raw[row.id]) for row in found.values()]


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
    entries = [entry(row, raw) for row, raw in best(options.folder)]
    text = yaml.safe_dump(entries, sort_keys=False, default_flow_style=None, width=130)
    options.output.write_text(_HEADER + text, encoding="utf-8")
    print(f"{len(entries)} recipes in {options.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
