"""A study explores within its budget, confirms the best, and answers within its limits or says why it cannot."""

from __future__ import annotations

import io
import time
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from optuna.storages import InMemoryStorage
from rich.console import Console

from autotune.pool_study import PoolStudy
from autotune.proposal import Proposal
from autotune.records import Phase, TrialResult
from autotune.report import final_report, remark
from autotune.settling import Settled
from launchers.outcome import Outcome
from tests.autotune.study_cases import (
    SMALL_SEARCH,
    completed,
    failed,
    open_pool,
    record,
    run_to_end,
    step_seconds,
    steps_of,
    study_spec,
)

CONFIRM: dict[str, Any] = {"confirm": {"top": 2, "repeats": 3}, "budget": {"trials": 12}}


def measured(proposal: Proposal) -> TrialResult:
    return completed(step_seconds(proposal.config))


def text(study: PoolStudy) -> str:
    console = Console(width=400, file=io.StringIO())
    console.print(final_report([study.results()], 2))
    return console.file.getvalue()  # type: ignore[attr-defined,no-any-return]


def test_exploring_is_followed_by_confirming_and_ends_with_its_own_reason() -> None:
    study = open_pool(study_spec(**CONFIRM))
    proposals = run_to_end(study, measured)
    phases = Counter(proposal.phase for proposal in proposals)
    assert study.launched == phases[Phase.BASELINE] + phases[Phase.EXPLORE] == 12
    runs = Counter(proposal.config for proposal in proposals if proposal.phase is Phase.CONFIRM)
    assert set(runs.values()) == {3} and len(runs) >= 2
    assert study.end_reason == "budget: 12 trials"
    assert study.best is not None and study.best.phase is Phase.CONFIRM
    assert study.results().best == study.best
    assert "runs in turns" in text(study)


def test_where_nothing_but_the_baseline_was_confirmed_beside_the_winner_it_is_no_next_best() -> None:
    study = open_pool(study_spec(confirm={"top": 1, "repeats": 2}, budget={"trials": 4}))
    run_to_end(study, measured)
    assert study.results().decision.runner_up.config == study.results().baseline.config  # type: ignore[union-attr]
    assert "times as fast as the baseline" in text(study) and "next best" not in text(study)


def test_a_confirming_run_is_called_so_among_the_trials() -> None:
    study = open_pool(study_spec(**CONFIRM))
    run_to_end(study, measured)
    assert all((remark(ended) == "confirming run") == (ended.phase is Phase.CONFIRM) for ended in study.records)


def test_the_winner_is_one_of_the_confirmed_although_another_explored_better() -> None:
    study = open_pool(study_spec(**CONFIRM))
    lucky: list[Proposal] = []

    def flattered(proposal: Proposal) -> TrialResult:
        if proposal.phase is Phase.EXPLORE and not lucky:
            lucky.append(proposal)
        luck = 0.01 if lucky and proposal.config == lucky[0].config and proposal.phase is Phase.EXPLORE else 1.0
        worse = 3.0 if lucky and proposal.config == lucky[0].config else 1.0
        return completed(luck * worse * step_seconds(proposal.config))

    run_to_end(study, flattered)
    assert study.best is not None and study.best.config != lucky[0].config
    assert max(study.records, key=lambda ended: ended.value or 0.0).config == lucky[0].config


def test_nothing_within_the_limits_is_said_with_the_nearest_and_by_how_much() -> None:
    study = open_pool(study_spec(limits={"step_time_s": {"max": 1e-4}}, **CONFIRM))
    run_to_end(study, measured)
    assert study.best is None
    nearest = study.results().nearest
    assert nearest is not None
    fastest = min(ended.metrics["step_time_s"] for ended in study.records if ended.metrics)
    assert nearest.metrics["step_time_s"] == fastest
    assert "No configuration keeps the limits" in text(study) and "beyond its limit (at most 0.0001)" in text(study)
    assert not any(ended.phase is Phase.CONFIRM for ended in study.records if ended.config != nearest.config and ended.violations)


