"""How a published trial was run: knobs and software, read from the words of its source."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from search_spaces.model import ModelSpec

Row = Mapping[str, str]

DELAYED_SCALING = ("nemo-launcher", "llm-foundry")
"""Sources from before Transformer Engine 2.0, which had no other recipe for one scale per tensor."""


@dataclass(frozen=True, slots=True)
class Facts:
    """What a source states of its software and no knob says.

    Attributes:
        framework: Who ran the trial.
        zero_stage: DeepSpeed's or FSDP's sharding: 0 nothing, 1 optimiser, 2 and gradients, 3 and parameters.
        grad_reduce_in_fp32: Whether gradients are kept and reduced in fp32.
        cross_entropy: How the loss is computed, as `search_spaces.memory.Software` names it.
        forced_balance: Whether every expert gets the same number of tokens.
        optimizer_states: Whether there is a full optimiser; not with LoRA.
    """

    framework: Literal["megatron", "deepspeed", "fsdp", "other"]
    zero_stage: int = 0
    grad_reduce_in_fp32: bool = True
    cross_entropy: Literal["unfused", "te", "torch", "chunked"] = "unfused"
    forced_balance: bool = False
    optimizer_states: bool = True


def whole(raw: Row, column: str, default: int) -> int:
    """A whole number, or a default where the source does not state it."""
    return int(float(raw[column])) if raw[column] else default


def facts_of(raw: Row) -> Facts:
    """What a row states of its software."""
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
        cross_entropy=_loss(raw, bridge or "CE fusion on" in notes),
        forced_balance="force-balanced" in notes or "force balance" in notes or "capacity factor 1" in notes,
        optimizer_states="LoRA" not in notes and raw["workload"] != "lora",
    )


def _loss(raw: Row, fused: bool) -> Literal["unfused", "te", "torch", "chunked"]:
    if "Liger" in raw["notes"] + raw["mem_definition"]:
        return "chunked"
    return "te" if fused else "torch" if raw["source_group"] == "torchtitan" else "unfused"


def method(raw: Row, model: ModelSpec, facts: Facts) -> dict[str, Any]:
    """The knobs besides the split: sharding, overlap, precision, recomputation, offload."""
    sharding, notes, precision = raw["optimizer_sharding"], raw["notes"].lower(), raw["precision"].lower()
    megatron_fsdp = bool(re.search(r"FSDP=\d+ \| Megatron FSDP", sharding))
    distributed = "istributed optimizer" in sharding and "no distributed" not in sharding
    recent = facts.framework == "megatron" and raw["source_group"] not in ("sc21-table1", "megatron-lm-readme")
    distributed = distributed or megatron_fsdp or facts.zero_stage in (1, 2) or (recent and "no distributed" not in sharding)
    overlap = recent and "no tp/p2p/dp overlap" not in notes
    knobs: dict[str, Any] = {
        "sequence_parallel": raw["sp"] == "on" or (not raw["sp"] and whole(raw, "tp", 1) > 1 and recent),
        "use_distributed_optimizer": distributed,
        "use_megatron_fsdp": megatron_fsdp,
        "ckpt_format": "fsdp_dtensor" if megatron_fsdp else "torch_dist",
        "use_torch_fsdp2": facts.zero_stage == 3 and not megatron_fsdp,
        "overlap_grad_reduce": overlap,
        "overlap_param_gather": overlap and distributed,
        "precision": "fp16" if precision.startswith("fp16") else "bf16",
        **_recompute(raw),
        **_low_precision(precision, raw["source_group"]),
    }
    if whole(raw, "cp", 1) > 1 and "cp_comm_type a2a" in notes:
        knobs["cp_comm_type"] = ("a2a",)
    offloaded = re.search(r"optimizer CPU offload (\d+)%", sharding)
    if offloaded and offloaded.group(1) != "0":
        knobs |= {"optimizer_cpu_offload": True, "optimizer_offload_fraction": int(offloaded.group(1)) / 100}
    if "CPU Adam offload" in sharding:
        knobs |= {"optimizer_cpu_offload": True}
    layers = re.search(r"activation cpu offload of (\d+) layers", notes)
    if layers:
        knobs["cpu_offloading_num_layers"] = int(layers.group(1))
    if raw["source_group"].startswith("megatron-bridge"):
        knobs |= _bridge_recipe(raw, knobs)
    if model.is_moe and "capacity factor 1" in notes:
        knobs |= {"moe_expert_capacity_factor": 1.0, "moe_pad_expert_input_to_capacity": True}
    return knobs


def _bridge_recipe(raw: Row, method: Mapping[str, Any]) -> dict[str, Any]:
    """What Megatron-Bridge sets besides (training/mixed_precision.py, recipes/, scripts/performance/perf_plugins.py)."""
    recipe: dict[str, Any] = {}
    if method.get("fp8_recipe") in ("tensorwise", "mxfp8") and "no distributed" not in raw["optimizer_sharding"]:
        recipe["fp8_param_gather"] = True
    tuned = raw["model"] == "LLAMA3_70B" and raw["workload"] in ("sft", "lora") and raw["source_group"].endswith("perf")
    if (
        tuned
        or "expandable_segments" in raw["notes"]
        or (raw["model"].startswith("DeepSeekV3") and raw["gpu"][:4] in ("H100", "GB20"))
    ):
        recipe["environment"] = (("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True"),)
    if re.search("deepseek|moonlight", raw["model"].lower()) and method["use_distributed_optimizer"]:
        recipe |= {"use_precision_aware_optimizer": True, "main_grads_dtype": "bf16"}
        recipe |= {"exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "bf16"}
    return recipe


def _low_precision(precision: str, source: str) -> dict[str, Any]:
    if "fp4" in precision:
        return {"fp4_format": "e2m1"}
    recipes = {"mx": "mxfp8", "block": "blockwise", "128x128": "blockwise"}
    if "fp8" not in precision and "float8" not in precision:
        return {}
    plain = "delayed" if source in DELAYED_SCALING else "tensorwise"
    return {"fp8_format": "hybrid", "fp8_recipe": next((to for word, to in recipes.items() if word in precision), plain)}


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
