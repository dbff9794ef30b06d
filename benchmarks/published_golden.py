"""Megatron-LM's own regression values (`megatron_golden.csv`) as published rows: good for memory, poor for time.

Left out: runs that are no pre-training of a GPT, shapes and numbers of ranks that the table lacks, and automatic attention on the
older image, where recordings of one test differ by the whole score matrix, so that its kernel is not known.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from benchmarks.published import PublishedRow, UnreadableRowError
from benchmarks.published_method import Facts
from search_spaces.case import IllegalCaseError, read_case

GROUP = "megatron-golden-ci"
GPT_2_VOCABULARY = 50257
_OTHER_PROGRAMS = r"grpo|modelopt|muon|nemotron|mamba|hybrid|t5|bert|multimodal|mimo|frozen|retro"


def read_golden(path: Path) -> tuple[list[PublishedRow], dict[str, str]]:
    """The rows of `megatron_golden.csv`, and by name why a row is not among them."""
    rows: list[PublishedRow] = []
    left_out: dict[str, str] = {}
    with path.open(newline="") as file:
        for raw in csv.DictReader(file):
            name = f"{raw['test']}/{raw['golden']}"
            try:
                rows.append(golden_row(raw, name))
            except (UnreadableRowError, ValidationError, IllegalCaseError) as error:
                left_out[name] = str(error).replace("\n", " ")
    return rows, left_out


def golden_row(raw: Mapping[str, str], name: str) -> PublishedRow:
    """One row.

    Raises:
        UnreadableRowError: it is left out by rule.
        IllegalCaseError: its arguments contradict each other.
    """
    _refuse(raw)
    workload, config = read_case(_case(raw))
    return PublishedRow(
        id=name,
        source_group=GROUP,
        gpu=raw["gpu"],
        gpus_per_node=_whole(raw, "gpus_per_node") or 8,
        workload=workload,
        config=config,
        facts=Facts(framework="megatron"),
        status="ok",
        core=False,
        quality="B",
        step_time_s=float(raw["iter_time_s"]) if raw["iter_time_s"] else None,
        memory_gib=float(raw["mem_max_allocated_bytes"]) / 2**30,
        memory_scope="last",
        assumed=(),
    )


def _refuse(raw: Mapping[str, str]) -> None:
    """Raise where a row cannot be used."""
    reasons = {
        "no peak is recorded": not raw["mem_max_allocated_bytes"],
        "the number of GPUs is not stated": not raw["n_gpus"],
        "it is not the pre-training of a GPT": bool(re.search(_OTHER_PROGRAMS, raw["test"])),
        "the shapes are not stated": not raw["layers"] or raw["mla"] == "True",
        "which kernel attention used is not known": "lts" in raw["golden"] and not raw["attention_backend"],
    }
    found = next((reason for reason, applies in reasons.items() if applies), None)
    if found:
        raise UnreadableRowError(found)


def _whole(raw: Mapping[str, str], column: str) -> int | None:
    return int(float(raw[column])) if raw[column] else None


def _case(raw: Mapping[str, str]) -> dict[str, Any]:
    """The row as a case; what Megatron-LM's defaults say where the table is silent."""
    numbers = {
        "num_layers": "layers",
        "hidden_size": "hidden",
        "num_attention_heads": "heads",
        "ffn_hidden_size": "ffn_hidden",
        "seq_length": "seq_len",
        "max_position_embeddings": "seq_len",
        "num_experts": "moe_experts",
        "moe_router_topk": "moe_topk",
        "moe_ffn_hidden_size": "moe_ffn",
        "world_size": "n_gpus",
        "mbs": "micro_batch",
        "gbs": "global_batch",
        **{name: name for name in ("tp", "pp", "vpp", "cp", "ep", "etp")},
    }
    case: dict[str, Any] = {key: _whole(raw, column) for key, column in numbers.items()}
    gated = raw["swiglu"] == "True"
    local = raw["transformer_impl"] == "local"
    experts = bool(raw["moe_experts"])
    return case | {
        "vocab_size": _whole(raw, "vocab") or GPT_2_VOCABULARY,
        "num_query_groups": _whole(raw, "kv_heads") if raw["kv_heads"] != raw["heads"] else None,
        "swiglu": gated,
        "add_bias_linear": not gated and not experts,
        "normalization": "LayerNorm",
        "position_embedding_type": "learned_absolute",
        "untie_embeddings_and_output_weights": raw["untie"] == "True",
        "sp": raw["sp"] == "True",
        "precision": raw["precision"].partition("+")[0] or "bf16",
        "attention_backend": raw["attention_backend"] or ("local" if local else "auto"),
        "use_distributed_optimizer": "dist-opt" in raw["optimizer_sharding"],
        "use_megatron_fsdp": "megatron-fsdp" in raw["optimizer_sharding"],
        "moe_token_dispatcher_type": "alltoall",
        "moe_grouped_gemm": raw["grouped_gemm"] == "True",
        **_recompute(raw["recompute"]),
        **_ends(case),
    }


def _ends(case: Mapping[str, Any]) -> dict[str, bool]:
    """Embedding and loss count as layers where Megatron would refuse the split without; no column says so."""
    chunks = (case["pp"] or 1) * (case["vpp"] or 1)
    counted = case["num_layers"] % chunks > 0 and (case["num_layers"] + 2) % chunks == 0
    return {"account_for_embedding_in_pipeline_split": counted, "account_for_loss_in_pipeline_split": counted}


def _recompute(text: str) -> dict[str, Any]:
    kind, _, rest = text.partition(":")
    if kind == "full":
        method, _, layers = rest.partition(":")
        return {"recompute_granularity": "full", "recompute_method": method or "uniform", "recompute_num_layers": int(layers or 1)}
    if kind == "selective":
        return {"recompute_granularity": "selective", "recompute_modules": re.findall(r"\w+", rest) or None}
    return {}
