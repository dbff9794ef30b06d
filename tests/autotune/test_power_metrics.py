"""Metrics of power, energy, throttling and heat, by hand."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.power_curves import integrated, packages_of
from autotune.power_metrics import PEAK_WINDOWS_S, mean_power_w, peak_power_w, power_ramp_w_per_s, power_swing_w
from autotune.steady_state import Window, steady_window
from autotune.telemetry.base import GpuInfo
from autotune.telemetry.clocks import ClockOffset, clock_offset
from autotune.telemetry.series import NodeTelemetry, Series, series_of
from autotune.telemetry_summary import TrialTelemetry, summarise_telemetry
from autotune.throttle_metrics import clock_deficit, straggler_ratio, throttling_of
from launchers.base import StepRecord
from launchers.gpu_sample import GpuSample, Throttle, sample_from_dict

PERIOD_S = 0.05


def info(index=0, **changes):
    values = {
        "uuid": f"GPU-{index}",
        "index": index,
        "vendor": "nvidia",
        "name": "H100",
        "pci_bus_id": f"0000:{index:02x}:00.0",
        "package": f"GPU-{index}",
        "power_source": "instant",
        "max_sm_clock_mhz": 2000.0,
    }
    return GpuInfo(**(values | changes))


def series(power=lambda second: 300.0, seconds=10.0, index=0, node=0, counter=True, start_s=0.0, gpu=None, **fields):
    """Readings every 50 ms; a field is a function of the second, `energy_j` the integral of the power."""
    gpu = gpu or info(index)
    samples, joules = [], 0.0
    for second in np.arange(start_s, start_s + seconds, PERIOD_S):
        values = {name: of(second) for name, of in fields.items()}
        energy_j = joules if counter else None
        samples.append(GpuSample(float(second), gpu.uuid, power_w=power(second), energy_j=energy_j, **values))
        joules += power(second) * PERIOD_S if power(second) else 0.0
    return replace(series_of(gpu, samples, node=node))


def summary(*found, start_s=1.0, end_s=9.0, tokens=1000, clocks=()):
    nodes = tuple(
        NodeTelemetry(node, tuple(one for one in found if one.node == node)) for node in sorted({one.node for one in found})
    )
    return summarise_telemetry(TrialTelemetry(nodes, clocks), Window(start_s, end_s, tokens))


def test_constant_power_by_hand():
    found = summary(series(), series(index=1)).metrics
    assert found["gpu_peak_power_w_1s"] == pytest.approx(300.0)
    assert found["pool_gpu_mean_power_w"] == pytest.approx(600.0)
    assert found["pool_gpu_energy_j"] == pytest.approx(4800.0)
    assert found["joules_per_token"] == pytest.approx(4.8)
    assert found["tokens_per_s_per_kw"] == pytest.approx(1000 / 8.0 / 0.6)
    assert found["pool_gpu_power_swing_w"] == pytest.approx(0.0, abs=1e-6)


def test_a_square_wave_by_hand():
    """200 W and 600 W, a second each: mean 400, swing 400, and 400 W between the means of two seconds."""
    wave = series(lambda second: 600.0 if int(second + 1e-9) % 2 else 200.0)
    curve = integrated(wave, 1.0, 9.0)
    assert mean_power_w(curve, 1.0, 9.0) == pytest.approx(400.0, rel=0.01)
    assert peak_power_w(curve, 1.0, 1.0, 9.0)[0] == pytest.approx(600.0, rel=0.02)
    assert peak_power_w(curve, 2.0, 1.0, 9.0)[0] == pytest.approx(400.0, rel=0.02)
    assert power_swing_w(curve, 1.0, 9.0) == pytest.approx(400.0, rel=0.01)
    assert power_ramp_w_per_s(curve, 1.0, 9.0) == pytest.approx(400.0, rel=0.06)  # an edge takes one period


@given(st.lists(st.floats(50.0, 900.0), min_size=60, max_size=200))
def test_a_longer_window_never_has_a_higher_peak_than_its_half(watts):
    wave = series(lambda second: watts[int(round(second / PERIOD_S)) % len(watts)], seconds=PERIOD_S * len(watts))
    curve = integrated(wave, 0.0, PERIOD_S * len(watts))
    end_s = float(curve.times[-1])
    peaks = [peak_power_w(curve, seconds, 0.0, end_s)[0] for seconds in (0.1, 0.2, 0.4, 0.8, 1.6)]
    assert all(later <= earlier + 1e-6 for earlier, later in zip(peaks, peaks[1:], strict=False))
    assert max(peaks) <= max(watts) + 1e-6


def test_a_window_longer_than_the_trial_is_marked():
    found = summary(series())
    assert found.metrics["gpu_peak_power_w_60s"] == found.metrics["gpu_peak_power_w_900s"] == pytest.approx(300.0)
    assert "60 s" in found.marks["power.extrapolated"]
    assert f"{PEAK_WINDOWS_S[1]:g} s," not in found.marks["power.extrapolated"]


def test_a_hole_in_the_readings_is_not_bridged():
    whole = series(counter=False)
    times, watts = whole.columns["power_w"]
    kept = (times < 4.0) | (times > 6.0)
    holed = replace(whole, columns={"power_w": (times[kept], watts[kept])})
    found = summary(holed)
    assert "pool_gpu_energy_j" not in found.metrics
    assert found.metrics["power_coverage_fraction"] == pytest.approx(0.75, abs=0.02)
    assert "power.partial" in found.marks


def test_readings_far_apart_tell_no_swing_and_no_ramp():
    """Every 2 s, 200 W and 600 W in turns: the counter tells the mean, and nothing tells what was within a second."""
    whole = series(lambda second: 200.0 if second % 2 < 1 else 600.0)
    sparse = {name: (times[::40], values[::40]) for name, (times, values) in whole.columns.items()}
    found = summary(replace(whole, columns=sparse), end_s=8.0).metrics
    assert found["pool_gpu_mean_power_w"] == pytest.approx(400.0, rel=0.05)
    assert not {"pool_gpu_power_swing_w", "pool_gpu_power_ramp_w_per_s"} & found.keys()


def test_a_share_of_the_window_is_never_above_one():
    """Counters that gain a little more than the time between their readings, as drivers' own clocks do."""
    counter = {"throttle_s": lambda second: {reason: 1.01 * second for reason in (Throttle.POWER_CAP, Throttle.HW_THERMAL)}}
    found = summary(series(**counter)).metrics
    assert found["power_cap_fraction"] == found["throttle_fraction"] == 1.0


