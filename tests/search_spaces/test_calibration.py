"""Calibration: recovers what made the measurements, stays near the prior where they say nothing, shrugs off one bad row."""

from __future__ import annotations

import numpy as np
import pytest

from search_spaces import calibration_store
from search_spaces.calibration import Measured, Predictor, Sample, fit
from search_spaces.calibration_store import Calibration, Store
from search_spaces.coefficients import Coefficients
from search_spaces.config import TrialConfig
from search_spaces.gpus import gpu, links_of
from search_spaces.model import ModelSpec, Workload

DEVICE = gpu("h100")
LINKS = links_of(DEVICE, 8)
MODEL = ModelSpec(num_layers=32, hidden_size=4096, num_attention_heads=32, vocab_size=32000)
TRUTH = Coefficients(gemm=0.6, memory=0.65, inside=0.5)


def samples(noise=None):
    configs = [
        TrialConfig(tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp, micro_batch_size=mbs, sequence_parallel=tp > 1)
        for tp in (1, 2, 4, 8)
        for pp in (1, 2)
        for mbs in (1, 4)
        if tp * pp <= 8
    ]
    workload = Workload(model=MODEL, world_size=8, global_batch_size=64, seq_length=4096)
    rows = [Sample(Measured(workload, config, 1.0, "balanced"), DEVICE, LINKS) for config in configs]
    seconds = Predictor(rows)(TRUTH) * (noise if noise is not None else 1.0)
    return [
        Sample(Measured(row.measured.workload, row.measured.config, float(second), "balanced"), DEVICE, LINKS)
        for row, second in zip(rows, seconds, strict=True)
    ]


def error(rows, coefficients):
    measured = np.array([row.measured.step_time_s for row in rows])
    return np.abs(Predictor(rows)(coefficients) / measured - 1)


def test_five_rows_make_the_others_right():
    rows = samples()
    own = fit(rows[::3][:5], Coefficients())
    assert error(rows, Coefficients()).mean() > 0.08
    assert error(rows, own).mean() < 0.02


def test_no_rows_no_change():
    assert fit([], TRUTH) == TRUTH


def test_what_rows_do_not_tell_stays():
    own = fit(samples()[:5], Coefficients())
    assert own.between == pytest.approx(Coefficients().between)
    assert own.imbalance == pytest.approx(Coefficients().imbalance)


def test_one_bad_row_moves_little():
    noise = np.ones(len(samples()))
    noise[3] = 3.0
    rows = samples(noise)
    own = fit(rows, Coefficients())
    good = np.delete(error(rows, own), 3)
    assert np.median(good) < 0.05


def test_what_all_rows_share_is_one_machine_slower_in_all():
    rows = samples(np.full(len(samples()), 1.25))
    own = fit(rows[::3][:5], TRUTH)
    assert own.gemm < TRUTH.gemm
    assert own.gemm_low < 0.97 * TRUTH.gemm_low  # no row ran in 8 bits
    assert error(rows, own).mean() < 0.04


def test_a_pool_that_is_slower_as_a_whole_does_not_pass_for_a_slow_link():
    wide = np.array([row.measured.config.tensor_model_parallel_size == 8 for row in samples()])
    rows = samples(np.where(wide, 1.3, 1.0))
    apart = fit(rows, TRUTH, pools=["slower" if own else "other" for own in wide])
    mixed = fit(rows, TRUTH)
    assert abs(np.log(apart.inside / TRUTH.inside)) < 0.5 * abs(np.log(mixed.inside / TRUTH.inside))


def test_store_keeps_each_pool_and_software_apart(tmp_path):
    store = Store(tmp_path / "calibration.json")
    store.put("pool-a", "megatron 0.16, torch 2.9", "study", Calibration(TRUTH, 5))
    store.put("pool-a", "megatron 0.19, torch 2.9", "study", Calibration(Coefficients(), 7))
    again = Store(tmp_path / "calibration.json")
    assert again.get("pool-a", "megatron 0.16, torch 2.9") == Calibration(TRUTH, 5)
    assert again.get("pool-a", "megatron 0.19, torch 2.9") == Calibration(Coefficients(), 7)
    assert again.get("pool-b", "megatron 0.16, torch 2.9") is None


def test_coefficients_that_meant_something_else_are_not_taken_for_these(tmp_path, monkeypatch):
    store = Store(tmp_path / "calibration.json")
    store.put("pool", "software", "study", Calibration(TRUTH, 5))
    monkeypatch.setattr(calibration_store, "MEANING", calibration_store.MEANING + 1)
    assert store.get("pool", "software") is None
    store.put("pool", "software", "study", Calibration(Coefficients(), 7))
    assert store.get("pool", "software").trials == 7


def test_the_newest_calibration_is_found_and_a_studys_own_left_out(tmp_path):
    store = Store(tmp_path / "calibration.json")
    for study, trials in (("a", 1), ("b", 2), ("a", 3)):
        store.put("pool", "software", study, Calibration(TRUTH, trials))
    assert store.get("pool", "software").trials == 3
    assert store.get("pool", "software", but_of="a").trials == 2


def test_calibrations_of_node_counts_that_run_beside_a_study_are_left_out_too(tmp_path):
    store = Store(tmp_path / "calibration.json")
    for study, trials in (("earlier/h/2x8", 1), ("case/h/2x8", 2), ("case/h/4x8", 3)):
        store.put("pool", "software", study, Calibration(TRUTH, trials))
    assert store.get("pool", "software", but_of="case/h/2x8").trials == 1
    assert store.get("pool", "software", but_of="later/h/2x8").trials == 3


def test_a_fit_goes_on_from_an_earlier_one():
    rows = samples()
    whole = fit(rows, Coefficients())
    assert error(rows, fit(rows, Coefficients(), iterations=1, start=whole)).mean() == pytest.approx(
        error(rows, whole).mean(), abs=2e-3
    )
    assert error(rows, fit(rows, Coefficients(), iterations=1)).mean() > error(rows, whole).mean()


def test_estimated_devices_may_be_far_from_their_figures():
    """A CPU three times as fast as it says, and as it could be were the figures a datasheet's."""
    device, links = gpu("cpu"), links_of(gpu("cpu"), 4)
    workload = Workload(
        model=ModelSpec(num_layers=4, hidden_size=256, num_attention_heads=4, vocab_size=1024),
        world_size=4,
        global_batch_size=16,
        seq_length=128,
        device="cpu",
    )
    configs = [
        TrialConfig(tensor_model_parallel_size=tp, micro_batch_size=mbs, precision="fp32") for tp in (1, 2, 4) for mbs in (1, 4)
    ]
    truth = Coefficients(gemm=2.0, attention=1.5)
    rows = [Sample(Measured(workload, config, 1.0), device, links) for config in configs]
    rows = [
        Sample(Measured(workload, row.measured.config, float(second)), device, links)
        for row, second in zip(rows, Predictor(rows)(truth), strict=True)
    ]
    assert error(rows, Coefficients()).mean() > 0.5
    assert error(rows, fit(rows, Coefficients())).mean() < 0.05
