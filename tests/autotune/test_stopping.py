"""A study ends when little is left to gain, and says how sure that is."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autotune.spec_parts import Budget
from autotune.stopping import Stopping
from tests.autotune.study_cases import PROMISED, completed, open_pool, run_to_end, step_seconds, study_spec


def ended(trials: int, chance: float | None, **budget: float) -> str:
    spec = study_spec(budget={"trials": 100, **budget})
    study, stopping, said = open_pool(spec), Stopping(spec), ""
    for _ in range(trials):
        proposal = study.propose()
        assert proposal is not None
        study.finish(proposal, completed(step_seconds(proposal.config)))
        said = stopping.reason(study._ledger, 0, None if chance is None else replace(PROMISED, chance_of_gain=chance))
    return said


@pytest.mark.parametrize(
    ("trials", "chance", "stops"), [(10, 0.01, True), (9, 0.01, False), (10, 0.2, False), (3, 0.01, False), (10, None, False)]
)
def test_converged_only_when_sure_after_a_few_trials(trials: int, chance: float | None, stops: bool) -> None:
    assert (ended(trials, chance) == "converged: the chance that a further trial gains 1 % is 1.0%") is stops


def test_how_sure_is_the_users_choice() -> None:
    assert ended(10, 0.08) == ""
    assert ended(10, 0.08, confidence=0.9).startswith("converged")
    assert Budget(confidence=None).confidence is None


def test_a_learned_space_converges_before_it_is_walked_through() -> None:
    study = open_pool(study_spec(sampler="residual", budget={"trials": 36}))
    proposals = run_to_end(study, lambda proposal: completed(step_seconds(proposal.config)))
    assert study.end_reason.startswith("converged") and len(proposals) < 36
    table = study.table
    best = min(step_seconds(table.config(row)) for row in range(len(table)))
    assert min(step_seconds(proposal.config) for proposal in proposals) <= 1.01 * best
