"""Accuracy of the predicted memory on published peaks, by source.

    python benchmarks/accuracy_memory.py FOLDER [--json] [--rows]

"shipped" holds a source out: one coefficient, what the optimiser step holds where gradients are bf16, was measured on rows of
Megatron-Bridge, and for those it is what Megatron's code says alone. "calibrated" has it. No other coefficient of the point
estimate is fitted; the bounds of fragmentation were chosen with these rows that ran and that ran out of memory in view.
Also prints which of the rows that ran out of memory are called so, which of the rows that ran are refused, and the speed.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.published import PublishedRow, read_throughput  # noqa: E402  the repository is no package
from benchmarks.published_golden import GROUP as GOLDEN  # noqa: E402
from benchmarks.published_golden import read_golden  # noqa: E402
from search_spaces import memory  # noqa: E402
from search_spaces.columns import Columns  # noqa: E402
from search_spaces.memory import Software, Verdict  # noqa: E402
from search_spaces.memory.table import VERDICTS  # noqa: E402
from search_spaces.model import ModelSpec, Workload  # noqa: E402
from search_spaces.normalise import normalise  # noqa: E402
from search_spaces.software import STEP_GRADIENT_BYTES, STEP_GRADIENT_BYTES_IN_CODE  # noqa: E402
from search_spaces.space import SearchSpace  # noqa: E402

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


@dataclass(frozen=True, slots=True)
class Result:
    """One row's prediction.

    Attributes:
        row: What was measured.
        predicted_gib: The same quantity, predicted.
        device_gib: What the board is expected to hold.
        upper_gib: At most.
        verdict: Whether it fits.
    """

    row: PublishedRow
    predicted_gib: float
    device_gib: float
    upper_gib: float
    verdict: Verdict


def predict(row: PublishedRow, *, held_out: bool = False) -> Result:
    """The prediction for a published row, of the quantity that its source measured."""
    table = memory.estimate(Columns.of(row.workload, normalise(row.workload, row.config)), kernels(row, held_out))
    stages = table.by_stage(0)
    predicted = {"largest": float(stages.max()), "first": float(stages[0]), "last": float(stages[-1])}[row.memory_scope]
    if row.source_group in ("bigscience-bloom", "torchtitan", "nanotron", "stas00"):
        predicted = float(table.device_gib[0])
    capacity_gib = CAPACITY_GIB.get(row.gpu, math.inf)
    verdict = next(name for name in VERDICTS if name == table.verdict(capacity_gib)[0])
    return Result(row, predicted, float(table.device_gib[0]), float(table.upper_gib[0]), verdict)


def kernels(row: PublishedRow, held_out: bool = False) -> Software:
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
        step_gradient_bytes=STEP_GRADIENT_BYTES_IN_CODE if held_out and bridge else STEP_GRADIENT_BYTES,
        balanced_experts=facts.forced_balance,
        separate_main_parameters=facts.framework != "fsdp",
        trained=facts.optimizer_states,
    )


def groups(results: Sequence[Result], mode: str) -> list[dict[str, Any]]:
    """Errors per source, in the shape that `benchmarks/accuracy.py` writes."""
    found = []
    for source in sorted({result.row.source_group for result in results}):
        own = [item for item in results if item.row.source_group == source and item.row.memory_gib and item.row.status == "ok"]
        if not own:
            continue
        error = np.array([item.predicted_gib / (item.row.memory_gib or 1) - 1 for item in own])
        numbers = {"n": len(own), "mape": float(np.abs(error).mean()), "max_ape": float(np.abs(error).max())}
        numbers["bias"] = float(error.mean())
        ranking = {"kendall_tau": None, "tau_groups": 0}
        found.append({"source": source, "quantity": "memory_gib", "mode": mode, **numbers, **ranking})
    return found


def accuracy(rows: Sequence[PublishedRow]) -> tuple[dict[str, Any], list[Result]]:
    """Errors and verdicts, and every prediction with its source held out."""
    shipped = [predict(row, held_out=True) for row in rows]
    calibrated = [predict(row) for row in rows]
    return {"groups": groups(shipped, "shipped") + groups(calibrated, "calibrated"), "oom": verdicts(shipped)}, shipped


def verdicts(results: Sequence[Result]) -> dict[str, Any]:
    """How rows that ran out of memory were called, and rows that ran whose recomputation, sharding and batch are stated.

    The small models of the regression tests are left out: they fit everywhere.
    """
    failed = [item for item in results if item.row.status == "oom"]
    stated = [item for item in results if not item.row.assumed and item.row.source_group != GOLDEN]
    ran = [item for item in stated if item.row.status == "ok"]
    return {
        "oom_rows": {item.row.id: item.verdict for item in failed},
        "oom_called": sum(item.verdict != "fits" for item in failed),
        "ran": len(ran),
        "ran_does_not_fit": _share(ran, "does_not_fit"),
        "ran_at_risk": _share(ran, "at_risk"),
        "wrongly_refused": [item.row.id for item in ran if item.verdict == "does_not_fit"],
    }


def _share(results: Sequence[Result], verdict: Verdict) -> float:
    return sum(item.verdict == verdict for item in results) / max(len(results), 1)


def speed(repeats: int = 3) -> dict[str, float]:
    """Candidates per second on one core: every legal candidate of DeepSeek-V3's shape on 2,048 GPUs."""
    model = ModelSpec(
        num_layers=61,
        hidden_size=7168,
        num_attention_heads=128,
        ffn_hidden_size=18432,
        vocab_size=129280,
        multi_latent_attention=True,
        q_lora_rank=1536,
        qk_layernorm=True,
        num_experts=256,
        moe_router_topk=8,
        moe_ffn_hidden_size=2048,
        moe_shared_expert_intermediate_size=2048,
        moe_layer_freq=(0,) * 3 + (1,) * 58,
        mtp_num_layers=1,
    )
    workload = Workload(model=model, world_size=2048, global_batch_size=8192, seq_length=4096)
    table = SearchSpace(workload, "auto").table()
    best = min(_timed(table.columns) for _ in range(repeats))
    return {"candidates": len(table), "per_second": len(table) / best}


