"""Seconds of a step: parts add up, tables agree with single rows, directions are those of physics."""

from __future__ import annotations

import numpy as np
import pytest

from search_spaces.calibration import columns_of
from search_spaces.coefficients import Coefficients, shipped
from search_spaces.columns import Columns
from search_spaces.communication import Group
from search_spaces.config import TrialConfig
from search_spaces.distinct import distinct
from search_spaces.gpus import gpu, links_of
from search_spaces.kernels import Machine, alignment, gemm_seconds
from search_spaces.model import ModelSpec, Workload
from search_spaces.step_time import PARTS, estimate
from search_spaces.work import LAYER_KNOBS, work

DEVICE = gpu("h100")
LINKS = links_of(DEVICE, 8)
GPT3 = ModelSpec(
    num_layers=96,
    hidden_size=12288,
    num_attention_heads=96,
    vocab_size=51200,
    swiglu=False,
    position_embedding_type="learned_absolute",
)
MOE = ModelSpec(
    num_layers=8,
    hidden_size=2048,
    num_attention_heads=16,
    vocab_size=64000,
    ffn_hidden_size=8192,
    num_experts=64,
    moe_router_topk=6,
    moe_ffn_hidden_size=1408,
    moe_shared_expert_intermediate_size=2816,
    multi_latent_attention=True,
    mtp_num_layers=1,
)


def step(model=GPT3, world=64, batch=128, seq=2048, coefficients=None, links=LINKS, routing="balanced", **knobs):
    workload = Workload(model=model, world_size=world, global_batch_size=batch, seq_length=seq)
    columns = Columns.of(workload, TrialConfig(**knobs))
    return estimate(columns, DEVICE, links, coefficients or Coefficients(), routing)


DENSE = {"tensor_model_parallel_size": 8, "pipeline_model_parallel_size": 4, "sequence_parallel": True}
EXPERTS = {"expert_model_parallel_size": 8, "expert_tensor_parallel_size": 1, "moe_token_dispatcher_type": "alltoall"}
NVFP4 = {"fp4_format": "e2m1"}
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


def test_parts_add_up():
    table = step(**DENSE)
    assert tuple(table.parts) == PARTS
    assert sum(table.row(0).values()) == pytest.approx(table.step_time_s[0])
    assert all(value >= 0 for value in table.row(0).values())


def test_gpt3_on_1024_a100_takes_about_half_a_minute():
    # Narayanan et al. 2021, section 5.1: "~32 s per iteration" for GPT-3 on 1,024 A100, batch 1,536
    device = gpu("a100")
    workload = Workload(model=GPT3, world_size=1024, global_batch_size=1536, seq_length=2048)
    config = TrialConfig(
        **DENSE | {"pipeline_model_parallel_size": 8, "sequence_parallel": False}, **FULL, attention_backend="unfused"
    )
    table = estimate(Columns.of(workload, config), device, links_of(device, 8), Coefficients())
    assert table.step_time_s[0] == pytest.approx(32, rel=0.2)


def test_a_table_agrees_with_its_rows():
    workload = Workload(model=MOE, world_size=64, global_batch_size=256, seq_length=4096)
    configs = [
        TrialConfig(
            pipeline_model_parallel_size=pp,
            micro_batch_size=mbs,
            recompute_granularity=granularity,
            overlap_grad_reduce=mbs > 1,
            use_distributed_optimizer=True,
            **EXPERTS,
        )
        for pp in (1, 2, 4)
        for mbs in (1, 2)
        for granularity in (None, "selective")
    ]
    table = estimate(columns_of(workload, configs), DEVICE, LINKS, Coefficients())
    alone = [estimate(Columns.of(workload, config), DEVICE, LINKS, Coefficients()).step_time_s[0] for config in configs]
    assert table.step_time_s == pytest.approx(alone)


def test_one_combination_is_worked_out_once():
    workload = Workload(model=GPT3, world_size=64, global_batch_size=64, seq_length=128)
    configs = [TrialConfig(micro_batch_size=mbs, overlap_grad_reduce=flag) for mbs in (1, 2) for flag in (False, True)]
    found = distinct(columns_of(workload, configs), LAYER_KNOBS)
    assert found.size == 2
    assert found.columns.mbs[found.rows].tolist() == [1, 1, 2, 2]


@pytest.mark.parametrize("model", [GPT3, MOE])
def test_costs_read_no_knob_that_is_not_declared(model, monkeypatch):
    tables = []

    def remember(columns, knobs):
        found = distinct(columns, knobs)
        found.columns.asked.clear()
        tables.append((found.columns, set(knobs)))
        return found

    monkeypatch.setattr("search_spaces.step_time.distinct", remember)
    monkeypatch.setattr("search_spaces.step_ends.distinct", remember)
    step(model)
    assert len(tables) == 3
    for columns, declared in tables:
        assert columns.asked <= declared


