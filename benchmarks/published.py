"""Published measurements as (workload, configuration, GPU): one reader for every benchmark of the predictions.

A row is read as its source states it. What no source states is Megatron's default or the nearest knob, and named in
`PublishedRow.assumed`; a row whose model or split cannot be expressed is left out with a reason.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from benchmarks.published_method import Facts, Row, facts_of, method, whole
from benchmarks.published_models import kinds
from search_spaces.config import TrialConfig
from search_spaces.layout import parse_layout
from search_spaces.model import ModelSpec, Workload

_METHODS = {"recompute_granularity": "recompute", "use_distributed_optimizer": "optimizer_sharding"}


class UnreadableRowError(ValueError):
    """A row whose model or split cannot be expressed; its message says why."""


@dataclass(frozen=True, slots=True)
class PublishedRow:
    """One published measurement.

    Attributes:
        id: The row's name in the table.
        source_group: What is held out together.
        gpu: GPU as the table names it.
        gpus_per_node: GPUs of one node.
        workload: What was trained.
        config: How.
        facts: What the source says beyond that.
        status: "ok" or "oom".
        core: Whether the row is one to validate on.
        quality: "A" where split, dimensions, batch and recompute are known, then "B" and "C".
        step_time_s: Seconds per step, stated or from tokens/s; None where neither is.
        memory_gib: Peak memory of a GPU; None where not stated.
        memory_scope: Whose peak: the largest rank's, the last stage's or the first stage's.
        assumed: Fields that the source does not state.
    """

    id: str
    source_group: str
    gpu: str
    gpus_per_node: int
    workload: Workload
    config: TrialConfig
    facts: Facts
    status: str
    core: bool
    quality: str
    step_time_s: float | None
    memory_gib: float | None
    memory_scope: Literal["largest", "first", "last"]
    assumed: tuple[str, ...]


def read_throughput(path: Path) -> tuple[list[PublishedRow], dict[str, str]]:
    """The rows of `throughput.csv`, and by id why a row is not among them; none where there is no such file."""
    rows: list[PublishedRow] = []
    left_out: dict[str, str] = {}
    for raw in raw_rows(path):
        try:
            rows.append(published_row(raw))
        except (UnreadableRowError, ValidationError) as error:
            left_out[raw["id"]] = str(error).replace("\n", " ")
    return rows, left_out


def published_row(raw: Row) -> PublishedRow:
    """One row of `throughput.csv`.

    Raises:
        UnreadableRowError: its model, split or batch cannot be expressed.
        pydantic.ValidationError: its shapes contradict each other.
    """
    assumed: list[str] = []
    model = _model(raw)
    facts = facts_of(raw)
    split = _split(raw, assumed)
    config = TrialConfig.model_validate({**split, **method(raw, model, facts), **_stages(raw, model, split)})
    world = split["tensor_model_parallel_size"] * split["pipeline_model_parallel_size"] * split["context_parallel_size"]
    dp = max(whole(raw, "n_gpus", 0) // world, 1)
    assumed += [name for name, column in _METHODS.items() if not raw[column]]
    batch = whole(raw, "global_batch", 0) or _assume(assumed, "global_batch_size", config.micro_batch_size * dp)
    workload = Workload(
        model=model, world_size=dp * world, global_batch_size=batch, seq_length=_sequence(raw, assumed), megatron="0.19"
    )
    return PublishedRow(
        id=raw["id"],
        source_group=raw["source_group"],
        gpu=raw["gpu"],
        gpus_per_node=whole(raw, "nvlink_domain", 8) if "GB" in raw["gpu"] else whole(raw, "gpus_per_node", 8),
        workload=workload,
        config=config,
        facts=facts,
        status=raw["status"],
        core=raw["validation_core"] == "1",
        quality=raw["quality"],
        step_time_s=_seconds(raw, workload),
        memory_gib=_memory_gib(raw),
        memory_scope=_scope(raw),
        assumed=tuple(assumed),
    )


def raw_rows(path: Path) -> Iterator[Row]:
    """The rows of a table as they are written; none where there is no such file."""
    if path.is_file():
        with path.open(newline="") as file:
            yield from csv.DictReader(file)


def _assume(assumed: list[str], name: str, value: int) -> int:
    assumed.append(name)
    return value


def _model(raw: Row) -> ModelSpec:
    fields = kinds(raw["model"])
    if fields is None or not raw["layers"] or not raw["hidden"] or not raw["heads"]:
        raise UnreadableRowError(f"the shapes of {raw['model']} are not stated or cannot be expressed")
    layers, experts = whole(raw, "layers", 0), whole(raw, "moe_experts", 0)
    dense = fields.pop("dense_layers", 0)
    fields |= {
        "num_layers": layers,
        "hidden_size": whole(raw, "hidden", 0),
        "num_attention_heads": whole(raw, "heads", 0),
        "vocab_size": whole(raw, "vocab", fields.get("vocab_size", 51200)),
    }
    if raw["kv_heads"] and raw["kv_heads"] != raw["heads"] and not fields.get("multi_latent_attention"):
        fields["num_query_groups"] = whole(raw, "kv_heads", 0)
    if raw["ffn_hidden"]:
        fields["ffn_hidden_size"] = whole(raw, "ffn_hidden", 0)
    if experts:
        fields |= {"num_experts": experts, "moe_router_topk": whole(raw, "moe_topk", 2)}
        fields["moe_ffn_hidden_size"] = whole(raw, "moe_ffn", 0) or None
        fields["moe_layer_freq"] = (0,) * dense + (1,) * (layers - dense) if dense else 1
    if "learned" in fields.get("position_embedding_type", ""):
        fields["max_position_embeddings"] = whole(raw, "seq_len", 2048)
    return ModelSpec.model_validate(fields)


def _split(raw: Row, assumed: list[str]) -> dict[str, Any]:
    known = {"tensor_model_parallel_size": "tp", "pipeline_model_parallel_size": "pp", "context_parallel_size": "cp"}
    if not raw["n_gpus"]:
        raise UnreadableRowError("the number of GPUs is not stated")
    if raw["source_group"] not in ("llm-foundry", "stas00") and not (raw["tp"] and raw["pp"]):
        raise UnreadableRowError("the split over tensor and pipeline ranks is not stated")
    split: dict[str, Any] = {knob: whole(raw, column, 1) for knob, column in known.items()}
    if not raw["micro_batch"]:
        if raw["quality"] == "A" or raw["source_group"] == "torchtitan":
            raise UnreadableRowError("the micro-batch size is not stated")
        assumed.append("micro_batch_size")
    split["micro_batch_size"] = whole(raw, "micro_batch", 1)
    split["expert_model_parallel_size"] = whole(raw, "ep", 1)
    if whole(raw, "moe_experts", 0):
        split |= {"expert_tensor_parallel_size": 1, "moe_token_dispatcher_type": "alltoall", "moe_grouped_gemm": True}
        if re.search("hybridep|deepep", raw["notes"], re.IGNORECASE):
            split["moe_token_dispatcher_type"] = "flex"
    return split


def _stages(raw: Row, model: ModelSpec, split: Mapping[str, Any]) -> dict[str, Any]:
    """The layers of each stage: as stated, else even, else as even as whole layers allow."""
    pp = split["pipeline_model_parallel_size"]
    vpp = whole(raw, "vpp", 1) if pp > 1 else 1
    stated = re.search(r"pp_layout ([^;]+?)\s*(;|$)", raw["notes"])
    if stated:
        layout = parse_layout(stated.group(1))
        own = (layout.decoders, layout.mtp) == (model.num_layers, model.mtp_num_layers or 0)
        if layout.problem or not own or len(layout.stages) % pp:
            raise UnreadableRowError(f"the layout {stated.group(1)} does not give this model's layers to {pp} stages")
        return {"pipeline_model_parallel_layout": stated.group(1)}
    if pp == 1:
        return {}
    even = model.num_layers % (pp * vpp) == 0 and not model.mtp_num_layers
    if even and "type:transformer|embedding" not in raw["notes"]:
        return {"num_virtual_stages_per_pipeline_rank": vpp if vpp > 1 else None}
    return {"pipeline_model_parallel_layout": even_layout(model.num_layers, pp * vpp, model.mtp_num_layers or 0)}


def even_layout(layers: int, stages: int, mtp: int = 0) -> str:
    """A layout with embedding and loss counted as a layer each, the longest stages in the middle."""
    items = ["E"] + ["t"] * layers + ["m"] * mtp + ["L"]
    short, longer = divmod(len(items), stages)
    sizes = [short + (1 if stages - 1 - longer <= index < stages - 1 else 0) for index in range(stages)]
    cuts = [sum(sizes[:index]) for index in range(stages + 1)]
    return "|".join("".join(items[start:end]) for start, end in zip(cuts, cuts[1:], strict=False))


def _sequence(raw: Row, assumed: list[str]) -> int:
    if raw["seq_len"]:
        return whole(raw, "seq_len", 0)
    stated = re.search(r"default(?: for this model)? (\d{4,})|default seq (\d{4,})", raw["notes"])
    if stated:
        return int(stated.group(1) or stated.group(2))
    return _assume(assumed, "seq_length", 4096)


def _seconds(raw: Row, workload: Workload) -> float | None:
    if raw["step_time_s"]:
        return float(raw["step_time_s"])
    if not raw["tokens_per_s_per_gpu"] or not raw["global_batch"] or not raw["seq_len"]:
        return None
    return workload.tokens_per_step / float(raw["tokens_per_s_per_gpu"]) / float(raw["n_gpus"])


def _memory_gib(raw: Row) -> float | None:
    if raw["peak_mem_gib_norm"]:
        return float(raw["peak_mem_gib_norm"])
    return float(raw["peak_mem_gb"]) if raw["peak_mem_gb"] else None


def _scope(raw: Row) -> Literal["largest", "first", "last"]:
    definition = raw["mem_definition"]
    return "last" if "LAST rank" in definition else "first" if "rank-0" in definition else "largest"
