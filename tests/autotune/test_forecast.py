"""How many trials the rest of each budget pays for, what they cost, and where a forecast is shown."""

from __future__ import annotations

import io
import math
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import pytest
from optuna.storages import InMemoryStorage
from rich.console import Console

from autotune.forecast import Forecast, Gain, forecast_of, lasting
from autotune.gains import Gains
from autotune.ledger import Ledger
from autotune.parent_run import ParentOf
from autotune.records import Phase, TrialRecord
from autotune.report import final_report, results_json
from autotune.spec_parts import Budget
from launchers.outcome import Outcome
from search_spaces.config import TrialConfig
from search_spaces.hardware import PoolSpec

from .study_cases import PROMISED, completed, open_pool, optuna_study, study_spec
from .test_residual_sampler import answer, gpu_study

POOL = PoolSpec(name="p", nodes=2, gpus_per_node=4, usd_per_gpu_hour=3.0)
MANY = 10_000


def record(number: int, started_s: float, took_s: float, outcome: Outcome = Outcome.COMPLETED, **fields: Any) -> TrialRecord:
    metrics = {"pool_gpu_energy_j": took_s * 4000.0, "tokens_per_s_per_gpu": 1.0} if outcome is Outcome.COMPLETED else {}
    fields = {"phase": Phase.EXPLORE, "metrics": metrics, **fields}
    times = {"started_s": started_s, "ended_s": started_s + took_s}
    return TrialRecord("s", number, config=TrialConfig(), argv=(), outcome=outcome, **times, **fields)


# Half an hour, 4 GPU-hours, 2 kWh and 12 USD in the median; one ran twice as long, one out of memory at once.
RECORDS = (
    record(0, 0.0, 3600.0, phase=Phase.BASELINE),
    record(1, 3600.0, 1800.0),
    record(2, 5400.0, 1800.0),
    record(3, 7200.0, 0.0, Outcome.OOM),
    record(4, 7200.0, 1800.0),
)


def forecast(
    records: tuple[TrialRecord, ...] = RECORDS, left_s: float | None = None, running: int = 0, untried: int = MANY, **budget: float
) -> Forecast:
    ledger = Ledger(study_spec(), POOL, records)
    return forecast_of(Budget(**{"trials": 1000, **budget}), ledger, left_s, running, untried, None)


@pytest.mark.parametrize(
    ("asked", "trials", "limited_by"),
    [
        ({"trials": 12}, 7, "trials"),
        ({"trials": 12, "running": 2}, 5, "trials"),
        ({"gpu_hours": 40.0}, 5, "GPU-hours"),  # 20 of them were spent
        ({"gpu_hours": 41.0}, 6, "GPU-hours"),  # a trial begins while anything is left
        ({"gpu_hours": 40.0, "running": 1}, 4, "GPU-hours"),
        ({"energy_kwh": 16.0}, 3, "kWh"),  # of 10 spent
        ({"usd": 72.0}, 1, "USD"),  # of 60 spent
        ({"left_s": 3600.0}, 2, "wall time"),
        ({"left_s": 3601.0}, 3, "wall time"),
        ({"left_s": -5.0}, 1, "wall time"),  # it was launched
        ({"untried": 8}, 9, "candidates"),
        ({"trials": 12, "gpu_hours": 40.0, "usd": 96.0, "left_s": 9000.0, "untried": 9}, 3, "USD"),
    ],
)
def test_each_budget_pays_for_so_many_trials_and_the_tightest_decides(asked: dict[str, Any], trials: int, limited_by: str) -> None:
    found = forecast(**asked)
    assert (found.trials, found.limited_by) == (trials, limited_by)


def test_what_they_cost_is_told_of_the_budgets_that_are_set() -> None:
    found = forecast(gpu_hours=40.0, energy_kwh=100.0)
    assert (found.wall_s, found.gpu_hours, found.energy_kwh, found.usd) == pytest.approx((5 * 1800.0, 20.0, 10.0, None))
    assert found.words() == "about 5 trials (limited by GPU-hours): 2.5 h, 20 GPU-hours, 10 kWh"
    assert (forecast(trials=8, usd=1000.0).usd, forecast().gpu_hours) == (pytest.approx(36.0), None)


def test_before_a_trial_completed_only_their_number_is_known() -> None:
    found = forecast((RECORDS[3],), left_s=1.0, trials=12, gpu_hours=1.0, usd=1.0)
    assert found == Forecast(11, "trials", None, None, None, None, None)
    assert found.words() == "about 11 trials (limited by trials)"


def test_confirming_runs_say_nothing_of_what_an_exploring_one_costs() -> None:
    confirming = tuple(record(5 + number, 9000.0 + number, 9000.0, phase=Phase.CONFIRM) for number in range(9))
    assert forecast((*RECORDS, *confirming)).wall_s == forecast().wall_s


