"""Options of random cases: each changes a case so that it uses one feature, mostly in a legal way."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

Case = dict[str, Any]

RECOMPUTE = ("core_attn", "moe_act", "layernorm", "mla_up_proj", "mlp", "moe", "shared_experts")
CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"


def divisors(number: int, most: int) -> list[int]:
    """Divisors of a number up to the largest wanted."""
    return [n for n in range(1, min(number, most) + 1) if number % n == 0]


def _virtual(case: Case, rng: random.Random) -> None:
    per_stage = case["num_layers"] // case["pp"]
    case["vpp"] = rng.choice(divisors(max(per_stage, 1), 8))
    if rng.random() < 0.2:
        case["microbatch_group_size_per_vp_stage"] = case["pp"] + rng.choice((0, 1, 2))
    if rng.random() < 0.1:
        case["no_overlap_p2p_communication"] = True


def _per_virtual(case: Case, rng: random.Random) -> None:
    case["vpp"] = None
    case["num_layers_per_virtual_pipeline_stage"] = rng.choice(divisors(max(case["num_layers"] // case["pp"], 1), 8))


def _uneven(case: Case, rng: random.Random) -> None:
    middle = -(-case["num_layers"] // case["pp"])
    ends = case["num_layers"] - middle * (case["pp"] - 2)
    if ends >= 2 and rng.random() < 0.7:
        case["decoder_first_pipeline_num_layers"] = ends // 2
        case["decoder_last_pipeline_num_layers"] = ends - ends // 2
    else:
        case["decoder_first_pipeline_num_layers"] = max(1, case["num_layers"] - middle * (case["pp"] - 1))


def _counted(case: Case, rng: random.Random) -> None:
    case["account_for_embedding_in_pipeline_split"] = rng.random() < 0.7
    case["account_for_loss_in_pipeline_split"] = rng.random() < 0.7


def even_layout(case: Case, rng: random.Random) -> None:
    """Stages of about as many layers each, spelled as a layout."""
    stages = case["pp"] * rng.choice((1, 1, 2))
    layers, mtp = case["num_layers"], case.get("mtp_num_layers") or 0
    counts = [layers // stages + (position < layers % stages) for position in range(stages)]
    parts = [f"t*{count}" if count else "" for count in counts]
    parts[0] = "E" + parts[0]
    parts[-1] = parts[-1] + "m" * mtp + "L"
    case |= dict(vpp=None, pipeline_model_parallel_layout="|".join(parts))


def _recompute(case: Case, rng: random.Random) -> None:
    case["recompute_granularity"] = rng.choice(("full", "selective", "selective"))
    if case["recompute_granularity"] == "full":
        case |= dict(recompute_method=rng.choice(("uniform", "block")), recompute_num_layers=rng.choice((1, 2, 3, 40)))
        if case["tp"] > 1 and not case["sp"] and rng.random() < 0.3:
            case["distribute_saved_activations"] = True
    elif rng.random() < 0.6:
        case["recompute_modules"] = rng.sample(RECOMPUTE, rng.choice((1, 2)))


def _optimizer(case: Case, rng: random.Random) -> None:
    case["use_distributed_optimizer"] = True
    case["overlap_grad_reduce"] = rng.random() < 0.6
    case["overlap_param_gather"] = case["overlap_grad_reduce"] and rng.random() < 0.6
    if rng.random() < 0.15:
        case["num_distributed_optimizer_instances"] = 2


def _step_overlap(case: Case, rng: random.Random) -> None:
    case |= dict(use_distributed_optimizer=True, overlap_grad_reduce=True, overlap_param_gather=True, ckpt_format="torch")
    case["overlap_param_gather_with_optimizer_step"] = True


def _fsdp(case: Case, rng: random.Random) -> None:
    strategy = rng.choice(("no_shard", "optim", "optim_grads", "optim_grads_params"))
    case |= dict(
        use_megatron_fsdp=True, ckpt_format="fsdp_dtensor", data_parallel_sharding_strategy=strategy, env={CONNECTIONS: None}
    )
    case["use_distributed_optimizer"] = rng.random() < 0.7


def _torch_fsdp(case: Case, rng: random.Random) -> None:
    case |= dict(use_torch_fsdp2=True, pp=1, ep=1, env={CONNECTIONS: None}, ckpt_format=rng.choice(("torch_dist", "torch_dcp")))


def _fp8(case: Case, rng: random.Random) -> None:
    case |= dict(precision="bf16+fp8", fp8_recipe=rng.choice(("delayed", "tensorwise", "mxfp8", "blockwise")))
    if rng.random() < 0.3:
        case |= dict(fp8_param_gather=True, use_distributed_optimizer=True)
    if rng.random() < 0.3:
        case |= dict(first_last_layers_bf16=True, num_layers_at_start_in_bf16=rng.choice((1, 2, 8)))


def _fp4(case: Case, rng: random.Random) -> None:
    if case["precision"] == "bf16":
        case["extra"] = [*case.get("extra", ()), "--fp4-format", "e2m1"]


def _offload(case: Case, rng: random.Random) -> None:
    case["cpu_offloading_num_layers"] = rng.choice((1, 4, case["num_layers"] - 1))
    case |= dict(pp=1, recompute_granularity=None) if rng.random() < 0.7 else {}


def _optimizer_offload(case: Case, rng: random.Random) -> None:
    case |= dict(optimizer_cpu_offload=True, use_precision_aware_optimizer=True, use_distributed_optimizer=True)
    if rng.random() < 0.3:
        case["exp_avg_dtype"] = "bf16"


def _graphs(case: Case, rng: random.Random) -> None:
    case["cuda_graph_impl"] = rng.choice(("local", "transformer_engine"))


def _context_kind(case: Case, rng: random.Random) -> None:
    case["cp_comm_type"] = rng.choice(("p2p", "a2a", "allgather", "a2a+p2p"))
    if case["cp_comm_type"] == "a2a+p2p":
        case["hierarchical_context_parallel_sizes"] = rng.choice(([case["cp"], 1], [1, case["cp"]], [2, max(case["cp"] // 2, 1)]))


def _mapping(case: Case, rng: random.Random) -> None:
    case["use_tp_pp_dp_mapping"] = True


def _mtp(case: Case, rng: random.Random) -> None:
    case["mtp_num_layers"] = rng.choice((1, 1, 2))


def _run(case: Case, rng: random.Random) -> None:
    case |= dict(train_iters=rng.choice((20, 100)), lr_warmup_iters=rng.choice((0, 5)))
    if rng.random() < 0.3:
        case |= dict(lr_warmup_fraction=0.1, lr_warmup_iters=0)


def _blackwell(case: Case, rng: random.Random) -> None:
    case |= dict(gpu_arch_major=10, env={CONNECTIONS: rng.choice((None, "1", "8"))})


def _overlap_tensor(case: Case, rng: random.Random) -> None:
    case["tp_comm_overlap"] = True


OPTIONS: tuple[tuple[Callable[[Case, random.Random], None], float], ...] = (
    (_mtp, 0.03),
    (_virtual, 0.3),
    (_per_virtual, 0.05),
    (_uneven, 0.15),
    (_counted, 0.07),
    (even_layout, 0.07),
    (_recompute, 0.45),
    (_optimizer, 0.5),
    (_step_overlap, 0.04),
    (_fsdp, 0.08),
    (_torch_fsdp, 0.03),
    (_fp8, 0.12),
    (_fp4, 0.04),
    (_offload, 0.06),
    (_optimizer_offload, 0.06),
    (_graphs, 0.06),
    (_context_kind, 0.12),
    (_mapping, 0.05),
    (_run, 0.1),
    (_blackwell, 0.1),
    (_overlap_tensor, 0.05),
)


def use_experts(case: Case, rng: random.Random) -> None:
    """Expert parallelism and its options."""
    case["etp"] = rng.choice((None, 1, 1, 2))
    tensor = case["etp"] or case["tp"]
    case["ep"] = 1 if case.get("use_torch_fsdp2") else rng.choice(divisors(max(case["world_size"] // case["pp"] // tensor, 1), 64))
    case["sp"] = case["tp"] > 1 and rng.random() < 0.9
    case["moe_token_dispatcher_type"] = rng.choice(("alltoall", "alltoall", "allgather"))
    case["moe_grouped_gemm"] = rng.random() < 0.6
    if case.get("moe_shared_expert_intermediate_size") and rng.random() < 0.3:
        case["moe_shared_expert_overlap"] = True
    if rng.random() < 0.12:
        case["overlap_moe_expert_parallel_comm"] = True
        case["delay_wgrad_compute"] = rng.random() < 0.3
    if rng.random() < 0.15:
        case["moe_expert_capacity_factor"] = 1.25
        case["moe_pad_expert_input_to_capacity"] = rng.random() < 0.5
    if "+fp8" in case["precision"] and rng.random() < 0.5:
        case["moe_router_padding_for_fp8"] = True
    if case["num_experts"] == 32 and rng.random() < 0.3:
        case |= dict(moe_router_num_groups=8, moe_router_group_topk=3)
