"""Accuracy on published rows: the ranking and error measures, the rules that choose calibration rows, and floors on the results."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from benchmarks import accuracy, accuracy_power
from benchmarks.accuracy_power import calibration_rows
from benchmarks.accuracy_time import _stated, choose, groups_of
from benchmarks.ranking import errors, kendall_tau, ranking
from benchmarks.timed_rows import by_source, read
from search_spaces.calibration import Sample
from search_spaces.coefficients import Coefficients, shipped


def test_kendall_tau_counts_pairs_and_ties():
    measured = np.array([1.0, 2.0, 3.0, 4.0])
    assert kendall_tau(measured * 3, measured) == 1
    assert kendall_tau(-measured, measured) == -1
    assert kendall_tau(np.ones(4), measured) == 0
    assert kendall_tau(np.array([1.0, 2.0, 4.0, 3.0]), measured) == pytest.approx(4 / 6)


def test_only_groups_of_eight_rows_are_ranked():
    values = np.arange(12.0)
    found = ranking(["a"] * 8 + ["b"] * 4, values, values)
    assert (found.median, found.groups) == (1.0, 1)


def test_errors_are_shares_of_the_measured():
    assert errors(np.array([1.1, 1.8]), np.array([1.0, 2.0])) == {"mape": 0.1, "max_ape": 0.1, "bias": 0.0}


@pytest.mark.parametrize("sizes", [[6], [8], [13], [7, 7, 7], [9, 9, 9], [3, 3]])
def test_calibration_rows_are_few_never_the_first_and_the_slowest_among_them(sizes):
    chosen = calibration_rows([np.linspace(1.0, 3.0, size) for size in sizes])
    assert sum(map(len, chosen)) == min(5, sum(size - 1 for size in sizes) // 2)
    assert all(0 not in rows and len(rows) == len(set(rows)) for rows in chosen)
    assert sizes[0] - 1 in chosen[0]


@pytest.fixture(scope="module")
def sources(shared):
    return by_source(read(shared / "data" / "published"))


def test_calibration_rows_are_chosen_without_measurements(sources):
    samples = [Sample(row.measured, row.gpu, row.links) for row in sources["simumax-b200"]]
    chosen, weights = choose(samples, Coefficients())
    assert len(chosen) == len(set(chosen)) == 5
    assert weights.mean() == pytest.approx(1)


def test_calibration_rows_are_of_those_whose_settings_are_stated_where_these_are_enough(sources):
    rows = [replace(row, stated=place % 2 == 0) for place, row in enumerate(sources["simumax-b200"])]
    assert _stated(rows) == list(range(0, len(rows), 2))
    assert _stated(rows[:18]) == list(range(18))


@pytest.mark.parametrize(
    ("source", "shipped_at_most", "calibrated_at_most"),
    [
        ("simumax-b200", 0.065, 0.035),
        ("bigscience-bloom", 0.08, 0.07),
        ("sc21-table1", 0.105, 0.035),
        ("nemo-launcher", 0.075, 0.065),
        ("megatron-bridge-perf", 0.155, 0.075),
        ("megatron-bridge-skills", 0.115, 0.035),
    ],
)
def test_step_time_does_not_get_worse(sources, source, shipped_at_most, calibrated_at_most):
    found = {entry["mode"]: entry for entry in groups_of(source, sources[source])}
    assert found["shipped"]["mape"] <= shipped_at_most
    assert found["calibrated"]["mape"] <= calibrated_at_most
    if source == "megatron-bridge-perf":
        assert all(found[mode]["kendall_tau_min"] >= 0.6 and found[mode]["tau_groups"] == 2 for mode in found)


def test_the_median_group_of_vtrain_is_ranked_well_and_none_badly(sources):
    for entry in groups_of("vtrain", sources["vtrain"]):
        assert entry["tau_groups"] >= 60
        assert entry["kendall_tau"] >= 0.85
        assert entry["kendall_tau_min"] >= 0.5


@pytest.fixture(scope="module")
def slowdowns(shared):
    return accuracy_power.groups(shared / "data" / "published")


@pytest.mark.parametrize(
    ("mode", "above", "share"),
    [("calibrated", False, 0.9), ("calibrated", True, 0.85), ("shipped", False, 0.79), ("shipped", True, 0.74)],
)
def test_slowdowns_within_five_points_do_not_get_fewer(slowdowns, mode, above, share):
    found = [g for g in slowdowns if g["mode"] == mode and ("above" in g["source"]) == above]
    assert sum(g["within_5_points"] for g in found) >= share * sum(g["n"] for g in found)


def test_a_folder_without_tables_is_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["accuracy.py", str(tmp_path)])
    with pytest.raises(SystemExit) as ended:
        accuracy.main()
    assert ended.value.code == 2
    assert "no throughput.csv" in capsys.readouterr().err


def test_held_out_coefficients_differ_from_the_shipped():
    assert shipped("b200-sxm-180gb", without="simumax-b200") != shipped("b200-sxm-180gb")
