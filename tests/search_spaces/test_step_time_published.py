"""The step time against published measurements carried in `tests/data`: errors stay within what was recorded for them."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from benchmarks.accuracy import error_band
from benchmarks.accuracy_time import groups_of
from benchmarks.carried_rows import carried
from benchmarks.timed_rows import _board, _vtrain, by_source
from search_spaces.prediction import step_time_error

TOLERANCE = 0.01
RECORDED: dict[str, tuple[float, float]] = {
    "sc21-table1": (0.079, 0.030),
    "bigscience-bloom": (0.051, 0.060),
    "internevo": (0.050, 0.029),
    "simumax-b200": (0.056, 0.027),
    "nemo-launcher": (0.060, 0.054),
    "vtrain": (0.080, 0.078),
}
"""Mean absolute error shipped (source held out of the fit) and calibrated (five rows), as measured on the carried rows."""


@pytest.fixture(scope="module")
def entries() -> Callable[[str], dict[str, dict[str, float]]]:
    sources = by_source(carried())
    return lambda source: {entry["mode"]: entry for entry in groups_of(source, sources[source])}


@pytest.mark.parametrize("source", RECORDED)
def test_errors_do_not_get_worse(entries, source):
    found = entries(source)
    shipped, calibrated = RECORDED[source]
    assert found["shipped"]["mape"] <= shipped + TOLERANCE
    assert found["calibrated"]["mape"] <= calibrated + TOLERANCE


def test_ranking_does_not_get_worse(entries):
    found = entries("bigscience-bloom")["calibrated"]
    assert found["kendall_tau"] >= 0.5
    assert found["kendall_tau"] > max(found["tau_parameters_tokens"], found["tau_fewest_ranks"])


def test_vtrains_ranks_have_their_share_of_words_and_its_rows_one_model():
    rows = by_source(carried())["vtrain"]
    ranks = {(row.measured.config.tensor_model_parallel_size, row.measured.workload.model) for row in rows}
    assert {tp for tp, _ in ranks} >= {1, 2, 4, 8}
    assert all(model.padded_vocab_size(tp) // tp == 50257 // tp for tp, model in ranks)
    assert {row.model.padded_vocab_size(1) for row in rows} == {50304}


def test_boards_that_are_not_known_are_left_out_and_numbers_may_be_written_as_floats():
    assert [_board(name) for name in ("H100", 'MI300X ("MI300" in source)', "TPU v5")] == ["h100-sxm-80gb", "mi300x", None]
    row = {"set": "single", "layers": "12", "hidden": "1024", "heads": "16", "seq_len": "1024", "n_gpus": "8", "global_batch": "64"}
    row |= {"tp": "2", "pp": "1", "micro_batch": "4", "iteration_time_ms": "500"}
    floats = {name: f"{value}.0" if value.isdigit() else value for name, value in row.items()}
    assert _vtrain(floats, 0) == _vtrain(row, 0)


def test_the_band_counts_each_source_once():
    groups = [
        {"quantity": quantity, "mode": mode, "mape": mape, "n": n}
        for quantity, mode, mape, n in [
            ("step_time_s", "shipped", 0.1, 1000),
            ("step_time_s", "shipped", 0.3, 1),
            ("step_time_s", "calibrated", 0.05, 9),
            ("slowdown", "shipped", 0.9, 9),
        ]
    ]
    band = error_band(groups)
    assert band["shipped"] == {"error": 0.2, "sources": 2, "rows": 1001}
    assert band["calibrated"]["error"] == 0.05


def test_predictions_carry_the_recorded_band():
    assert 0 < step_time_error("calibrated") < step_time_error("shipped") < 0.3
