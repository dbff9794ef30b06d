"""Memory that others measured or ran out of, each case named by its number in the collection of real situations."""

from __future__ import annotations

import pytest

from search_spaces import memory
from search_spaces.case import read_case
from search_spaces.columns import Columns
from search_spaces.memory import MemoryTable, Software
from search_spaces.normalise import normalise
from tests.search_spaces.memory_cases import Case

FUSED = Software(gradient_accumulation_fusion=True)
REGRESSION = Software(hidden_dropout=True, attention_dropout=True)

GPT_7B: Case = {
    "num_layers": 32,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_query_groups": 8,
    "ffn_hidden_size": 16384,
    "swiglu": False,
    "add_bias_linear": True,
    "normalization": "LayerNorm",
    "position_embedding_type": "learned_absolute",
    "max_position_embeddings": 8192,
    "seq_length": 8192,
    "vocab_size": 131073,
    "world_size": 8,
    "gbs": 8,
    "precision": "bf16",
    "use_distributed_optimizer": True,
}
MIXTRAL: Case = {
    "num_layers": 32,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_query_groups": 8,
    "ffn_hidden_size": 14336,
    "vocab_size": 256000,
    "seq_length": 4096,
    "num_experts": 8,
    "moe_router_topk": 2,
    "moe_grouped_gemm": True,
    "moe_token_dispatcher_type": "alltoall",
    "world_size": 64,
    "tp": 2,
    "pp": 4,
    "sp": True,
    "mbs": 1,
    "precision": "bf16",
    "use_distributed_optimizer": True,
}
LATENT: Case = {
    "multi_latent_attention": True,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_head_dim": 128,
    "qk_pos_emb_head_dim": 64,
    "v_head_dim": 128,
    "qk_layernorm": True,
    "mtp_num_layers": 1,
    "moe_router_score_function": "sigmoid",
    "moe_grouped_gemm": True,
    "moe_token_dispatcher_type": "alltoall",
    "make_vocab_size_divisible_by": 3232,
    "seq_length": 4096,
    "tp": 2,
    "pp": 2,
    "etp": 1,
    "sp": True,
    "mbs": 4,
    "precision": "bf16",
    "use_distributed_optimizer": True,
}
SMALL_EXPERTS: Case = {
    **LATENT,
    "num_layers": 16,
    "hidden_size": 1024,
    "num_attention_heads": 32,
    "kv_channels": 128,
    "ffn_hidden_size": 4096,
    "vocab_size": 50257,
    "num_experts": 32,
    "moe_router_topk": 4,
    "moe_ffn_hidden_size": 1024,
    "moe_shared_expert_intermediate_size": 1024,
    "moe_layer_freq": [0] + [1] * 15,
    "world_size": 8,
    "ep": 4,
    "gbs": 32,
    "attention_backend": "unfused",
    "pipeline_model_parallel_layout": "Et|tt|tt|tt|tt|tt|tt|tttmL",
}
DEEPSEEK_PROXY: Case = {
    **LATENT,
    "num_layers": 14,
    "hidden_size": 7168,
    "num_attention_heads": 128,
    "ffn_hidden_size": 18432,
    "vocab_size": 256000,
    "num_experts": 64,
    "moe_router_topk": 8,
    "moe_ffn_hidden_size": 2048,
    "moe_shared_expert_intermediate_size": 2048,
    "moe_layer_freq": [0] * 3 + [1] * 11,
    "world_size": 32,
    "ep": 8,
    "gbs": 512,
    "pipeline_model_parallel_layout": "Et*7|t*7mL",
}
LLAMA_7B: Case = {
    "num_layers": 32,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "ffn_hidden_size": 11008,
    "vocab_size": 32000,
    "seq_length": 2048,
    "precision": "bf16",
}
LLAMA_3B: Case = {
    "num_layers": 28,
    "hidden_size": 3072,
    "num_attention_heads": 24,
    "num_query_groups": 8,
    "kv_channels": 128,
    "ffn_hidden_size": 8192,
    "vocab_size": 128256,
    "untie_embeddings_and_output_weights": False,
    "seq_length": 4096,
    "world_size": 8,
    "mbs": 1,
    "gbs": 8,
    "precision": "bf16",
    "use_distributed_optimizer": True,
}
LLAMA_70B: Case = {
    "num_layers": 80,
    "hidden_size": 8192,
    "num_attention_heads": 64,
    "num_query_groups": 8,
    "ffn_hidden_size": 28672,
    "vocab_size": 128256,
    "seq_length": 8192,
    "world_size": 256,
    "tp": 8,
    "sp": True,
    "mbs": 16,
    "gbs": 512,
    "precision": "bf16",
    "fp8_format": "hybrid",
    "fp8_recipe": "tensorwise",
    "use_torch_fsdp2": True,
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
}
RECOMPUTED = {
    "recompute_granularity": "selective",
    "recompute_modules": ["layernorm", "mla_up_proj", "mlp", "moe_act"],
}
NATIVE = Software(gradient_accumulation_fusion=True, cross_entropy="native")
IN_PLACE = Software(gradient_accumulation_fusion=True, cross_entropy="te")
TORCH = Software(cross_entropy="torch", separate_main_parameters=False)


