"""Mixture of experts: experts against ranks, the router, token dispatchers and their overlap."""

from __future__ import annotations

from search_spaces.columns import Bools, Columns
from search_spaces.rules.base import Finding, Rule, always, finding, near_divisors
from search_spaces.rules.recompute import full

DISPATCHER = "moe_token_dispatcher_type"


def experts_exist(c: Columns) -> Finding:
    """EP shares experts, so there must be some (arguments.py validate_args)."""
    return finding(
        (c.ep > 1) & (c.model.num_experts is None),
        "expert_model_parallel_size={ep} needs a model with experts; legal: 1",
        ep=c.ep,
    )


def experts_over_expert_ranks(c: Columns) -> Finding:
    """EP divides the experts (arguments.py validate_args; moe/moe_layer.py BaseMoELayer)."""
    experts = c.model.num_experts or 0
    return finding(
        experts % c.ep,
        "num_experts={experts} is not divisible by expert_model_parallel_size={ep}; nearest: {legal}",
        experts=experts,
        ep=c.ep,
        legal=near_divisors(experts, c.ep),
    )


def experts_need_sequence_parallel(c: Columns) -> Finding:
    """Training MoE with TP needs SP (moe/moe_layer.py MoELayer.forward raises in the first step)."""
    return finding(
        (c.tp > 1) & ~c.sp & c.model.is_moe,
        "a model with experts and tensor_model_parallel_size={tp} needs sequence_parallel",
        tp=c.tp,
    )


def expert_bias_tensor_ranks(c: Columns) -> Finding:
    """Linear biases in experts allow no expert tensor parallelism (transformer_config.py TransformerConfig.__post_init__)."""
    biased = c.model.is_moe and c.model.add_bias_linear
    return finding(
        (c.etp != 1) & biased,
        "add_bias_linear with experts needs expert_tensor_parallel_size=1, but it is {etp}",
        etp=c.etp,
    )


def shared_expert_bias(c: Columns) -> Finding:
    """Shared experts have no biases (moe/shared_experts.py SharedExpertMLP)."""
    shared = c.model.is_moe and c.model.moe_shared_expert_intermediate_size is not None
    return always(shared and c.model.add_bias_linear, "moe_shared_expert_intermediate_size excludes add_bias_linear")


def router_top1(c: Columns) -> Finding:
    """Softmax over one chosen expert has no gradient (transformer_config.py TransformerConfig.__post_init__)."""
    model = c.model
    dead = model.moe_router_topk == 1 and model.moe_router_score_function == "softmax" and not model.moe_router_pre_softmax
    return always(dead, "moe_router_topk=1 needs moe_router_pre_softmax (or at least 2 experts per token)")


def router_topk_over_experts(c: Columns) -> Finding:
    """A token cannot go to more experts than there are (moe/moe_utils.py topk_routing_with_score_function)."""
    model = c.model
    return always(
        model.is_moe and model.moe_router_topk > (model.num_experts or 0),
        "moe_router_topk={topk} is more than num_experts={experts}",
        topk=model.moe_router_topk,
        experts=model.num_experts,
    )


def router_groups(c: Columns) -> Finding:
    """Group-limited routing divides the experts into groups (transformer_config.py; moe/moe_utils.py group_limited_topk)."""
    model = c.model
    groups, chosen = model.moe_router_num_groups, model.moe_router_group_topk
    experts = model.num_experts
    if not chosen:
        return always(False, "")
    misfit = not groups or not experts or experts % groups != 0 or chosen > groups
    crowded = not misfit and model.moe_router_topk // chosen > (experts or 0) // (groups or 1)
    return always(
        misfit or crowded,
        "moe_router_group_topk={chosen} of moe_router_num_groups={groups} does not fit num_experts={experts} and topk={topk}",
        chosen=chosen,
        groups=groups,
        experts=experts,
        topk=model.moe_router_topk,
    )


