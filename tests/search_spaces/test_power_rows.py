"""The published power sweeps: how rows become sweeps and pools, what their workloads compute, and what a fit recovers."""

from __future__ import annotations

import dataclasses
import logging

import pytest

from benchmarks.fit_clock_curve import fit, read_kernels
from benchmarks.fit_power import OUTSIDE
from benchmarks.power_rows import fit_power, pools, read_sweeps
from benchmarks.power_workloads import OTHER_SHARE, share_of
from search_spaces.clock_power import PowerCoefficients, shipped_power
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


def test_the_row_with_the_highest_limit_is_what_was_measured_before(table):
    head, *lines = table.read_text().splitlines(keepends=True)
    table.write_text(head + "".join(reversed(lines)))
    sweeps = read_sweeps(table)
    assert [(sweep.draw.mean_w, list(sweep.limits_w)) for sweep in sweeps] == [(270, list(CAPS))] * 2


def test_clocks_are_a_sweep_from_the_highest_down(tmp_path):
    path = tmp_path / "power.csv"
    lines = [f"Perseus,A40,gpt3-175b,stage 1,,{clock / 10},{clock},{1740 / clock},raw\n" for clock in (870, 1740, 1305)]
    path.write_text(HEADER + "".join(lines))
    assert list(read_sweeps(path)[0].watts) == [174, 130.5, 87]


@pytest.mark.parametrize(("watts", "slowdown"), [("", "1.1"), ("270", ""), ("500-600", "1.1"), ("270", "<=1.03")])
def test_a_row_without_one_figure_of_both_is_no_part_of_a_sweep(table, watts, slowdown):
    table.write_text(table.read_text() + f'Zeus 23,A40,BERT-base,"1 GPU, batch 48",125,{watts},,{slowdown},raw data\n')
    assert [len(sweep.slowdown) for sweep in read_sweeps(table)] == [4, 4]


@pytest.mark.parametrize(("config", "devices"), [("16 GPUs; uniform dp2", 16), ("1 GPU, batch 32", 1), ("stage 1 of 8", 1)])
def test_devices_that_wait_for_each_other_come_from_the_configuration(tmp_path, config, devices):
    path = tmp_path / "power.csv"
    path.write_text(HEADER + rows("A40", config))
    assert read_sweeps(path)[0].draw.devices == devices


def test_larger_models_and_devices_with_more_bandwidth_compute_for_a_larger_share():
    a40, a100 = gpu("a40"), gpu("a100-pcie")
    assert share_of("gpt3-175b stage", "", a40) > share_of("BERT-base SQuAD", "1 GPU, batch 32", a40)
    assert share_of("t5-3b training", "tp1 mbs4", a100) > share_of("t5-3b training", "tp1 mbs4", a40)
    assert share_of("gpt3-6.7b training", "tp2 mbs4", a40) < share_of("gpt3-6.7b training", "tp1 mbs4", a40)
    assert share_of("bert-huge-uncased training", "tp1 mbs8", a40) > share_of("bert-large-uncased training", "tp1 mbs8", a40)
    assert share_of("an image model", "batch 64", a40) == OTHER_SHARE


def test_a_fit_recovers_the_slow_downs_of_a_device_unlike_the_prior(table):
    sweep = read_sweeps(table)[0]
    own = PowerCoefficients(static=0.6, rise=0.6)
    slowdown, watts = sweep.predict(own)
    measured = dataclasses.replace(sweep, slowdown=slowdown, watts=watts)
    fitted = fit_power([[(measured, [1, 3])]], PowerCoefficients())
    assert abs(sweep.predict(PowerCoefficients())[0] - slowdown).max() > 0.1
    assert sweep.predict(fitted)[0] == pytest.approx(slowdown, abs=0.03)


def test_a_device_measured_by_others_keeps_their_figures_where_no_row_of_it_is_left():
    found = shipped_power(gpu("v100-pcie-32gb"), without="zeus")
    assert {name: getattr(found, name) for name in ("static", "knee_mhz", "rise")} == OUTSIDE["v100-pcie-32gb"]
    assert found.static < shipped_power(gpu("h100"), without="zeus").static


def kernel(name, clock, seconds, activity, static_w=30.0, knee_mhz=900.0, rise=0.6, memory_w=60.0):
    voltage = max(1.0, 1.0 + rise * (clock / knee_mhz - 1.0))
    watts = static_w + memory_w * activity + 80.0 * voltage**2 / seconds
    return {"benchmark": name, "core_frequency": clock, "average_power": watts, "time": seconds, "DRAMA": activity}


def test_static_watts_and_the_curve_are_found_apart_from_the_memorys_watts():
    clocks = (500, 650, 800, 950, 1100, 1250, 1400)
    compute = [kernel("compute", clock, 1400 / clock, 0.02) for clock in clocks]
    memory = [kernel("memory", clock, max(1.0, 900 / clock), 0.9 * min(1.0, clock / 900)) for clock in clocks]
    figures, error = fit(read_kernels(compute + memory))
    assert figures == pytest.approx({"static_w": 30.0, "knee_mhz": 900.0, "rise": 0.6, "memory_w": 60.0}, rel=0.02)
    assert error < 0.005
