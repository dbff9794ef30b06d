"""Watts: the signs of CharLLM-PPT's findings (grades A and B) on its models and machines and on two other models, limits, bounds.

P1, P2: larger micro-batches raise peaks and throttling. P6: deeper pipelines throttle more, tensor parallel splits less.
P7: overlap raises demand. P8: recomputation lowers throttling in deep pipelines and raises it in data parallel training.
"""

from __future__ import annotations

import numpy as np
import pytest

from search_spaces import power
from search_spaces.calibration import columns_of
from search_spaces.clock_power import ClockCurve, Draw, PowerCoefficients, hungriest, shipped_power, under_limit
from search_spaces.coefficients import Coefficients
from search_spaces.config import TrialConfig
from search_spaces.gpus import gpu, gpu_names, links_of
from search_spaces.model import ModelSpec, Workload
from search_spaces.step_time import estimate

GPT3_175B = ModelSpec(
    num_layers=96,
    hidden_size=12288,
    num_attention_heads=96,
    vocab_size=51200,
    swiglu=False,
    position_embedding_type="learned_absolute",
)
LLAMA3_70B = ModelSpec(
    num_layers=80, hidden_size=8192, num_attention_heads=64, num_query_groups=8, ffn_hidden_size=28672, vocab_size=128256
)
OTHER_DEEP = ModelSpec(
    num_layers=96,
    hidden_size=10240,
    num_attention_heads=80,
    num_query_groups=8,
    ffn_hidden_size=40960,
    swiglu=False,
    vocab_size=100000,
)
OTHER_WIDE = ModelSpec(num_layers=64, hidden_size=6656, num_attention_heads=52, ffn_hidden_size=17920, vocab_size=64000)
ONE_PORT = {
    "one-port": {
        "bandwidth_gb_s": 12.5,
        "latency_us": 8,
        "devices_per_port": 8,
        "rail_optimised": False,
        "source": "one 100 Gb/s InfiniBand port for the eight GPUs of a node",
    }
}
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
DEVICE = gpu("h200")


def watts(model, seq, configs, device=DEVICE, world=32):
    workload = Workload(model=model, world_size=world, global_batch_size=128, seq_length=seq)
    columns = columns_of(workload, configs)
    times = estimate(columns, device, links_of(device, 8, "one-port", own=ONE_PORT), Coefficients())
    return times, power.estimate(times, columns, shipped_power(device))


def config(tp, pp, **knobs):
    return TrialConfig(
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        sequence_parallel=tp > 1,
        use_distributed_optimizer=True,
        **knobs,
    )


MACHINES = pytest.mark.parametrize(("device", "world"), [(gpu("h200"), 32), (gpu("h100-sxm-80gb"), 64)], ids=["h200", "h100"])
DEEP = pytest.mark.parametrize(("model", "seq"), [(GPT3_175B, 2048), (OTHER_DEEP, 4096)])
DATA_PARALLEL = pytest.mark.parametrize(("model", "seq"), [(LLAMA3_70B, 8192), (OTHER_WIDE, 4096)])


