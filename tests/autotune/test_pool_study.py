"""One pool's study: what is proposed, how every end is told, what counts, and what a reopened study remembers."""

import math

import optuna
import pytest
from optuna.storages import InMemoryStorage
from optuna.trial import TrialState

from autotune.attempts import MOST_ATTEMPTS
from autotune.errors import SpecError
from autotune.pool_study import MAX_REFUSALS_IN_A_ROW, STOPPED_BY_USER
from autotune.records import Phase, TrialResult, record_from_trial
from launchers.outcome import Outcome
from search_spaces.legality import Violation

from .study_cases import (
    FAULTS,
    STEP_LIMITED,
    NoLauncher,
    completed,
    failed,
    open_pool,
    optuna_study,
    run_to_end,
    step_seconds,
    steps_of,
    study_spec,
)

TP = "tensor_model_parallel_size"
CONSTRAINT = "infeasible"


def told(study, number):
    return optuna_study(study).trials[number]


def run(study, result):
    return study.finish(study.propose(), result)


def test_the_baseline_runs_first_and_once_even_with_two_trials_at_a_time():
    study = open_pool(study_spec())
    first, second = study.propose(), study.propose()
    assert (first.phase, second.phase) == (Phase.BASELINE, Phase.EXPLORE)
    assert first.config == study_spec().baseline
    assert second.config != first.config


@pytest.mark.parametrize("outcome", FAULTS)
def test_a_fault_is_told_complete_with_the_worst_value_and_a_broken_constraint(outcome):
    study = open_pool(study_spec())
    values = [run(study, completed(seconds)).value for seconds in (0.1, 0.4, 0.2)]
    record = run(study, failed(outcome))
    trial = told(study, record.number)
    assert trial.state is TrialState.COMPLETE
    assert trial.value == record.value == min(values)
    assert trial.constraints == {CONSTRAINT: 1.0}
    assert study.best.number == 0
    assert record.outcome is outcome


def test_a_fault_before_any_measurement_is_told_a_finite_value_and_is_never_best():
    study = open_pool(study_spec())
    record = run(study, failed(Outcome.OOM))
    assert told(study, record.number).value == 0.0
    assert study.best is None
    better = run(study, completed(1e6))
    assert study.best.number == better.number


def test_the_two_steps_before_an_oom_are_no_measurement_but_are_kept():
    study = open_pool(study_spec())
    run(study, completed(0.5))
    record = run(study, failed(Outcome.OOM))
    assert len(record.steps) == 2
    assert record.value == study.best.value
    assert study.best.number == 0


def test_a_measurement_is_told_as_its_score_relative_to_the_baseline():
    study = open_pool(study_spec())
    assert run(study, completed(0.1)).value == 0.0
    assert run(study, completed(0.05)).value == pytest.approx(math.log(2))
    assert told(study, 0).constraints == {CONSTRAINT: -1.0}


def test_all_constraints_have_one_name_and_finite_values():
    def odd(config):
        return config.micro_batch_size == 2

    class Endless(NoLauncher):
        def refusals(self, workload, config):
            return [Violation(STEP_LIMITED, math.inf, "far too much")] if odd(config) else []

    study = open_pool(study_spec(baseline={"micro_batch_size": 2}), launcher=Endless())
    run_to_end(study, lambda proposal: completed())
    assert study.records[0].outcome is Outcome.REFUSED
    for trial in optuna_study(study).trials:
        assert list(trial.constraints) == [CONSTRAINT]
        assert math.isfinite(trial.constraints[CONSTRAINT])


def test_an_illegal_baseline_is_a_refused_trial_with_its_reasons_and_counts_against_nothing():
    study = open_pool(study_spec(baseline={TP: 3}, budget={"trials": 2}))
    proposal = study.propose()
    refused = study.records[0]
    assert (refused.outcome, refused.phase, refused.config.tensor_model_parallel_size) == (Outcome.REFUSED, Phase.BASELINE, 3)
    assert refused.violations
    assert refused.detail == "; ".join(violation.message for violation in refused.violations)
    assert told(study, 0).state is TrialState.COMPLETE
    assert told(study, 0).constraints[CONSTRAINT] >= 1.0
    assert proposal.phase is Phase.EXPLORE
    assert study.launched == 0


def test_refusals_count_against_no_budget():
    study = open_pool(study_spec(budget={"trials": 20}))
    proposals = run_to_end(study, lambda proposal: completed())
    assert len(proposals) == study.launched == 20
    assert sum(record.outcome is Outcome.REFUSED for record in study.records) > 0
    assert study.end_reason == "budget: 20 trials"


