"""NVIDIA's cases of the telemetry table, played by the scripted NVML to the real pynvml."""

from __future__ import annotations

import importlib.metadata
import math
import subprocess
import sys

import numpy as np
import pytest

from autotune.telemetry.counters import EnergyCounter
from autotune.telemetry.reasons import REASON_BITS, decode
from autotune.telemetry.sensors import distinct, update_period_s
from autotune.telemetry.visible import cuda_visible, is_mig
from autotune.throttle_metrics import SAMPLED_BITS, _from_bits, throttling_of
from launchers.gpu_sample import Throttle
from tests.telemetry.cases import case, covers
from tests.telemetry.devices import H100, Scenario, ask, environment
from tests.telemetry.played import play, summary

SECONDS = 3.0
OPENED = "import json; from autotune.telemetry import open_gpus; gpus = open_gpus('nvidia'); "
LOCKED, OLD, NO_REASONS, COUNTER, NO_ENERGY, BOTH, MISMATCH, BLIND, RESET, LOST, DENIED, STEPS, MIG = range(13)


def scenario():
    script = Scenario(H100, 13)
    script.set(LOCKED, "reasons", REASON_BITS["ApplicationsClocksSetting"]).set(LOCKED, "sm_clock", 915)
    script.set(OLD, "reasons", "E13").set(OLD, "old_reasons", REASON_BITS["SwPowerCap"])
    script.set(NO_REASONS, "reasons", "E13").set(NO_REASONS, "old_reasons", "E13")
    script.set(COUNTER, "field_74", 1_000_000_000).set(COUNTER, "field_74", 1_200_000_000, 1.2)
    script.set(NO_ENERGY, "field_83", "E3")
    script.set(BOTH, "field_185", 410_000).set(BOTH, "field_186", 655_000)
    script.set(BOTH, "field_83", "E3")
    script.set(MISMATCH, "field_186", 400_000)  # 12,000 J where the counter says 9,000
    for field in ("field_185", "field_186", "field_83", "power_usage"):
        script.set(BLIND, field, "E3")
    # From 1,450,000 mJ to 5,000 mJ at second 1.5.
    script.set(RESET, "energy_base_mj", 1_000_000).set(RESET, "energy_base_mj", 5_000 - 450_000, 1.5)
    script.set(LOST, "lost", f"E{15}", 1.0)
    script.set(DENIED, "field_82", "E4")
    for number in range(40):
        script.set(STEPS, "power_mw", 300_000 + 1000 * number, 0.1 * number, 0.1 * (number + 1))
    script.set(MIG, "mig", 1).set(MIG, "mig_slots", 7).set(MIG, "mig_uuid_0", "MIG-aaaa").set(MIG, "mig_memory_mib", 512)
    script.set(MIG, "utilization", "E3")
    return script


@pytest.fixture(scope="module")
def played(tmp_path_factory):
    folder = tmp_path_factory.mktemp("nvidia")
    return play(folder, environment(scenario(), folder=folder), ["nvidia"], SECONDS)


def of(played, index, start_s=0.5, end_s=2.5):
    series, _, _, zero_s = played
    return summary([series["nvidia", index]], zero_s, start_s, end_s)


@covers("F001")
def test_masks(name, tmp_path):
    given, expected = case(name)
    script = Scenario(H100, len(given["masks"]))
    for gpu, mask in enumerate(given["masks"]):
        script.set(gpu, "reasons", mask)
    code = f"{OPENED}print(json.dumps([g.read().reason_bits for g in gpus]))"
    masks = ask(code, environment(script, folder=tmp_path))
    assert [list(decode(mask).names) for mask in masks] == expected["names"]
    assert expected["bit_values"] == REASON_BITS


@covers("F005", "F006")
def test_masks_with_bits_of_other_headers(name):
    given, expected = case(name)
    mask = given.get("mask", given.get("supported_mask"))
    found = decode(mask)
    assert found.unknown == expected.get("unknown_mask", 0)
    assert list(found.names) == expected.get("known", list(REASON_BITS))


@covers("F008")
def test_locked_clocks_are_no_event_but_a_flag(name, played):
    found = of(played, LOCKED)
    assert found.metrics["throttle_events"] == 0
    assert "not comparable" in found.marks["clocks_locked"]


@covers("F009")
def test_the_reasons_call_under_its_old_name(name, played):
    series = played[0]
    assert set(series["nvidia", OLD].column("reason_bits")[1]) == {REASON_BITS["SwPowerCap"]}
    assert not len(series["nvidia", NO_REASONS].column("throttling")[0])
    assert "FUNCTION_NOT_FOUND" in series["nvidia", NO_REASONS].gaps["throttling"]


@covers("F010")
def test_a_short_throttle_is_seen_by_the_counter_alone(name, played):
    series, _, _, zero_s = played
    found = throttling_of(series["nvidia", COUNTER], zero_s + 0.7, zero_s + 1.7)
    assert found.seconds[Throttle.POWER_CAP] == pytest.approx(0.2)
    _, sampled_s, source = _from_bits(series["nvidia", COUNTER], Throttle.POWER_CAP)
    assert (sampled_s.sum(), source) == (0.0, SAMPLED_BITS)


