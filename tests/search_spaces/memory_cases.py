"""Random small models and splits for comparing the memory model with megatron-core, and the subprocess that asks it."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

from search_spaces.case import read_case
from search_spaces.columns import Columns
from search_spaces.legality import check
from search_spaces.normalise import normalise

ROOT = Path(__file__).resolve().parents[2]
Case = dict[str, Any]


def ask(**questions: list[Case]) -> dict[str, list[tuple[Case, Any]]]:
    """The cases of every question with megatron-core's answers, in a process of its own."""
    command = [sys.executable, "-m", "tests.search_spaces.megatron_oracle"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    asked = json.dumps(questions)
    done = subprocess.run(command, input=asked, capture_output=True, text=True, cwd=ROOT, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return {question: list(zip(questions[question], found, strict=True)) for question, found in json.loads(done.stdout).items()}


def columns(case: Case, device: str = "cpu") -> Columns:
    """A case as a table of one row."""
    workload, config = read_case({**case, "device": device}, "0.16")
    return Columns.of(workload, normalise(workload, config))


def legal(case: Case) -> bool:
    """Whether Megatron on a GPU accepts a case; that a CPU cannot run it does not matter for its parameters."""
    workload, config = read_case({**case, "device": "cuda"}, "0.16")
    return not check(workload, config)


def parameter_cases(count: int, seed: int) -> list[Case]:
    """Legal random (model, TP, PP, VPP, EP, ETP)."""
    draw = random.Random(seed)
    cases: list[Case] = []
    while len(cases) < count:
        case = {**_model(draw), **_split(draw)}
        if case["pp"] > 1 and draw.random() < 0.25:
            case = _laid_out(draw, case)
        case["world_size"] = case["tp"] * case["pp"] * max(case.get("ep", 1), 1) * draw.choice([1, 2])
        if case["world_size"] <= 64 and _readable(case) and legal(case):
            cases.append(case)
    return cases


def _readable(case: Case) -> bool:
    try:
        columns(case, "cuda")
    except ValueError:
        return False
    return True


def _model(draw: random.Random) -> Case:
    heads = draw.choice([4, 8])
    model: Case = {
        "num_layers": draw.choice([4, 6, 8, 12]),
        "hidden_size": heads * draw.choice([8, 16]),
        "num_attention_heads": heads,
        "vocab_size": draw.choice([500, 1000, 1024]),
        "ffn_hidden_size": draw.choice([64, 96, 256]),
        "swiglu": draw.random() < 0.7,
        "normalization": draw.choice(["RMSNorm", "LayerNorm"]),
        "untie_embeddings_and_output_weights": draw.random() < 0.5,
        "position_embedding_type": draw.choice(["rope", "rope", "learned_absolute"]),
        "seq_length": 64,
        "gbs": 64,
        "precision": "bf16",
    }
    kind = draw.choice(["dense", "dense", "moe", "moe", "mla", "mla_moe"])
    if kind in ("dense", "moe"):
        model |= {"num_query_groups": draw.choice([heads, heads // 2]), "add_qkv_bias": draw.random() < 0.3}
        model["kv_channels"] = draw.choice([None, 16])
    else:
        model |= _latent(draw)
    model["qk_layernorm"] = draw.random() < 0.4
    model["add_bias_linear"] = kind == "dense" and draw.random() < 0.4
    if model["position_embedding_type"] == "learned_absolute":
        model["max_position_embeddings"] = 128
    if draw.random() < 0.2:
        model["mtp_num_layers"] = 1
    return model | (_experts(draw, model["num_layers"]) if "moe" in kind else {})


def _latent(draw: random.Random) -> Case:
    return {
        "multi_latent_attention": True,
        "q_lora_rank": draw.choice([None, 32]),
        "kv_lora_rank": 16,
        "qk_head_dim": draw.choice([8, 16]),
        "qk_pos_emb_head_dim": 8,
        "v_head_dim": draw.choice([8, 16]),
        "position_embedding_type": "rope",
    }


def _experts(draw: random.Random, layers: int) -> Case:
    return {
        "num_experts": draw.choice([4, 8]),
        "moe_router_topk": 2,
        "moe_ffn_hidden_size": draw.choice([32, 64]),
        "moe_shared_expert_intermediate_size": draw.choice([None, 64]),
        "moe_shared_expert_gate": draw.random() < 0.3,
        "moe_layer_freq": draw.choice([1, 2, 3, [0] + [1] * (layers - 1), [0, 1] * (layers // 2), f"[0]*2+[1]*{layers - 2}"]),
        "moe_token_dispatcher_type": "alltoall",
        "ep": draw.choice([1, 2, 4]),
        "etp": draw.choice([1, 2]),
    }


def _split(draw: random.Random) -> Case:
    split: Case = {"tp": draw.choice([1, 2, 4]), "pp": draw.choice([1, 2, 4]), "use_distributed_optimizer": draw.random() < 0.5}
    split["sp"] = split["tp"] > 1 and draw.random() < 0.7
    if split["pp"] > 1:
        shape = draw.choice(["even", "vpp", "uneven", "accounted"])
        if shape == "vpp":
            split["vpp"] = draw.choice([2, 3])
        elif shape == "uneven":
            split["decoder_first_pipeline_num_layers"] = draw.choice([1, 2, 3])
        elif shape == "accounted":
            split |= {"account_for_embedding_in_pipeline_split": True, "account_for_loss_in_pipeline_split": draw.random() < 0.5}
    return split


def _laid_out(draw: random.Random, case: Case) -> Case:
    """The same with a layout in place of other split options: layers cut at random places."""
    dropped = ("vpp", "decoder_first_pipeline_num_layers", "account_for_embedding_in_pipeline_split")
    case = {key: value for key, value in case.items() if key not in (*dropped, "account_for_loss_in_pipeline_split")}
    layers, stages = case["num_layers"], case["pp"] * draw.choice([1, 2])
    cuts = [0, *sorted(draw.randint(0, layers) for _ in range(stages - 1)), layers]
    parts = ["t" * (end - start) for start, end in zip(cuts, cuts[1:], strict=False)]
    parts[0], parts[-1] = "E" + parts[0], parts[-1] + "m" * case.get("mtp_num_layers", 0) + "L"
    return {**case, "pipeline_model_parallel_layout": "|".join(parts)}


def activation_cases(count: int, seed: int) -> list[Case]:
    """Random models of a few layers on one stage, with sequence parallelism and recomputation."""
    draw = random.Random(seed)
    cases: list[Case] = []
    while len(cases) < count:
        case = {**_model(draw), "mtp_num_layers": None, "num_layers": draw.choice([2, 4]), "pp": 1, "tp": draw.choice([1, 2, 4])}
        case |= {"seq_length": draw.choice([64, 128, 256]), "mbs": draw.choice([1, 2]), "ep": 1, "etp": 1, "gbs": 64}
        if case.get("num_experts"):
            case["moe_layer_freq"] = draw.choice([1, [0] + [1] * (case["num_layers"] - 1)])
        case["sp"] = case["tp"] > 1 and (draw.random() < 0.6 or "num_experts" in case)
        case["precision"] = draw.choice(["bf16", "bf16", "fp32"])
        case |= _recompute(draw, case)
        case["world_size"] = case["tp"]
        if _readable(case) and legal(case):
            cases.append(case)
    return cases


def _recompute(draw: random.Random, case: Case) -> Case:
    choice = draw.choice(["none", "none", "full", "core_attn", "layernorm", "mlp"])
    if choice == "none" or (choice == "mlp" and case["add_bias_linear"]):
        return {}
    if choice == "full":
        return {"recompute_granularity": "full", "recompute_method": draw.choice(["uniform", "block"]), "recompute_num_layers": 1}
    return {"recompute_granularity": "selective", "recompute_modules": [choice]}