def table(case: Case, kernels: Software) -> MemoryTable:
    workload, config = read_case(case)
    return memory.estimate(Columns.of(workload, normalise(workload, config)), kernels)


@pytest.mark.parametrize(
    ("case", "kernels", "stage", "low", "high"),
    [
        pytest.param({**GPT_7B, "pp": 4, "vpp": 8, "mbs": 1}, REGRESSION, -1, 47.9, 70.4, id="B002-B003"),
        pytest.param({**GPT_7B, "tp": 4, "mbs": 2}, REGRESSION, -1, 46.1, 67.7, id="B005"),
        pytest.param({**MIXTRAL, "ep": 4, "gbs": 1024}, FUSED, -1, 21.0, 30.9, id="B007"),
        pytest.param({**MIXTRAL, "ep": 8, "vpp": 8, "etp": 1, "gbs": 256}, FUSED, -1, 28.1, 41.3, id="B009"),
        pytest.param(SMALL_EXPERTS, NATIVE, -1, 47.6, 70.0, id="B010"),
        pytest.param({**SMALL_EXPERTS, **RECOMPUTED}, NATIVE, -1, 39.0, 57.3, id="B011"),
        pytest.param(DEEPSEEK_PROXY, IN_PLACE, -1, 79.9, 117.4, id="B013"),
        pytest.param({**LLAMA_7B, "pp": 2, "mbs": 2, "gbs": 2048, "world_size": 16}, FUSED, 0, 62.0, 76.0, id="B015"),
        pytest.param(LLAMA_3B, FUSED, 0, 33000 / 1024, 48000 / 1024, id="B018"),
        pytest.param(LLAMA_70B, TORCH, 0, 58.0, 82.0, id="B034"),
    ],
)
def test_estimate_is_within(case: Case, kernels: Software, stage: int, low: float, high: float):
    """What a source does not state is the nearest known configuration: sequence (B015), layers (B018), world size (B007-B013)."""
    assert low <= table(case, kernels).by_stage(0)[stage] <= high


GPT_2: Case = {
    "num_layers": 36,
    "hidden_size": 1280,
    "num_attention_heads": 20,
    "ffn_hidden_size": 5120,
    "vocab_size": 50257,
    "swiglu": False,
    "add_bias_linear": True,
    "normalization": "LayerNorm",
    "position_embedding_type": "learned_absolute",
    "untie_embeddings_and_output_weights": False,
    "seq_length": 1024,
    "world_size": 1,
    "mbs": 4,
    "gbs": 8,
    "precision": "fp16",
}
DEEPSEEK_16B: Case = {
    "num_layers": 27,
    "hidden_size": 2048,
    "num_attention_heads": 16,
    "ffn_hidden_size": 10944,
    "vocab_size": 102400,
    "multi_latent_attention": True,
    "kv_lora_rank": 512,
    "qk_head_dim": 128,
    "qk_pos_emb_head_dim": 64,
    "v_head_dim": 128,
    "qk_layernorm": True,
    "num_experts": 64,
    "moe_router_topk": 6,
    "moe_ffn_hidden_size": 1408,
    "moe_shared_expert_intermediate_size": 2816,
    "moe_layer_freq": [0] + [1] * 26,
    "seq_length": 4096,
    "world_size": 8,
    "mbs": 4,
    "gbs": 64,
    "precision": "bf16",
    "use_torch_fsdp2": True,
}
QWEN_7B: Case = {
    "num_layers": 28,
    "hidden_size": 3584,
    "num_attention_heads": 28,
    "num_query_groups": 4,
    "ffn_hidden_size": 18944,
    "vocab_size": 152064,
    "add_qkv_bias": True,
    "seq_length": 10240,
    "world_size": 8,
    "tp": 2,
    "sp": True,
    "mbs": 1,
    "gbs": 64,
    "precision": "bf16",
}


