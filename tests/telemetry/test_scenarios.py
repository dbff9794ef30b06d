"""Real trials of the Megatron program on CPU with scripted devices beside them: exact metrics of each scenario.

One trial plays all scenarios at once, one GPU each; what it would say had it run on that GPU alone is compared with figures that
follow from the scenario by hand. Second 0 is the end of the trial's first step.
"""

from __future__ import annotations

import os
from dataclasses import replace

import pytest

from autotune.steady_state import Window, steady_window
from autotune.telemetry_summary import TrialTelemetry, summarise_telemetry
from launchers.outcome import Outcome
from tests.telemetry.cases import covers
from tests.telemetry.devices import H100, MI250, MI300X, ROOT, Scenario, environment
from tests.telemetry.megatron_trial import play

PERIOD_S = 0.05
SECONDS = 6.0
SPIKE, BITS, NOT_AVAILABLE, RESET, DENIED, THERMAL, LOST, MIG = range(8)
MI250_EVEN, MI250_ODD, MI300, WRAP = range(4)


def nvidia():
    script = Scenario(H100, 8)
    script.set(SPIKE, "power_mw", 700_000, 2.0, 2.15)
    for field in (74, 76, 269, 270, 271):
        script.set(BITS, f"field_{field}", "E3")
    script.set(BITS, "reasons", 0x20, 1.0, 1.6).set(BITS, "reasons", 0x20, 3.0, 3.4)
    for field in ("field_185", "field_186", "field_83", "power_usage"):
        script.set(NOT_AVAILABLE, field, "E3")
    script.set(RESET, "energy_base_mj", 5_000_000).set(RESET, "energy_base_mj", 0, 2.0)
    script.set(DENIED, "set_limit", "E4")
    script.set(THERMAL, "active_270", 1, 1.0, 2.5).set(THERMAL, "reasons", 0x48, 1.0, 2.5).set(THERMAL, "sm_clock", 990, 1.0, 2.5)
    script.set(THERMAL, "active_269", 1, 3.0, 3.2)
    script.set(LOST, "lost", "E15", 3.0)
    script.set(MIG, "mig", 1).set(MIG, "mig_slots", 7).set(MIG, "mig_uuid_0", "MIG-7-0-0").set(MIG, "mig_memory_mib", 512)
    # NVML's order is not that of the UUIDs.
    for gpu in range(8):
        script.set(gpu, "uuid", f"GPU-{7 - gpu:08x}-0000")
    return script


def amd():
    script = Scenario(MI300X, 4, "amd")
    for die in (MI250_EVEN, MI250_ODD):
        for key, value in MI250.items():
            script.set(die, key, value)
        script.set(die, "violations", "E2")
    script.set(MI250_ODD, "average_w", 0)
    script.set(MI300, "active_ppt", 1, 1.0, 2.0).set(MI300, "active_prochot", 1, 2.5, 3.5)
    script.set(WRAP, "energy_base", 2**32 - 60_000_000).set(WRAP, "energy_wrap", 2**32)
    return script


def trial(folder, vendors, seconds, charged=()):
    values = environment(*[{"nvidia": nvidia, "amd": amd}[vendor]() for vendor in vendors], folder=folder, clock=folder / "clock")
    values = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **values}
    return play(folder, values, {"vendors": vendors, "gpus": charged}, seconds)


@pytest.fixture(scope="module")
def played(tmp_path_factory):
    return trial(tmp_path_factory.mktemp("scenarios"), ["nvidia", "amd"], SECONDS)


def found(played, vendor, *indices, uuid=None):
    """The trial as if it had run on these GPUs."""
    steps, (node,), _, _ = played
    chosen = [
        replace(one, charged=True)
        for one in node.series
        if one.info.vendor == vendor and one.info.index in indices and one.info.uuid.startswith(uuid or "")
    ]
    counted = steps[1:]  # whatever warm-up a busy machine shows: the scenario is played from its second 0
    window = Window(counted[0].time_s - counted[0].step_s, counted[-1].time_s, sum(step.tokens for step in counted))
    assert window.start_s < played[3] + 1.0, "the first steps took too long for the scenario"
    return summarise_telemetry(TrialTelemetry((replace(node, series=tuple(chosen)),)), window), window


def _skip_where_late(played, index, start_s, end_s):
    """A spike of three readings needs all three: a machine too busy to read every 50 ms shows nothing about it."""
    (series,) = [one for one in played[1][0].series if (one.info.vendor, one.info.index) == ("nvidia", index)]
    times = series.column("power_w")[0] - played[3]
    inside = times[(times >= start_s) & (times <= end_s)]
    longest_s = max(later - earlier for earlier, later in zip(inside, inside[1:], strict=False))
    if longest_s > 1.1 * PERIOD_S:
        pytest.skip(f"this machine was too busy: {longest_s:.3f} s between two readings")


@pytest.mark.acceptance
@pytest.mark.timeout(300)
def test_a_spike_of_150_ms_between_two_averages(played):
    """300 W, and 700 W for 0.15 s: 0.1 s peak 700 W, 1 s peak 0.15 x 700 + 0.85 x 300 = 360 W."""
    summary, window = found(played, "nvidia", SPIKE)
    _skip_where_late(played, SPIKE, 1.9, 2.3)
    assert summary.metrics["gpu_peak_power_w_0.1s"] == pytest.approx(700.0, rel=0.01)
    assert summary.metrics["gpu_peak_power_w_1s"] == pytest.approx(360.0, rel=0.01)
    assert summary.metrics["pool_gpu_energy_j"] == pytest.approx(300.0 * window.length_s + 400.0 * 0.15, rel=0.01)


