"""Measured watts at the wall by hand: what readings a second or a minute apart can tell of a window, and what they cannot."""

import numpy as np
import pytest

from autotune.steady_state import Window
from autotune.telemetry.base import WALL, GpuInfo
from autotune.telemetry.clocks import ClockOffset
from autotune.telemetry.series import NodeTelemetry, Series
from autotune.telemetry_summary import TrialTelemetry, summarise_telemetry
from autotune.wall_metrics import judged_on, wall_curve, wall_metrics, wall_words

from .test_power_metrics import series as gpu_series

WINDOW = Window(100.0, 120.0, 1000)
NONE = (np.empty(0), np.empty(0))


def readings(watts=lambda second: 400.0, start_s=90.0, end_s=130.0, period_s=1.0):
    times = np.arange(start_s, end_s + 1e-9, period_s)
    return times, np.array([watts(second) for second in times])


def test_constant_watts_by_hand():
    metrics, marks = wall_metrics({0: readings(), 1: readings(lambda second: 500.0)}, WINDOW, "a meter")
    assert metrics["pool_wall_mean_power_w"] == pytest.approx(900.0)
    assert metrics["pool_wall_energy_j"] == pytest.approx(18_000.0)
    assert metrics["pool_wall_joules_per_token"] == pytest.approx(18.0)
    assert metrics["pool_wall_peak_power_w_10s"] == pytest.approx(900.0)
    assert metrics["node_wall_mean_power_w"] == metrics["node_wall_peak_power_w_1s"] == pytest.approx(500.0)
    assert marks["wall.source"] == "a meter"
    assert marks["wall.readings"] == "19 in 20.0 s, one every 1.0 s"
    assert marks["wall.extrapolated"].startswith("peaks over 60 s, 900 s:")


def test_more_watts_for_five_readings_count_by_the_trapezoid_rule():
    """400 W, and 800 W in the readings of seconds 105 to 109: 4 s in between and half a second to each side."""
    metrics, _ = wall_metrics({0: readings(lambda second: 800.0 if 104.5 < second < 109.5 else 400.0)}, WINDOW, "")
    assert metrics["pool_wall_energy_j"] == pytest.approx(20 * 400.0 + 5 * 400.0)
    assert metrics["pool_wall_peak_power_w_1s"] == pytest.approx(800.0)
    assert metrics["pool_wall_peak_power_w_10s"] == pytest.approx(600.0)


@pytest.mark.parametrize(
    ("period_s", "told"), [(1.0, {1, 10, 60, 900}), (1.05, {1, 10, 60, 900}), (2.0, {10, 60, 900}), (8.0, {10, 60, 900})]
)
def test_readings_tell_no_peak_shorter_than_they_are_apart(period_s, told):
    metrics, _ = wall_metrics({0: readings(period_s=period_s, start_s=80.0, end_s=140.0)}, WINDOW, "")
    names = {name for name in metrics if name.startswith("pool_wall_peak")}
    assert names == {f"pool_wall_peak_power_w_{seconds}s" for seconds in told}


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"end_s": 110.0}, "the second half is missing"),
        ({"start_s": 110.0}, "the first half is missing"),
        ({"start_s": 121.0, "end_s": 160.0}, "all after it"),
        ({"start_s": 50.0, "end_s": 99.0}, "all before it"),
        ({"start_s": 70.0, "end_s": 190.0, "period_s": 30.0}, "one reading inside"),
        ({"start_s": 110.0, "end_s": 110.0}, "a single reading"),
    ],
)
def test_a_window_that_is_not_covered_tells_nothing(changes, why):
    assert wall_curve(readings(**changes), WINDOW) is None, why
    metrics, marks = wall_metrics({0: readings(**changes)}, WINDOW, "a meter")
    assert metrics == {}
    assert "wall.source" not in marks
    assert "node 0" in marks["wall.not_covered"]


def test_two_failures_in_a_row_are_bridged_and_more_are_a_hole():
    times, watts = readings()
    for missing, covered in ((2, True), (3, False)):
        kept = (times < 109.5) | (times > 109.5 + missing)
        assert (wall_curve((times[kept], watts[kept]), WINDOW) is not None) is covered


def test_a_reading_far_before_the_window_says_nothing_of_its_start():
    """700 W at second 60 and a hole until second 100.5: the window begins at 400 W, not on the way down from 700."""
    times, watts = readings(start_s=100.5)
    early = np.concatenate([[59.0, 60.0], times]), np.concatenate([[700.0, 700.0], watts])
    metrics, _ = wall_metrics({0: early}, WINDOW, "")
    assert metrics["pool_wall_mean_power_w"] == pytest.approx(400.0)


def test_the_outermost_readings_hold_to_the_ends_of_the_window():
    """Readings from 101 to 119 at 400 W: 20 s at 400 W, not 18."""
    metrics, _ = wall_metrics({0: readings(start_s=101.0, end_s=119.0)}, WINDOW, "")
    assert metrics["pool_wall_energy_j"] == pytest.approx(8000.0)


