"""Every sampler walks the whole table without a repeat, whatever fails, and the same seed walks the same way."""

import warnings
from typing import get_args

import numpy as np
import optuna
import pytest
from optuna.trial import TrialState

from autotune.candidates import Candidates, candidate_table
from autotune.sampler import candidate_sampler, inner_sampler
from autotune.spec import SamplerName
from launchers.outcome import Outcome

from .study_cases import FAULTS, completed, failed, mixed, open_pool, optuna_study, run_to_end, step_seconds, study_spec

SAMPLERS = get_args(SamplerName)
# 24 candidates for the Gaussian process, whose every proposal is a fit; 300 for those that are cheap.
SPACE_24 = {"tensor_model_parallel_size": [1, 2, 4], "micro_batch_size": [1, 2, 4, 8], "use_distributed_optimizer": [False, True]}
SPACE_300 = {
    "tensor_model_parallel_size": [1, 2, 4],
    "pipeline_model_parallel_size": [1, 2, 4],
    "num_virtual_stages_per_pipeline_rank": ["none", 2],
    "micro_batch_size": [1, 2, 4, 8],
    "sequence_parallel": [False, True],
    "use_distributed_optimizer": [False, True],
    "overlap_grad_reduce": [False, True],
}


def walk(sampler, search, seed=0, share=0.5, concurrent=1):
    study = open_pool(study_spec(sampler=sampler, search=search, seed=seed))
    return study, run_to_end(study, mixed(seed, share), concurrent=concurrent)


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_D014_every_candidate_of_24_points_exactly_once(sampler):
    study, proposals = walk(sampler, SPACE_24)
    configs = [proposal.config for proposal in proposals]
    assert set(configs) == {study.table.config(row) for row in range(len(study.table))}
    assert len(configs) == len(set(configs)) == len(study.table) == 22
    assert study.end_reason == "all 22 legal candidates were tried"


SPACE_64 = {name: choices for name, choices in SPACE_300.items() if name not in ("overlap_grad_reduce", "sequence_parallel")}


@pytest.mark.parametrize(
    ("sampler", "search"), [("random", SPACE_300), ("grid", SPACE_300), ("tpe", SPACE_64), ("nsga2", SPACE_64)]
)
def test_a_large_space_is_exhausted_without_a_repeat_by_three_at_once(sampler, search):
    study, proposals = walk(sampler, search, concurrent=3)
    configs = [proposal.config for proposal in proposals]
    assert len(configs) == len(set(configs)) == len(study.table)
    assert len(study.table) == (196 if search is SPACE_300 else 66)
    asked = [record.config for record in study.records]
    assert len(asked) == len(set(asked))


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_ninety_percent_failing_is_told_and_never_proposed_again(sampler):
    study, proposals = walk(sampler, SPACE_24, seed=3, share=0.9)
    assert len({proposal.config for proposal in proposals}) == len(proposals) == 22
    kinds = {record.outcome for record in study.records}
    assert len(kinds & set(FAULTS)) >= 5
    assert study.best.outcome is Outcome.COMPLETED


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_every_single_trial_failing_raises_nothing(sampler):
    study = open_pool(study_spec(sampler=sampler, search=SPACE_24))
    proposals = run_to_end(study, lambda proposal: failed(FAULTS[proposal.trial.number % 6]))
    assert len(proposals) == 22
    assert study.best is None


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_same_seed_same_walk(sampler):
    first, second = ([p.config for p in walk(sampler, SPACE_24, seed=5)[1]] for _ in range(2))
    assert first == second


@pytest.mark.parametrize("sampler", ["tpe", "nsga2", "random"])
def test_another_seed_another_walk(sampler):
    first, second = ([p.config for p in walk(sampler, SPACE_24, seed=seed)[1]] for seed in (5, 6))
    assert first != second


