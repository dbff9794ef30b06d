"""Accuracy of predicted memory by source, and how rows that ran and rows that ran out of memory are called.

One coefficient of the point estimate is fitted: what the optimiser step holds where gradients are bf16. "shipped" holds a source
out: that coefficient was measured on rows of Megatron-Bridge, and for those it is what Megatron's code says alone. "calibrated" has
it from up to five rows of the source, evenly spaced over the predicted memory, which are not scored. The bounds of fragmentation
were chosen with these rows that ran and that ran out of memory in view.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.published import PublishedRow, raw_rows, read_throughput
from benchmarks.published_golden import GROUP as GOLDEN
from benchmarks.published_golden import read_golden
from benchmarks.ranking import errors, ranking
from search_spaces import memory
from search_spaces.columns import Columns
from search_spaces.gpus import gpu
from search_spaces.memory import Software, Verdict
from search_spaces.memory.table import VERDICTS
from search_spaces.normalise import normalise
from search_spaces.software import STEP_GRADIENT_BYTES, STEP_GRADIENT_BYTES_IN_CODE

CAPACITY_GIB = {
    "A100-SXM4-40GB": 39.4,
    "A100-SXM4-80GB": 79.1,
    "H100-SXM-80GB": 79.1,
    "H100-SXM-96GB-HBM2e (500 W limit)": 94.5,
    "H200-SXM-141GB": 139.8,
    "B200-SXM": 178.3,
    "GB200": 184.0,
    "B300-SXM": 267.0,
    "GB300": 276.0,
    'MI300X ("MI300" in source)': 191.5,
    "MI325X": 255.5,
    "MI355X": 287.5,
    'MI355X ("MI355" in source)': 287.5,
}
"""What a process can use of each board that the tables name: total memory as the driver reports it."""
DRIVER_SHARE = 0.985
"""The same over the nominal memory, for other boards of hardware.yaml."""
CALIBRATION_ROWS = 5
STEP_BYTES = (STEP_GRADIENT_BYTES_IN_CODE, *range(5, 13))


@dataclass(frozen=True, slots=True)
class Result:
    """One row's prediction.

    Attributes:
        row: What was measured.
        predicted_gib: The same quantity, predicted.
        verdict: Whether it fits.
    """

    row: PublishedRow
    predicted_gib: float
    verdict: Verdict


def report(folder: Path) -> dict[str, Any]:
    """Errors by source, and how rows were called, of the tables in a folder."""
    rows, left_out = read_throughput(folder / "throughput.csv")
    golden = read_golden(folder / "megatron_golden.csv")[0] if (folder / "megatron_golden.csv").is_file() else []
    found = accuracy(rows + golden)
    failed = {raw["id"] for raw in raw_rows(folder / "throughput.csv") if raw["status"] == "oom"}
    found["oom"]["not_expressed"] = {row: reason for row, reason in left_out.items() if row in failed}
    return found


def accuracy(rows: Sequence[PublishedRow]) -> dict[str, Any]:
    """Errors of both modes, and verdicts with the source held out."""
    shipped = [predict(row, _held_out(row)) for row in rows]
    sources: dict[str, list[Result]] = {}
    for item in shipped:
        if item.row.memory_gib and item.row.status == "ok":
            sources.setdefault(item.row.source_group, []).append(item)
    found = [_entry(own, "shipped") for own in sources.values()]
    found += [_entry(rest, "calibrated") for rest in map(calibrate, sources.values()) if rest]
    return {"groups": sorted(found, key=lambda entry: str(entry["source"])), "oom": _verdicts(shipped)}


def calibrate(shipped: Sequence[Result]) -> list[Result]:
    """The rows of one source that are scored after calibration on the others; none where there is but one."""
    order = sorted(range(len(shipped)), key=lambda place: shipped[place].predicted_gib)
    places = np.linspace(0, len(shipped) - 1, min(CALIBRATION_ROWS, len(shipped) // 2)).round().astype(int)
    chosen = {order[place] for place in places}
    if not chosen:
        return []
    known = [shipped[place].row for place in chosen]
    best = min(STEP_BYTES, key=lambda held: sum(abs(_error(predict(row, held))) for row in known))
    return [predict(item.row, best) for place, item in enumerate(shipped) if place not in chosen]


def _error(item: Result) -> float:
    return item.predicted_gib / (item.row.memory_gib or math.inf) - 1


def _held_out(row: PublishedRow) -> float:
    """Bytes per parameter that the optimiser step holds, as known without the row's source."""
    return STEP_GRADIENT_BYTES_IN_CODE if row.source_group.startswith("megatron-bridge") else STEP_GRADIENT_BYTES