def test_no_sum_where_a_node_is_not_covered():
    metrics, marks = wall_metrics({0: readings(), 1: NONE}, WINDOW, "a meter")
    assert {name.split("_wall_")[0] for name in metrics} == {"node"}
    assert marks["wall.not_covered"].startswith("the readings of node 1 do")
    assert wall_metrics({}, WINDOW, "") == ({}, {})


def test_the_pools_peak_is_that_of_the_sum_unless_clocks_differ_too_much():
    early = readings(lambda second: 800.0 if 102.5 < second < 105.5 else 400.0)
    late = readings(lambda second: 800.0 if 112.5 < second < 115.5 else 400.0)
    exact, _ = wall_metrics({0: early, 1: late}, WINDOW, "", clock_bound_s=0.01)
    assert exact["pool_wall_peak_power_w_1s"] == pytest.approx(1200.0)
    loose, marks = wall_metrics({0: early, 1: late}, WINDOW, "", clock_bound_s=0.3)
    assert loose["pool_wall_peak_power_w_1s"] == pytest.approx(1600.0)
    assert loose["pool_wall_peak_power_w_10s"] == pytest.approx(exact["pool_wall_peak_power_w_10s"])
    assert "wall.upper_bound" in marks


def meter(node, gaps=None, **changes):
    info = GpuInfo("wall", 0, WALL, "wall", "", "wall", power_source="command")
    return Series(info, {"power_w": readings(start_s=0.0, end_s=10.0, **changes)}, gaps=gaps or {}, node=node)


def test_a_nodes_meter_is_no_board_and_boards_are_no_wall():
    nodes = tuple(
        NodeTelemetry(node, (gpu_series(node=node), meter(node, {"power_w": "1 of 12 readings: no answer"}))) for node in (0, 1)
    )
    found = summarise_telemetry(TrialTelemetry(nodes), Window(1.0, 9.0, 1000))
    assert found.metrics["pool_gpu_mean_power_w"] == pytest.approx(600.0)
    assert found.metrics["pool_wall_mean_power_w"] == pytest.approx(800.0)
    assert found.metrics["gpu_peak_power_w_1s"] == pytest.approx(300.0)
    assert found.marks["gaps.wall.node1"] == "1 of 12 readings: no answer"


def test_meters_of_nodes_are_brought_to_one_clock():
    """Node 0 is 3 s ahead: both nodes jump at the same time."""
    ahead, last = (meter(node, watts=lambda second, at=at: 800.0 if second > at else 400.0) for node, at in ((0, 7.5), (1, 4.5)))
    clocks = (ClockOffset(3.0, 0.001), ClockOffset(0.0, 0.001))
    found = summarise_telemetry(
        TrialTelemetry((NodeTelemetry(0, (ahead,)), NodeTelemetry(1, (last,))), clocks), Window(1.0, 7.0, 9)
    )
    assert found.metrics["pool_wall_mean_power_w"] == pytest.approx((3.5 * 800.0 + 2.5 * 1600.0) / 6.0)


def test_no_window_no_metric():
    nodes = (NodeTelemetry(0, (meter(0, {"power_w": "1 of 1 readings: denied"}),)),)
    found = summarise_telemetry(TrialTelemetry(nodes), None)
    assert found.metrics == {}
    assert "denied" in found.marks["gaps.wall.node0"]


@pytest.mark.parametrize(
    ("limit", "metrics", "judged"),
    [
        ("pool_wall_mean_power_w", {"pool_wall_mean_power_w", "pool_wall_mean_power_w_estimated"}, "pool_wall_mean_power_w"),
        ("pool_wall_mean_power_w_estimated", {"pool_wall_mean_power_w"}, "pool_wall_mean_power_w"),
        ("pool_wall_mean_power_w", {"pool_wall_mean_power_w_estimated"}, "pool_wall_mean_power_w_estimated"),
        ("pool_wall_mean_power_w_estimated", {"pool_wall_mean_power_w_estimated"}, "pool_wall_mean_power_w_estimated"),
        ("pool_wall_mean_power_w", {"pool_gpu_mean_power_w"}, "pool_wall_mean_power_w"),
        ("gpu_mean_power_w", {"gpu_mean_power_w"}, "gpu_mean_power_w"),
    ],
)
def test_what_a_limit_is_judged_on(limit, metrics, judged):
    assert judged_on(limit, dict.fromkeys(metrics, 1.0)) == judged


def test_a_report_says_whether_watts_were_measured():
    marks = {"telemetry.wall.source": "log pdu.csv"}
    assert wall_words({"pool_wall_mean_power_w": 5312.4}, marks) == "5,312 W (measured, log pdu.csv)"
    assert wall_words({"pool_wall_mean_power_w_estimated": 5000.0}, {}) == "5,000 W (estimated from its boards)"
    assert wall_words({}, marks) == ""