def test_bubble_follows_1f1b_and_interleaving():
    plain, interleaved = step(**DENSE), step(**DENSE, num_virtual_stages_per_pipeline_rank=3)
    busy = plain.step_time_s[0] - plain.row(0)["bubble"]
    assert plain.row(0)["bubble"] / busy == pytest.approx(3 / (128 / 2), rel=0.15)
    assert interleaved.row(0)["bubble"] == pytest.approx(plain.row(0)["bubble"] / 3, rel=0.15)


def test_full_recompute_costs_about_a_third():
    extra = step(**DENSE, **FULL).step_time_s[0] / step(**DENSE).step_time_s[0]
    assert 1.2 < extra < 1.4


def test_block_recompute_costs_its_share():
    half = step(**DENSE, recompute_granularity="full", recompute_method="block", recompute_num_layers=12)
    assert half.row(0)["recompute"] == pytest.approx(step(**DENSE, **FULL).row(0)["recompute"] / 2)


def test_overlap_hides_and_never_more_than_there_is():
    for names in ({"overlap_grad_reduce": True}, {"overlap_grad_reduce": True, "overlap_param_gather": True}):
        with_it, without = (step(**DENSE, use_distributed_optimizer=True, **extra) for extra in (names, {}))
        assert 0 < with_it.row(0)["dp_comm"] < without.row(0)["dp_comm"]
        assert with_it.hidden_s[0] > 0


def test_tensor_parallel_across_nodes_is_dear():
    inside = step(tensor_model_parallel_size=8).row(0)["tp_comm"]
    across = step(tensor_model_parallel_size=16).row(0)["tp_comm"]
    assert across > 2 * inside


def test_real_routing_is_slower_than_forced_balance():
    assert step(MOE, routing="real", **EXPERTS).step_time_s[0] > step(MOE, **EXPERTS).step_time_s[0]


def test_capacity_padding_bounds_the_load():
    padded = {**EXPERTS, "moe_expert_capacity_factor": 1.0, "moe_pad_expert_input_to_capacity": True}
    assert step(MOE, routing="real", **padded).step_time_s[0] == pytest.approx(step(MOE, **padded).step_time_s[0])


def test_cuda_graphs_remove_the_hosts_time():
    assert step(MOE, batch=64, **EXPERTS).row(0)["launch"] > 0
    assert step(MOE, batch=64, cuda_graph_impl="local", **EXPERTS).row(0)["launch"] == 0


def test_offload_costs_host_traffic():
    table = step(**DENSE, use_distributed_optimizer=True, optimizer_cpu_offload=True, cpu_offloading_num_layers=4)
    assert table.row(0)["offload"] > 0


def test_8_bit_products_are_faster():
    assert step(**DENSE, fp8_format="hybrid").step_time_s[0] < step(**DENSE).step_time_s[0]


@pytest.mark.parametrize("kind", [None, ("p2p",), ("a2a",), ("all_gather",)])
def test_context_parallel_exchanges_cost_time(kind):
    assert step(context_parallel_size=4, cp_comm_type=kind).row(0)["cp_comm"] > 0


def test_group_spans_domains():
    machine = Machine(DEVICE, LINKS, Coefficients())
    group = Group.of(machine, np.array([4.0, 16.0]), np.array([8.0, 1.0]))
    assert group.local.tolist() == [1, 8]
    assert group.spans.tolist() == [4, 2]
    assert (group.reduce(np.float64(1e9)) > group.gather(np.float64(1e9))).all()


def test_small_and_misaligned_products_are_less_efficient():
    machine = Machine(DEVICE, LINKS, Coefficients())
    big = gemm_seconds(machine, 5e14, 8192.0, 8192.0, 8192.0)
    small = gemm_seconds(machine, 5e14, 512.0, 512.0, 512.0)
    assert small / 512.0**3 > 2 * big / 8192.0**3
    assert alignment(DEVICE, 4096, 1024) == 1 < alignment(DEVICE, 1800, 4096) < alignment(DEVICE, 4096, 12)


def test_watts_limit_products_where_an_operation_has_few():
    shares = {
        name: Machine(gpu(name), LINKS, Coefficients()).watts_share for name in ("a100", "h100", "h100-pcie-80gb", "b200", "gb300")
    }
    assert shares["a100"] == shares["h100"] == pytest.approx(1, abs=0.02)
    assert shares["h100-pcie-80gb"] < shares["gb300"] < 1
    assert shares["b200"] < shares["gb300"]


