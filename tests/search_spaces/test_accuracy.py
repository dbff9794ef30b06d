"""Accuracy on published rows: the ranking and error measures, the rules that choose calibration rows, and floors on the results."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks import accuracy_power
from benchmarks.accuracy_power import calibration_rows
from benchmarks.accuracy_time import choose, groups_of
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


@pytest.mark.parametrize("size", range(4, 20))
def test_calibration_rows_leave_two_and_never_the_first(size):
    rows = calibration_rows(size)
    assert 0 not in rows
    assert len(rows) <= 5
    assert size - 1 - len(rows) >= 2


@pytest.fixture(scope="module")
def sources(shared):
    return by_source(read(shared / "data" / "published"))


def test_calibration_rows_are_chosen_without_measurements(sources):
    samples = [Sample(row.measured, row.gpu, row.links) for row in sources["simumax-b200"]]
    chosen, weights = choose(samples, Coefficients())
    assert len(chosen) == len(set(chosen)) == 5
    assert weights.mean() == pytest.approx(1)


@pytest.mark.parametrize(
    ("source", "shipped_at_most", "calibrated_at_most"),
    [
        ("simumax-b200", 0.07, 0.05),
        ("bigscience-bloom", 0.12, 0.07),
        ("sc21-table1", 0.09, 0.04),
        ("megatron-bridge-perf", 0.21, 0.09),
    ],
)
def test_step_time_does_not_get_worse(sources, source, shipped_at_most, calibrated_at_most):
    found = {entry["mode"]: entry for entry in groups_of(source, sources[source])}
    assert found["shipped"]["mape"] <= shipped_at_most
    assert found["calibrated"]["mape"] <= calibrated_at_most


def test_slowdowns_after_calibration(shared):
    found = [
        g for g in accuracy_power.groups(shared / "data" / "published") if g["mode"] == "calibrated" and "above" not in g["source"]
    ]
    assert sum(g["within_5_points"] for g in found) >= 0.9 * sum(g["n"] for g in found)


def test_held_out_coefficients_differ_from_the_shipped():
    assert shipped("b200-sxm-180gb", without="simumax-b200") != shipped("b200-sxm-180gb")