def expert_layer_pattern(c: Columns) -> Finding:
    """A list of MoE layers has one entry per layer, 0 or 1 (models/gpt/gpt_layer_specs.py get_gpt_decoder_layer_specs)."""
    pattern, layers = c.model.moe_layer_freq, c.model.num_layers
    length = len(pattern) if isinstance(pattern, tuple) else layers
    other = isinstance(pattern, tuple) and bool(set(pattern) - {0, 1})
    return always(
        c.model.is_moe and (length != layers or other),
        "moe_layer_freq has {length} entries for num_layers={layers}; legal: one per layer, 1 with experts and 0 without",
        length=length,
        layers=layers,
    )


def expert_width_needs_experts(c: Columns) -> Finding:
    """moe_ffn_hidden_size belongs to experts (transformer_config.py TransformerConfig.__post_init__)."""
    stray = c.model.num_experts is None and c.model.moe_ffn_hidden_size is not None
    return always(stray, "moe_ffn_hidden_size={size} needs num_experts", size=c.model.moe_ffn_hidden_size)


def grouped_gemm_device(c: Columns) -> Finding:
    """Grouped GEMM needs Ampere or later (arguments.py validate_args)."""
    arch = c.workload.settings.gpu_arch_major
    return finding(
        c.flag("moe_grouped_gemm") & (arch < 8), "moe_grouped_gemm needs compute capability 8 or later, but it is {arch}", arch=arch
    )


def flex_dispatcher_ranks(c: Columns) -> Finding:
    """The flex dispatcher needs more than one expert rank (moe/token_dispatcher.py MoEFlexTokenDispatcher)."""
    return finding(
        flex(c) & (c.etp * c.ep == 1) & c.model.is_moe,
        "moe_token_dispatcher_type=flex needs expert tensor x expert parallel > 1",
    )


def flex_dispatcher_capacity(c: Columns) -> Finding:
    """DeepEP does not pad to capacity (transformer_config.py TransformerConfig.__post_init__)."""
    return finding(
        flex(c) & c.flag("moe_pad_expert_input_to_capacity"),
        "moe_token_dispatcher_type=flex excludes moe_pad_expert_input_to_capacity",
    )


def capacity_padding(c: Columns) -> Finding:
    """Padding to capacity needs a capacity (transformer_config.py TransformerConfig.__post_init__)."""
    return finding(
        c.flag("moe_pad_expert_input_to_capacity") & ~c.given("moe_expert_capacity_factor"),
        "moe_pad_expert_input_to_capacity needs moe_expert_capacity_factor",
    )


def shared_expert_overlap_dispatcher(c: Columns) -> Finding:
    """Shared experts overlap the all-to-all dispatcher, in 0.19 also flex (transformer_config.py __post_init__)."""
    legal = ("alltoall", "flex") if c.v19 else ("alltoall",)
    shared = c.model.moe_shared_expert_intermediate_size is not None
    return finding(
        c.flag("moe_shared_expert_overlap") & ~c.equals(DISPATCHER, *legal) & shared,
        "moe_shared_expert_overlap needs moe_token_dispatcher_type {legal}",
        legal=" or ".join(legal),
    )


def expert_overlap_ranks(c: Columns) -> Finding:
    """The experts' overlap needs expert parallelism (transformer_config.py TransformerConfig.__post_init__)."""
    return finding(overlapped(c) & (c.ep == 1), "overlap_moe_expert_parallel_comm needs expert_model_parallel_size > 1")


def expert_overlap_stages(c: Columns) -> Finding:
    """With PP the experts' overlap needs virtual stages (transformer_config.py TransformerConfig.__post_init__)."""
    return finding(
        overlapped(c) & (c.pp > 1) & (c.vpp == 0),
        "overlap_moe_expert_parallel_comm with pipeline_model_parallel_size={pp} needs virtual stages",
        pp=c.pp,
    )


def expert_overlap_dispatcher(c: Columns) -> Finding:
    """The experts' overlap works with all-to-all or flex (transformer_config.py TransformerConfig.__post_init__)."""
    return finding(
        overlapped(c) & ~c.equals(DISPATCHER, "alltoall", "flex"),
        "overlap_moe_expert_parallel_comm needs moe_token_dispatcher_type alltoall or flex",
    )


