"""Situations that Ray Tune's users met, by the id of the collection in which they were described.

No Ray here: a study loop with fake results is enough to show what the funnel, the searcher and the sampler do.
"""

import hashlib
import json
import math
import os
import shutil

import pytest
import yaml
from optuna.storages import InMemoryStorage
from optuna.trial import TrialState
from typer.testing import CliRunner

from autotune import study as study_module
from autotune.cli import app
from autotune.errors import SpecError
from autotune.pool_study import STOPPED_BY_USER
from autotune.records import TrialResult
from autotune.state_folder import StateFolder
from autotune.storage import open_storage
from autotune.trial import MegatronTrial
from launchers.base import StepRecord
from launchers.outcome import Outcome
from search_spaces.hardware import GPU_SELECTION

from .study_cases import (
    FAULTS,
    NoLauncher,
    completed,
    failed,
    open_pool,
    optuna_study,
    run_to_end,
    steps_of,
    study_data,
    study_spec,
)

TP = "tensor_model_parallel_size"
SMALL = {TP: [1, 2, 4]}


def with_values(value, field):
    return tuple(
        StepRecord(**{**step.to_dict(), field: value}) if number > 1 else step for number, step in enumerate(steps_of(0.1))
    )


UNREADABLE = {"C001_none": None, "C002_text": "N/A", "C003_nan": math.nan, "C003_infinite": math.inf}


@pytest.mark.parametrize("value", UNREADABLE.values(), ids=UNREADABLE.keys())
def test_C001_C002_C003_an_unreadable_step_time_is_a_failed_trial_and_the_study_goes_on(tmp_path, value):
    spec = study_spec(search=SMALL)
    study = open_pool(spec, open_storage(None, tmp_path))
    study.finish(study.propose(), completed(0.1))
    record = study.finish(study.propose(), TrialResult(Outcome.COMPLETED, "", with_values(value, "step_s")))
    assert record.outcome is Outcome.CRASHED
    trial = optuna_study(study).trials[record.number]
    assert (trial.state, trial.value) == (TrialState.COMPLETE, study.best.value)
    study.finish(study.propose(), completed(0.2))
    reopened = open_pool(spec, open_storage(None, tmp_path))
    assert [found.outcome for found in reopened.records] == [Outcome.COMPLETED, Outcome.CRASHED, Outcome.COMPLETED]
    assert all(trial.state.is_finished() for trial in optuna_study(reopened).trials)


@pytest.mark.parametrize("value", UNREADABLE.values(), ids=UNREADABLE.keys())
def test_C001_C002_C003_an_unreadable_loss_is_nan(value):
    study = open_pool(study_spec(search=SMALL))
    record = study.finish(study.propose(), TrialResult(Outcome.COMPLETED, "", with_values(value, "loss")))
    assert (record.outcome, record.detail) == (Outcome.NAN, f"the loss of step 8 is {value!r}")


@pytest.mark.parametrize("value", UNREADABLE.values(), ids=UNREADABLE.keys())
def test_C001_C002_C003_an_unreadable_peak_memory_is_absent(value):
    study = open_pool(study_spec(search=SMALL))
    steps = tuple(StepRecord(**{**step.to_dict(), "peak_memory_gib": value}) for step in steps_of(0.1))
    record = study.finish(study.propose(), TrialResult(Outcome.COMPLETED, "", steps))
    assert record.outcome is Outcome.COMPLETED
    assert "peak_memory_gib" not in record.metrics


def test_C004_every_completed_trial_carries_every_declared_metric():
    study = open_pool(study_spec())
    run_to_end(study, lambda proposal: completed() if proposal.trial.number % 3 else failed(Outcome.CRASHED))
    done = [record for record in study.records if record.outcome is Outcome.COMPLETED]
    declared = {"tokens_per_s_per_gpu", "tokens_per_s_per_gpu_low", "tokens_per_s_per_gpu_high", "step_time_s", "loss_last"}
    assert done
    assert all(declared <= record.metrics.keys() for record in done)


