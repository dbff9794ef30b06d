"""AMD's cases of the telemetry table, played by the scripted AMD SMI to the real amdsmi where a device is needed."""

from __future__ import annotations

import numpy as np
import pytest

from autotune.telemetry.counters import EnergyCounter, number, plausible_power_w
from autotune.telemetry.kfd import hip_order
from autotune.telemetry.sensors import distinct
from autotune.telemetry.visible import amd_visible
from launchers.gpu_sample import Throttle
from tests.telemetry.cases import case, covers
from tests.telemetry.devices import MI250, MI300X, Scenario, ask, environment
from tests.telemetry.played import play, summary

SECONDS = 4.0
MI200, MI300, ABSENT, FROZEN_ENERGY, FROZEN_POWER, IDLE_BIT, DIE0, DIE1, VIOLATING = range(9)


def scenario():
    script = Scenario(MI300X, 9, "amd")
    single = {**MI250, "name": "AMD_Instinct_MI210"}
    for key, value in single.items():
        script.set(MI200, key, value)
    script.set(MI200, "average_w", 320).set(MI200, "violations", "E2")
    script.set(MI300, "current_w", 610)
    script.set(ABSENT, "current_w", 0xFFFF).set(ABSENT, "average_w", 0xFFFF)
    script.set(FROZEN_ENERGY, "energy_ticks", 1000).set(FROZEN_ENERGY, "current_w", 400)
    script.set(FROZEN_POWER, "current_w", 90).set(FROZEN_POWER, "clock", 800, 1.0)
    script.set(FROZEN_POWER, "energy_ticks", "E2")
    script.set(IDLE_BIT, "bit_hbm", 1).set(IDLE_BIT, "activity", 0).set(IDLE_BIT, "hotspot", 40)
    for die, watts in ((DIE0, 480), (DIE1, 0)):
        for key, value in MI250.items():
            script.set(die, key, value)
        script.set(die, "average_w", watts).set(die, "power_w", watts).set(die, "violations", "E2")
    script.set(VIOLATING, "active_socket", 1, 1.0, 2.5)
    return script


@pytest.fixture(scope="module")
def played(tmp_path_factory):
    folder = tmp_path_factory.mktemp("amd")
    return play(folder, environment(scenario(), folder=folder), ["amd"], SECONDS)


def of(played, *indices, start_s=0.5, end_s=3.5):
    series, _, _, zero_s = played
    return summary([series["amd", index] for index in indices], zero_s, start_s, end_s)


@covers("F047", "F064")
def test_all_ones_are_no_watts(name, played):
    assert number(0xFFFF) is None
    assert not len(played[0]["amd", ABSENT].column("power_w")[0])
    assert "power_w" in played[0]["amd", ABSENT].gaps


@covers("F048", "F049")
def test_watts_by_generation(name, played):
    for index, watts in {MI200: 320.0, MI300: 610.0}.items():
        assert set(played[0]["amd", index].column("power_w")[1]) == {watts}


@covers("F050")
def test_limits_are_in_microwatts(name, tmp_path):
    script = Scenario({**MI300X, "cap_uw": 750_000_000}, 1, "amd")
    code = "import json; from autotune.telemetry import open_gpus as o; print(json.dumps(o('amd')[0].enforced_power_limit_w()))"
    assert ask(code, environment(script, folder=tmp_path)) == 750.0


@covers("F051")
def test_two_dies_are_one_package(name, played):
    found = of(played, DIE0, DIE1)
    assert found.metrics["pool_gpu_mean_power_w"] == pytest.approx(480.0, rel=0.01)
    assert found.metrics["gpu_peak_power_w_0.1s"] == pytest.approx(480.0, rel=0.01)
    assert not len(played[0]["amd", DIE1].column("power_w")[0])
    assert "other die" in played[0]["amd", DIE1].gaps["power_w"]


def test_a_die_whose_partner_is_not_visible_stays_alone(tmp_path):
    """A container shows the odd die of one package and the even die of the next: they share nothing."""
    script = Scenario(MI250, 2, "amd").set(0, "average_w", 0)
    code = "import json; from autotune.telemetry import open_gpus as o; print(json.dumps([g.info.package for g in o('amd')]))"
    packages = ask(code, environment(script, folder=tmp_path))
    assert len(set(packages)) == 2


@covers("F053")
def test_what_cannot_be_seen_is_no_zero(name, played):
    for index in (MI200, DIE0):
        found = of(played, index)
        assert "throttle_events" not in found.metrics
        assert "unknown" in found.marks["throttle.source"]
    seen = of(played, MI300)
    assert seen.metrics["throttle_events"] == 0
    assert seen.marks["throttle.source"] == "counters"
    assert not {"throttle_s_sync_boost", "throttle_events_power_brake"} & seen.metrics.keys()


def test_violations_are_seconds_by_reason(played):
    found = of(played, VIOLATING)
    series = played[0]["amd", VIOLATING]
    period_s = float(np.max(np.diff(series.column("throttle_s.sw_thermal")[0])))
    assert found.metrics["throttle_s_sw_thermal"] == pytest.approx(1.5, abs=period_s)
    assert found.metrics["throttle_events"] == 1
    assert found.metrics["throttle_s_hw_thermal"] == 0.0


@covers("F054")
def test_the_blocking_call_has_a_thread_of_its_own(name, played):
    series = played[0]["amd", MI300]
    assert np.min(np.diff(series.column("throttle_s.power_cap")[0])) >= 0.1
    fast = len(series.column("power_w")[0])
    assert fast > 4 * len(series.column("throttle_s.power_cap")[0])