def test_grid_walks_the_table_in_its_order():
    study, proposals = walk("grid", SPACE_24)
    order = [study.table.config(row) for row in range(len(study.table))]
    assert [proposal.config for proposal in proposals] == order


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_D017_baseline_outside_the_choices_runs_and_the_sampler_goes_on(sampler):
    spec = study_spec(sampler=sampler, search=SPACE_24, baseline={"micro_batch_size": 16, "tensor_model_parallel_size": 4})
    study = open_pool(spec)
    proposals = run_to_end(study, mixed(0, 0.3))
    assert proposals[0].config == spec.baseline
    assert proposals[0].trial.params == {}
    assert study.results().baseline.config == spec.baseline
    assert len(proposals) == 1 + len(study.table)


def test_tpe_finds_the_best_early():
    """TPE learns: it meets the best candidate within a third of the walk, as the median of three seeds."""
    found = []
    for seed in range(3):
        search = {key: SPACE_300[key] for key in list(SPACE_300)[:4]}
        study = open_pool(study_spec(sampler="tpe", search=search, seed=seed, baseline={"tensor_model_parallel_size": 4}))
        proposals = run_to_end(study, lambda proposal: completed(step_seconds(proposal.config)))
        costs = [step_seconds(proposal.config) for proposal in proposals]
        found.append(costs.index(min(costs)) / len(costs))
    assert np.median(found) < 1 / 3


def sampler_and_study(name, search):
    spec = study_spec(sampler=name, search=search)
    table = candidate_table(spec, spec.pools[0])
    candidates = Candidates(table, spec.baseline, np.ones(len(table), dtype=bool))
    sampler = candidate_sampler(spec, candidates)
    return candidates, optuna.create_study(sampler=sampler, direction="maximize")


@pytest.mark.parametrize("name", SAMPLERS)
def test_D042_200_asks_with_8_running_never_raise(name):
    asks = 30 if name == "gp" else 200  # every proposal of a Gaussian process is a fit
    candidates, study = sampler_and_study(name, {**SPACE_300, "micro_batch_size": [1, 2, 4, 8, 16]})
    running, seen = [], []
    for number in range(asks):
        trial = study.ask()
        for knob, distribution in candidates.distributions.items():
            trial.suggest_int(knob, 0, distribution.high)
        config = candidates.config(trial.params)
        candidates.mark_seen(config)
        seen.append(config)
        running.append(trial)
        if len(running) > 8:
            ended = running.pop(0)
            ended.set_constraint("infeasible", 1.0 if number % 3 else -1.0)
            study.tell(ended, float(number % 7))
    assert len(set(seen)) == asks
    assert sum(trial.state is TrialState.RUNNING for trial in study.trials) == 8


@pytest.mark.parametrize("name", SAMPLERS)
def test_lost_trials_and_mixed_constraints_do_not_disturb(name):
    """FAIL trials without value or constraint, and a trial of an older version without the constraint, lie beside the others."""
    study = open_pool(study_spec(sampler=name, search=SPACE_24))
    outcomes = iter([Outcome.LOST, Outcome.OOM, Outcome.LOST, Outcome.NAN] * 100)
    proposals = run_to_end(study, lambda proposal: completed() if proposal.trial.number % 2 else failed(next(outcomes)))
    assert {p.config for p in proposals} == {study.table.config(row) for row in range(len(study.table))}
    assert study.end_reason == "all 22 legal candidates were tried"


def test_a_choice_of_lists_is_an_index_too():
    search = {"recompute": ["none", "selective:core_attn,mlp", "full"], "micro_batch_size": [1, 2]}
    study, proposals = walk("tpe", search)
    assert {proposal.config.recompute_modules for proposal in proposals} == {None, ("core_attn", "mlp")}
    assert all(isinstance(value, int) for trial in optuna_study(study).trials for value in trial.params.values())


def test_D019_nothing_deprecated_or_experimental_is_said():
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        walk("nsga2", SPACE_24)


def test_grid_has_no_sampler_behind_it():
    candidates, _ = sampler_and_study("grid", SPACE_24)
    assert inner_sampler(study_spec(sampler="grid"), candidates, lambda: None) is None
