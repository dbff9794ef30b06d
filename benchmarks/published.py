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

from benchmarks.published_models import kinds
from search_spaces.config import TrialConfig
from search_spaces.model import ModelSpec, Workload

GIB = 2**30
Row = Mapping[str, str]


class UnreadableRowError(ValueError):
    """A row whose model or split cannot be expressed; its message says why."""


@dataclass(frozen=True, slots=True)
class Facts:
    """What a source states of its software and no knob says.

    Attributes:
        framework: Who ran the trial.
        zero_stage: DeepSpeed's or FSDP's sharding: 0 nothing, 1 optimiser, 2 and gradients, 3 and parameters.
        grad_reduce_in_fp32: Whether gradients are kept and reduced in fp32.
        fused_cross_entropy: Whether the loss is one fused kernel.
        forced_balance: Whether every expert gets the same number of tokens.
        fp4: Whether matrix products run in NVFP4 (read as MXFP8, which has a knob).
        optimizer_states: Whether there is a full optimiser; not with LoRA.
    """

    framework: Literal["megatron", "deepspeed", "fsdp", "other"]
    zero_stage: int = 0
    grad_reduce_in_fp32: bool = True
    fused_cross_entropy: bool = False
    forced_balance: bool = False
    fp4: bool = False
    optimizer_states: bool = True


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
    """The rows of `throughput.csv`, and by id why a row is not among them."""
    rows: list[PublishedRow] = []
    left_out: dict[str, str] = {}
    for raw in _raw(path):
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
    facts = _facts(raw)
    split = _split(raw, assumed)
    config = TrialConfig.model_validate({**split, **_method(raw, model, facts), **_stages(raw, model, split)})
    world = split["tensor_model_parallel_size"] * split["pipeline_model_parallel_size"] * split["context_parallel_size"]
    dp = max(_whole(raw, "n_gpus", 0) // world, 1)
    batch = _whole(raw, "global_batch", 0) or _assume(assumed, "global_batch_size", config.micro_batch_size * dp)
    workload = Workload(
        model=model, world_size=dp * world, global_batch_size=batch, seq_length=_sequence(raw, assumed), megatron="0.19"
    )
    return PublishedRow(
        id=raw["id"],
        source_group=raw["source_group"],
        gpu=raw["gpu"],
        gpus_per_node=_whole(raw, "nvlink_domain", 8) if "GB" in raw["gpu"] else _whole(raw, "gpus_per_node", 8),
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


def _raw(path: Path) -> Iterator[Row]:
    with path.open(newline="") as file:
        yield from csv.DictReader(file)


def _whole(raw: Row, column: str, default: int) -> int:
    return int(float(raw[column])) if raw[column] else default


def _assume(assumed: list[str], name: str, value: int) -> int:
    assumed.append(name)
    return value


def _model(raw: Row) -> ModelSpec:
    fields = kinds(raw["model"])
    if fields is None or not raw["layers"] or not raw["hidden"] or not raw["heads"]:
        raise UnreadableRowError(f"the shapes of {raw['model']} are not stated or cannot be expressed")
    layers, experts = _whole(raw, "layers", 0), _whole(raw, "moe_experts", 0)
    dense = fields.pop("dense_layers", 0)
    fields |= {
        "num_layers": layers,
        "hidden_size": _whole(raw, "hidden", 0),
        "num_attention_heads": _whole(raw, "heads", 0),
        "vocab_size": _whole(raw, "vocab", 51200),
    }
    if raw["kv_heads"] and raw["kv_heads"] != raw["heads"] and not fields.get("multi_latent_attention"):
        fields["num_query_groups"] = _whole(raw, "kv_heads", 0)
    if raw["ffn_hidden"]:
        fields["ffn_hidden_size"] = _whole(raw, "ffn_hidden", 0)
    if experts:
        fields |= {"num_experts": experts, "moe_router_topk": _whole(raw, "moe_topk", 2)}
        fields["moe_ffn_hidden_size"] = _whole(raw, "moe_ffn", 0) or None
        fields["moe_layer_freq"] = (0,) * dense + (1,) * (layers - dense) if dense else 1
    if "learned" in fields.get("position_embedding_type", ""):
        fields["max_position_embeddings"] = _whole(raw, "seq_len", 2048)
    return ModelSpec.model_validate(fields)


def _facts(raw: Row) -> Facts:
    sharding, notes = raw["optimizer_sharding"], raw["notes"]
    stage = re.search(r"ZeRO-(\d)", sharding)
    framework: Literal["megatron", "deepspeed", "fsdp", "other"] = "megatron"
    if raw["source_group"] in ("bigscience-bloom", "stas00"):
        framework = "deepspeed"
    elif raw["source_group"] in ("llm-foundry", "torchtitan"):
        framework = "fsdp"
    elif raw["source_group"] in ("nanotron", "internevo"):
        framework = "other"
    shards = 3 if framework == "fsdp" or "FULL_SHARD" in sharding else 2 if "SHARD_GRAD" in sharding else 0
    bridge = raw["source_group"].startswith("megatron-bridge")
    return Facts(
        framework=framework,
        zero_stage=int(stage.group(1)) if stage else shards,
        grad_reduce_in_fp32=not (bridge and ("grad_reduce_in_fp32=False" in notes or raw["model"] == "LLAMA3_70B")),
        fused_cross_entropy="CE fusion on" in notes or bridge,
        forced_balance="force-balanced" in notes or "force balance" in notes or "capacity factor 1" in notes,
        fp4="FP4" in raw["precision"],
        optimizer_states="LoRA" not in notes and raw["workload"] != "lora",
    )


def _split(raw: Row, assumed: list[str]) -> dict[str, Any]:
    known = {"tensor_model_parallel_size": "tp", "pipeline_model_parallel_size": "pp", "context_parallel_size": "cp"}
    if not raw["n_gpus"]:
        raise UnreadableRowError("the number of GPUs is not stated")
    if raw["source_group"] not in ("llm-foundry", "stas00") and not (raw["tp"] and raw["pp"]):
        raise UnreadableRowError("the split over tensor and pipeline ranks is not stated")
    split: dict[str, Any] = {knob: _whole(raw, column, 1) for knob, column in known.items()}
    if not raw["micro_batch"]:
        if raw["quality"] == "A" or raw["source_group"] == "torchtitan":
            raise UnreadableRowError("the micro-batch size is not stated")
        assumed.append("micro_batch_size")
    split["micro_batch_size"] = _whole(raw, "micro_batch", 1)
    split["expert_model_parallel_size"] = _whole(raw, "ep", 1)
    if _whole(raw, "moe_experts", 0):
        split |= {"expert_tensor_parallel_size": 1, "moe_token_dispatcher_type": "alltoall", "moe_grouped_gemm": True}
        if re.search("hybridep|deepep", raw["notes"], re.IGNORECASE):
            split["moe_token_dispatcher_type"] = "flex"
    return split


def _method(raw: Row, model: ModelSpec, facts: Facts) -> dict[str, Any]:
    sharding, notes, precision = raw["optimizer_sharding"], raw["notes"].lower(), raw["precision"].lower()
    megatron_fsdp = bool(re.search(r"FSDP=\d+ \| Megatron FSDP", sharding))
    distributed = "istributed optimizer" in sharding and "no distributed" not in sharding
    recent = facts.framework == "megatron" and raw["source_group"] not in ("sc21-table1", "megatron-lm-readme")
    distributed = distributed or megatron_fsdp or facts.zero_stage in (1, 2) or (recent and "no distributed" not in sharding)
    overlap = recent and "no tp/p2p/dp overlap" not in notes
    method: dict[str, Any] = {
        "sequence_parallel": raw["sp"] == "on" or (not raw["sp"] and _whole(raw, "tp", 1) > 1 and recent),
        "use_distributed_optimizer": distributed,
        "use_megatron_fsdp": megatron_fsdp,
        "ckpt_format": "fsdp_dtensor" if megatron_fsdp else "torch_dist",
        "use_torch_fsdp2": facts.zero_stage == 3 and not megatron_fsdp,
        "overlap_grad_reduce": overlap,
        "overlap_param_gather": overlap and distributed,
        "precision": "fp16" if precision.startswith("fp16") else "bf16",
        **_recompute(raw),
        **_eight_bit(precision),
    }
    if _whole(raw, "cp", 1) > 1 and "cp_comm_type a2a" in notes:
        method["cp_comm_type"] = ("a2a",)
    offloaded = re.search(r"optimizer CPU offload (\d+)%", sharding)
    if offloaded and offloaded.group(1) != "0":
        method |= {"optimizer_cpu_offload": True, "optimizer_offload_fraction": int(offloaded.group(1)) / 100}
    if "CPU Adam offload" in sharding:
        method |= {"optimizer_cpu_offload": True}
    layers = re.search(r"activation cpu offload of (\d+) layers", notes)
    if layers:
        method["cpu_offloading_num_layers"] = int(layers.group(1))
    if model.is_moe and "capacity factor 1" in notes:
        method |= {"moe_expert_capacity_factor": 1.0, "moe_pad_expert_input_to_capacity": True}
    return method


def _eight_bit(precision: str) -> dict[str, Any]:
    recipes = {"mx": "mxfp8", "fp4": "mxfp8", "block": "blockwise", "128x128": "blockwise"}
    if "fp8" not in precision and "float8" not in precision and "fp4" not in precision:
        return {}
    return {"fp8_format": "hybrid", "fp8_recipe": next((to for word, to in recipes.items() if word in precision), "tensorwise")}


def _recompute(raw: Row) -> dict[str, Any]:
    text = raw["recompute"].lower()
    block = re.search(r"block, (\d+) layers", text)
    if block:
        return {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": int(block.group(1))}
    if text.startswith("full"):
        return {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    if text.startswith("selective:"):
        modules = tuple(part.strip() for part in text.partition(":")[2].split(","))
        return {"recompute_granularity": "selective", "recompute_modules": modules}
    if "selective" in text:
        return {"recompute_granularity": "selective", "recompute_modules": ("core_attn", "mlp")}
    return {}


def _stages(raw: Row, model: ModelSpec, split: Mapping[str, Any]) -> dict[str, Any]:
    """The layers of each stage: as stated, else even, else as even as whole layers allow."""
    pp = split["pipeline_model_parallel_size"]
    vpp = _whole(raw, "vpp", 1) if pp > 1 else 1
    stated = re.search(r"pp_layout ([^;]+?)\s*(;|$)", raw["notes"])
    if stated:
        return {"pipeline_model_parallel_layout": stated.group(1)}
    if pp == 1:
        return {}
    whole = model.num_layers % (pp * vpp) == 0 and not model.mtp_num_layers
    if whole and "type:transformer|embedding" not in raw["notes"]:
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
        return _whole(raw, "seq_len", 0)
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
