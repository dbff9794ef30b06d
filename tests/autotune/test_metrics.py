"""Metrics of a trial: units by hand, only finite numbers, and whatever a program may report."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.metrics import derived, readable, summarise, tokens_per_s_per_gpu
from autotune.run_spread import RunSpread
from launchers.base import StepRecord
from search_spaces.gpus import gpu as find_gpu
from search_spaces.hardware import PoolSpec
from search_spaces.model import ModelSpec
from search_spaces.model_flops import model_flops_per_token

from .study_cases import steps_of, study_spec

SPEC = study_spec()
WORKLOAD = SPEC.workload(SPEC.pools[0])
ODD = [None, "N/A", "nan", "", math.nan, math.inf, -math.inf, True, [1.0], {"a": 1}]


def steps(*seconds, loss=2.0):
    return tuple(StepRecord(number, 0.0, value, loss, None, 512, None) for number, value in enumerate(seconds, 1))


def test_tokens_per_second_and_gpu_by_hand():
    # 16 sequences of 32 tokens in 0.5 s on 4 ranks.
    assert tokens_per_s_per_gpu(WORKLOAD, 0.5) == 256.0


def test_every_metric_by_hand():
    trial = [
        replace(step, peak_memory_gib=memory)
        for step, memory in zip(steps(9.0, 3.0, 0.2, 0.4, 0.8), [1, 2, None, 4, 3], strict=True)
    ]
    trial[0] = replace(trial[0], loss=7.0)
    # Half and twice the median, root two wider for the other run.
    wider = 2.0**2**0.5
    assert summarise(WORKLOAD, trial, warmup_steps=2, spread=RunSpread(0.0)) == {
        "tokens_per_s_per_gpu": 320.0,
        "tokens_per_s_per_gpu_low": pytest.approx(320.0 / wider),
        "tokens_per_s_per_gpu_high": pytest.approx(320.0 * wider),
        "step_time_s": 0.4,
        "step_time_cv": pytest.approx((0.56 / 9) ** 0.5 / (1.4 / 3)),
        "step_interval_fraction": 1.0,
        "run_spread_fraction": 0.0,
        "steady_steps": 3.0,
        "interval_coverage": 0.75,
        "first_step_s": 9.0,
        "loss_first": 7.0,
        "loss_last": 2.0,
        "peak_memory_gib": 4,
    }


def test_no_step_has_no_metric_and_one_step_has_no_confidence():
    assert summarise(WORKLOAD, (), 2) == {}
    one = summarise(WORKLOAD, steps(0.5), 2)
    assert (one["tokens_per_s_per_gpu"], one["steady_steps"], one["interval_coverage"]) == (256.0, 1.0, 0.0)


def test_nan_losses_leave_their_metrics_out_and_keep_the_speed():
    metrics = summarise(WORKLOAD, steps_of(0.1, loss=math.nan), 2)
    assert not {"loss_first", "loss_last"} & metrics.keys()
    assert metrics["tokens_per_s_per_gpu"] > 0


@pytest.mark.parametrize("field", ["time_s", "step_s", "loss", "grad_norm", "peak_memory_gib"])
@pytest.mark.parametrize("value", ODD, ids=repr)
def test_what_is_no_number_is_read_as_nan_or_none(field, value):
    step = readable([replace(steps(0.5)[0], **{field: value})])[0]
    found = getattr(step, field)
    if field in ("grad_norm", "peak_memory_gib"):
        assert found is None or found == value
    else:
        assert math.isnan(found) or found == value


def test_numbers_are_read_as_they_are():
    assert readable(steps_of(0.1)) == steps_of(0.1)


anything = st.one_of(st.floats(), st.integers(-5, 5), st.none(), st.text(max_size=3), st.booleans())


@given(st.lists(st.tuples(anything, anything, anything), max_size=8), st.integers(0, 3))
def test_metrics_are_finite_whatever_was_reported(reported, warmup):
    trial = readable([StepRecord(1, 0.0, seconds, loss, None, 512, memory) for seconds, loss, memory in reported])
    metrics = summarise(WORKLOAD, trial, warmup)
    assert all(isinstance(value, int | float) and math.isfinite(value) for value in metrics.values())


@given(st.lists(st.floats(0.001, 100), min_size=1, max_size=30))
def test_the_interval_of_the_speed_holds_the_speed(seconds):
    metrics = summarise(WORKLOAD, steps(*seconds), 0)
    assert metrics["tokens_per_s_per_gpu_low"] <= metrics["tokens_per_s_per_gpu"] <= metrics["tokens_per_s_per_gpu_high"]


def test_model_operations_are_those_of_the_published_count():
    """GPT-3 175B at 2,048 tokens: Narayanan et al. 2021, equation 3 without recomputation, attention halved for the mask."""
    layers, hidden, vocabulary, sequence = 96, 12288, 51200, 2048
    model = ModelSpec(
        num_layers=layers,
        hidden_size=hidden,
        num_attention_heads=96,
        vocab_size=vocabulary,
        ffn_hidden_size=4 * hidden,
        swiglu=False,
        untie_embeddings_and_output_weights=False,
    )
    published = 72 * layers * hidden**2 * (1 + sequence / (12 * hidden) + vocabulary / (12 * layers * hidden))
    assert model_flops_per_token(model, sequence) == pytest.approx(published, rel=1e-3)


def test_derived_metrics_follow_from_the_measured_ones():
    gpu = find_gpu("h200")
    pool = PoolSpec(name="p", gpu="h200", gpus_per_node=4, usd_per_gpu_hour=3.6)
    workload = WORKLOAD.model_copy(update={"device": "cuda"})
    shown = derived({"tokens_per_s_per_gpu": 1000.0, "peak_memory_gib": 0.75 * gpu.memory_gib}, workload, pool, gpu)
    assert shown["memory_headroom_fraction"] == pytest.approx(0.25)
    assert shown["usd_per_million_tokens"] == pytest.approx(1.0)
    assert shown["mfu"] == pytest.approx(shown["model_tflops_per_gpu"] * 1e12 / gpu.peak("bf16"))
    assert derived({}, workload, pool, gpu) == {}
    assert set(derived({"tokens_per_s_per_gpu": 1.0}, WORKLOAD, PoolSpec(name="p", gpus_per_node=4), None)) == {
        "model_tflops_per_gpu"
    }


def test_what_a_meter_tells_is_not_estimated_beside_it():
    gpu, pool = find_gpu("h200"), PoolSpec(name="p", gpu="h200", gpus_per_node=8, node_overhead_w=1000, psu_efficiency=0.9)
    boards = {f"pool_gpu_{name}": 900.0 for name in ("mean_power_w", "peak_power_w_0.1s", "peak_power_w_1s")}
    meter = {"tokens_per_s_per_gpu": 1.0, "pool_wall_mean_power_w": 2345.0, "pool_wall_peak_power_w_1s": 2400.0}
    shown = {name: value for name, value in derived({**boards, **meter}, WORKLOAD, pool, gpu).items() if "wall" in name}
    assert shown == {"pool_wall_peak_power_w_0.1s_estimated": pytest.approx(2000.0)}
