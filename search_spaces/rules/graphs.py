"""CUDA graphs: what may be captured, and beside what."""

from __future__ import annotations

from search_spaces.columns import Bools, Columns
from search_spaces.rules.base import Finding, Rule, finding
from search_spaces.rules.recompute import full, offloaded, selective

IMPL = "cuda_graph_impl"
MODULES = "cuda_graph_modules"
NAMES = ("attn", "mlp", "moe", "moe_router", "moe_preprocess", "mamba")


def graph_kind(c: Columns) -> Finding:
    """Whole iterations are a kind of their own only in 0.19 (transformer_config.py TransformerConfig.__post_init__)."""
    return finding(
        c.equals(IMPL, "full_iteration") & (not c.v19),
        "cuda_graph_impl=full_iteration needs Megatron-Core 0.19; in 0.16 legal: none, local, transformer_engine",
    )


def graph_module_names(c: Columns) -> Finding:
    """Captured modules come from a fixed list (transformer/enums.py CudaGraphScope, CudaGraphModule)."""
    unknown = c.where(MODULES, lambda modules: bool(set(modules or ()) - set(NAMES)))
    return finding(unknown, "cuda_graph_modules has an unknown name; legal: {names}", names=", ".join(NAMES))


def graph_modules_of_iteration(c: Columns) -> Finding:
    """A graph of the whole iteration has no modules (arguments.py validate_args, 0.19)."""
    return finding(
        c.equals(IMPL, "full_iteration") & c.where(MODULES, bool),
        "cuda_graph_impl=full_iteration excludes cuda_graph_modules",
    )


def graph_nan_check(c: Columns) -> Finding:
    """A graph of the whole iteration cannot check losses for NaN (arguments.py validate_args)."""
    checked = c.workload.settings.check_for_nan_in_loss_and_grad
    return finding(
        c.equals(IMPL, "full_iteration") & ~c.equals("precision", "fp16") & checked,
        "cuda_graph_impl=full_iteration needs --no-check-for-nan-in-loss-and-grad",
    )


def graph_offload(c: Columns) -> Finding:
    """Layer graphs exclude activation offload (transformer_config.py TransformerConfig.__post_init__)."""
    return finding(
        graphed(c) & ~c.equals(IMPL, "full_iteration") & offloaded(c),
        "cuda_graph_impl excludes cpu_offloading_num_layers > 0; drop one",
    )


def graph_full_recompute(c: Columns) -> Finding:
    """Full recompute is captured only with the whole iteration (transformer_config.py TransformerConfig.__post_init__)."""
    return finding(
        graphed(c) & ~c.equals(IMPL, "full_iteration") & full(c),
        "recompute_granularity=full excludes layer-wise cuda_graph_impl; use full_iteration or selective recompute",
    )


def graph_recompute_experts(c: Columns) -> Finding:
    """A recomputed MoE layer cannot hold a captured router (transformer_config.py TransformerConfig.__post_init__)."""
    return finding(
        c.equals(IMPL, "transformer_engine") & selective(c) & c.holds("recompute_modules", "moe") & c.holds(MODULES, "moe_router"),
        "recompute_modules moe excludes cuda_graph_modules moe_router",
    )


def graph_expert_modules(c: Columns) -> Finding:
    """Moe and moe_router are captured one or the other (transformer_config.py TransformerConfig.__post_init__)."""
    router = c.holds(MODULES, "moe_router") | (c.equals(IMPL, "local") & c.holds(MODULES, "moe_preprocess"))
    return finding(layered(c) & c.holds(MODULES, "moe") & router, "cuda_graph_modules moe and moe_router exclude each other")


def graph_preprocess_module(c: Columns) -> Finding:
    """moe_preprocess is captured with moe_router (transformer_config.py TransformerConfig.__post_init__)."""
    return finding(
        c.equals(IMPL, "transformer_engine") & c.holds(MODULES, "moe_preprocess") & ~c.holds(MODULES, "moe_router"),
        "cuda_graph_modules moe_preprocess needs moe_router",
    )


def graph_modules_need_experts(c: Columns) -> Finding:
    """Moe and moe_router need experts (transformer_config.py TransformerConfig.__post_init__)."""
    dense = (c.model.num_experts or 0) <= 1
    router = c.holds(MODULES, "moe_router") | (c.equals(IMPL, "local") & c.holds(MODULES, "moe_preprocess"))
    return finding(
        layered(c) & (c.holds(MODULES, "moe") | router) & dense,
        "cuda_graph_modules moe and moe_router need a model with experts",
    )


