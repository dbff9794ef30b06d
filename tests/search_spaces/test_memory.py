"""The memory model by itself: one implementation for tables and rows, its parts, bounds and verdicts."""

from __future__ import annotations

import numpy as np
import pytest

from search_spaces import memory
from search_spaces.columns import Columns
from search_spaces.config import TrialConfig
from search_spaces.distinct import distinct
from search_spaces.memory import Software
from search_spaces.memory.stages import Pipeline, in_flight, pipelines, stage_counts
from search_spaces.memory.tables import GIB, flowing_bytes
from search_spaces.model import ModelSpec, Workload
from search_spaces.pipeline_stages import Split
from search_spaces.space import SearchSpace

LLAMA_70B = ModelSpec(
    num_layers=80, hidden_size=8192, num_attention_heads=64, num_query_groups=8, ffn_hidden_size=28672, vocab_size=128256
)
MIXTRAL = ModelSpec(
    num_layers=32,
    hidden_size=4096,
    num_attention_heads=32,
    num_query_groups=8,
    ffn_hidden_size=14336,
    vocab_size=32000,
    num_experts=8,
)
LATENT = MIXTRAL.model_copy(
    update={"multi_latent_attention": True, "moe_shared_expert_intermediate_size": 4096, "mtp_num_layers": 1, "qk_layernorm": True}
)
PAIR = {"tensor_model_parallel_size": 8, "pipeline_model_parallel_size": 4, "use_distributed_optimizer": True}


def workload(model: ModelSpec = LLAMA_70B, world_size: int = 64, **fields: object) -> Workload:
    return Workload.model_validate(
        {"model": model, "world_size": world_size, "global_batch_size": 128, "seq_length": 4096, **fields}
    )


def estimate(model: ModelSpec = LLAMA_70B, kernels: Software | None = None, **knobs: object) -> memory.MemoryTable:
    return memory.estimate(Columns.of(workload(model), TrialConfig.model_validate({**PAIR, **knobs})), kernels)


