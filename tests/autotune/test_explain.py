"""The explanation of a winner follows from measured trials first, and from predictions only where nothing was measured."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from autotune.explain import explain
from autotune.records import Phase, TrialRecord
from launchers.outcome import Outcome
from search_spaces.candidates import CandidateTable
from search_spaces.config import TrialConfig
from tests.autotune.study_cases import open_pool, step_seconds, study_spec


@pytest.fixture(scope="module")
def table() -> CandidateTable:
    return open_pool(study_spec()).table


def measured(config: TrialConfig, outcome: Outcome = Outcome.COMPLETED) -> TrialRecord:
    metrics = {"tokens_per_s_per_gpu": 1.0 / step_seconds(config)} if outcome is Outcome.COMPLETED else {}
    return TrialRecord("s", 0, Phase.EXPLORE, config, (), outcome, metrics=metrics)


def fastest(records: list[TrialRecord]) -> TrialRecord:
    return max(records, key=lambda record: record.metrics["tokens_per_s_per_gpu"])


def test_importance_finds_the_knob_that_matters_and_the_one_that_does_not(table: CandidateTable) -> None:
    records = [measured(table.config(row)) for row in range(len(table))]
    shares = explain(fastest(records), records, table).importance
    assert shares["micro_batch_size"] + shares["tensor_model_parallel_size"] > 0.8
    assert shares["use_distributed_optimizer"] < 0.05


def test_neighbours_differ_in_one_knob_and_carry_what_was_measured(table: CandidateTable) -> None:
    records = [measured(table.config(row)) for row in range(len(table))]
    winner = fastest(records)
    shown = explain(winner, records, table)
    assert shown.neighbours and shown.next_to_try is None
    for neighbour in shown.neighbours:
        config = table.config(neighbour.row)
        differing = {name for name in table.knobs if getattr(config, name) != getattr(winner.config, name)}
        assert differing == {neighbour.knob} and getattr(config, neighbour.knob) == neighbour.value
        assert neighbour.origin == "measured"
        assert neighbour.ratio == pytest.approx(step_seconds(winner.config) / step_seconds(config))


def test_what_is_faster_but_scores_less_is_told_apart(table: CandidateTable) -> None:
    slowest = max(map(table.config, range(len(table))), key=step_seconds)
    winner = replace(measured(slowest), value=1.0)
    beside = [one.row for one in explain(winner, [winner], table, np.ones(len(table))).neighbours][:6]
    values = [0.9 if place % 2 else 1.1 for place in range(len(beside))]
    records = [replace(measured(table.config(row)), value=value) for row, value in zip(beside, values, strict=True)]
    shown = explain(winner, [winner, *records], table).neighbours
    assert {one.row: one.scores_less for one in shown} == {row: value < 1.0 for row, value in zip(beside, values, strict=True)}
    told = explain(winner, [winner, *(replace(record, value=None) for record in records)], table).neighbours
    assert not any(one.scores_less for one in told)


def test_what_was_not_run_is_predicted_and_the_best_of_it_is_next(table: CandidateTable) -> None:
    everything = [measured(table.config(row)) for row in range(len(table))]
    winner = fastest(everything)
    predicted = np.array([2.0 / step_seconds(table.config(row)) for row in range(len(table))])
    shown = explain(winner, [winner], table, predicted)
    assert {neighbour.origin for neighbour in shown.neighbours} == {"predicted"}
    assert shown.next_to_try == shown.neighbours[0]
    failed = measured(table.config(shown.neighbours[0].row), Outcome.OOM)
    assert explain(winner, [winner, failed], table, predicted).next_to_try == shown.neighbours[1], "what failed is not to be tried"


def test_a_basin_is_broad_or_sharp(table: CandidateTable) -> None:
    winner = measured(table.config(0))
    flat, steep = np.full(len(table), 7.0), np.linspace(7.0, 1.0, len(table))
    assert explain(winner, [winner], table, flat).shape == "broad"
    assert explain(winner, [winner], table, steep).shape == "sharp"
    assert explain(winner, [winner], table).shape == "unknown"


def test_few_trials_say_nothing_of_importance(table: CandidateTable) -> None:
    records = [measured(table.config(row)) for row in range(4)]
    assert explain(fastest(records), records, table).importance == {}


@pytest.mark.parametrize("tokens_per_s", [1.0, 5.0])
def test_trials_that_are_all_alike_say_nothing_of_importance_and_stop_nothing(table: CandidateTable, tokens_per_s: float) -> None:
    records = [replace(measured(table.config(row)), metrics={"tokens_per_s_per_gpu": tokens_per_s}) for row in range(len(table))]
    assert explain(records[0], records, table).importance == {}
