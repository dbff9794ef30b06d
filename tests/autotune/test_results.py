"""What a study has shown, read from the storage without changing it."""

from dataclasses import replace

import pytest
from optuna.storages import InMemoryStorage

from autotune.pool_study import PoolStudy
from autotune.results import read_results, run_spread_of, speedup, study_name
from autotune.run_spread import RunSpread
from autotune.state_folder import StateFolder
from autotune.storage import JOURNAL_NAME, open_storage
from launchers.outcome import Outcome

from .study_cases import NoLauncher, completed, failed, open_pool, study_spec

POOLS = [{"name": "a", "gpus_per_node": 2}, {"name": "b", "gpus_per_node": 4}]


def test_one_name_per_pool_and_node_count():
    spec = study_spec(pools=[{"name": "a", "nodes": 4, "gpus_per_node": 8}])
    assert study_name(spec, spec.pools[0]) == "case/a/4x8"


def test_reading_closes_no_trial_and_writes_nothing(tmp_path):
    spec, folder = study_spec(pools=POOLS, sampler="grid"), StateFolder(tmp_path)
    study = open_pool(spec, open_storage(None, tmp_path))
    study.finish(study.propose(), completed())
    study.propose()
    before = (tmp_path / JOURNAL_NAME).read_bytes()
    (found,) = read_results(spec, folder)
    assert (tmp_path / JOURNAL_NAME).read_bytes() == before
    assert (found.pool.name, found.running, len(found.records), found.end_reason) == ("a", 1, 1, "")
    assert found.best is not None
    assert found.best == found.baseline


def test_a_trial_whose_record_is_there_but_whose_end_is_not_still_runs(monkeypatch):
    study = open_pool(study_spec())
    proposal = study.propose()
    monkeypatch.setattr("autotune.pool_study.tell", lambda *args: None)
    study.finish(proposal, completed())
    found = study.results()
    assert (found.running, found.records, found.best) == (1, (), None)


def test_counts_by_outcome_and_rule():
    study = open_pool(study_spec(baseline={"tensor_model_parallel_size": 3}))
    for result in (failed(Outcome.OOM), failed(Outcome.OOM), completed()):
        study.finish(study.propose(), result)
    found = study.results()
    assert (found.outcomes[Outcome.OOM], found.outcomes[Outcome.COMPLETED]) == (2, 1)
    assert found.outcomes[Outcome.REFUSED] == sum(bool(record.violations) for record in found.records) >= 1
    assert sum(found.refusals.values()) >= found.outcomes[Outcome.REFUSED]
    assert found.baseline is None


def test_best_of_the_whole_job_is_over_all_ranks():
    study = open_pool(study_spec())
    study.finish(study.propose(), completed(0.1))
    found = study.results()
    assert found.best_tokens_per_s == pytest.approx(16 * 32 / 0.101)
    assert open_pool(study_spec()).results().best_tokens_per_s == 0.0


def test_speedup_by_hand_and_its_interval():
    study = open_pool(study_spec())
    slow = study.finish(study.propose(), completed(0.4))
    fast = study.finish(study.propose(), completed(0.1))
    ratio, low, high = speedup(fast, slow, 2, RunSpread(0.0, 100))
    assert ratio == pytest.approx(4.0)
    # The made-up steps differ by at most 2 %.
    assert 4.0 / 1.021 <= low <= ratio <= high <= 4.0 * 1.021
    assert speedup(fast, slow, 2, RunSpread(0.0, 100)) == (ratio, low, high)
    _, wider_low, wider_high = speedup(fast, slow, 2, RunSpread(0.05, 100))
    assert wider_low < low / 1.1
    assert wider_high > high * 1.1


def test_repeats_of_a_configuration_tell_the_spread_and_contaminated_ones_do_not_count():
    study = open_pool(study_spec())
    first = study.finish(study.propose(), completed(0.1))
    again = replace(first, metrics={**first.metrics, "step_time_s": first.metrics["step_time_s"] * 1.1})
    assert run_spread_of([first]) == RunSpread()
    assert run_spread_of([first, again]).repeats == 1
    assert run_spread_of([first, again]).relative > 2 * RunSpread().relative
    assert run_spread_of([first, replace(again, contaminated="somebody")]) == RunSpread()


def test_C013_after_a_restart_as_many_trials_have_ended_as_were_told():
    storage, spec = InMemoryStorage(), study_spec()
    study = open_pool(spec, storage)
    heard = []
    study = PoolStudy(spec, spec.pools[0], NoLauncher(), storage, lambda owner, record: heard.append(record))
    for _ in range(10):
        study.finish(study.propose(), completed())
    assert list(open_pool(spec, storage).results().records) == heard
