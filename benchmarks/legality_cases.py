"""Random cases for comparing verdicts: plausible ones, legal ones, and neighbours of legal ones."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from search_spaces.case import IllegalCaseError, read_case
from search_spaces.legality import RULES, check

Case = dict[str, Any]

MODELS: dict[str, Case] = {
    "llama3-8b": dict(num_layers=32, hidden_size=4096, num_attention_heads=32, num_query_groups=8, ffn_hidden_size=14336),
    "llama3-70b": dict(num_layers=80, hidden_size=8192, num_attention_heads=64, num_query_groups=8, ffn_hidden_size=28672),
    "llama3-405b": dict(num_layers=126, hidden_size=16384, num_attention_heads=128, num_query_groups=8, ffn_hidden_size=53248),
    "qwen2-7b": dict(num_layers=28, hidden_size=3584, num_attention_heads=28, num_query_groups=4, ffn_hidden_size=18944),
    "gpt-13b": dict(
        num_layers=40, hidden_size=5120, num_attention_heads=40, num_query_groups=40, ffn_hidden_size=20480, add_bias_linear=True
    ),
    "smollm": dict(num_layers=30, hidden_size=576, num_attention_heads=9, num_query_groups=3, ffn_hidden_size=1536),
    "mixtral-like": dict(
        num_layers=16,
        hidden_size=4096,
        num_attention_heads=32,
        num_query_groups=8,
        ffn_hidden_size=14336,
        num_experts=8,
        moe_router_topk=2,
    ),
    "qwen3-like": dict(
        num_layers=12,
        hidden_size=2048,
        num_attention_heads=32,
        num_query_groups=4,
        kv_channels=128,
        ffn_hidden_size=6144,
        num_experts=32,
        moe_router_topk=8,
        moe_ffn_hidden_size=768,
    ),
    "deepseek-like": dict(
        num_layers=9,
        hidden_size=2048,
        num_attention_heads=16,
        ffn_hidden_size=10944,
        num_experts=32,
        moe_router_topk=6,
        moe_ffn_hidden_size=1408,
        moe_shared_expert_intermediate_size=2816,
        moe_layer_freq="[0]*1+[1]*8",
        multi_latent_attention=True,
    ),
    "qwen2-moe-like": dict(
        num_layers=8,
        hidden_size=2048,
        num_attention_heads=16,
        num_query_groups=16,
        ffn_hidden_size=5632,
        num_experts=20,
        moe_router_topk=4,
        moe_ffn_hidden_size=1408,
        moe_shared_expert_intermediate_size=5632,
    ),
}
# Experts are built one by one by the oracles: the MoE models have fewer layers and experts than their originals.
WORLDS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 256, 384, 512, 1024, 2048, 4096)
RECOMPUTE = ("core_attn", "moe_act", "layernorm", "mla_up_proj", "mlp", "moe", "shared_experts")
CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"


def draw(rng: random.Random) -> Case:
    """A plausible case: a known model on some world, with a few options; legal about one time in eight."""
    case: Case = dict(MODELS[rng.choice(list(MODELS))])
    world = rng.choice(WORLDS)
    case |= dict(
        vocab_size=rng.choice((1024, 50257, 128256)), seq_length=rng.choice((512, 2048, 4096, 8192, 6144)), world_size=world
    )
    tensor = rng.choice(_divisors(world, 8))
    stages = rng.choice(_divisors(world // tensor, 16))
    context = rng.choice(_divisors(world // tensor // stages, 4)) if rng.random() < 0.4 else 1
    case |= dict(tp=tensor, pp=stages, cp=context, ep=1, etp=None, vpp=None, sp=tensor > 1 and rng.random() < 0.6)
    case |= dict(mbs=rng.choice((1, 1, 2, 4)), precision="bf16", env={CONNECTIONS: "1"}, gpu_arch_major=9)
    replicas = max(1, world // (tensor * stages * context))
    case["gbs"] = case["mbs"] * replicas * rng.choice((1, stages, 2 * stages, 4 * stages, 8 * stages, 3))
    for option, share in OPTIONS:
        if rng.random() < share:
            option(case, rng)
    if case.get("num_experts"):
        _experts(case, rng)
    return case


def legal(rng: random.Random, megatron: str) -> Case:
    """A case that the rules accept."""
    while True:
        case = draw(rng)
        if not broken(case, megatron):
            return case


def neighbour(case: Case, rng: random.Random) -> Case:
    """The case with one field changed."""
    name = rng.choice(list(FIELDS))
    values = FIELDS[name]
    value = rng.choice(values(case, rng) if callable(values) else values)
    return {**case, name: value}


def broken(case: Case, megatron: str) -> list[str]:
    """Names of the rules that refuse a case."""
    try:
        return [violation.name for violation in check(*read_case(case, megatron))]
    except IllegalCaseError as error:
        return [violation.name for violation in error.violations]


def sample(count: int, megatron: str, seed: int, per_rule: int) -> Iterator[Case]:
    """Cases: a quarter plausible, a quarter legal by the rules, half one field from a legal one; then more per rule where few.

    Args:
        count: Cases in all, before those that rules still lack.
        megatron: Version whose rules decide what is legal.
        seed: Seed of the draw.
        per_rule: Illegal cases wanted of every rule that neighbours of legal cases can break.
    """
    rng = random.Random(seed)
    hits: Counter[str] = Counter()
    near: list[Case] = []
    for position in range(count):
        if position % 4 == 0:
            case = draw(rng)
        elif position % 4 == 1:
            case = legal(rng, megatron)
            near = [*near[-200:], case]
        else:
            case = neighbour(rng.choice(near), rng)
        hits.update(broken(case, megatron))
        yield case
    yield from _rare(near, megatron, rng, hits, per_rule)


def _rare(near: list[Case], megatron: str, rng: random.Random, hits: Counter[str], per_rule: int) -> Iterator[Case]:
    """Further cases for rules that were broken too seldom: up to three changed fields, kept where they break one of those."""
    wanted = {rule.__name__ for rule in RULES}
    for _ in range(400 * per_rule):
        lacking = {name for name in wanted if hits[name] < per_rule}
        if not lacking:
            return
        case = rng.choice(near)
        for recipe in rng.sample(RECIPES, 1) if rng.random() < 0.5 else ():
            case = {**case, **recipe}
        for _ in range(rng.choice((1, 2, 3))):
            case = neighbour(case, rng)
        names = broken(case, megatron)
        if lacking & set(names):
            hits.update(names)
            yield case


def _divisors(number: int, most: int) -> list[int]:
    return [n for n in range(1, min(number, most) + 1) if number % n == 0]


# Options: each changes a case so that it uses one feature, mostly in a legal way ---------------------------------------------


def _virtual(case: Case, rng: random.Random) -> None:
    per_stage = case["num_layers"] // case["pp"]
    case["vpp"] = rng.choice(_divisors(max(per_stage, 1), 8))
    if rng.random() < 0.2:
        case["microbatch_group_size_per_vp_stage"] = case["pp"] + rng.choice((0, 1, 2))
    if rng.random() < 0.1:
        case["no_overlap_p2p_communication"] = True


def _per_virtual(case: Case, rng: random.Random) -> None:
    case["vpp"] = None
    case["num_layers_per_virtual_pipeline_stage"] = rng.choice(_divisors(max(case["num_layers"] // case["pp"], 1), 8))


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


def _layout(case: Case, rng: random.Random) -> None:
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
    (_layout, 0.07),
    (_recompute, 0.45),
    (_optimizer, 0.5),
    (_step_overlap, 0.04),
    (_fsdp, 0.08),
    (_torch_fsdp, 0.03),
    (_fp8, 0.12),
    (_offload, 0.06),
    (_optimizer_offload, 0.06),
    (_graphs, 0.06),
    (_context_kind, 0.12),
    (_mapping, 0.05),
    (_run, 0.1),
    (_blackwell, 0.1),
    (_overlap_tensor, 0.05),
)


def _experts(case: Case, rng: random.Random) -> None:
    """Expert parallelism and its options."""
    case["etp"] = rng.choice((None, 1, 1, 2))
    tensor = case["etp"] or case["tp"]
    case["ep"] = 1 if case.get("use_torch_fsdp2") else rng.choice(_divisors(max(case["world_size"] // case["pp"] // tensor, 1), 64))
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


def _layouts(case: Case, rng: random.Random) -> list[Any]:
    """No layout, a good one, and several bad ones."""
    copy = dict(case)
    _layout(copy, rng)
    good = str(copy["pipeline_model_parallel_layout"])
    return [None, good, good, good + "|t", good.replace("E", "", 1), good.replace("L", ""), good.replace("t", "x", 1), "m" + good]


def _around(name: str) -> Callable[[Case, random.Random], list[Any]]:
    """Values near a field's own."""

    def values(case: Case, rng: random.Random) -> list[Any]:
        value = case.get(name) or 1
        return [value * 2, max(1, value // 2), value + 1, max(1, value - 1), value * 3]

    return values


_SWITCH = (False, True)
FIELDS: dict[str, Any] = {
    "tp": (1, 2, 3, 4, 5, 8, 16),
    "pp": (1, 2, 3, 4, 6, 8, 16),
    "vpp": (None, 1, 2, 3, 4, 5, 7),
    "num_layers_per_virtual_pipeline_stage": (None, 1, 2, 3, 4),
    "microbatch_group_size_per_vp_stage": (None, 1, 2, 3, 4, 5, 6, 8, 9, 12, 16),
    "decoder_first_pipeline_num_layers": (None, 1, 2, 3, 5, 7, 30),
    "decoder_last_pipeline_num_layers": (None, 1, 2, 3, 4, 6),
    "account_for_embedding_in_pipeline_split": _SWITCH,
    "account_for_loss_in_pipeline_split": _SWITCH,
    "no_overlap_p2p_communication": _SWITCH,
    "pipeline_model_parallel_layout": _layouts,
    "cp": (1, 2, 3, 4, 5, 8),
    "cp_comm_type": (None, "p2p", "a2a+p2p", ["p2p", "a2a"], ["a2a"]),
    "hierarchical_context_parallel_sizes": (None, [2, 2], [1, 2], [2, 3]),
    "ep": (1, 2, 3, 4, 8, 16, 32),
    "etp": (None, 1, 2, 3, 4, 8),
    "use_tp_pp_dp_mapping": _SWITCH,
    "mbs": (1, 2, 3, 4, 8),
    "gbs": _around("gbs"),
    "sp": _SWITCH,
    "world_size": _around("world_size"),
    "seq_length": (511, 512, 1000, 2050, 4096, 4098, 4100, 6144, 8192, 16368),
    "num_layers": _around("num_layers"),
    "num_attention_heads": (9, 14, 15, 16, 28, 32, 40),
    "num_query_groups": (1, 2, 3, 4, 5, 6, 8, 16),
    "kv_channels": (64, 128),
    "ffn_hidden_size": (1000, 5461, 11000, 14336, 13824),
    "num_experts": (None, 4, 6, 8, 20, 32),
    "moe_router_topk": (1, 2, 5, 9, 70),
    "moe_ffn_hidden_size": (768, 1407, 1408, 1001),
    "moe_shared_expert_intermediate_size": (None, 1408, 1410),
    "moe_layer_freq": (1, 2, "[0]*1+[1]*8", "[1]*16", "[0]*3+[1]*9"),
    "moe_router_num_groups": (None, 4, 7, 8),
    "moe_router_group_topk": (None, 1, 2, 3, 9),
    "add_bias_linear": _SWITCH,
    "mtp_num_layers": (None, 0, 1, 2),
    "max_position_embeddings": (1024, 8192, 16384),
    "recompute_granularity": (None, "full", "selective"),
    "recompute_method": (None, "uniform", "block"),
    "recompute_num_layers": (None, 1, 2, 5, 100),
    "recompute_modules": lambda case, rng: [None, ["bogus"], ["gdn_norm_out"], rng.sample(RECOMPUTE, 1), rng.sample(RECOMPUTE, 2)],
    "distribute_saved_activations": _SWITCH,
    "use_distributed_optimizer": _SWITCH,
    "num_distributed_optimizer_instances": (1, 2, 3, 4),
    "overlap_grad_reduce": _SWITCH,
    "overlap_param_gather": _SWITCH,
    "overlap_param_gather_with_optimizer_step": _SWITCH,
    "use_megatron_fsdp": _SWITCH,
    "use_torch_fsdp2": _SWITCH,
    "ckpt_format": ("torch", "torch_dist", "torch_dcp", "fsdp_dtensor"),
    "tp_comm_overlap": _SWITCH,
    "moe_token_dispatcher_type": ("allgather", "alltoall"),
    "moe_grouped_gemm": _SWITCH,
    "moe_shared_expert_overlap": _SWITCH,
    "overlap_moe_expert_parallel_comm": _SWITCH,
    "delay_wgrad_compute": _SWITCH,
    "moe_expert_capacity_factor": (None, 1.0, -1.0),
    "moe_pad_expert_input_to_capacity": _SWITCH,
    "moe_router_padding_for_fp8": _SWITCH,
    "optimizer_cpu_offload": _SWITCH,
    "use_precision_aware_optimizer": _SWITCH,
    "main_grads_dtype": ("fp32", "bf16"),
    "exp_avg_dtype": ("fp32", "bf16"),
    "cpu_offloading_num_layers": (0, 1, 4, 40, 200),
    "precision": ("fp32", "bf16", "fp16", "bf16+fp8"),
    "fp8_recipe": ("delayed", "tensorwise", "mxfp8", "blockwise"),
    "fp8_param_gather": _SWITCH,
    "first_last_layers_bf16": _SWITCH,
    "num_layers_at_start_in_bf16": (0, 1, 5, 50),
    "num_layers_at_end_in_bf16": (0, 1, 5, 50),
    "cuda_graph_impl": ("none", "local", "transformer_engine", "full_iteration"),
    "multi_latent_attention": _SWITCH,
    "optimizer": ("adam", "sgd"),
    "env": ({CONNECTIONS: "1"}, {CONNECTIONS: None}, {CONNECTIONS: "8"}),
    "gpu_arch_major": (7, 8, 9, 10),
    "lr_warmup_iters": (0, 5, 200),
    "lr_warmup_fraction": (None, 0.1, 1.0),
    "rampup_batch_size": (None, [8, 8, 160]),
    "also_fp16": _SWITCH,
}


_MTP = {"mtp_num_layers": 2, "num_layers": 8, "vpp": None, "decoder_first_pipeline_num_layers": None}
RECIPES: list[Case] = [
    {**_MTP, "pp": 4, "pipeline_model_parallel_layout": "Ett|tt|ttm|ttmL"},
    {**_MTP, "pp": 2, "pipeline_model_parallel_layout": "Ett|tt|ttm|ttmL"},
    {**_MTP, "pp": 1, "pipeline_model_parallel_layout": "Ett|tt|ttmm|ttL"},
    {"cuda_graph_impl": "local", "cpu_offloading_num_layers": 2, "pp": 1, "recompute_granularity": None},
    {"overlap_moe_expert_parallel_comm": True, "moe_token_dispatcher_type": "alltoall", "ep": 2},
    {"overlap_moe_expert_parallel_comm": True, "precision": "fp32"},
    {"overlap_moe_expert_parallel_comm": True, "moe_shared_expert_overlap": True, "moe_token_dispatcher_type": "alltoall"},
    {"overlap_moe_expert_parallel_comm": True, "mtp_num_layers": 2},
    {"optimizer_cpu_offload": True, "use_precision_aware_optimizer": True, "fp8_param_gather": True, "precision": "bf16+fp8"},
    {"precision": "bf16+fp8", "fp8_recipe": "tensorwise", "first_last_layers_bf16": True},
    {
        "precision": "bf16+fp8",
        "recompute_granularity": "selective",
        "recompute_modules": ["layernorm"],
        "recompute_num_layers": None,
    },
    {"distribute_saved_activations": True, "recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 1},
    {"extra": ["--cuda-graph-scope", "moe_router", "moe"], "cuda_graph_impl": "transformer_engine"},
    {"extra": ["--cuda-graph-scope", "moe_router"], "cuda_graph_impl": "transformer_engine"},
    {"extra": ["--cuda-graph-scope", "moe_preprocess"], "cuda_graph_impl": "transformer_engine"},
    {"extra": ["--cuda-graph-scope", "moe_router", "moe_preprocess"], "cuda_graph_impl": "local"},
    {"extra": ["--cuda-graph-scope", "attn", "mlp"], "cuda_graph_impl": "local", "moe_layer_freq": 1},
    {"extra": ["--cuda-graph-scope", "attn"], "cuda_graph_impl": "full_iteration"},
    {
        "extra": ["--cuda-graph-scope", "moe_router", "attn"],
        "cuda_graph_impl": "transformer_engine",
        "recompute_granularity": "selective",
        "recompute_modules": ["moe"],
        "recompute_method": None,
        "recompute_num_layers": None,
    },
    {"extra": ["--cuda-graph-scope", "everything"], "cuda_graph_impl": "local"},
    {"extra": ["--group-query-attention", "--num-query-groups", "8"], "multi_latent_attention": True},
    {"use_torch_fsdp2": True, "precision": "fp16", "pp": 1, "ep": 1, "use_distributed_optimizer": False, "env": {}},
    {"optimizer": "muon", "use_megatron_fsdp": True, "ckpt_format": "fsdp_dtensor", "env": {}},
    {"env": {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}, "cuda_graph_impl": "transformer_engine"},
]
