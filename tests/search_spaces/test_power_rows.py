"""The published power sweeps: how rows become sweeps and pools, what their workloads compute, and what a fit recovers."""

from __future__ import annotations

import dataclasses
import logging

import pytest

from benchmarks.power_rows import fit_power, pools, read_sweeps
from benchmarks.power_workloads import OTHER_SHARE, share_of
from search_spaces.clock_power import PowerCoefficients
from search_spaces.gpus import gpu

HEADER = "source,gpu,workload,config,cap_w,power_w,clock_mhz,slowdown,evidence\n"
CAPS = (300, 250, 200, 150)


def rows(device: str, config: str, evidence: str = "raw data") -> str:
    return "".join(f'Zeus 23,{device},BERT-base,"{config}",{cap},{0.9 * cap},,{300 / cap},{evidence}\n' for cap in CAPS)


@pytest.fixture
def table(tmp_path):
    path = tmp_path / "power.csv"
    claimed = rows("A40", "1 GPU, batch 8", evidence="vendor claim")
    path.write_text(HEADER + rows("A40", "1 GPU, batch 32") + rows("A40", "1 GPU, batch 48") + rows("RTX6000", "batch 8") + claimed)
    return path


def test_measured_rows_become_a_sweep_per_configuration_and_a_pool_per_workload(table, caplog):
    with caplog.at_level(logging.WARNING):
        sweeps = read_sweeps(table)
    assert [len(sweep.slowdown) for sweep in sweeps] == [4, 4]
    assert [len(pool) for pool in pools(sweeps)] == [2]
    assert (sweeps[0].kind, sweeps[0].draw.mean_w, sweeps[0].draw.limit_w) == ("cap", 270, 300)
    assert "RTX6000" in caplog.text


def test_larger_models_and_devices_with_more_bandwidth_compute_for_a_larger_share():
    a40, a100 = gpu("a40"), gpu("a100-pcie")
    assert share_of("gpt3-175b stage", "", a40) > share_of("BERT-base SQuAD", "1 GPU, batch 32", a40)
    assert share_of("t5-3b training", "tp1 mbs4", a100) > share_of("t5-3b training", "tp1 mbs4", a40)
    assert share_of("gpt3-6.7b training", "tp2 mbs4", a40) < share_of("gpt3-6.7b training", "tp1 mbs4", a40)
    assert share_of("an image model", "batch 64", a40) == OTHER_SHARE


def test_a_fit_recovers_the_slow_downs_of_a_device_unlike_the_prior(table):
    sweep = read_sweeps(table)[0]
    own = PowerCoefficients(static=0.6, rise=0.6)
    slowdown, watts = sweep.predict(own)
    measured = dataclasses.replace(sweep, slowdown=slowdown, watts=watts)
    fitted = fit_power([[(measured, [1, 3])]], PowerCoefficients())
    assert abs(sweep.predict(PowerCoefficients())[0] - slowdown).max() > 0.1
    assert sweep.predict(fitted)[0] == pytest.approx(slowdown, abs=0.03)