def test_where_two_run_at_once_twice_as_many_fit_into_the_time() -> None:
    pairs = tuple(record(number, 1800.0 * (number // 2), 1800.0) for number in range(8))
    assert forecast(pairs, left_s=3600.0, running=1).trials == 4
    assert forecast(pairs[:2], left_s=3600.0, running=1).trials == 4


def test_a_study_that_waits_for_its_turn_needs_the_time_of_the_others_too() -> None:
    turns = tuple(record(number, 5400.0 * number, 1800.0) for number in range(5))
    assert forecast(turns, left_s=10_800.0).trials == 2


def test_the_gain_is_that_of_as_many_trials_as_are_paid_for_and_of_all_that_were_looked_at_beyond() -> None:
    gains = Gains(np.log([1.1, 1.2, 1.3]), np.zeros(3), np.log([1.2, 1.3, 1.4]))

    def gain(trials: int) -> Gain | None:
        ledger, budget = Ledger(study_spec(), POOL, RECORDS), Budget(trials=5 + trials)
        return forecast_of(budget, ledger, None, 0, MANY, replace(PROMISED, gains=gains)).gain

    assert asdict(gain(2)) == pytest.approx({"following": 0.02, "chance": 0.4, "expected": 0.2, "low": 0.0, "high": 0.3})
    assert gain(9) == gain(3) and gain(3).high == pytest.approx(0.4)


@pytest.mark.parametrize(("seconds", "words"), [(89.0, "89 s"), (90.0, "2 min"), (5399.0, "90 min"), (5400.0, "1.5 h")])
def test_durations_are_short(seconds: float, words: str) -> None:
    assert lasting(seconds) == words


def shown(results: list[Any]) -> str:
    console = Console(file=io.StringIO(), record=True, width=300)
    console.print(final_report(results, 2))
    return console.export_text()


def test_while_a_study_explores_its_results_hold_what_was_forecast_at_the_last_launch() -> None:
    study = gpu_study(budget={"trials": 12, "confidence": None})
    proposals = []
    for _ in range(4):
        proposals.append(study.propose())
        study.finish(proposals[-1], answer(study)(proposals[-1]))
    running = study.propose()
    forecast = study.results().forecast
    assert forecast == running.forecast and forecast.trials == 8
    assert 0.0 <= forecast.gain.low <= forecast.gain.expected <= forecast.gain.high < math.inf
    assert proposals[1].forecast.gain.expected > forecast.gain.expected
    optuna_study(study).ask()  # the next one, of which nothing is known yet
    assert f"Remaining budget: {forecast.words()}." in shown([study.results()])
    assert results_json([study.results()])[0]["forecast"] == asdict(forecast)


def test_a_study_without_a_model_tells_the_number_of_trials_and_their_cost() -> None:
    study = open_pool(study_spec(sampler="grid", budget={"trials": 9, "gpu_hours": 1e9}))
    study.finish(study.propose(), completed())
    forecast = study.propose().forecast
    assert (forecast.trials, forecast.gain) == (8, None)
    assert forecast.gpu_hours is not None and "gain" not in forecast.words()


@pytest.mark.parametrize("confirming", [False, True])
def test_once_a_study_explores_no_more_nothing_is_forecast(confirming: bool) -> None:
    study = open_pool(study_spec(budget={"trials": 2}, confirm={"top": int(confirming)}))
    for _ in range(2):
        study.finish(study.propose(), completed())
    assert study.results().forecast is not None
    proposal = study.propose()
    assert (proposal is not None) == confirming
    if proposal is None:
        study.close()
    assert study.results().forecast is None
    assert "Remaining" not in shown([study.results()])


def test_a_study_that_goes_on_with_a_larger_budget_has_not_ended() -> None:
    storage = InMemoryStorage()
    study = open_pool(study_spec(budget={"trials": 1}), storage)
    study.finish(study.propose(), completed())
    assert study.propose() is None
    study.close()
    assert study.results().end_reason
    again = open_pool(study_spec(budget={"trials": 3}), storage)
    again.propose()
    assert again.results().end_reason == ""
    assert again.results().forecast.trials == 2


def test_the_parent_run_is_tagged_while_the_study_explores() -> None:
    told: list[str] = []

    class FakeTracker:
        def open_parent(self, parent: Any) -> str:
            return "run"

        def rebuild(self, records: Any) -> int:
            return 0

        def tag_parent(self, run_id: str, tags: Any) -> None:
            told.append(tags["forecast"])

        def close_parent(self, run_id: str, status: str, metrics: Any, tags: Any) -> None:
            told.append(tags["forecast"])

    spec = study_spec(budget={"trials": 2})
    study = open_pool(spec)
    parent = ParentOf(FakeTracker(), spec, study)  # type: ignore[arg-type]
    parent.open()
    proposal = study.propose()
    parent.foretell(proposal.forecast)
    parent.foretell(None)
    parent.close()
    assert told == ["about 2 trials (limited by trials)", "", ""]