def all_failing():
    study = open_pool(study_spec(search=SMALL))
    outcomes = iter([Outcome.OOM, Outcome.HUNG, Outcome.OOM])
    run_to_end(study, lambda proposal: failed(next(outcomes)))
    return study.results()


@pytest.mark.parametrize("as_json", [False, True])
def test_C006_G001_G023_all_trials_failing_ends_with_a_table_of_failures_and_exit_code_1(tmp_path, monkeypatch, as_json):
    monkeypatch.setattr(study_module, "run_study", lambda spec, folder, listener, address: [all_failing()])
    path = tmp_path / "study.yaml"
    path.write_text(yaml.safe_dump(study_data()))
    command = ["tune", str(path), "--state", str(tmp_path), *(["--json"] if as_json else [])]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 1
    if as_json:
        (pool,) = json.loads(result.stdout)
        assert (pool["best"], pool["outcomes"]) == (None, {"OOM": 2, "HUNG": 1})
        return
    lines = [line.split() for line in result.stdout.splitlines()]
    assert "No feasible configuration: not one trial completed." in result.stdout
    assert ["OOM", "2", "trial", "2:", "told", "to", "end", "as", "OOM"] in lines
    assert ["HUNG", "1", "trial", "1:", "told", "to", "end", "as", "HUNG"] in lines


def test_C007_a_trial_stopped_with_its_study_is_launched_by_the_next_driver():
    storage, spec = InMemoryStorage(), study_spec(search=SMALL)
    study = open_pool(spec, storage)
    study.finish(study.propose(), failed(Outcome.CRASHED))
    stopped = study.propose()
    record = study.finish(stopped, failed(Outcome.STOPPED), stopped_by_user=True)
    assert (record.outcome, record.detail) == (Outcome.LOST, STOPPED_BY_USER)
    again = run_to_end(open_pool(spec, storage), lambda proposal: completed())
    assert [proposal.config for proposal in again].count(stopped.config) == 1
    assert len(again) == 2


@pytest.mark.parametrize("choices", ["grid_search[1,2,4]", {"grid_search": [1, 2, 4]}, ["grid_search", 1]])
def test_C008_grid_search_in_a_study_file_is_refused_with_its_key(tmp_path, choices):
    path = tmp_path / "study.yaml"
    path.write_text(yaml.safe_dump(study_data(search={"micro_batch_size": [1], TP: choices})))
    result = CliRunner().invoke(app, ["check", str(path)])
    assert result.exit_code == 2
    error, hint = result.stderr.splitlines()
    assert error.startswith(f"error: search.{TP}: Ray's grid_search is not used here (got ")
    assert hint == "hint: list the choices, e.g. [1, 2, 4]; `sampler: grid` tries them all in order"


def fingerprint(config):
    return hashlib.sha256(config.model_dump_json().encode()).hexdigest()


def test_C010_G019_concurrent_trials_record_exactly_what_they_ran():
    study = open_pool(study_spec(search={**SMALL, "recompute": ["none", "selective:core_attn,mlp"]}))
    running, started = [], {}
    for _ in range(4):
        proposal = study.propose()
        started[proposal.trial.number] = fingerprint(proposal.config)
        running.append((proposal, NoLauncher().job(study.workload, proposal.config, steps=1, seed=0)))
    running[0][1]["steps"] = 99
    assert running[1][1]["steps"] == 1
    for proposal, _ in reversed(running):
        record = study.finish(proposal, completed())
        assert fingerprint(record.config) == started[record.number]
        assert study.candidates.config(proposal.trial.params) == record.config
    with pytest.raises(ValueError, match="frozen"):
        running[0][0].config.micro_batch_size = 2