def expert_overlap_recompute(c: Columns) -> Finding:
    """The experts' overlap allows no full recompute, in 0.19 none of module moe (transformer_config.py __post_init__)."""
    whole = full(c) | c.given("recompute_method") | c.given("recompute_num_layers")
    experts = c.holds("recompute_modules", "moe") & c.v19
    return finding(
        overlapped(c) & (whole | experts),
        "overlap_moe_expert_parallel_comm excludes full recompute and recompute_modules moe",
    )


def expert_overlap_precision(c: Columns) -> Finding:
    """The experts' overlap needs bf16 or fp16 (transformer_config.py TransformerConfig.__post_init__)."""
    return finding(overlapped(c) & c.equals("precision", "fp32"), "overlap_moe_expert_parallel_comm needs precision bf16 or fp16")


def expert_overlap_shared(c: Columns) -> Finding:
    """The experts' overlap excludes that of shared experts (transformer_config.py TransformerConfig.__post_init__)."""
    return finding(
        overlapped(c) & c.flag("moe_shared_expert_overlap"),
        "overlap_moe_expert_parallel_comm excludes moe_shared_expert_overlap; drop one",
    )


def expert_overlap_mtp(c: Columns) -> Finding:
    """The experts' overlap allows one MTP layer, in 0.16 only with PP (transformer_config.py __post_init__)."""
    mtp = c.model.mtp_num_layers or 0
    alone = (c.pp == 1) & (mtp == 1) & (not c.v19)
    return finding(
        overlapped(c) & (alone | (mtp > 1)),
        "overlap_moe_expert_parallel_comm does not allow mtp_num_layers={mtp} with pipeline_model_parallel_size={pp}",
        mtp=mtp,
        pp=c.pp,
    )


def delayed_gradients(c: Columns) -> Finding:
    """Delayed weight gradients belong to the experts' overlap (transformer_config.py TransformerConfig.__post_init__)."""
    return finding(
        c.flag("delay_wgrad_compute") & ~overlapped(c),
        "delay_wgrad_compute needs overlap_moe_expert_parallel_comm",
    )


def router_padding_precision(c: Columns) -> Finding:
    """Padding the routing map is for quantised GEMMs (transformer_config.py TransformerConfig.__post_init__)."""
    return finding(
        c.flag("moe_router_padding_for_fp8") & ~c.low_precision,
        "moe_router_padding_for_fp8 needs fp8_format or fp4_format",
    )


def router_padding_dispatcher(c: Columns) -> Finding:
    """The allgather dispatcher does not pad the routing map (transformer_config.py TransformerConfig.__post_init__)."""
    return finding(
        c.flag("moe_router_padding_for_fp8") & c.equals(DISPATCHER, "allgather"),
        "moe_router_padding_for_fp8 needs moe_token_dispatcher_type alltoall or flex",
    )


def overlapped(c: Columns) -> Bools:
    """Where the experts' all-to-all overlaps compute."""
    return c.flag("overlap_moe_expert_parallel_comm")


def flex(c: Columns) -> Bools:
    """Where tokens go through the flex dispatcher."""
    return c.equals(DISPATCHER, "flex")


RULES: tuple[Rule, ...] = (
    experts_exist,
    experts_over_expert_ranks,
    experts_need_sequence_parallel,
    expert_bias_tensor_ranks,
    shared_expert_bias,
    router_top1,
    router_topk_over_experts,
    router_groups,
    expert_layer_pattern,
    expert_width_needs_experts,
    grouped_gemm_device,
    flex_dispatcher_ranks,
    flex_dispatcher_capacity,
    capacity_padding,
    shared_expert_overlap_dispatcher,
    expert_overlap_ranks,
    expert_overlap_stages,
    expert_overlap_dispatcher,
    expert_overlap_recompute,
    expert_overlap_precision,
    expert_overlap_shared,
    expert_overlap_mtp,
    delayed_gradients,
    router_padding_precision,
    router_padding_dispatcher,
)
