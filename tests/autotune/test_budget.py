"""Every budget ends a study with its own reason; refused proposals cost nothing, lost trials cost time but no trial."""

from __future__ import annotations

import math

import pytest

from autotune.budget import Spent, less, runs_paid, spent, used_up
from autotune.records import Phase, TrialRecord
from autotune.spec_parts import Budget
from launchers.outcome import Outcome
from search_spaces.config import TrialConfig
from search_spaces.hardware import PoolSpec


def record(outcome: Outcome, seconds: float, phase: Phase = Phase.EXPLORE, **metrics: float) -> TrialRecord:
    return TrialRecord("s", 0, phase, TrialConfig(), (), outcome, metrics=metrics, started_s=100.0, ended_s=100.0 + seconds)


def test_what_is_counted() -> None:
    pool = PoolSpec(name="p", gpu="cpu", nodes=2, gpus_per_node=4, usd_per_gpu_hour=3.0)
    records = [
        record(Outcome.COMPLETED, 900.0, pool_gpu_energy_j=1.8e6),
        record(Outcome.OOM, 450.0, pool_gpu_energy_j=1.8e6),
        record(Outcome.LOST, 450.0),
        record(Outcome.REFUSED, 9000.0),
        record(Outcome.COMPLETED, 1800.0, Phase.CONFIRM),
    ]
    shown = spent(records, pool)
    assert shown == Spent(trials=2, gpu_hours=pytest.approx(8.0), energy_kwh=pytest.approx(1.0), usd=pytest.approx(24.0))


def test_energy_and_money_are_unknown_not_zero() -> None:
    shown = spent([record(Outcome.COMPLETED, 10.0)], PoolSpec(name="p", gpus_per_node=1))
    assert shown.energy_kwh is None and shown.usd is None


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"trials": 3}, "budget: 3 trials"),
        ({"gpu_hours": 2.0}, "budget: 2.5 GPU-hours of 2"),
        ({"energy_kwh": 0.5}, "budget: 0.7 kWh of 0.5"),
        ({"usd": 10.0}, "budget: 10 USD of 10"),
        ({"trials": 4, "gpu_hours": 3.0, "energy_kwh": 1.0, "usd": 11.0}, ""),
    ],
)
def test_each_budget_has_its_reason(fields: dict[str, float], reason: str) -> None:
    assert used_up(Budget(**fields), Spent(3, 2.5, 0.7, 10.0)) == reason


RUN = Spent(trials=0, gpu_hours=2.0, energy_kwh=5.0, usd=None)


def test_what_is_set_aside_is_at_most_a_share() -> None:
    left = less(Budget(trials=7, gpu_hours=30.0, usd=90.0), Spent(3, 100.0, None, 12.0), 1 / 3)
    assert (left.trials, left.gpu_hours, left.energy_kwh, left.usd) == (7, pytest.approx(20.0), None, 78.0)


@pytest.mark.parametrize(
    ("fields", "runs"),
    [({"gpu_hours": 9.0}, 4.5), ({"gpu_hours": 9.0, "energy_kwh": 16.0}, 3.2), ({"usd": 1.0}, math.inf), ({"trials": 3}, math.inf)],
)
def test_how_many_runs_a_budget_pays_for(fields: dict[str, float], runs: float) -> None:
    assert runs_paid(Budget(**fields), RUN) == pytest.approx(runs)


def test_costs_in_words_name_what_is_known() -> None:
    assert RUN.times(600).words() == "1,200 GPU-hours, 3,000 kWh"


def test_what_is_kept_for_confirming_is_told() -> None:
    budget, exploring = Budget(gpu_hours=4.0), Budget(gpu_hours=2.0)
    assert used_up(budget, Spent(3, 2.5, 0.7, 10.0), exploring) == "budget: 2.5 GPU-hours of 4, the rest is for confirming"
    assert used_up(budget, Spent(3, 4.5, 0.7, 10.0), exploring) == "budget: 4.5 GPU-hours of 4"
    assert used_up(budget, Spent(3, 1.5, 0.7, 10.0), exploring) == ""