def test_C013_the_history_is_there_after_a_restart(tmp_path):
    spec = study_spec()
    study = open_pool(spec, open_storage(None, tmp_path))
    for number in range(10):
        study.finish(study.propose(), failed(FAULTS[number % 6]) if number % 2 else completed())
    ended = len(study.records)
    again = open_pool(spec, open_storage(None, tmp_path))
    assert sum(trial.state.is_finished() for trial in optuna_study(again).trials) == ended == len(again.records)


def test_C014_G024_finished_trials_are_never_run_again(tmp_path):
    """Tune's own snapshots do not matter: every opening knows the storage only."""
    spec, seen = study_spec(search=SMALL), []
    while True:
        study = open_pool(spec, open_storage(None, tmp_path))
        proposal = study.propose()
        if proposal is None:
            break
        seen.append(proposal.config)
        study.finish(proposal, completed())
    assert len(seen) == len(set(seen)) == 3


def test_C015_the_same_name_goes_on_with_the_same_study_or_is_refused(tmp_path):
    folder = StateFolder(tmp_path)
    spec = study_spec(search=SMALL)
    study_module.prepare_study(spec, folder)
    study = open_pool(spec, open_storage(None, tmp_path))
    study.finish(study.propose(), completed())
    other = study_spec(search={TP: [1, 2]})
    with pytest.raises(SpecError, match="name: the storage holds a study of this name with another choices"):
        study_module.prepare_study(other, folder)
    assert folder.read_spec() == spec
    study_module.prepare_study(spec, folder)
    assert len(open_pool(spec, open_storage(None, tmp_path)).records) == 1


@pytest.mark.parametrize(("percent", "warns"), [(80, False), (95, True)])
def test_C035_a_study_warns_of_a_disk_that_is_nearly_full_before_it_starts(tmp_path, monkeypatch, percent, warns):
    used = type(shutil.disk_usage(tmp_path))(100 << 30, percent << 30, (100 - percent) << 30)
    monkeypatch.setattr("autotune.doctor.machine.shutil.disk_usage", lambda path: used)
    monkeypatch.setattr(study_module, "run_study", lambda spec, folder, listener, address: [all_failing()])
    path = tmp_path / "study.yaml"
    path.write_text(yaml.safe_dump(study_data()))
    result = CliRunner().invoke(app, ["tune", str(path), "--state", str(tmp_path)])
    for name in ("state disk", "temporary disk"):
        assert (f"warning: {name}: " in result.stderr and "95% full, 5.0 GiB free" in result.stderr) == warns


@pytest.mark.parametrize("name", GPU_SELECTION)
def test_C038_gpus_chosen_for_all_nodes_of_a_pool_are_refused(tmp_path, name):
    path = tmp_path / "study.yaml"
    environment = {"env": {name: "0,1"}}
    path.write_text(yaml.safe_dump(study_data(pools=[{"name": "a", "gpus_per_node": 2, "environment": environment}])))
    result = CliRunner().invoke(app, ["check", str(path)])
    assert result.exit_code == 2
    assert result.stderr.startswith(f"error: pools[0].environment.env: {name}=0,1 would be the same on every node")


def test_C036_a_tune_worker_sees_no_gpu(monkeypatch):
    """Ray leaves an actor without GPUs those of its node."""
    for name in GPU_SELECTION:
        monkeypatch.setenv(name, "0,1")
    MegatronTrial({}, None)
    assert [os.environ[name] for name in GPU_SELECTION] == ["", "", ""]


def test_C048_C053_trials_know_their_study_by_an_explicit_name():
    pools = [{"name": "a", "gpus_per_node": 2}, {"name": "b", "gpus_per_node": 4}]
    storage, spec = InMemoryStorage(), study_spec(pools=pools)
    records = []
    for number in range(2):
        study = open_pool(spec, storage, pool=number)
        records.append(study.finish(study.propose(), completed()))
    assert [record.study for record in records] == ["case/a/1x2", "case/b/1x4"]