def test_a_budget_is_not_overrun_by_trials_that_run_at_once():
    study = open_pool(study_spec(budget={"trials": 3}))
    running = [study.propose() for _ in range(3)]
    assert study.propose() is None
    assert study.end_reason == ""
    study.finish(running[0], failed(Outcome.LOST))
    assert study.propose().config == running[0].config


# 192 points, of which the launcher runs only the last few.
MOSTLY_ILLEGAL = {
    TP: [1, 2, 4],
    "pipeline_model_parallel_size": [1, 2, 4],
    "micro_batch_size": list(range(1, 17)),
    "use_distributed_optimizer": [False, True],
}


def test_at_most_100_refusals_in_a_row_then_the_next_legal_candidate():
    study = open_pool(study_spec(search=MOSTLY_ILLEGAL), launcher=NoLauncher(lambda config: config.micro_batch_size != 1))
    proposals = run_to_end(study, lambda proposal: completed())
    assert {p.config.micro_batch_size for p in proposals} == {1}
    assert len(proposals) == study.candidates.table.index_matrix[:, 2].tolist().count(0)
    in_a_row = [0]
    for record in study.records:
        in_a_row.append(in_a_row[-1] + 1 if record.outcome is Outcome.REFUSED else 0)
    assert 3 < max(in_a_row) <= MAX_REFUSALS_IN_A_ROW


def test_the_hundredth_refusal_is_followed_by_a_legal_one(monkeypatch):
    monkeypatch.setattr("autotune.pool_study.MAX_REFUSALS_IN_A_ROW", 2)
    study = open_pool(study_spec(search=MOSTLY_ILLEGAL), launcher=NoLauncher(lambda config: config.micro_batch_size not in (1, 16)))
    run_to_end(study, lambda proposal: completed())
    kinds = "".join("r" if record.outcome is Outcome.REFUSED else "L" for record in study.records)
    assert "rrL" in kinds
    assert "rrr" not in kinds


def test_nothing_legal_ends_the_study_and_names_the_rule():
    study = open_pool(study_spec(), launcher=NoLauncher(lambda config: True))
    assert study.propose() is None
    assert study.end_reason.startswith("no legal candidate: ")
    assert f"{STEP_LIMITED} refused 46" in study.end_reason


def test_a_lost_trial_is_told_fail_and_launched_again_first():
    study = open_pool(study_spec())
    run(study, completed())
    lost = study.propose()
    record = study.finish(lost, failed(Outcome.LOST))
    assert (record.value, told(study, lost.trial.number).state) == (None, TrialState.FAIL)
    assert study.launched == 1
    again = study.propose()
    assert (again.config, again.phase) == (lost.config, lost.phase)


def test_a_candidate_is_launched_three_times_and_then_never():
    study = open_pool(study_spec(search={TP: [1, 2, 4]}))
    cursed = study.propose()
    attempts = [cursed.config]
    study.finish(cursed, failed(Outcome.LOST))
    for _ in range(10):
        proposal = study.propose()
        if proposal is None:
            break
        attempts.append(proposal.config)
        study.finish(proposal, failed(Outcome.LOST) if proposal.config == cursed.config else completed())
        study._attempts.lost_in_a_row = 0
    assert attempts.count(cursed.config) == MOST_ATTEMPTS == 3
    assert study.end_reason == "all 3 legal candidates were tried"


def test_attempts_outlive_the_driver():
    storage, spec = InMemoryStorage(), study_spec(search={TP: [1, 2, 4]})
    configs = []
    for _ in range(5):
        study = open_pool(spec, storage)
        proposal = study.propose()
        configs.append(proposal.config)
        if proposal.config != spec.baseline:
            break
        assert proposal.phase is Phase.BASELINE
        study.finish(proposal, failed(Outcome.LOST))
    assert configs.count(spec.baseline) == 3


def test_three_losses_in_a_row_end_the_study_with_the_last_reason():
    study = open_pool(study_spec())
    for _ in range(3):
        run(study, failed(Outcome.LOST))
    assert study.propose() is None
    assert study.end_reason == "infrastructure: 3 trials in a row were lost; the last: told to end as LOST"


def test_a_result_between_two_losses_begins_the_count_anew():
    study = open_pool(study_spec())
    for outcome in (Outcome.LOST, Outcome.LOST, Outcome.OOM, Outcome.LOST, Outcome.LOST):
        run(study, failed(outcome))
    assert study.end_reason == ""


def test_a_trial_stopped_by_its_user_is_lost_but_no_attempt():
    storage, spec = InMemoryStorage(), study_spec(search={TP: [1, 2, 4]})
    for _ in range(4):
        study = open_pool(spec, storage)
        stopped = study.propose()
        record = study.finish(stopped, failed(Outcome.STOPPED), stopped_by_user=True)
        assert (record.outcome, record.detail, stopped.config) == (Outcome.LOST, STOPPED_BY_USER, spec.baseline)
    assert study.launched == 0