@covers("F013")
def test_energy_of_two_sources_is_marked(name, played):
    series, _, _, zero_s = played
    sources = [of(played, index).marks["energy.source"] for index in (COUNTER, NO_ENERGY)]
    assert sources == ["counter", "integrated"]
    both = summary([series["nvidia", COUNTER], series["nvidia", NO_ENERGY]], zero_s, 0.5, 2.5)
    assert "mixed" in both.marks["energy.source"]


@covers("F014")
def test_peak_from_the_instant_sensor_mean_from_the_average(name, played):
    found = of(played, BOTH)
    assert found.metrics["gpu_peak_power_w_0.1s"] == pytest.approx(655.0)
    assert found.metrics["pool_gpu_mean_power_w"] == pytest.approx(410.0)
    assert len(played[0]["nvidia", BOTH].column("average_power_w")[0])


@covers("F015")
def test_a_sensor_asked_too_often_repeats_itself(name):
    given, expected = case(name)
    times = np.arange(0.0, 2.0, 1.0 / given["poll_hz"])
    watts = np.floor(times * given["sensor_update_hz"] + 1e-9)
    assert distinct(watts) / 2.0 == expected["distinct_points_per_s"]
    assert update_period_s(times, watts) == pytest.approx(1.0 / given["sensor_update_hz"])


def test_a_trial_of_few_updates_is_marked(played):
    series, _, _, zero_s = played
    assert "power.few_updates" in summary([series["nvidia", STEPS]], zero_s, 0.5, 1.5).marks
    assert "power.few_updates" not in summary([series["nvidia", STEPS]], zero_s, 0.2, 2.8).marks


@covers("F016")
def test_every_figure_of_power_carries_its_scope(name, played):
    powers = [metric for metric in of(played, COUNTER).metrics if "power_w" in metric or "energy_j" in metric]
    assert powers
    assert all(metric.startswith(("gpu_", "pool_gpu_")) for metric in powers)


@covers("F018")
def test_milliwatts_and_millijoules(name, tmp_path):
    given, expected = case(name)
    script = Scenario({**H100, "field_186": given["power_raw"]})
    code = f"{OPENED}print(json.dumps(gpus[0].read().power_w))"
    assert ask(code, environment(script, folder=tmp_path)) == expected["power_w"]
    counter = EnergyCounter(1e-3)
    counter.update(0.0, 0)
    assert counter.update(60.0, given["energy_raw"]) == pytest.approx(expected["energy_j"])


@covers("F020")
def test_counter_and_readings_that_disagree(name, played):
    assert "energy.energy_mismatch" in of(played, MISMATCH).marks
    assert "energy.energy_mismatch" not in of(played, COUNTER).marks


@covers("F021")
def test_a_library_that_starts_but_tells_nothing(name, played):
    found = of(played, BLIND)
    assert found.metrics["power_coverage_fraction"] == 0.0
    assert found.marks["power.unavailable"] == "no usable sensor"
    assert not [metric for metric in found.metrics if "power_w" in metric or "energy" in metric]


OPEN = """
import json
from autotune.telemetry import TelemetryError, open_gpus
try:
    print(json.dumps(len(open_gpus("nvidia"))))
except TelemetryError as error:
    print(json.dumps(str(error)))
"""


@covers("F022")
@pytest.mark.parametrize(("ready_s", "opens"), [(1.5, True), (60.0, False)])
def test_a_board_that_is_not_ready_at_once(name, ready_s, opens, tmp_path):
    script = Scenario(H100).set(0, "init", "E27", -1e9, ready_s)
    answer = ask(OPEN, environment(script, folder=tmp_path))
    assert (answer == 1) if opens else "NOT_READY" in answer


@covers("F040", "F041")
def test_a_library_that_cannot_be_used_is_an_error_of_ours(name, tmp_path):
    values = environment(Scenario(H100).set(0, "init", "E18"), folder=tmp_path) if name == "F040" else {}
    assert {"F040": "LIB_RM_VERSION_MISMATCH", "F041": "LIBRARY_NOT_FOUND"}[name] in ask(OPEN, values)


@covers("F023")
def test_a_counter_that_starts_again(name, played):
    found = of(played, RESET)
    assert "energy.counter_reset" in found.marks
    assert found.marks["energy.source"] == "integrated"
    assert found.metrics["pool_gpu_energy_j"] == pytest.approx(600.0, rel=0.01)


@covers("F026", "F029", "F032")
def test_lists_of_visible_devices(name):
    given, expected = case(name)
    entries = cuda_visible(given["CUDA_VISIBLE_DEVICES"])
    if name == "F029":
        assert [int(entry) for entry in entries] == expected["visible"]
    elif name == "F032":
        assert len(entries) == expected["count"]
        assert is_mig(entries[0])
    else:
        assert entries == tuple(given["CUDA_VISIBLE_DEVICES"].split(","))