@pytest.mark.parametrize(
    ("case", "kernels", "capacity_gib"),
    [
        pytest.param(GPT_2, Software(flash_attention=False, hidden_dropout=True, attention_dropout=True), 31.7, id="B017"),
        pytest.param(DEEPSEEK_16B, TORCH, 79.1, id="B023"),
        pytest.param(QWEN_7B, FUSED, 79.1, id="B026"),
    ],
)
def test_must_reject(case: Case, kernels: Software, capacity_gib: float):
    assert table(case, kernels).verdict(capacity_gib)[0] == "does_not_fit"


def test_must_accept_what_a_margin_of_ten_percent_leaves_free():
    """B036: 179 GiB are accepted on a board of 288."""
    case = {**LLAMA_70B, "use_torch_fsdp2": False, "use_distributed_optimizer": True, "fp8_format": None, "mbs": 8}
    found = table(case, IN_PLACE)
    assert found.upper_gib[0] < 259.2
    assert found.verdict(288.0)[0] == "fits"


def test_offloaded_state_is_counted_on_the_host():
    """B025: 7 B parameters whose optimiser is offloaded cost each rank 102 GB of the host's memory."""
    case = {**LLAMA_7B, "world_size": 8, "gbs": 64, "optimizer_cpu_offload": True}
    found = table(case, FUSED)
    assert found.host_gib[0] * 1.0737 == pytest.approx(102, rel=0.1)
    assert found.by_component(0)["optimizer"] == 0


def test_stages_differ():
    """B016, B019, B022: one number for all stages is wrong by a wide margin; the fullest counts."""
    found = table({**GPT_7B, "pp": 4, "mbs": 1}, FUSED)
    stages = found.by_stage(0)
    assert found.memory_gib[0] == pytest.approx(stages.max())
    assert stages.max() > 1.3 * stages.min()
    uneven = {**LLAMA_7B, "num_layers": 8, "pp": 4, "world_size": 4, "gbs": 4, "pipeline_model_parallel_layout": "Et|tt|tt|tttL"}
    assert table(uneven, FUSED).by_component(0, 3)["weights"] > 1.4 * table(uneven, FUSED).by_component(0, 1)["weights"]


def test_eight_bits_do_not_lower_memory_by_themselves():
    """B020: bf16 weights stay beside their FP8 copies."""
    case = {**LLAMA_7B, "world_size": 8, "gbs": 64, "use_distributed_optimizer": True}
    eight_bit = {**case, "fp8_format": "hybrid", "fp8_recipe": "delayed"}
    assert table(eight_bit, FUSED).by_component(0)["weights"] > 1.9 * table(case, FUSED).by_component(0)["weights"]


def test_experts_cost_activations():
    """B021: the stock formula has no term for them."""
    dense = {key: value for key, value in MIXTRAL.items() if "moe" not in key and key != "num_experts"}
    assert (
        table({**MIXTRAL, "gbs": 64}, FUSED).by_component(0)["activations"]
        > 1.3 * (table({**dense, "gbs": 64}, FUSED).by_component(0)["activations"])
    )


def test_memory_is_constant_where_each_rank_has_as_many_tokens():
    """B033: 32k tokens on one rank to 256k on eight, measured 83.9 to 84.5 GiB."""
    case = {**LLAMA_7B, "world_size": 8, "mbs": 1, "use_torch_fsdp2": True, **FULL}
    found = [table({**case, "seq_length": 32768 * cp, "cp": cp, "gbs": 8 // cp}, TORCH).memory_gib[0] for cp in (1, 2, 4, 8)]
    assert max(found) / min(found) < 1.02


FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


def test_the_first_step_lacks_the_moments():
    """B038: a steady peak is the first one plus 8 bytes per parameter over the data parallel ranks, on two splits."""
    for split, parameters in (({"tp": 1, "pp": 4, "vpp": 8, "mbs": 1}, 1946161152), ({"tp": 4, "mbs": 2}, 1711278080)):
        last = table({**GPT_7B, **split}, REGRESSION)
        optimizer = last.by_component(0, len(last.by_stage(0)) - 1)["optimizer"]
        assert optimizer == pytest.approx(12 * parameters / 2 / 2**30, rel=2e-3)
