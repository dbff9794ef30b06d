"""Aims at the rules on recompute, offload, the optimiser, precision, CUDA graphs and the learning rate."""

from __future__ import annotations

from benchmarks.legality_aims import (
    DELAYED,
    DISTRIBUTED,
    EXPERT_OVERLAP,
    FP4,
    FP8,
    FSDP,
    FULL,
    GRAPHS,
    KEEP_ALL,
    LOCAL_GRAPHS,
    NO_DROPS,
    OFFLOADED,
    PLAIN_OPTIMIZER,
    SELECTIVE,
    STEP_OVERLAP,
    TORCH_FSDP,
    Aim,
    one_of,
    scope,
)
from benchmarks.legality_options import CONNECTIONS

AIMS: dict[str, tuple[Aim, ...]] = {
    # Recompute and activation offload
    "full_recompute_method": (Aim(FULL, {"recompute_method": None}),),
    "full_recompute_layers": (Aim(FULL, {"recompute_num_layers": None}),),
    "uniform_recompute_layers": (Aim(FULL | dict(recompute_method="uniform"), {"recompute_num_layers": 0}),),
    "uniform_recompute_over_chunks": (
        Aim(FULL | dict(recompute_method="uniform"), {"recompute_num_layers": one_of(3, 5, 7)}),
        Aim(FULL | dict(recompute_method="block", recompute_num_layers=one_of(3, 5, 7)), {"recompute_method": "uniform"}),
    ),
    "selective_recompute_method": (Aim(SELECTIVE, {"recompute_method": one_of("uniform", "block")}),),
    "selective_recompute_layers": (Aim(SELECTIVE, {"recompute_num_layers": one_of(1, 2)}),),
    "recompute_module_names": (Aim(SELECTIVE, {"recompute_modules": one_of(["bogus"], ["core_attn", "attention"])}),),
    "recompute_gated_norm": (Aim(SELECTIVE, {"recompute_modules": one_of(["gdn_norm_out"], ["core_attn", "gdn_norm_out"])}),),
    "recompute_expert_activation": (
        Aim(SELECTIVE | dict(moe_grouped_gemm=False), {"recompute_modules": one_of(["moe_act"], ["core_attn", "moe_act"])}),
    ),
    "recompute_latent_projection": (Aim(SELECTIVE, {"recompute_modules": one_of(["mla_up_proj"], ["core_attn", "mla_up_proj"])}),),
    "recompute_shared_experts": (
        Aim(
            SELECTIVE | dict(moe_token_dispatcher_type="alltoall", moe_shared_expert_overlap=True),
            {"recompute_modules": one_of(["shared_experts"], ["core_attn", "shared_experts"])},
        ),
    ),
    "recompute_with_fp8": (
        Aim(SELECTIVE | DELAYED, {"recompute_modules": ["layernorm"]}),
        Aim(SELECTIVE | DELAYED | dict(moe_grouped_gemm=True), {"recompute_modules": ["moe_act"]}),
    ),
    "distributed_activations_ranks": (Aim(FULL, {"distribute_saved_activations": True}),),
    "distributed_activations_recompute": (
        Aim(KEEP_ALL | dict(sp=False), {"distribute_saved_activations": True}),
        Aim(SELECTIVE | dict(sp=False), {"distribute_saved_activations": True}),
    ),
    "distributed_activations_sequence": (Aim(FULL, {"distribute_saved_activations": True}),),
    "offload_layers": (
        Aim(OFFLOADED, {"cpu_offloading_num_layers": lambda case, rng: case["num_layers"] + rng.choice((0, 1, 9))}),
    ),
    "offload_needs_one_stage": (Aim(KEEP_ALL, {"cpu_offloading_num_layers": one_of(1, 2)}),),
    "offload_excludes_recompute": (Aim(OFFLOADED, {"recompute_granularity": "selective"}),),
    # Optimiser
    "parameter_gather_optimizer": (
        Aim(PLAIN_OPTIMIZER | dict(overlap_grad_reduce=True), {"overlap_param_gather": True}),
        Aim(DISTRIBUTED | dict(overlap_grad_reduce=True, overlap_param_gather=True), {"use_distributed_optimizer": False}),
    ),
    "parameter_gather_gradients": (
        Aim(DISTRIBUTED, {"overlap_param_gather": True}),
        Aim(DISTRIBUTED | dict(overlap_grad_reduce=True, overlap_param_gather=True), {"overlap_grad_reduce": False}),
    ),
    "step_overlap_gather": (Aim(STEP_OVERLAP, {"overlap_param_gather": False}),),
    "step_overlap_interleaving": (Aim(STEP_OVERLAP, {"vpp": None}),),
    "step_overlap_checkpoint": (Aim(STEP_OVERLAP, {"ckpt_format": "torch_dist"}),),
    "fsdp_checkpoint": (
        Aim(FSDP, {"ckpt_format": one_of("torch", "torch_dist")}),
        Aim(PLAIN_OPTIMIZER, {"ckpt_format": "fsdp_dtensor"}),
    ),
    "fsdp_optimizer": (Aim(FSDP, {"optimizer": "muon"}),),
    "torch_fsdp_parallelism": (
        Aim(TORCH_FSDP, {"use_distributed_optimizer": True}),
        Aim(TORCH_FSDP, {"ep": one_of(2, 4)}),
        Aim(TORCH_FSDP, {"pp": one_of(2, 4)}),
    ),
    "torch_fsdp_checkpoint": (Aim(TORCH_FSDP, {"ckpt_format": "torch"}),),
    "torch_fsdp_model": (
        Aim(TORCH_FSDP | dict(precision="bf16"), {"precision": "fp16"}),
        Aim(TORCH_FSDP, {"untie_embeddings_and_output_weights": False}),
    ),
    "torch_dcp_checkpoint": (
        Aim(PLAIN_OPTIMIZER, {"ckpt_format": "torch_dcp"}),
        Aim(TORCH_FSDP | dict(tp=1, sp=False, ckpt_format="torch_dcp"), {"tp": 2}),
    ),
    "optimizer_offload": (
        Aim(DISTRIBUTED, {"optimizer_cpu_offload": True}),
        Aim(
            DISTRIBUTED | dict(optimizer_cpu_offload=True, use_precision_aware_optimizer=True),
            {"use_precision_aware_optimizer": False},
        ),
    ),
    "optimizer_offload_fp8": (
        Aim(
            DISTRIBUTED
            | DELAYED
            | SELECTIVE
            | dict(optimizer_cpu_offload=True, use_precision_aware_optimizer=True, fp8_param_gather=True),
            {"fp8_recipe": one_of("tensorwise", "mxfp8", "blockwise")},
        ),
    ),
    "precision_aware_optimizer": (
        Aim(PLAIN_OPTIMIZER, {"use_precision_aware_optimizer": True}),
        Aim(DISTRIBUTED | dict(use_precision_aware_optimizer=True), {"optimizer": "sgd"}),
    ),
    "optimizer_state_types": (
        Aim(DISTRIBUTED, {"exp_avg_dtype": "bf16"}),
        Aim(DISTRIBUTED, {"main_grads_dtype": "bf16"}),
    ),
    # Precision
    "one_precision": (Aim({"precision": "bf16"}, {"also_fp16": True}),),
    "fp8_parameters_need_fp8": (Aim(DISTRIBUTED | dict(precision="bf16"), {"fp8_param_gather": True}),),
    "fp8_parameters_optimizer": (
        Aim(PLAIN_OPTIMIZER | FP8, {"fp8_param_gather": True}),
        Aim(DISTRIBUTED | FP8 | dict(fp8_param_gather=True), {"use_distributed_optimizer": False}),
    ),
    "bf16_layers_recipe": (
        Aim(DELAYED, {"first_last_layers_bf16": True}),
        Aim(FP8 | dict(first_last_layers_bf16=True), {"fp8_recipe": "delayed"}),
    ),
    "bf16_layers_over_stage": (
        Aim(
            FP8 | dict(first_last_layers_bf16=True, num_layers_at_start_in_bf16=1, num_layers_at_end_in_bf16=1),
            {"num_layers_at_start_in_bf16": lambda case, rng: case["num_layers"] // case["pp"] + rng.choice((1, 9))},
        ),
        Aim(
            FP8 | dict(first_last_layers_bf16=True, num_layers_at_start_in_bf16=1, num_layers_at_end_in_bf16=1),
            {"num_layers_at_end_in_bf16": lambda case, rng: case["num_layers"] // case["pp"] + rng.choice((1, 9))},
        ),
    ),
    "fp4_excludes_fp8": (Aim(FP8, {"extra": FP4["extra"]}), Aim(FP4, {"precision": "bf16+fp8"})),
    "low_precision_tokens": (
        Aim(FP8, {"seq_length": lambda case, rng: case["seq_length"] + 2 * case["cp"] * case["tp"] * rng.choice((1, 2))}),
        Aim(FP4, {"seq_length": lambda case, rng: case["seq_length"] + 2 * case["cp"] * case["tp"] * rng.choice((2, 4))}),
    ),
    "low_precision_width": (
        Aim(FP8, {"ffn_hidden_size": lambda case, rng: case["tp"] * rng.choice((1000, 1375, 1380))}),
        Aim({"precision": "bf16", "ffn_hidden_size": lambda case, rng: case["tp"] * 1375}, {"precision": "bf16+fp8"}),
        Aim(FP4, {"ffn_hidden_size": lambda case, rng: case["tp"] * rng.choice((1000, 1375, 1380))}),
    ),
    # CUDA graphs
    "graph_kind": (Aim(KEEP_ALL | dict(precision="fp16"), {"cuda_graph_impl": "full_iteration"}),),
    "graph_module_names": (
        Aim(GRAPHS, {"extra": scope("everything")}),
        Aim(LOCAL_GRAPHS, {"extra": scope("attn", "norm")}),
    ),
    "graph_modules_of_iteration": (
        Aim(KEEP_ALL | dict(precision="fp16", cuda_graph_impl="full_iteration"), {"extra": scope("attn")}),
    ),
    "graph_nan_check": (
        Aim(KEEP_ALL | dict(precision="fp16", cuda_graph_impl="full_iteration"), {"precision": one_of("bf16", "fp32")}),
    ),
    "graph_offload": (Aim(OFFLOADED, {"cuda_graph_impl": one_of("local", "transformer_engine")}),),
    "graph_full_recompute": (Aim(FULL, {"cuda_graph_impl": one_of("local", "transformer_engine")}),),
    "graph_recompute_experts": (
        Aim(
            GRAPHS | NO_DROPS | dict(extra=scope("attn", "moe_router"), recompute_granularity="selective"),
            {"recompute_modules": ["moe"]},
        ),
    ),
    "graph_expert_modules": (
        Aim(
            GRAPHS | dict(moe_expert_capacity_factor=1.25, moe_pad_expert_input_to_capacity=True, extra=scope("moe")),
            {"extra": scope("moe", "moe_router")},
        ),
    ),
    "graph_preprocess_module": (
        Aim(GRAPHS | NO_DROPS, {"extra": one_of(scope("moe_preprocess"), scope("attn", "moe_preprocess"))}),
    ),
    "graph_modules_need_experts": (
        Aim(GRAPHS, {"extra": one_of(scope("moe_router"), scope("moe"), scope("attn", "moe_router"))}),
        Aim(LOCAL_GRAPHS, {"extra": one_of(scope("moe_router"), scope("moe"))}),
    ),
    "graph_dense_module": (Aim(GRAPHS, {"extra": one_of(scope("mlp"), scope("attn", "mlp"))}),),
    "graph_dropless_experts": (
        Aim(GRAPHS | NO_DROPS, {"extra": one_of(scope("moe"), scope("attn", "moe"))}),
        Aim(LOCAL_GRAPHS | NO_DROPS, {"extra": scope("moe")}),
    ),
    "graph_preprocess_sync": (
        Aim(
            GRAPHS
            | dict(
                moe_token_dispatcher_type="alltoall",
                moe_expert_capacity_factor=1.25,
                moe_pad_expert_input_to_capacity=False,
                extra=scope("moe_router"),
            ),
            {"extra": scope("moe_router", "moe_preprocess")},
        ),
    ),
    "graph_expert_overlap": (
        Aim(EXPERT_OVERLAP | dict(extra=scope("mlp")), {"cuda_graph_impl": "transformer_engine"}),
        Aim({**EXPERT_OVERLAP, "cuda_graph_impl": "transformer_engine", "extra": scope("attn")}, {"extra": scope("attn", "mlp")}),
        Aim(EXPERT_OVERLAP, {"cuda_graph_impl": "local"}),
    ),
    "graph_experts_inference_padding": (Aim(KEEP_ALL, {"cuda_graph_impl": "local"}),),
    "graph_allocator": (
        Aim(
            GRAPHS,
            {"env": {CONNECTIONS: "1", "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}},
        ),
        Aim(
            KEEP_ALL | dict(extra=scope("attn"), env={CONNECTIONS: "1", "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}),
            {"cuda_graph_impl": "transformer_engine"},
        ),
    ),
    # Learning rate
    "one_warmup": (
        Aim({"train_iters": 100, "lr_warmup_iters": 5, "lr_warmup_fraction": None}, {"lr_warmup_fraction": one_of(0.1, 0.2)}),
    ),
    "warmup_within_decay": (
        Aim({"train_iters": 100, "lr_warmup_fraction": None}, {"lr_warmup_iters": one_of(100, 200)}),
        Aim({"train_iters": 100, "lr_warmup_iters": 0, "lr_warmup_fraction": None}, {"lr_warmup_fraction": 1.0}),
    ),
    "ramp_up": (Aim({}, {"rampup_batch_size": one_of([8, 8, 160], [16, 16, 320])}),),
}
