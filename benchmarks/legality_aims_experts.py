"""Aims at the rules on experts."""

from __future__ import annotations

from benchmarks.legality_aims import EXPERT_OVERLAP, FP8, INTERLEAVED, NO_DROPS, PLAIN_OPTIMIZER, Aim, one_of

AIMS: dict[str, tuple[Aim, ...]] = {
    # Experts
    "experts_exist": (Aim({}, {"ep": one_of(2, 4, 8)}), Aim({"etp": None}, {"num_experts": None})),
    "experts_over_expert_ranks": (Aim({}, {"num_experts": one_of(6, 9, 10, 21, 33)}),),
    "experts_need_sequence_parallel": (Aim({"tp_comm_overlap": False}, {"sp": False}),),
    "expert_bias_tensor_ranks": (Aim({"moe_shared_expert_intermediate_size": None}, {"add_bias_linear": True}),),
    "shared_expert_bias": (Aim({"etp": 1}, {"add_bias_linear": True}),),
    "router_top1": (Aim({"moe_router_group_topk": None}, {"moe_router_topk": 1}),),
    "router_topk_over_experts": (Aim({"moe_router_group_topk": None}, {"moe_router_topk": one_of(33, 40, 70)}),),
    "router_groups": (
        Aim({"moe_router_num_groups": 8, "moe_router_group_topk": 3}, {"moe_router_num_groups": one_of(3, 5, 7)}),
        Aim({"moe_router_num_groups": 8, "moe_router_group_topk": 3}, {"moe_router_group_topk": one_of(9, 12)}),
        Aim({"moe_router_num_groups": 8, "moe_router_group_topk": 3}, {"moe_router_topk": one_of(15, 20)}),
    ),
    "expert_layer_pattern": (
        Aim(
            {},
            {"moe_layer_freq": lambda case, rng: f"[0]*{rng.choice((1, 2))}+[1]*{case['num_layers'] + rng.choice((-4, -3, 3, 4))}"},
        ),
    ),
    "expert_width_needs_experts": (Aim({}, {"moe_ffn_hidden_size": one_of(768, 1408)}),),
    "grouped_gemm_device": (
        Aim({"moe_grouped_gemm": True}, {"gpu_arch_major": 7}),
        Aim({"moe_grouped_gemm": False, "gpu_arch_major": 7}, {"moe_grouped_gemm": True}),
    ),
    "flex_dispatcher_ranks": (
        Aim(
            {"ep": 1, "etp": 1, "moe_pad_expert_input_to_capacity": False, "overlap_moe_expert_parallel_comm": False},
            {"moe_token_dispatcher_type": "flex"},
        ),
    ),
    "flex_dispatcher_capacity": (
        Aim(
            {"moe_expert_capacity_factor": 1.25, "moe_pad_expert_input_to_capacity": True},
            {"moe_token_dispatcher_type": "flex"},
        ),
    ),
    "capacity_padding": (Aim(NO_DROPS, {"moe_pad_expert_input_to_capacity": True}),),
    "shared_expert_overlap_dispatcher": (
        Aim(
            {"moe_token_dispatcher_type": "alltoall", "moe_shared_expert_overlap": True, "moe_router_padding_for_fp8": False},
            {"moe_token_dispatcher_type": "allgather"},
        ),
        Aim(
            {"moe_token_dispatcher_type": "allgather", "moe_shared_expert_overlap": False},
            {"moe_shared_expert_overlap": True},
        ),
    ),
    "expert_overlap_ranks": (Aim(EXPERT_OVERLAP, {"ep": 1}),),
    "expert_overlap_stages": (
        Aim(EXPERT_OVERLAP, {"pp": one_of(2, 4)}),
        Aim({**EXPERT_OVERLAP, "pp": one_of(2, 4), **INTERLEAVED}, {"vpp": None}),
    ),
    "expert_overlap_dispatcher": (
        Aim({**EXPERT_OVERLAP, "moe_router_padding_for_fp8": False}, {"moe_token_dispatcher_type": "allgather"}),
    ),
    "expert_overlap_recompute": (
        Aim(EXPERT_OVERLAP, {"recompute_num_layers": one_of(1, 2)}),
        Aim(EXPERT_OVERLAP, {"recompute_method": one_of("uniform", "block")}),
        Aim({**EXPERT_OVERLAP, "recompute_granularity": "selective"}, {"recompute_modules": ["moe"]}),
    ),
    "expert_overlap_precision": (Aim({**EXPERT_OVERLAP, **PLAIN_OPTIMIZER}, {"precision": "fp32"}),),
    "expert_overlap_shared": (Aim(EXPERT_OVERLAP, {"moe_shared_expert_overlap": True}),),
    "expert_overlap_mtp": (Aim(EXPERT_OVERLAP, {"mtp_num_layers": one_of(2, 3)}),),
    "delayed_gradients": (
        Aim({"overlap_moe_expert_parallel_comm": False, "delay_wgrad_compute": False}, {"delay_wgrad_compute": True}),
    ),
    "router_padding_precision": (
        Aim({"precision": "bf16", "moe_token_dispatcher_type": "alltoall"}, {"moe_router_padding_for_fp8": True}),
    ),
    "router_padding_dispatcher": (
        Aim(
            {
                **FP8,
                "moe_token_dispatcher_type": "alltoall",
                "moe_router_padding_for_fp8": True,
                "overlap_moe_expert_parallel_comm": False,
                "moe_shared_expert_overlap": False,
            },
            {"moe_token_dispatcher_type": "allgather"},
        ),
    ),
}