@pytest.mark.parametrize("model", [LLAMA_70B, MIXTRAL], ids=["dense", "experts"])
def test_a_table_says_of_each_row_what_a_table_of_one_row_says(model):
    choices = {
        "tensor_model_parallel_size": [1, 2, 4, 8],
        "pipeline_model_parallel_size": [1, 2, 4],
        "num_virtual_stages_per_pipeline_rank": [None, 2],
        "context_parallel_size": [1, 2],
        "expert_model_parallel_size": [1, 4] if model.is_moe else [1],
        "expert_tensor_parallel_size": [1] if model.is_moe else [None],
        "moe_token_dispatcher_type": ["alltoall"],
        "micro_batch_size": [1, 4],
        "sequence_parallel": [True, False],
        "recompute_granularity": [None, "full", "selective"],
        "recompute_method": [None, "uniform", "block"],
        "recompute_num_layers": [None, 1, 2],
        "use_distributed_optimizer": [True, False],
    }
    table = SearchSpace(workload(model), choices).table()
    found = memory.estimate(table.columns)
    assert len(found) == len(table) > 300
    for row in range(0, len(table), len(table) // 60):
        one = memory.estimate(Columns.of(table.workload, table.config(row)))
        assert found.memory_gib[row] == pytest.approx(one.memory_gib[0], rel=1e-12)
        assert found.upper_gib[row] == pytest.approx(one.upper_gib[0], rel=1e-12)
        assert found.stage[row] == one.stage[0]
        assert found.by_component(row) == pytest.approx(one.by_component(0))


def test_components_add_up_to_what_the_device_holds():
    found = estimate(num_virtual_stages_per_pipeline_rank=5)
    parts = found.by_component(0)
    assert sum(parts.values()) == pytest.approx(found.device_gib[0])
    assert found.by_stage(0).max() == pytest.approx(found.memory_gib[0])
    assert len(found.by_stage(0)) == 4
    assert found.memory_gib[0] < found.device_gib[0] < found.upper_gib[0]


def test_verdict_and_what_decides():
    found = estimate()
    device, upper = found.device_gib[0], found.upper_gib[0]
    assert found.verdict(upper + 0.1).tolist() == ["fits"]
    assert found.verdict((device + upper) / 2).tolist() == ["at_risk"]
    assert found.verdict(device - 0.1).tolist() == ["does_not_fit"]
    assert found.decides(0) == ("activations", 0)
    full = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    assert estimate(**full).decides(0) == ("optimizer", 0)


@pytest.mark.parametrize(
    ("knobs", "kernels", "bytes_per_parameter"),
    [
        ({"use_distributed_optimizer": False}, Software(), 2 + 4 + 12),
        ({}, Software(), 2 + 4 + 12 / 2),
        ({}, Software(grad_reduce_in_fp32=False), 2 + 2 + 12 / 2),
        ({"precision": "fp16", "use_distributed_optimizer": False}, Software(), 20),
        ({"precision": "fp32", "use_distributed_optimizer": False}, Software(), 16),
        ({"use_precision_aware_optimizer": True, "exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "bf16"}, Software(), 2 + 4 + 6 / 2),
        ({"optimizer_cpu_offload": True, "optimizer_offload_fraction": 0.5}, Software(), 2 + 4 + 6 / 2),
        ({"use_megatron_fsdp": True}, Software(), 18 / 2),
        ({"use_megatron_fsdp": True, "data_parallel_sharding_strategy": "optim_grads"}, Software(), 2 + 4 / 2 + 12 / 2),
        ({}, Software(trained=False), 2),
    ],
)
def test_states_cost_what_megatrons_table_says(knobs, kernels, bytes_per_parameter):
    plain = estimate(kernels=Software(trained=False)).by_component(0)["weights"] / 2
    parts = estimate(kernels=kernels, **knobs).by_component(0)
    assert (parts["weights"] + parts["gradients"] + parts["optimizer"]) / plain == pytest.approx(bytes_per_parameter, rel=1e-6)


def test_eight_bit_weights_are_gathered_or_copied():
    plain = estimate().by_component(0)["weights"]
    gathered = estimate(
        fp8_format="hybrid", fp8_recipe="tensorwise", fp8_param_gather=True, kernels=Software(fp8_transpose_cache=False)
    )
    assert 0.5 < gathered.by_component(0)["weights"] / plain < 0.55
    assert 1.9 < estimate(fp8_format="hybrid").by_component(0)["weights"] / plain < 2.01


def test_NVFP4_keeps_two_copies_beside_the_weight_and_small_inputs():
    wide, eight, four = estimate(), estimate(fp8_format="hybrid"), estimate(fp4_format="e2m1")
    weights = [table.by_component(0)["weights"] for table in (wide, eight, four)]
    assert (weights[2] - weights[0]) / (weights[1] - weights[0]) == pytest.approx(2 * 0.5625 / 2)
    activations = [table.by_component(0)["activations"] for table in (wide, eight, four)]
    assert (activations[0] - activations[2]) / (activations[0] - activations[1]) == pytest.approx((2 - 0.5625) / (2 - 1), rel=0.2)


def pipeline(stages: int = 4, chunks: int = 1, micro_batches: int = 16) -> Pipeline:
    split = Split(stages, chunks, first=0, last=0, layout=None, embedding_counts=False, loss_counts=False)
    return Pipeline(split, micro_batches, group=4, recompute=0, recompute_layers=1, offloaded=0, extra_warm_up=0)


def test_G017_micro_batches_in_flight_without_interleaving():
    assert [sum(in_flight(pipeline(), stage)) for stage in range(4)] == [4, 3, 2, 1]
    assert [sum(in_flight(pipeline(micro_batches=2), stage)) for stage in range(4)] == [2, 2, 2, 1]
    assert in_flight(pipeline(stages=1), 0) == [1]


def test_micro_batches_in_flight_with_interleaving():
    """get_pp_rank_microbatches: 2 (PP - rank - 1) + (chunks - 1) group warm-up passes, and one more."""
    interleaved = pipeline(chunks=2)
    assert [in_flight(interleaved, stage) for stage in range(4)] == [[7, 4], [5, 4], [4, 3], [4, 1]]
    assert in_flight(pipeline(chunks=2, micro_batches=4), 0) == [4, 4]


def test_tied_embeddings_are_copied_to_the_last_stage():
    tied = LLAMA_70B.model_copy(update={"untie_embeddings_and_output_weights": False})
    one_stage, four = {"pipeline_model_parallel_size": 1}, {"pipeline_model_parallel_size": 4}
    table = Columns.of(workload(tied), TrialConfig.model_validate(four))
    (cut,), _ = pipelines(table)
    assert stage_counts(tied, cut)[4].tolist() == [0, 0, 0, 1]
    single = Columns.of(workload(tied), TrialConfig.model_validate(one_stage))
    assert stage_counts(tied, pipelines(single)[0][0])[4].tolist() == [0]


def test_every_way_of_saving_activations_saves_some():
    plain = estimate().by_component(0)["activations"]
    full = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    block = {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 2}
    modules = {"recompute_granularity": "selective", "recompute_modules": ("mlp", "layernorm")}
    saved = {
        "sequence parallel": estimate(sequence_parallel=True),
        "recompute, full": estimate(**full),
        "recompute, block": estimate(**block),
        "recompute, modules": estimate(**modules),
        "context parallel": estimate(context_parallel_size=2),
        "distributed": estimate(**full, distribute_saved_activations=True),
    }
    least = {name: found.by_component(0)["activations"] for name, found in saved.items()}
    assert all(value < plain for value in least.values()), least
    assert least["distributed"] == pytest.approx(least["recompute, full"] / 8, rel=0.01)
    assert least["recompute, full"] < least["recompute, modules"] < plain


def test_offloaded_layers_keep_nothing():
    one = {"pipeline_model_parallel_size": 1}
    kept = estimate(**one).by_component(0)["activations"]
    assert estimate(**one, cpu_offloading_num_layers=40).by_component(0)["activations"] == pytest.approx(kept / 2, rel=0.03)


def test_a_capacity_bounds_what_experts_get():
    moe = {"expert_model_parallel_size": 4, "expert_tensor_parallel_size": 1, "sequence_parallel": True}
    free = estimate(MIXTRAL, **moe)
    half = estimate(MIXTRAL, **moe, moe_expert_capacity_factor=0.5)
    double = estimate(MIXTRAL, **moe, moe_expert_capacity_factor=2.0, moe_pad_expert_input_to_capacity=True)
    assert half.by_component(0)["activations"] < free.by_component(0)["activations"] < double.by_component(0)["activations"]
    balanced = estimate(MIXTRAL, Software(balanced_experts=True, gradient_accumulation_fusion=True), **moe)
    assert balanced.memory_gib[0] == free.memory_gib[0]
    assert balanced.upper_gib[0] < free.upper_gib[0]


def test_without_a_fused_kernel_the_scores_are_kept():
    scores = 64 / 8 * 4096 * 4096 * 2 / GIB * 80  # four micro-batches of twenty layers
    fused, unfused = estimate(), estimate(attention_backend="unfused")
    difference = unfused.by_component(0)["activations"] - fused.by_component(0)["activations"]
    assert scores < difference < 1.2 * scores


def test_the_loss_decides_how_many_bytes_a_logit_takes():
    one = {"pipeline_model_parallel_size": 1, "micro_batch_size": 16}
    logits = {
        loss: estimate(kernels=Software(cross_entropy=loss), **one).by_component(0)["logits"]
        for loss in ("chunked", "te", "unfused", "torch")
    }
    assert sorted(logits, key=lambda loss: logits[loss]) == ["chunked", "te", "unfused", "torch"]


def test_expandable_segments_lower_the_bound_of_interleaving():
    expandable = (("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True"),)
    fixed = estimate(num_virtual_stages_per_pipeline_rank=5)
    growing = estimate(num_virtual_stages_per_pipeline_rank=5, environment=expandable)
    assert growing.memory_gib[0] == fixed.memory_gib[0]
    assert growing.upper_gib[0] < 0.85 * fixed.upper_gib[0]


def test_a_laptop_has_no_context():
    cpu = workload(world_size=32).model_copy(update={"device": "cpu"})
    found = memory.estimate(Columns.of(cpu, TrialConfig.model_validate(PAIR)))
    assert found.context_gib[0] == 0


def test_a_large_table_is_worked_out_by_combination(monkeypatch):
    seen = {"pipelines": 0, "bytes": 0}

    def pipelines_of(columns):
        seen["pipelines"] += len(columns)
        return pipelines(columns)

    def bytes_of(columns, *arguments, **options):
        seen["bytes"] += len(columns)
        return flowing_bytes(columns, *arguments, **options)

    monkeypatch.setattr("search_spaces.memory.stages.pipelines", pipelines_of)
    monkeypatch.setattr("search_spaces.memory.flowing_bytes", bytes_of)
    table = SearchSpace(workload(world_size=512, global_batch_size=1024), "auto").table()
    found = memory.estimate(table.columns)
    assert len(found) == len(table) > 20_000
    assert np.isfinite(found.upper_gib).all()
    assert seen["pipelines"] < len(table) / 2
    assert seen["bytes"] < len(table) / 8


@pytest.mark.parametrize("software", [Software(), Software(transformer_engine=False)], ids=["fused", "local"])
@pytest.mark.parametrize("model", [LLAMA_70B, MIXTRAL, LATENT], ids=["dense", "experts", "latent"])
def test_formulas_read_no_knob_that_is_not_declared(model, software, monkeypatch):
    tables = []

    def remember(columns, knobs):
        found = distinct(columns, knobs)
        found.columns.asked.clear()
        tables.append((found.columns, set(knobs)))
        return found

    for module in ("memory", "memory.stages", "memory.outside"):
        monkeypatch.setattr(f"search_spaces.{module}.distinct", remember)
    estimate(model, software)
    assert len(tables) == 6
    for columns, declared in tables:
        assert columns.asked <= declared <= set(memory.KNOBS)