@pytest.mark.acceptance
@pytest.mark.timeout(300)
def test_a_thermal_throttle_on_gpu_5_of_8(played):
    summary, window = found(played, "nvidia", SPIKE, BITS, THERMAL)
    assert summary.metrics["throttle_s_hw_thermal"] == pytest.approx(1.5, abs=PERIOD_S)
    assert summary.metrics["throttle_events_hw_thermal"] == 1
    alone, _ = found(played, "nvidia", THERMAL)
    assert alone.metrics["throttle_s_sw_thermal"] == pytest.approx(0.2, abs=PERIOD_S)
    assert alone.metrics["throttle_events"] == 2
    assert alone.metrics["throttle_fraction"] == pytest.approx(1.7 / window.length_s, abs=2 * PERIOD_S / window.length_s)
    assert summary.marks["throttle.worst_gpu"].startswith("5 ")
    assert alone.metrics["clock_deficit"] == pytest.approx(0.5 * 1.5 / window.length_s, rel=0.1)


@pytest.mark.acceptance
@pytest.mark.timeout(300)
def test_no_counters_but_bits(played):
    summary, _ = found(played, "nvidia", BITS)
    assert summary.metrics["throttle_s_sw_thermal"] == pytest.approx(0.6 + 0.4, abs=2 * PERIOD_S)
    assert summary.metrics["throttle_events_sw_thermal"] == 2
    assert summary.marks["throttle.source"] == "sampled bits"


@pytest.mark.acceptance
@pytest.mark.timeout(300)
def test_not_available_is_absent_with_its_reason(played):
    summary, _ = found(played, "nvidia", NOT_AVAILABLE)
    assert not [name for name in summary.metrics if "power_w" in name or "energy" in name]
    assert "NOT_SUPPORTED" in summary.marks["gaps.power_w"]


@pytest.mark.acceptance
@pytest.mark.timeout(300)
def test_an_energy_counter_that_wraps_or_starts_again(played):
    wrapped, window = found(played, "amd", WRAP)
    assert wrapped.marks["energy.source"] == "counter"
    assert wrapped.metrics["pool_gpu_energy_j"] == pytest.approx(600.0 * window.length_s, rel=0.01)
    again, window = found(played, "nvidia", RESET)
    assert "energy.counter_reset" in again.marks
    assert again.metrics["pool_gpu_energy_j"] == pytest.approx(300.0 * window.length_s, rel=0.01)


@pytest.mark.acceptance
@pytest.mark.timeout(300)
def test_an_mi250_whose_odd_die_reads_0_w(played):
    summary, window = found(played, "amd", MI250_EVEN, MI250_ODD)
    assert summary.metrics["pool_gpu_energy_j"] == pytest.approx(480.0 * window.length_s, rel=0.01)
    assert summary.metrics["gpu_mean_power_w"] == pytest.approx(480.0, rel=0.01)
    assert "throttle_events" not in summary.metrics


@pytest.mark.acceptance
@pytest.mark.timeout(300)
def test_mi300x_violation_accumulators(played):
    """The accumulators of four devices are read one after another, about 0.1 s each: that is one period."""
    summary, window = found(played, "amd", MI300)
    series = next(one for one in played[1][0].series if one.info.vendor == "amd" and one.info.index == MI300)
    times, _ = series.column("throttle_s.power_cap")
    period_s = max(later - earlier for earlier, later in zip(times, times[1:], strict=False))
    assert summary.metrics["power_cap_fraction"] * window.length_s == pytest.approx(1.0, abs=period_s)
    assert summary.metrics["throttle_s_hw_thermal"] == pytest.approx(1.0, abs=period_s)
    assert summary.metrics["throttle_events"] == 1
    assert summary.marks["throttle.source"] == "counters"


@pytest.mark.acceptance
@pytest.mark.timeout(300)
def test_a_mig_instance_is_charged_no_power(played):
    summary, _ = found(played, "nvidia", MIG, uuid="MIG-")
    assert "power.shared" in summary.marks
    assert not [name for name in summary.metrics if "power_w" in name or "energy" in name or name == "joules_per_token"]


@covers("F036")
@pytest.mark.acceptance
@pytest.mark.timeout(300)
def test_a_gpu_lost_in_mid_trial_is_the_nodes_fault(name, tmp_path):
    """The trial's GPU, named by its UUID, is lost at second 3: the trial ends there as LOST, whatever the ranks do."""
    steps, (node,), end, zero_s = trial(tmp_path, ["nvidia"], 60.0, charged=("GPU-00000001",))
    assert end.outcome is Outcome.LOST
    assert "GPU_IS_LOST" in end.detail
    (charged,) = [one for one in node.series if one.charged]
    assert charged.info.index == LOST
    assert steps[-1].time_s >= zero_s + 2.5
    assert charged.column("power_w")[0][-1] < zero_s + 3.1


@pytest.mark.timeout(300)
def test_a_trial_is_measured_from_beside_it(tmp_path):
    """The small one of `make test`: half of the node's GPUs are the trial's, and none of its libraries reach the ranks."""
    steps, (node,), end, zero_s = trial(tmp_path, ["nvidia"], 2.5, charged=("0", "5"))
    assert end.outcome is Outcome.STOPPED
    assert sorted(one.info.index for one in node.series if one.charged) == [SPIKE, THERMAL]
    window = replace(steady_window(steps, 1), start_s=zero_s + 0.2, end_s=zero_s + 2.4)
    summary = summarise_telemetry(TrialTelemetry((node,)), window)
    assert summary.metrics["pool_gpu_energy_j"] == pytest.approx(2 * 300.0 * 2.2 + 400.0 * 0.15, rel=0.01)
    assert summary.metrics["throttle_s_hw_thermal"] == pytest.approx(1.4, abs=PERIOD_S)
    assert node.cost.cpu_s > 0.0