@pytest.mark.parametrize(
    ("text", "entries"),
    [
        ("", ()),
        ("-1", ()),
        ("NoDevFiles", ()),
        ("2, 0", ("2", "0")),
        ("1,x,2", ("1",)),
        ("1gpu2,2ampere", ("1", "2")),
        ("0,1,0", ()),
        ("0,00", ()),
        ("GPU-aaaa,GPU-aaaa", ()),
        ("12345678-9abc-def0-1234-56789abcdef0", ("12345678-9abc-def0-1234-56789abcdef0",)),
    ],
)
def test_visible_devices_are_those_that_torch_counts(text, entries):
    """torch/cuda/__init__.py, _parse_visible_devices."""
    assert cuda_visible(text) == entries


SELECT = """
import json, sys
from autotune.telemetry import TelemetryError, open_gpus
try:
    print(json.dumps([gpu.info.index for gpu in open_gpus("nvidia", {ids})]))
except TelemetryError as error:
    print(json.dumps(str(error)))
"""


@covers("F027", "F028")
def test_gpus_are_found_by_uuid_and_never_guessed(name, tmp_path):
    values = environment(Scenario(H100, 1 if name == "F027" else 8), folder=tmp_path)
    assert ask(SELECT.format(ids=("GPU-00000000",)), values) == [0]
    if name == "F027":
        assert "means no GPU" in ask(SELECT.format(ids=("3",)), values)


@covers("F030", "F031")
def test_a_mig_instance_has_memory_of_its_own_and_no_power(name, played):
    series, _, _, zero_s = played
    mig = [one for one in series.values() if one.info.mig]
    assert mig
    found = summary(mig, zero_s, 0.5, 2.5)
    assert "power.shared" in found.marks
    assert not [metric for metric in found.metrics if "power_w" in metric or "energy_j" in metric or metric == "joules_per_token"]


def test_a_mig_instance_is_listed_with_its_own_memory(tmp_path):
    script = Scenario(H100).set(0, "mig", 1).set(0, "mig_slots", 7).set(0, "mig_uuid_0", "MIG-aaaa").set(0, "mig_memory_mib", 512)
    code = f"{OPENED}print(json.dumps([(g.info.uuid, g.info.package, g.read().memory_used_gib, g.read().power_w) for g in gpus]))"
    board, instance = ask(code, environment(script, folder=tmp_path))
    assert board == ["GPU-00000000-0000", "GPU-00000000-0000", 1.0, 300.0]
    assert instance == ["MIG-aaaa", "GPU-00000000-0000", 0.5, 300.0]


@covers("F035")
def test_the_binding_is_nvidias_own_and_warns_of_nothing(name):
    command = [sys.executable, "-W", "error", "-c", "import pynvml"]
    assert subprocess.run(command, capture_output=True, timeout=60, check=False).returncode == 0
    assert importlib.metadata.version("nvidia-ml-py")
    with pytest.raises(importlib.metadata.PackageNotFoundError):
        importlib.metadata.version("pynvml")


@covers("F038")
def test_one_lost_board_leaves_the_others(name, played):
    series, _, _, zero_s = played
    lost, other = series["nvidia", LOST], series["nvidia", COUNTER]
    assert "GPU_IS_LOST" in lost.lost
    assert lost.column("power_w")[0][-1] < zero_s + 1.1
    assert other.column("power_w")[0][-1] > zero_s + SECONDS - 0.5
    found = summary([lost, other], zero_s, 0.5, 2.5)
    assert "pool_gpu_mean_power_w" not in found.metrics
    assert found.metrics["gpu_mean_power_w"] == pytest.approx(300.0, rel=0.01)


@covers("F044")
def test_values_come_from_numbered_fields_not_from_a_tool(name, tmp_path):
    code = f"import subprocess; subprocess.Popen = None; {OPENED}print(json.dumps(gpus[0].read().power_w))"
    assert ask(code, environment(Scenario({**H100, "driver": "535.54"}), folder=tmp_path)) == 300.0


@covers("F045")
def test_a_missing_right_is_no_missing_sensor(name, played):
    series = played[0]["nvidia", DENIED]
    assert series.gaps["memory_temperature_c"] == "NVML: NO_PERMISSION"
    assert not len(series.column("memory_temperature_c")[0])


@covers("F070")
def test_no_sum_over_the_gpus_that_happen_to_tell(name, played):
    series, _, _, zero_s = played
    telling = [series["nvidia", index] for index in (LOCKED, OLD, NO_REASONS, COUNTER, NO_ENERGY, DENIED, STEPS)]
    found = summary([*telling, series["nvidia", BLIND]], zero_s, 0.5, 2.5)
    assert not [metric for metric in found.metrics if metric.startswith("pool_gpu")]
    assert math.isfinite(found.metrics["gpu_mean_power_w"])
    assert found.marks["power.partial"].startswith("7 of 8")