def graph_dense_module(c: Columns) -> Finding:
    """Mlp needs dense layers (transformer_config.py TransformerConfig.__post_init__)."""
    only_experts = (c.model.num_experts or 0) > 1 and not c.model.has_dense_layers
    return finding(layered(c) & c.holds(MODULES, "mlp") & only_experts, "cuda_graph_modules mlp needs a model with dense layers")


def graph_dropless_experts(c: Columns) -> Finding:
    """Whole MoE layers are captured only with padding to capacity (transformer_config.py TransformerConfig.__post_init__)."""
    padded = c.given("moe_expert_capacity_factor") & c.flag("moe_pad_expert_input_to_capacity")
    return finding(
        layered(c) & c.holds(MODULES, "moe") & ~padded & ((c.model.num_experts or 0) > 1),
        "cuda_graph_modules moe needs moe_pad_expert_input_to_capacity",
    )


def graph_preprocess_sync(c: Columns) -> Finding:
    """moe_preprocess is not captured where it waits for the host (transformer_config.py __post_init__)."""
    padded = c.given("moe_expert_capacity_factor") & c.flag("moe_pad_expert_input_to_capacity")
    synchronises = c.given("moe_expert_capacity_factor") | c.flag("moe_router_padding_for_fp8")
    captured = c.holds(MODULES, "moe_preprocess") | (c.equals(IMPL, "local") & c.holds(MODULES, "moe_router"))
    return finding(
        layered(c) & captured & ~padded & synchronises & c.equals("moe_token_dispatcher_type", "alltoall") & c.model.is_moe,
        "cuda_graph_modules moe_preprocess excludes token dropping without padding and moe_router_padding_for_fp8",
    )


def graph_expert_overlap(c: Columns) -> Finding:
    """The experts' overlap leaves moe and mlp out of graphs; in 0.16 also local graphs (transformer_config.py)."""
    captured = c.holds(MODULES, "moe") | c.holds(MODULES, "mlp")
    wrong_kind = ~c.equals(IMPL, "transformer_engine") & (not c.v19)
    return finding(
        c.flag("overlap_moe_expert_parallel_comm") & graphed(c) & (wrong_kind | (captured & c.equals(IMPL, "transformer_engine"))),
        "overlap_moe_expert_parallel_comm excludes cuda_graph_modules moe and mlp (and in 0.16 cuda_graph_impl=local)",
    )


def graph_experts_inference_padding(c: Columns) -> Finding:
    """0.16 refuses local graphs with EP unless experts are padded (arguments.py validate_args, 0.16)."""
    return finding(
        c.equals(IMPL, "local") & (c.ep > 1) & (not c.v19),
        "cuda_graph_impl=local with expert_model_parallel_size={ep} needs Megatron-Core 0.19",
        ep=c.ep,
    )


def graph_allocator(c: Columns) -> Finding:
    """Expandable segments need NCCL_GRAPH_REGISTER=0 with Transformer Engine's graphs (arguments.py validate_args)."""
    outer = dict(c.workload.settings.env or {})

    def unsafe(inner: tuple[tuple[str, str], ...]) -> bool:
        env = {**outer, **dict(inner)}
        return "expandable_segments:True" in (env.get("PYTORCH_CUDA_ALLOC_CONF") or "") and env.get("NCCL_GRAPH_REGISTER") != "0"

    return finding(
        c.equals(IMPL, "transformer_engine") & c.where("environment", unsafe),
        "cuda_graph_impl=transformer_engine with expandable_segments:True needs NCCL_GRAPH_REGISTER=0",
    )


def graphed(c: Columns) -> Bools:
    """Where anything is captured."""
    return ~c.equals(IMPL, "none")


def layered(c: Columns) -> Bools:
    """Where layers are captured one by one."""
    return c.equals(IMPL, "local", "transformer_engine")


RULES: tuple[Rule, ...] = (
    graph_kind,
    graph_module_names,
    graph_modules_of_iteration,
    graph_nan_check,
    graph_offload,
    graph_full_recompute,
    graph_recompute_experts,
    graph_expert_modules,
    graph_preprocess_module,
    graph_modules_need_experts,
    graph_dense_module,
    graph_dropless_experts,
    graph_preprocess_sync,
    graph_expert_overlap,
    graph_experts_inference_padding,
    graph_allocator,
)