def test_a_trial_over_a_limit_is_completed_infeasible_and_never_best() -> None:
    bound = sorted(step_seconds(row) for row in _rows())[len(_rows()) // 2]
    study = open_pool(study_spec(limits={"step_time_s": {"min": bound}}, **{**CONFIRM, "budget": {"trials": 36}}))
    run_to_end(study, measured)
    over = [ended for ended in study.records if ended.violations and ended.outcome is Outcome.COMPLETED]
    assert over and all(violation.name == "limit_step_time_s" for ended in over for violation in ended.violations)
    assert study.best is not None and study.best.metrics["step_time_s"] >= bound


def _rows() -> list[Any]:
    table = open_pool(study_spec()).table
    return [table.config(row) for row in range(len(table))]


def test_a_limit_that_nothing_here_measures_ends_the_study_after_the_baseline() -> None:
    study = open_pool(study_spec(limits={"gpu_peak_power_w_1s": {"max": 700.0}}, **CONFIRM))
    assert len(run_to_end(study, measured)) == 1
    assert study.end_reason == "limits: gpu_peak_power_w_1s cannot be measured on pool laptop"


def test_a_term_that_nothing_here_measures_is_named_beside_the_answer() -> None:
    terms = {"tokens_per_s_per_gpu": 1.0, "joules_per_token": -1.0, "step_time_cv": 0.0}
    study = open_pool(study_spec(objective=terms, **CONFIRM))
    assert study.notes == [], "nothing is known before the first trial"
    run_to_end(study, measured)
    note = "objective: without joules_per_token, which cannot be measured on pool laptop."
    assert study.results().notes == (note,)
    assert note in text(study)


def test_where_no_term_is_measured_the_study_ends_after_the_baseline() -> None:
    study = open_pool(study_spec(objective={"joules_per_token": -1.0, "gpu_mean_power_w": -1.0}, **CONFIRM))
    assert len(run_to_end(study, measured)) == 1
    why = "objective: joules_per_token, gpu_mean_power_w cannot be measured on pool laptop, and nothing else counts"
    assert study.end_reason == why
    assert study.results().notes == ()


def test_a_budget_of_energy_that_no_trial_tells_is_named() -> None:
    pool = {"name": "laptop", "gpu": "cpu", "gpus_per_node": 4, "telemetry": {"vendors": ["nvidia"]}}
    study = open_pool(study_spec(budget={"trials": 2, "energy_kwh": 1.0}, objective={"tokens_per_s_per_gpu": 1.0}, pools=[pool]))
    run_to_end(study, measured)
    assert study.results().notes == ("budget: energy_kwh is not kept, because no trial on pool laptop could tell its energy.",)


@pytest.mark.parametrize("stop_after", [12, 13, 16])
def test_a_resumed_study_confirms_only_what_is_missing(stop_after: int) -> None:
    storage = InMemoryStorage()
    spec = study_spec(**CONFIRM)
    first = open_pool(spec, storage)
    for _ in range(stop_after):
        proposal = first.propose()
        assert proposal is not None
        first.finish(proposal, measured(proposal))
    second = open_pool(spec, storage)
    run_to_end(second, measured)
    runs = Counter(ended.config for ended in second.records if ended.phase is Phase.CONFIRM)
    assert set(runs.values()) == {3}
    assert second.launched == 12


def test_one_that_fails_when_confirmed_gives_its_place_to_the_next() -> None:
    study = open_pool(study_spec(**CONFIRM))
    dropped: list[Any] = []

    def brittle(proposal: Proposal) -> TrialResult:
        if proposal.phase is Phase.CONFIRM and (not dropped or proposal.config == dropped[0]):
            dropped[:] = [proposal.config]
            return failed(Outcome.OOM)
        return measured(proposal)

    run_to_end(study, brittle)
    assert study.best is not None and study.best.config != dropped[0]
    runs = Counter(ended.config for ended in study.records if ended.phase is Phase.CONFIRM and ended.outcome is Outcome.COMPLETED)
    assert len(runs) >= 2 and runs[dropped[0]] == 0
    assert record(study, 0).phase is Phase.BASELINE


def test_a_confirming_run_that_is_lost_again_and_again_is_given_up_not_repeated_forever() -> None:
    study = open_pool(study_spec(**CONFIRM))
    unlucky: list[Any] = []

    def lost(proposal: Proposal) -> TrialResult:
        if proposal.phase is Phase.CONFIRM and (not unlucky or proposal.config == unlucky[0]):
            unlucky[:] = [proposal.config]
            return TrialResult(Outcome.LOST, "the node went away")
        return measured(proposal)

    proposals = run_to_end(study, lost)
    assert sum(proposal.config == unlucky[0] and proposal.phase is Phase.CONFIRM for proposal in proposals) == 3
    assert study.end_reason.startswith(("budget", "infrastructure"))


def test_exploring_ends_early_enough_for_confirming_within_the_wall_time() -> None:
    study = open_pool(study_spec(**CONFIRM))
    for _ in range(4):
        proposal = study.propose()
        assert proposal is not None
        proposal = replace(proposal, proposed_s=proposal.proposed_s - 10.0)
        study.finish(proposal, measured(proposal))
    # Three contenders three times each, about as long as the 10 s that a trial takes; at most a third is kept for them.
    study.stopping.deadline_s = time.time() + 190.0
    following = study.propose()
    assert following is not None and following.phase is Phase.EXPLORE
    study.finish(following, measured(following))
    study.stopping.deadline_s = time.time() + 0.95 * study._ledger.confirming_s()
    study.stopping._opened_s = study.stopping.deadline_s - 600.0
    following = study.propose()
    assert following is not None and following.phase is Phase.CONFIRM


def test_what_explains_the_winner_is_kept_with_the_study_and_shown() -> None:
    study = open_pool(study_spec(limits={"step_time_s": {"max": 10.0}}, confirm={"top": 0}, budget={"trials": 20}))
    run_to_end(study, measured)
    assert study.results().explanation == ()
    study.close()
    told = study.results().explanation
    assert any(line.startswith("What mattered") and "tensor_model_parallel_size" in line for line in told)
    assert any(line.startswith("One step from the winner") for line in told)
    assert any(line.startswith("Room left to each limit, as a share of it: step_time_s") for line in told)
    assert all(line in text(study) for line in told)


def test_runs_that_were_measured_before_their_gpus_were_warm_are_named() -> None:
    why = "not settled within 600 s: 2.00 C/min over 60 s"

    def drifting(proposal: Proposal) -> TrialResult:
        return replace(measured(proposal), settled=Settled(2, why) if proposal.phase is Phase.CONFIRM else None)

    study = open_pool(study_spec(**CONFIRM))
    run_to_end(study, drifting)
    runs = [ended for ended in study.records if ended.phase is Phase.CONFIRM]
    told = f"{len(runs)} confirming runs were measured before their GPUs were warm; trial {runs[-1].number}: temperatures {why}."
    assert told in text(study)
    run_to_end(still := open_pool(study_spec(**CONFIRM)), measured)
    assert "warm" not in text(still)


def test_one_run_before_its_gpus_were_warm_is_one_and_a_lost_one_was_never_measured() -> None:
    why = "not settled within 600 s: 2.00 C/min over 60 s"
    seen: list[Proposal] = []

    def drifting_once_and_lost_once(proposal: Proposal) -> TrialResult:
        seen.extend([proposal] if proposal.phase is Phase.CONFIRM else [])
        result = replace(measured(proposal), settled=Settled(2, why) if seen[:1] == [proposal] or seen[1:2] == [proposal] else None)
        return replace(result, outcome=Outcome.LOST, detail="killed") if seen[1:2] == [proposal] else result

    study = open_pool(study_spec(**CONFIRM))
    run_to_end(study, drifting_once_and_lost_once)
    lost = [ended for ended in study.records if ended.outcome is Outcome.LOST]
    assert [ended.number for ended in lost] == [seen[1].trial.number]
    first = seen[0].trial.number
    assert f"1 confirming run was measured before its GPUs were warm; trial {first}: temperatures {why}." in text(study)


def paying(confirm_step_s: float = 1.0, **budget: float) -> tuple[PoolStudy, list[Proposal]]:
    """Four ranks that cost 1 USD a second; 50 s of start-up, then 8 steps of a second, or 62 for confirming."""
    pool = {"name": "laptop", "gpu": "cpu", "gpus_per_node": 4, "usd_per_gpu_hour": 900.0}
    fields = {
        "search": {**SMALL_SEARCH, "recompute": ["none", "selective", "full"]},
        "confirm": {"top": 2, "repeats": 3, "steps": 62},
    }
    study = open_pool(study_spec(pools=[pool], budget={"trials": 1000, "confidence": None, **budget}, **fields))
    study.stopping.follow(lambda: sum(record.took_s for record in study.records), budget.get("wall_time_s"))

    def cost(proposal: Proposal) -> TrialResult:
        confirming = proposal.phase is Phase.CONFIRM
        step_s = confirm_step_s if confirming else 1.0
        steps = tuple(replace(step, step_s=step_s) for step in steps_of(step_s, 62 if confirming else 8))
        return TrialResult(Outcome.COMPLETED, "", steps, virtual_s=50.0 + step_s * len(steps))

    return study, run_to_end(study, cost)


@pytest.mark.parametrize(
    ("name", "budget", "explored", "confirmed"),
    [("usd", 3300.0, 40, 3), ("usd", 2400.0, 30, 2), ("usd", 600.0, 11, 0), ("gpu_hours", 2400.0 / 900.0, 30, 2)],
)
def test_what_confirming_costs_is_kept_for_it(name: str, budget: float, explored: int, confirmed: int) -> None:
    """A trial takes 58 s, a confirming run 112; three each of three configurations 1,008, of two 672, and a third may go there."""
    study, proposals = paying(**{name: budget})
    runs = Counter(proposal.config for proposal in proposals if proposal.phase is Phase.CONFIRM)
    assert (study.launched, list(runs.values())) == (explored, [3] * confirmed)
    spent, run = study.results().spent, 112.0 / (3600.0 / 4 if name == "gpu_hours" else 1.0)
    assert getattr(spent, name) < budget + run, "the last one may begin while anything is left"
    assert study.end_reason.startswith("budget: ") and ("the rest is for confirming" in study.end_reason) is (confirmed > 0)
    assert f"Spent: {spent.words()}." in text(study)


def test_confirming_ends_where_money_does() -> None:
    """14 trials of 58 USD leave 668: six runs of 112 are begun, and four of 174, which is what they turn out to take."""
    for step_s, runs in ((1.0, 6), (2.0, 4)):
        study, proposals = paying(confirm_step_s=step_s, trials=14, usd=1480.0)
        assert Counter(proposal.phase for proposal in proposals)[Phase.CONFIRM] == runs
        assert study.end_reason == "budget: 14 trials" and study.best is not None


@pytest.mark.parametrize(("wall_s", "explored", "confirmed"), [(3300.0, 40, 3), (2400.0, 28, 2), (600.0, 11, 0)])
def test_wall_time_is_kept_for_confirming_what_it_is_enough_for(wall_s: float, explored: int, confirmed: int) -> None:
    """As with money; of 600 s a third is too little for one configuration and the baseline, so none of it is kept."""
    study, proposals = paying(wall_time_s=wall_s)
    runs = Counter(proposal.config for proposal in proposals if proposal.phase is Phase.CONFIRM)
    assert (study.launched, list(runs.values())) == (explored, [3] * confirmed)
    assert sum(record.took_s for record in study.records) < wall_s + 112.0


def test_where_confirming_is_cut_short_the_baseline_does_not_win_for_having_run_more_often() -> None:
    """Of four runs three are made: both of the baseline's, and one of a configuration ten times as fast."""
    study = open_pool(study_spec(confirm={"top": 1, "repeats": 2}, budget={"trials": 4}))
    for _ in range(4 + 3):
        proposal = study.propose()
        assert proposal is not None
        baseline = proposal.config == study.baseline
        study.finish(proposal, completed(1.0 if baseline else 0.1 + 0.05 * proposal.trial.number))
    assert sorted(Counter(r.config for r in study.records if r.phase is Phase.CONFIRM).values()) == [1, 2]
    assert study.best is not None and study.best.config != study.baseline