def test_the_pools_peak_is_that_of_the_sum_not_the_sum_of_peaks():
    """Two GPUs that peak at different times; where node clocks differ too much, the sum of peaks bounds it."""
    early = series(lambda second: 700.0 if 2.0 <= second < 4.0 else 300.0)
    late = series(lambda second: 700.0 if 6.0 <= second < 8.0 else 300.0, index=1)
    assert summary(early, late).metrics["pool_gpu_peak_power_w_1s"] == pytest.approx(1000.0, rel=0.01)
    apart = replace(late, node=1)
    exact = (ClockOffset(0.0, 0.001), ClockOffset(0.0, 0.001))
    assert summary(early, apart, clocks=exact).metrics["pool_gpu_peak_power_w_1s"] == pytest.approx(1000.0, rel=0.01)
    loose = summary(early, apart, clocks=(ClockOffset(0.0, 0.3), ClockOffset(0.0, 0.3)))
    assert loose.metrics["pool_gpu_peak_power_w_1s"] == pytest.approx(1400.0, rel=0.01)
    assert loose.metrics["pool_gpu_peak_power_w_10s"] == pytest.approx(800.0, rel=0.01)
    assert "1 s" in loose.marks["power.upper_bound"]


def test_nodes_are_brought_to_one_clock():
    """Node 0 is 3 s ahead: its spike at its own second 8 happened at second 5 of the last node."""
    ahead = series(lambda second: 700.0 if 7.9 <= second < 9.1 else 300.0, start_s=3.0)
    last = series(lambda second: 700.0 if 4.9 <= second < 6.1 else 300.0, index=1, node=1)
    found = summary(ahead, last, clocks=(ClockOffset(3.0, 0.001), ClockOffset(0.0, 0.001)))
    assert found.metrics["pool_gpu_peak_power_w_1s"] == pytest.approx(1400.0, rel=0.01)


def test_a_clock_is_bounded_by_the_quickest_answer():
    ours = iter([0.0, 1.0, 10.0, 10.2, 20.0, 20.6])
    theirs = iter([5.9, 15.1, 25.0])
    offset = clock_offset(lambda: next(theirs), lambda: next(ours))
    assert (offset.offset_s, offset.bound_s) == (pytest.approx(5.0), pytest.approx(0.1))


def test_two_dies_share_a_package():
    loud = series(lambda second: 480.0, gpu=info(0, package="board"))
    silent = series(lambda second: None, gpu=info(1, package="board"), counter=False)
    (package,) = packages_of([loud, silent], 1.0, 9.0)
    assert package.energy.energy_j(1.0, 9.0) == pytest.approx(480.0 * 8)


def counted(active, **fields):
    """A counter of hardware heat that runs while `active(second)`."""
    total = [0.0]

    def seconds(second):
        found = dict.fromkeys((Throttle.HW_THERMAL,), total[0])
        total[0] += PERIOD_S if active(second) else 0.0
        return found

    return series(throttle_s=seconds, **fields)


def test_events_are_stretches_of_growth():
    """Heat at 2-3 s and 5-5.5 s; a counter that moves in steps of 100 ms makes no more of them."""
    heat = counted(lambda second: 2.0 <= second < 3.0 or 5.0 <= second < 5.5)
    found = throttling_of(heat, 1.0, 9.0)
    assert found.seconds[Throttle.HW_THERMAL] == pytest.approx(1.5)
    assert found.counts[Throttle.HW_THERMAL] == 2
    times, values = heat.columns["throttle_s.hw_thermal"]
    stepped = replace(heat, columns={"throttle_s.hw_thermal": (times, np.floor(values * 10 + 1e-9) / 10)})
    assert throttling_of(stepped, 1.0, 9.0).counts[Throttle.HW_THERMAL] == 2