@covers("F055")
def test_a_bit_that_is_always_set(name, played):
    found = of(played, IDLE_BIT)
    assert found.metrics["throttle_events"] == found.metrics["throttle_fraction"] == 0.0
    assert not np.any(played[0]["amd", IDLE_BIT].column("throttling")[1])


MISMATCH = """
import json
from pathlib import Path
from autotune.telemetry import amd
print(json.dumps(amd._mismatch("7.0.2", Path({rocm!r}))))
"""


@covers("F056")
@pytest.mark.parametrize(("installed", "trusted"), [("7.0.1-38", True), ("6.4.2", False), (None, True)])
def test_binding_and_library_of_different_releases(name, installed, trusted, tmp_path):
    if installed:
        (tmp_path / ".info").mkdir()
        (tmp_path / ".info" / "version").write_text(installed)
    answer = ask(MISMATCH.format(rocm=str(tmp_path)), environment(Scenario(MI300X, 1, "amd"), folder=tmp_path))
    assert (answer == "") is trusted


@covers("F057")
def test_ticks_are_not_joules(name):
    given, expected = case(name)
    counter = EnergyCounter(given["resolution_uj"] * 1e-6)
    counter.update(0.0, 0)
    assert counter.update(1.0, given["counter"]) == pytest.approx(expected["energy_j"])


@covers("F059")
def test_an_energy_counter_that_stands_still(name, played):
    found = of(played, FROZEN_ENERGY)
    assert found.marks["energy.source"] == "integrated"
    assert "energy.counter_frozen" in found.marks
    assert found.metrics["pool_gpu_mean_power_w"] == pytest.approx(400.0)


NAMES = """
import json
from autotune.telemetry import TelemetryError, open_gpus
try:
    print(json.dumps([gpu.info.pci_bus_id for gpu in open_gpus("amd", ["0"])]))
except TelemetryError as error:
    print(json.dumps(str(error)))
"""


@covers("F060", "F066")
def test_hips_number_is_never_the_librarys(name, tmp_path):
    """SMI's first row is bus 05; HIP's device 0 is bus c1. A library that does not tell HIP's numbers leaves the name unknown."""
    script = Scenario(MI300X, 2, "amd").set(0, "bus_id", 0x05 << 8).set(1, "bus_id", 0xC1 << 8)
    if name == "F060":
        script.set(0, "hip_id", 1).set(1, "hip_id", 0)
        assert ask(NAMES, environment(script, folder=tmp_path)) == ["0000:c1:00.0"]
    else:
        script.set("*", "hip_id", "E2")
        assert "means no GPU" in ask(NAMES, environment(script, folder=tmp_path))


def test_hips_order_from_the_kernels_topology(tmp_path):
    for node, (simds, location) in enumerate([(0, 0), (304, 0xC100), (304, 0x0500)]):
        folder = tmp_path / str(node)
        folder.mkdir()
        (folder / "properties").write_text(f"simd_count {simds}\nlocation_id {location}\ndomain 0\n")
    assert hip_order(tmp_path) == {"0000:c1:00.0": 0, "0000:05:00.0": 1}
    assert hip_order(tmp_path / "absent") == {}


@covers("F061")
def test_rocr_filters_first_and_hip_indexes_the_rest(name):
    given, expected = case(name)
    assert amd_visible(given) == (str(expected["physical"]),)


@covers("F063")
def test_milliwatts_where_watts_are_documented(name):
    given, expected = case(name)
    assert [plausible_power_w(raw, given["board_limit_w"]) for raw in given["raw_values"]] == expected["power_w"]


@covers("F065")
def test_repeats_of_a_cached_reading_count_once(name):
    given, expected = case(name)
    per_ms = 1000 // given["poll_us"]
    watts = np.repeat(np.arange(5.0), per_ms)
    assert distinct(watts) == 5 * expected["distinct_per_ms"]


@covers("F067")
def test_a_sensor_that_stands_still_while_the_clock_moves(name, played):
    found = of(played, FROZEN_POWER)
    assert "energy.sensor_frozen" in found.marks
    assert not [metric for metric in found.metrics if "power_w" in metric]


@covers("F068")
def test_a_counter_that_falls_is_no_terawatt(name):
    """100 uJ less within 10 s: as a wrap of 64 bits that would be terawatts, of 32 bits a plausible 430 W."""
    counter = EnergyCounter(1e-6)
    assert [counter.update(10.0 * second, ticks) for second, ticks in enumerate((1000, 900))] == [0.0, 0.0]


def test_a_counter_that_wraps_at_32_bits():
    counter = EnergyCounter(15.3e-6, limit_w=750.0)
    counter.update(0.0, 2**32 - 1_000_000)
    assert counter.update(1.0, 1_000_000) == pytest.approx(2_000_000 * 15.3e-6)


def test_each_reason_of_violations_is_ours():
    from autotune.telemetry.violations import ViolationSeconds

    status = {"acc_counter": 0, "acc_ppt_pwr": 0, "acc_prochot_thrm": 0, "acc_hbm_thrm": "N/A"}
    counter = ViolationSeconds()
    counter.update(0.0, status)
    seconds, active = counter.update(2.0, {**status, "acc_counter": 2000, "acc_ppt_pwr": 500})
    assert seconds == {Throttle.POWER_CAP: 0.5, Throttle.HW_THERMAL: 0.0}
    assert active == (Throttle.POWER_CAP,)