def test_the_longer_of_host_and_device_decides():
    def waits(device: float, host: float) -> float:
        return float(work(gemm=device, host=host).waits(np.bool_(False)))

    assert waits(1.0, 0.0) == 0
    assert waits(1.0, 0.5) < 0.02
    assert waits(1.0, 1.0) == pytest.approx(2**0.25 - 1)
    assert waits(0.01, 1.0) == pytest.approx(0.99, abs=0.001)
    assert work(gemm=3.0, host=1.0).waits(np.bool_(True)) == 1


def test_whole_activations_are_handed_over_without_sequence_parallelism():
    latency = 4 * 128 / 2 * LINKS.between.latency_s
    sliced, whole = (step(**DENSE | {"sequence_parallel": on}).row(0)["pp_comm"] for on in (True, False))
    assert 6 < whole / sliced < 8
    assert latency < sliced


def test_flex_dispatch_sends_a_token_once_to_each_place():
    exchange = EXPERTS | {"expert_model_parallel_size": 16}
    plain = step(MOE, **exchange).row(0)["ep_comm"]
    flex = step(MOE, **exchange | {"moe_token_dispatcher_type": "flex"}).row(0)["ep_comm"]
    assert 0.2 < flex / plain < 0.8


def test_copies_of_the_sharded_optimizer_gather_inside_their_own():
    def exchange(copies: int) -> float:
        table = step(world=64, batch=64, use_distributed_optimizer=True, num_distributed_optimizer_instances=copies)
        return table.row(0)["dp_comm"]

    assert exchange(8) != exchange(1)
    assert exchange(64) > exchange(8)


def test_sequence_parallelism_gathers_the_input_once_more_in_the_backward_pass():
    sliced, whole = (step(tensor_model_parallel_size=8, sequence_parallel=on).row(0)["tp_comm"] for on in (True, False))
    assert sliced > 1.1 * whole


def test_main_gradients_are_added_in_part_behind_products():
    wide, narrow = (step(**DENSE, main_grads_dtype=kind).row(0)["elementwise"] for kind in ("fp32", "bf16"))
    weights = (24 * 12 * 12288**2 + 12288 * 51200) / 8
    traffic = 4.0 * weights * 64 / Machine(DEVICE, LINKS, Coefficients()).bandwidth
    assert wide - narrow == pytest.approx(0.55 * traffic, rel=0.01)


def test_casts_cost_by_recipe():
    seconds = {
        recipe: step(**DENSE, fp8_format="hybrid", fp8_recipe=recipe).row(0)["elementwise"]
        for recipe in ("delayed", "mxfp8", "blockwise", "tensorwise")
    }
    none = step(**DENSE).row(0)["elementwise"]
    casts = {recipe: value - none for recipe, value in seconds.items()}
    assert casts["delayed"] / casts["tensorwise"] == pytest.approx(0.63, abs=0.01)
    assert casts["mxfp8"] == casts["blockwise"] == pytest.approx(0.77 * casts["tensorwise"], rel=0.01)


def test_NVFP4_multiplies_faster_than_8_bits_and_casts_slower():
    eight, four = (step(**DENSE, **knobs).row(0) for knobs in ({"fp8_format": "hybrid", "fp8_recipe": "tensorwise"}, NVFP4))
    plain = step(**DENSE).row(0)["elementwise"]
    assert 1.2 < eight["gemm"] / four["gemm"] < 1.81
    assert (four["elementwise"] - plain) / (eight["elementwise"] - plain) == pytest.approx(1.17, abs=0.01)


def test_watts_do_not_bind_8_bit_products():
    machine = Machine(gpu("b200"), LINKS, Coefficients())
    low, wide = (float(machine.gemm_rate(np.bool_(eight), np.bool_(False))) for eight in (True, False))
    assert low == pytest.approx(machine.gpu.peak("fp8") * Coefficients().gemm_low)
    assert wide == pytest.approx(machine.gpu.peak("bf16") * Coefficients().gemm * machine.watts_share)
    assert machine.watts_share < 0.9


def test_flash_2_is_slow_on_hopper_only():
    hopper = [step(attention_backend=kind).row(0)["attention"] for kind in ("flash", "fused")]
    assert hopper[0] == pytest.approx(2 * hopper[1])
    workload = Workload(model=GPT3, world_size=8, global_batch_size=8, seq_length=2048)
    ampere = [
        estimate(Columns.of(workload, TrialConfig(attention_backend=kind)), gpu("a100"), LINKS, Coefficients()).row(0)["attention"]
        for kind in ("flash", "fused")
    ]
    assert ampere[0] == ampere[1]


def test_unknown_gpu_gets_the_general_coefficients():
    assert shipped("somebody's own") == shipped("another's own")