def test_only_the_window_counts():
    heat = counted(lambda second: 0.5 <= second < 2.0)
    assert throttling_of(heat, 1.0, 9.0).seconds[Throttle.HW_THERMAL] == pytest.approx(1.0, abs=PERIOD_S)
    assert throttling_of(heat, 3.0, 9.0).counts[Throttle.HW_THERMAL] == 0


def bits(at):
    return series(throttling=at, reason_bits=lambda second: 0)


def test_bits_of_an_idle_gpu_are_no_throttling():
    hot = lambda second: (Throttle.SW_THERMAL,)  # noqa: E731
    idle = series(throttling=hot, idle=lambda second: True, reason_bits=lambda second: 1)
    assert throttling_of(idle, 1.0, 9.0).fault_s == 0.0
    assert throttling_of(bits(hot), 1.0, 9.0).fault_s == pytest.approx(8.0, abs=PERIOD_S)


def test_reasons_that_act_together_count_once_and_a_power_limit_is_no_fault():
    both = bits(lambda second: (Throttle.SW_THERMAL, Throttle.HW_THERMAL) if 2.0 <= second < 4.0 else (Throttle.POWER_CAP,))
    found = summary(both).metrics
    assert found["throttle_fraction"] == pytest.approx(2.0 / 8.0, abs=0.01)
    assert found["power_cap_fraction"] == pytest.approx(6.0 / 8.0, abs=0.02)
    assert found["throttle_events"] == 2
    assert found["throttle_events_power_cap"] == 2


def test_events_per_minute_are_those_of_the_window_alone():
    """Two stretches of heat in the 8 s of the window and one before it are 15 a minute, one of a power limit is 7.5."""
    hot = ((0.2, 0.6), (2.0, 3.0), (5.0, 5.5))

    def reasons(second):
        heat = (Throttle.HW_THERMAL,) if any(begin <= second < end for begin, end in hot) else ()
        return heat + ((Throttle.POWER_CAP,) if 6.0 <= second < 7.0 else ())

    found = summary(bits(reasons)).metrics
    rates = {name.removeprefix("throttle_events_per_minute"): rate for name, rate in found.items() if "per_minute" in name}
    assert rates.pop("") == rates.pop("_hw_thermal") == pytest.approx(15.0)
    assert rates.pop("_power_cap") == pytest.approx(7.5)
    assert set(rates) == {"_power_brake", "_sw_thermal", "_sync_boost", "_other"} and not any(rates.values())


def test_one_gpu_that_tells_nothing_leaves_events_unknown():
    blind = series(index=1)
    found = summary(bits(lambda second: ()), blind)
    assert "throttle_events" not in found.metrics
    assert found.marks["throttle.source"].startswith("1 of 2")


def test_clocks_under_load():
    slow = series(sm_clock_mhz=lambda second: 1000.0 if second < 5.0 else 2000.0, idle=lambda second: second < 3.0)
    assert clock_deficit(slow, 1.0, 9.0) == pytest.approx(1.0 - (2 * 1000 + 4 * 2000) / 6 / 2000, abs=0.01)
    assert clock_deficit(series(sm_clock_mhz=lambda second: 1500.0, gpu=info(max_sm_clock_mhz=None)), 1.0, 9.0) is None
    assert straggler_ratio([1800.0, 1800.0, 1200.0]) == pytest.approx(1.5)
    assert straggler_ratio([1800.0]) is None


def test_context_gpus_are_not_charged():
    other = replace(series(lambda second: 700.0, index=1), charged=False)
    assert summary(series(), other).metrics["pool_gpu_mean_power_w"] == pytest.approx(300.0)


def test_nothing_measured_is_no_metric():
    assert summarise_telemetry(TrialTelemetry(), Window(0.0, 1.0, 10)).metrics == {}
    assert summarise_telemetry(TrialTelemetry((NodeTelemetry(problems={"nvidia": "no library"}),)), None).marks == {
        "gaps.node0.nvidia": "no library",
        "cost.node0": "0.0000 of a core, 0 rounds late",
    }


def test_the_window_is_that_of_the_steady_steps():
    steps = [StepRecord(number, 10.0 + number, 1.0, 2.0, None, 512, None) for number in range(1, 6)]
    steps[2] = replace(steps[2], step_s=math.nan)
    window = steady_window(steps, 1)
    assert (window.start_s, window.end_s, window.tokens) == (11.0, 15.0, 3 * 512)
    assert steady_window([], 1) is None


def test_a_sample_survives_json():
    sample = GpuSample(1.5, "GPU-0", power_w=3.0, throttle_s={Throttle.OTHER: 0.5}, throttling=(Throttle.POWER_CAP,), idle=False)
    assert sample_from_dict({**sample.to_dict(), "a_field_of_tomorrow": 1}) == sample
    columns: Series = series_of(info(), [sample])
    assert columns.column("throttle_s.other")[1] == [0.5]
    assert "energy_j" not in columns.columns
