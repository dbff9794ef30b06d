"""Fields of a case and the values that a neighbour of a legal case may have in them."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from benchmarks.legality_options import CONNECTIONS, RECOMPUTE, Case, even_layout


def _layouts(case: Case, rng: random.Random) -> list[Any]:
    """No layout, a good one, and several bad ones."""
    copy = dict(case)
    even_layout(copy, rng)
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