@DEEP
@MACHINES
def test_p1_p2_larger_micro_batches_raise_peak_and_throttling_though_throughput_falls(model, seq, device, world):
    stages, data_parallel = 16, world // 32
    sizes = [mbs for mbs in (1, 2, 4, 8) if 128 // (mbs * data_parallel) >= stages]
    configs = [config(2, stages, micro_batch_size=mbs, **FULL) for mbs in sizes]
    times, table = watts(model, seq, configs, device, world)
    assert (np.diff(table.peak_w) > 0).all()
    assert (np.diff(table.throttle_risk) > 0).all()
    assert times.step_time_s[-1] > times.step_time_s[0]


@DATA_PARALLEL
@MACHINES
def test_p2_peak_rises_where_throughput_does_not_fall(model, seq, device, world):
    _, table = watts(model, seq, [config(8, 2, micro_batch_size=mbs, **FULL) for mbs in (1, 2, 4)], device, world)
    assert (np.diff(table.peak_w) > 0).all()


@DEEP
@MACHINES
@pytest.mark.parametrize("recompute", [{}, FULL])
def test_p6_throttling_grows_with_depth_and_falls_with_tensor_parallel(model, seq, device, world, recompute):
    _, table = watts(model, seq, [config(tp, 32 // tp, **recompute) for tp in (1, 2, 4, 8)], device, world)
    assert (np.diff(table.throttle_risk) < 0).all()


@DATA_PARALLEL
@MACHINES
@pytest.mark.parametrize(("tp", "pp"), [(8, 1), (4, 1), (8, 2)])
def test_p7_overlap_raises_demand(model, seq, device, world, tp, pp):
    overlap = {"overlap_grad_reduce": True, "overlap_param_gather": True}
    _, table = watts(model, seq, [config(tp, pp), config(tp, pp, **overlap)], device, world)
    assert table.throttle_risk[1] > table.throttle_risk[0]
    assert table.peak_w[1] > table.peak_w[0]


@DEEP
@MACHINES
@pytest.mark.parametrize("tp", [1, 2])
def test_p8_recompute_lowers_throttling_in_deep_pipelines(model, seq, device, world, tp):
    _, table = watts(model, seq, [config(tp, 32 // tp), config(tp, 32 // tp, **FULL)], device, world)
    assert table.throttle_risk[1] < table.throttle_risk[0]


@DATA_PARALLEL
@MACHINES
@pytest.mark.parametrize(("tp", "pp"), [(8, 1), (4, 1), (8, 2)])
def test_p8_recompute_raises_throttling_in_data_parallel_training(model, seq, device, world, tp, pp):
    _, table = watts(model, seq, [config(tp, pp), config(tp, pp, **FULL)], device, world)
    assert table.throttle_risk[1] > table.throttle_risk[0]


def test_lower_limits_cost_time_and_never_more_watts():
    limits = [700, 600, 500, 400, 300, 250]
    _, table = watts(LLAMA3_70B, 4096, [config(8, 1, micro_batch_size=4, gpu_power_limit_w=limit) for limit in limits])
    assert (np.diff(table.slowdown) >= 0).all()
    assert (np.diff(table.mean_w) <= 0).all()
    assert (table.mean_w[:-1] <= np.array(limits)[:-1]).all()
    assert table.slowdown[0] == pytest.approx(1.0)


def test_clock_limit_slows_by_at_most_its_ratio():
    _, table = watts(LLAMA3_70B, 4096, [config(8, 1), config(8, 1, sm_clock_limit_mhz=990)])
    assert 1.0 < table.slowdown[1] <= 2.0
    assert table.clock_mhz[1] == pytest.approx(990)


@pytest.mark.parametrize("mbs", [1, 4])
def test_a_lower_clock_lowers_peak_and_throttling_as_it_lowers_the_mean(mbs):
    limits = [None, 1700, 1400, 1000, 700, 345]
    _, table = watts(LLAMA3_70B, 4096, [config(8, 1, micro_batch_size=mbs, sm_clock_limit_mhz=limit) for limit in limits])
    assert (np.diff(table.mean_w) < 0).all()
    assert (np.diff(table.peak_w) < 0).all()
    assert (np.diff(table.throttle_risk) < 0).all()
    assert (table.peak_w >= table.mean_w).all()
    assert table.peak_w[-1] < 1.4 * table.mean_w[-1]
    assert table.peak_w[-1] < 0.5 * table.peak_w[0]


def test_a_peak_passes_its_limit_by_less_than_the_band_and_only_where_more_is_asked_for():
    limits = np.array([700, 600, 500, 400, 300, 200])
    _, table = watts(LLAMA3_70B, 4096, [config(8, 1, micro_batch_size=4, gpu_power_limit_w=int(limit)) for limit in limits])
    assert (table.peak_w < limits * (1 + power.PEAK_BAND)).all()
    assert (np.diff(table.peak_w / limits) > 0).all()
    _, slow = watts(LLAMA3_70B, 4096, [config(8, 1, gpu_power_limit_w=600, sm_clock_limit_mhz=700)])
    assert slow.peak_w[0] < 600


@pytest.mark.parametrize("name", gpu_names())
def test_watts_of_a_package_stay_between_idle_and_a_little_above_the_limit(name):
    device = gpu(name)
    precision = "fp16" if "bf16" not in device.peak_tflops else "bf16"
    _, table = watts(OTHER_WIDE, 2048, [config(8, 4, precision=precision), config(1, 32, precision=precision)], device)
    packages = device.dies_per_package
    assert (table.mean_w * packages > device.idle_w).all()
    assert (table.mean_w * packages <= device.tdp_w).all()
    assert (table.peak_w >= table.mean_w).all()
    assert (table.peak_w * packages <= (1 + power.PEAK_BAND) * device.tdp_w).all()
    assert table.pool_mean_w == pytest.approx(32 * table.mean_w)


def test_two_dies_share_a_package():
    _, table = watts(OTHER_WIDE, 2048, [config(8, 4)], device=gpu("mi250"))
    assert table.peak_w[0] <= (1 + power.PEAK_BAND) * gpu("mi250").tdp_w / 2


@pytest.mark.parametrize("follows", [0.05, 0.5, 1.0])
@pytest.mark.parametrize("name", ["v100-pcie-32gb", "a40", "h200", "mi250"])
def test_dynamic_watts_rise_with_the_clock_and_the_clock_is_their_inverse(name, follows):
    curve = ClockCurve.of(gpu(name), PowerCoefficients())
    clocks = np.linspace(curve.floor, 1, 60)
    assert (np.diff(curve.dynamic(clocks, follows)) > 0).all()
    assert curve.dynamic(1.0, follows) == pytest.approx(1.0)
    assert curve.clock(curve.dynamic(clocks, follows), follows) == pytest.approx(clocks, abs=1e-9)
    assert curve.clock(np.array([0.0, 2.0]), follows) == pytest.approx([curve.floor, 1.0])


def test_below_the_knee_a_step_costs_the_same_dynamic_energy_at_any_clock():
    curve = ClockCurve.of(gpu("a40"), PowerCoefficients())
    energy = [curve.dynamic(clock, 0.4) * curve.seconds(clock, 0.4) for clock in (curve.floor, 0.4, 0.6, curve.knee, 0.9, 1.0)]
    assert energy[:4] == pytest.approx([energy[0]] * 4)
    assert energy[3] < energy[4] < energy[5]


def test_memory_bound_work_follows_the_clock_only_when_it_is_low():
    curve = ClockCurve.of(gpu("a40"), PowerCoefficients())
    assert curve.seconds(0.99, 0.2) - 1 == pytest.approx(0.2 * 0.01, rel=0.1)
    assert curve.seconds(0.125, 0.2) / curve.seconds(0.25, 0.2) == pytest.approx(2, rel=0.1)


def test_no_lower_limit_no_slowdown():
    draw = Draw(mean_w=250.0, limit_w=300.0, matrix_share=0.8)
    slow, mean = under_limit(gpu("a40"), shipped_power(gpu("a40")), draw, np.array([300.0, 150.0]))
    assert slow[0] == pytest.approx(1.0)
    assert mean[0] == pytest.approx(250.0, rel=0.01)
    assert slow[1] > 1.2
    assert mean[1] < 170


def test_a_limit_below_what_the_lowest_clock_draws_is_passed_and_costs_no_more_time():
    draw = Draw(mean_w=290.0, limit_w=300.0, matrix_share=0.8)
    slow, mean = under_limit(gpu("a40"), shipped_power(gpu("a40")), draw, np.array([80.0, 60.0]))
    assert slow[0] == slow[1]
    assert mean[1] > 60


def test_the_hungriest_of_many_devices_needs_more_watts_than_the_mean_one():
    assert hungriest(0.05, 1) == 1.0
    assert hungriest(0.05, 4) == pytest.approx(1 + 0.05 * 1.03, abs=0.002)
    assert hungriest(0.05, 16) == pytest.approx(1 + 0.05 * 1.77, abs=0.002)


def test_where_devices_wait_for_each_other_the_hungriest_sets_the_pace_and_the_others_draw_less():
    limits = np.array([300.0, 200.0, 150.0, 125.0])
    alone, together = (
        under_limit(gpu("a40"), PowerCoefficients(), Draw(mean_w=280.0, limit_w=300.0, matrix_share=0.8, devices=devices), limits)
        for devices in (1, 16)
    )
    assert together[0][0] == pytest.approx(1.0)
    assert (together[0][1:] > alone[0][1:] + 0.02).all()
    assert (together[1][1:] < alone[1][1:]).all()


def test_the_more_devices_of_a_pool_differ_the_more_a_limit_slows_it():
    workload = Workload(model=LLAMA3_70B, world_size=32, global_batch_size=128, seq_length=4096)
    columns = columns_of(workload, [config(8, 1, micro_batch_size=4, gpu_power_limit_w=limit) for limit in (700, 400, 300)])
    times = estimate(columns, DEVICE, links_of(DEVICE, 8), Coefficients())
    alike, unlike = (power.estimate(times, columns, PowerCoefficients(spread=spread)) for spread in (0.001, 0.05))
    assert unlike.slowdown[0] == alike.slowdown[0] == pytest.approx(1.0)
    assert (unlike.slowdown[1:] > alike.slowdown[1:] + 0.01).all()
    assert (unlike.mean_w[1:] < alike.mean_w[1:]).all()


def test_products_behind_a_larger_cache_follow_the_clock_more():
    small, large = (gpu("a40").model_copy(update={"last_cache_mib": cache}) for cache in (6, 24))
    twice = PowerCoefficients(intensity=2 * PowerCoefficients().intensity)
    follows = ClockCurve.of(large, PowerCoefficients()).follows
    assert follows > ClockCurve.of(small, PowerCoefficients()).follows
    assert follows == pytest.approx(ClockCurve.of(small, twice).follows)


def test_a_device_of_its_own_gets_the_general_coefficients():
    own = gpu("mine", own={"mine": gpu("h100-sxm-80gb").model_copy(update={"name": "mine"})})
    assert shipped_power(own) == shipped_power(gpu("h200"))
    assert shipped_power(gpu("a40")) != shipped_power(own)


def test_coefficients_fitted_without_a_source_are_others():
    for source in ("perseus", "zeus"):
        assert shipped_power(gpu("a40"), without=source) != shipped_power(gpu("a40"))
