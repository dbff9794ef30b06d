"""Aims at the rules on meshes, shapes and stages."""

from __future__ import annotations

from benchmarks.legality_aims import (
    DISTRIBUTED,
    FSDP,
    INTERLEAVED,
    MTP_LAYOUT,
    ONE_CHUNK,
    ONE_STAGE,
    TORCH_FSDP,
    UNTIERED_CONTEXT,
    Aim,
    layout,
    one_of,
    per_step,
)
from benchmarks.legality_options import CONNECTIONS

AIMS: dict[str, tuple[Aim, ...]] = {
    # Meshes and batch
    "world_over_attention_mesh": (
        Aim({**UNTIERED_CONTEXT, "cp": 1, "seq_length": 6144}, {"cp": 3}),
        Aim({}, {"world_size": lambda case, rng: case["world_size"] + rng.choice((1, 2, 3))}),
    ),
    "world_over_expert_mesh": (Aim({}, {"ep": one_of(2, 4, 8, 16, 32)}), Aim({}, {"etp": one_of(2, 4, 8)})),
    "rank_order": (Aim({"use_tp_pp_dp_mapping": False}, {"use_tp_pp_dp_mapping": True}),),
    "batch_over_replicas": (
        Aim(ONE_CHUNK, {"gbs": lambda case, rng: case["gbs"] + rng.choice((1, 2, 3))}),
        Aim(ONE_CHUNK, {"mbs": one_of(3, 5, 7, 16)}),
    ),
    "optimizer_instances": (Aim(DISTRIBUTED | dict(ep=1), {"num_distributed_optimizer_instances": one_of(2, 3, 4, 5, 7)}),),
    "expert_optimizer_instances": (Aim(DISTRIBUTED, {"num_distributed_optimizer_instances": one_of(2, 3, 4, 8)}),),
    "device_connections": (
        Aim({"gpu_arch_major": one_of(8, 9)}, {"env": one_of({}, {CONNECTIONS: "8"}, {CONNECTIONS: None})}),
        Aim({"gpu_arch_major": 10, "env": one_of({}, {CONNECTIONS: "8"})}, {"gpu_arch_major": one_of(8, 9)}),
    ),
    "fsdp_connections": (Aim(FSDP, {"env": {CONNECTIONS: "1"}}), Aim(TORCH_FSDP, {"env": {CONNECTIONS: "1"}})),
    # Shapes
    "heads_over_tensor_ranks": (
        Aim({"kv_channels": 128, "num_query_groups": 1}, {"num_attention_heads": one_of(9, 15, 25, 33)}),
        Aim({"kv_channels": 128}, {"tp": one_of(3, 5)}),
    ),
    "query_groups_over_tensor_ranks": (
        Aim({"kv_channels": 128, "num_attention_heads": 24, "num_query_groups": 24}, {"num_query_groups": one_of(3, 6, 12)}),
        Aim({"kv_channels": 128, "num_attention_heads": 40, "num_query_groups": 40}, {"num_query_groups": one_of(5, 10, 20)}),
    ),
    "ffn_over_tensor_ranks": (Aim({"precision": "bf16"}, {"ffn_hidden_size": one_of(5461, 11001, 13825)}),),
    "expert_ffn_over_expert_tensor_ranks": (Aim({"precision": "bf16"}, {"moe_ffn_hidden_size": one_of(769, 1001, 1407)}),),
    "shared_expert_over_tensor_ranks": (Aim({}, {"moe_shared_expert_intermediate_size": one_of(1409, 2817, 5633)}),),
    "position_table": (Aim({}, {"max_position_embeddings": lambda case, rng: case["seq_length"] - rng.choice((1, 256))}),),
    "sequence_over_context_ranks": (
        Aim({"sp": False}, {"seq_length": lambda case, rng: case["seq_length"] + rng.choice((1, case["cp"]))}),
        Aim({}, {"seq_length": lambda case, rng: case["seq_length"] + rng.choice((1, case["cp"] * case["tp"]))}),
    ),
    "sequence_over_tensor_ranks": (
        Aim({"precision": "bf16"}, {"seq_length": lambda case, _: case["seq_length"] + 2 * case["cp"]}),
        Aim({"precision": "bf16"}, {"seq_length": lambda case, rng: case["seq_length"] + rng.choice((1, 3))}),
    ),
    "tensor_overlap_needs_sequence_parallel": (
        Aim({"sp": False}, {"tp_comm_overlap": True}),
        Aim({"tp_comm_overlap": True}, {"sp": False}),
    ),
    "hierarchical_context_sizes": (
        Aim(UNTIERED_CONTEXT, {"hierarchical_context_parallel_sizes": one_of([2, 3], [1, 2], [2, 2], [3, 1])}),
    ),
    "hierarchical_context_needed": (Aim(UNTIERED_CONTEXT, {"cp_comm_type": "a2a+p2p"}),),
    "context_exchange_per_layer": (Aim(UNTIERED_CONTEXT, {"cp_comm_type": one_of(["p2p", "a2a"], ["a2a", "p2p", "p2p"])}),),
    "latent_attention_excludes_groups": (
        Aim({}, {"extra": lambda _, rng: ["--group-query-attention", "--num-query-groups", rng.choice(("4", "8", "16"))]}),
    ),
    "heads_over_query_groups": (
        Aim({"kv_channels": 128, "num_attention_heads": 32, "num_query_groups": 32}, {"num_query_groups": one_of(12, 24)}),
        Aim({"kv_channels": 128, "num_attention_heads": 24, "num_query_groups": 8}, {"num_query_groups": 16}),
    ),
    "hidden_size_over_heads": (Aim({"kv_channels": None}, {"num_attention_heads": one_of(9, 15, 25, 33)}),),
    # Stages
    "one_virtual_spelling": (
        Aim(INTERLEAVED, {"num_layers_per_virtual_pipeline_stage": one_of(1, 2)}),
        Aim(ONE_CHUNK | {"num_layers_per_virtual_pipeline_stage": 1}, {"vpp": one_of(2, 4)}),
    ),
    "layers_per_virtual_stage": (Aim(ONE_CHUNK, {"num_layers_per_virtual_pipeline_stage": one_of(3, 5, 7, 9, 11)}),),
    "interleaving_needs_stages": (Aim(ONE_STAGE, {"vpp": one_of(2, 4)}), Aim(INTERLEAVED, {"pp": 1})),
    "interleaving_without_overlap": (Aim(dict(pp=2) | INTERLEAVED, {"no_overlap_p2p_communication": True}),),
    "layers_over_stages": (
        Aim(ONE_CHUNK, {"num_layers": lambda case, rng: case["num_layers"] + rng.choice((1, 2, 3))}),
        Aim(ONE_CHUNK, {"account_for_embedding_in_pipeline_split": True}),
        Aim(ONE_CHUNK, {"account_for_loss_in_pipeline_split": True}),
    ),
    "layers_over_virtual_stages": (Aim(INTERLEAVED, {"vpp": one_of(3, 4, 5, 7)}),),
    "uneven_stages": (
        Aim(ONE_CHUNK, {"decoder_first_pipeline_num_layers": one_of(1, 2, 3, 5)}),
        Aim(ONE_CHUNK, {"decoder_last_pipeline_num_layers": one_of(1, 2, 3, 5)}),
    ),
    "every_stage_has_layers": (
        Aim(ONE_CHUNK, {"decoder_first_pipeline_num_layers": lambda case, _: case["num_layers"] + case["pp"] - 1}),
        Aim(ONE_CHUNK, {"decoder_last_pipeline_num_layers": lambda case, _: case["num_layers"] + case["pp"] - 1}),
    ),
    "uneven_stages_over_virtual_stages": (
        Aim(INTERLEAVED, {"decoder_first_pipeline_num_layers": lambda case, rng: rng.choice((1, 3, case["pp"] + 1))}),
        Aim(INTERLEAVED, {"decoder_last_pipeline_num_layers": lambda case, rng: rng.choice((1, 3, case["pp"] + 1))}),
    ),
    "interleaving_needs_middle_stages": (
        Aim(
            dict(pp=2)
            | INTERLEAVED
            | dict(num_layers=8, decoder_first_pipeline_num_layers=4, decoder_last_pipeline_num_layers=None),
            {"decoder_last_pipeline_num_layers": 4},
        ),
    ),
    "one_uneven_spelling": (
        Aim(
            ONE_CHUNK
            | dict(
                moe_layer_freq=None,
                num_layers=lambda case, rng: case["pp"] * 3,
                decoder_first_pipeline_num_layers=3,
            ),
            {"account_for_embedding_in_pipeline_split": True},
        ),
        Aim(
            ONE_CHUNK | dict(moe_layer_freq=None, num_layers=lambda case, rng: case["pp"] * 2, decoder_last_pipeline_num_layers=2),
            {"account_for_loss_in_pipeline_split": True},
        ),
    ),
    "layout_alone": (
        Aim(ONE_CHUNK | dict(pipeline_model_parallel_layout=layout(lambda parts: parts)), {"decoder_first_pipeline_num_layers": 1}),
        Aim(
            ONE_CHUNK | dict(pipeline_model_parallel_layout=layout(lambda parts: parts)),
            {"account_for_loss_in_pipeline_split": True},
        ),
    ),
    "layout_form": (
        Aim(ONE_CHUNK, {"pipeline_model_parallel_layout": layout(lambda parts: [parts[0][1:], *parts[1:]])}),
        Aim(ONE_CHUNK, {"pipeline_model_parallel_layout": layout(lambda parts: [*parts[:-1], parts[-1][:-1]])}),
        Aim(ONE_CHUNK, {"pipeline_model_parallel_layout": layout(lambda parts: [parts[0] + "x", *parts[1:]])}),
    ),
    "layout_over_stages": (
        Aim(ONE_CHUNK, {"pipeline_model_parallel_layout": layout(lambda parts: parts, stages=1)}),
        Aim(ONE_CHUNK, {"pipeline_model_parallel_layout": layout(lambda parts: parts, stages=-1)}),
    ),
    "layout_layers": (
        Aim(ONE_CHUNK, {"pipeline_model_parallel_layout": layout(lambda parts: [parts[0] + "t", *parts[1:]])}),
        Aim(
            ONE_CHUNK | dict(pipeline_model_parallel_layout=layout(lambda parts: parts)),
            {"mtp_num_layers": lambda case, _: 2 if case.get("mtp_num_layers") == 1 else 1},
        ),
    ),
    "layout_mtp_stage": tuple(
        Aim(
            dict(pp=stages) | MTP_LAYOUT | dict(pipeline_model_parallel_layout="Ett|tt|tt|ttmmL"),
            {"pipeline_model_parallel_layout": text},
        )
        for stages, text in ((4, "Ett|tttt|ttm|mL"), (4, "Etttt|tttt|mm|L"), (2, "Ett|tttt|ttm|mL"), (2, "Ett|ttttttmm||L"))
    ),
    "micro_batch_group": (
        Aim(
            INTERLEAVED, {"microbatch_group_size_per_vp_stage": lambda case, rng: rng.choice((case["pp"] - 1, 2 * case["pp"] + 1))}
        ),
        Aim(INTERLEAVED, {"gbs": per_step(lambda case: max(case["pp"] - 1, 1))}),
    ),
    "micro_batch_remainder": (
        Aim(INTERLEAVED, {"gbs": per_step(lambda case: case["pp"] + 1)}),
        Aim(INTERLEAVED, {"microbatch_group_size_per_vp_stage": lambda case, _: 2 * case["pp"] - 1}),
    ),
}