def _timed(columns: Columns) -> float:
    start = time.process_time()
    memory.estimate(columns)
    return time.process_time() - start


def main() -> None:
    """Read, predict, report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rows", action="store_true", help="print every row with a measured peak")
    options = parser.parse_args()
    rows, left_out = read_throughput(options.folder / "throughput.csv")
    golden, left_out_golden = read_golden(options.folder / "megatron_golden.csv")
    left_out |= left_out_golden
    report, results = accuracy(rows + golden)
    report |= {"left_out": left_out, "speed": speed()}
    if options.json:
        print(json.dumps(report, indent=1))
        return
    if options.rows:
        _print_rows(results)
    _print(report)


def _print_rows(results: Iterable[Result]) -> None:
    for item in results:
        if item.row.memory_gib or item.row.status == "oom":
            measured = item.row.memory_gib or float("nan")
            print(
                f"{item.row.id:9} {item.row.source_group:24} {item.row.status:4} measured {measured:7.2f} predicted "
                f"{item.predicted_gib:7.2f} {100 * (item.predicted_gib / measured - 1):+6.1f} % device {item.device_gib:7.2f} "
                f"upper {item.upper_gib:7.2f} {item.verdict}"
            )


def _print(report: dict[str, Any]) -> None:
    print(f"{'source':26}{'mode':12}{'n':>5}{'mean %':>9}{'max %':>9}{'bias %':>9}")
    for group in report["groups"]:
        shares = "".join(f"{100 * group[name]:9.2f}" for name in ("mape", "max_ape", "bias"))
        print(f"{group['source']:26}{group['mode']:12}{group['n']:5}{shares}")
    for name, value in {**report["oom"], **report["speed"]}.items():
        print(f"{name}: {value}")


if __name__ == "__main__":
    main()