def test_a_trial_that_completed_while_its_user_stopped_counts():
    study = open_pool(study_spec())
    record = study.finish(study.propose(), completed(), stopped_by_user=True)
    assert record.outcome is Outcome.COMPLETED


def test_a_reopened_study_goes_on_where_it_was():
    storage, spec = InMemoryStorage(), study_spec(search={TP: [1, 2, 4], "micro_batch_size": [1, 2, 4]}, baseline={TP: 4})
    first = open_pool(spec, storage)
    done = [run(first, completed(step_seconds(first._spec.baseline))).config for _ in range(4)]
    second = open_pool(spec, storage)
    assert [record.config for record in second.records] == [record.config for record in first.records]
    assert (second.launched, second.best.number) == (4, first.best.number)
    rest = run_to_end(second, lambda proposal: completed())
    assert not set(done) & {proposal.config for proposal in rest}
    assert all(proposal.phase is Phase.EXPLORE for proposal in rest)
    assert len(done) + len(rest) == len(second.table)


def test_a_reopened_study_tells_the_worst_value_that_it_knew():
    storage, spec = InMemoryStorage(), study_spec()
    worst = run(open_pool(spec, storage), completed(0.9)).value
    second = open_pool(spec, storage)
    run(second, completed(0.1))
    assert run(second, failed(Outcome.NAN)).value == worst


def test_the_record_in_the_storage_is_the_record_that_was_passed_on():
    heard = []
    study = open_pool(study_spec())
    study._on_record = lambda owner, record: heard.append((owner, record))
    record = run(study, completed())
    assert heard == [(study, record)]
    assert record_from_trial(told(study, 0)) == record
    assert record.argv == tuple(record.config.argv())


def test_end_reason_is_kept_beside_the_trials():
    storage, spec = InMemoryStorage(), study_spec(budget={"trials": 1})
    study = open_pool(spec, storage)
    run_to_end(study, lambda proposal: completed())
    study.close()
    assert open_pool(spec, storage).results().end_reason == "budget: 1 trials"


@pytest.mark.parametrize(
    ("changed", "what"),
    [
        ({"search": {TP: [1, 2]}}, "choices"),
        ({"global_batch_size": 32}, "workload"),
        ({"launcher": "other"}, "launcher"),
        ({"baseline": {"precision": "fp32"}}, "baseline"),
    ],
)
def test_a_study_over_something_else_is_refused(changed, what):
    storage = InMemoryStorage()
    run(open_pool(study_spec(), storage), completed())
    with pytest.raises(SpecError, match=f"another {what}"):
        open_pool(study_spec(**changed), storage)


def test_budget_sampler_and_seed_may_change():
    storage = InMemoryStorage()
    run(open_pool(study_spec(), storage), completed())
    study = open_pool(study_spec(sampler="tpe", seed=4, budget={"trials": 3}), storage)
    assert len(run_to_end(study, lambda proposal: completed())) == 2


def test_every_ended_trial_is_final_in_optuna():
    study = open_pool(study_spec())
    outcomes = [*FAULTS, Outcome.LOST, Outcome.COMPLETED]
    run_to_end(study, lambda proposal: failed(outcomes[proposal.trial.number % len(outcomes)]))
    assert all(trial.state.is_finished() for trial in optuna_study(study).trials)
    assert all(trial.state is not TrialState.PRUNED for trial in optuna_study(study).trials)


def test_two_pools_are_two_studies_in_one_storage():
    pools = [{"name": "a", "gpus_per_node": 2}, {"name": "b", "gpus_per_node": 4}]
    storage, spec = InMemoryStorage(), study_spec(pools=pools)
    for pool in range(2):
        run(open_pool(spec, storage, pool=pool), completed())
    assert sorted(optuna.get_all_study_names(storage)) == ["case/a/1x2", "case/b/1x4"]


def test_no_step_is_a_crash_even_where_the_ranks_ended_well():
    study = open_pool(study_spec())
    record = run(study, TrialResult(Outcome.COMPLETED, ""))
    assert (record.outcome, record.detail) == (Outcome.CRASHED, "all ranks ended without reporting a step")


def test_a_last_loss_that_is_not_finite_is_nan_even_where_the_ranks_ended_well():
    study = open_pool(study_spec())
    record = run(study, TrialResult(Outcome.COMPLETED, "", steps_of(0.1, loss=math.nan)))
    assert (record.outcome, record.detail) == (Outcome.NAN, "the loss of step 8 is nan")