def predict(row: PublishedRow, step_gradient_bytes: float) -> Result:
    """The prediction for a published row, of the quantity that its source measured."""
    table = memory.estimate(Columns.of(row.workload, normalise(row.workload, row.config)), software(row, step_gradient_bytes))
    stages = table.by_stage(0)
    predicted = {"largest": float(stages.max()), "first": float(stages[0]), "last": float(stages[-1])}[row.memory_scope]
    if row.source_group in ("bigscience-bloom", "torchtitan", "nanotron", "stas00"):
        predicted = float(table.device_gib[0])
    verdict = table.verdict(capacity_gib(row.gpu))[0]
    return Result(row, predicted, next(name for name in VERDICTS if name == verdict))


def capacity_gib(board: str) -> float:
    """What a process can use of a board, as the tables name it; without end where nothing is known of it."""
    try:
        return CAPACITY_GIB.get(board) or DRIVER_SHARE * gpu(board.partition(" (")[0]).memory_gib
    except KeyError:
        return math.inf


def software(row: PublishedRow, step_gradient_bytes: float) -> Software:
    """The software that a source states."""
    facts = row.facts
    bridge = row.source_group.startswith("megatron-bridge")
    golden = row.source_group.startswith("megatron-golden")
    return Software(
        cross_entropy=facts.cross_entropy,
        hidden_dropout=golden,
        attention_dropout=golden,
        grad_reduce_in_fp32=facts.grad_reduce_in_fp32,
        gradient_accumulation_fusion=facts.framework == "megatron" and not golden,
        fp8_transpose_cache=not bridge,
        step_gradient_bytes=step_gradient_bytes,
        balanced_experts=facts.forced_balance,
        separate_main_parameters=facts.framework != "fsdp",
        trained=facts.optimizer_states,
    )


def _entry(results: Sequence[Result], mode: str) -> dict[str, Any]:
    """Errors and ranking of one source."""
    predicted = np.array([item.predicted_gib for item in results])
    measured = np.array([item.row.memory_gib for item in results], dtype=np.float64)
    ranks = ranking([_group(item.row) for item in results], predicted, measured)
    return {
        "source": results[0].row.source_group,
        "quantity": "memory_gib",
        "mode": mode,
        "n": len(results),
        **errors(predicted, measured),
        "kendall_tau": ranks.median,
        "kendall_tau_min": ranks.worst,
        "tau_groups": ranks.groups,
    }


def _group(row: PublishedRow) -> tuple[Any, ...]:
    """What a ranking is over: model, GPU, count, global batch, sequence length."""
    w = row.workload
    return row.gpu, w.model, w.world_size, w.global_batch_size, w.seq_length


def _verdicts(results: Sequence[Result]) -> dict[str, Any]:
    """How rows that ran out of memory were called, and rows that ran whose recomputation, sharding and batch are stated.

    The small models of the regression tests are left out: they fit everywhere.
    """
    failed = [item for item in results if item.row.status == "oom"]
    stated = [item for item in results if not item.row.assumed and item.row.source_group != GOLDEN]
    ran = [item for item in stated if item.row.status == "ok"]
    return {
        "rows": {item.row.id: item.verdict for item in failed},
        "called_out": 1 - _share(failed, "fits"),
        "ran": len(ran),
        "wrongly_refused": _share(ran, "does_not_fit"),
        "at_risk": _share(ran, "at_risk"),
        "verdicts": {
            name: {verdict: sum(item.verdict == verdict for item in items) for verdict in VERDICTS}
            for name, items in (("oom", failed), ("ran", ran))
        },
        "wrongly_refused_rows": [item.row.id for item in ran if item.verdict == "does_not_fit"],
    }


def _share(results: Sequence[Result], verdict: Verdict) -> float:
    return sum(item.verdict == verdict for item in results) / max(len(results), 1)
