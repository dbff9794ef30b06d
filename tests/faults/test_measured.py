"""A trial ends by itself once its steps tell enough, with all its ranks, and counts as completed."""

from __future__ import annotations

from launchers.outcome import Outcome
from tests.faults.harness import STUDY


def test_a_trial_that_is_measured_well_enough_is_completed_and_leaves_nothing(new_study):
    study = new_study(
        measurement={**STUDY["measurement"], "steps": 100_000, "interval": 0.01}, budget={"trials": 3}, confirm={"top": 0}
    )
    study.plan("escape")  # steps of the same length, for ever, and processes that try to outlive the trial
    study.start()
    assert study.wait(120) == 0, study.tail()
    records = study.records()
    assert {record.outcome for record in records} == {Outcome.COMPLETED}
    for record in records:
        assert record.detail.startswith("measured well enough after ")
        assert 8 <= len(record.steps) < 100
        assert record.metrics["step_interval_fraction"] <= 0.01
    assert records[-1].environment["node0.preloads"] == records[-1].environment["node0.supervisors_started"] == "1"
    assert not study.members()
