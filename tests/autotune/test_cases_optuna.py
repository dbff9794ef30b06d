"""Situations that Optuna's users met, by the id of the collection in which they were described."""

import math
import sqlite3

import optuna
import pytest
import yaml
from optuna.storages import InMemoryStorage, RDBStorage
from optuna.trial import TrialState
from sqlalchemy.exc import IntegrityError, OperationalError
from typer.testing import CliRunner

from autotune import storage as storage_module
from autotune.cli import app
from autotune.errors import InfrastructureError, SpecError
from autotune.records import TrialResult, record_from_trial
from autotune.storage import open_storage, open_study
from launchers.outcome import Outcome
from search_spaces.legality import Violation

from .study_cases import (
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
URLS = {"journal": None, "sqlite": "sqlite:///{folder}/study.db"}


@pytest.fixture(params=URLS)
def storage(request, tmp_path):
    url = URLS[request.param]
    return lambda: open_storage(url and url.format(folder=tmp_path), tmp_path)


def refusal(tmp_path, **fields):
    path = tmp_path / "study.yaml"
    path.write_text(yaml.safe_dump(study_data(**fields)))
    result = CliRunner().invoke(app, ["check", str(path)])
    return result.exit_code, result.stderr


def test_D002_only_a_lost_trial_is_told_without_a_value():
    study = open_pool(study_spec(search=SMALL))
    outcomes = iter([Outcome.LOST, Outcome.OOM, Outcome.COMPLETED, Outcome.HUNG])
    run_to_end(study, lambda proposal: failed(next(outcomes)))
    states = {record.outcome: optuna_study(study).trials[record.number].state for record in study.records}
    assert {outcome for outcome, state in states.items() if state is TrialState.FAIL} == {Outcome.LOST}


@pytest.mark.parametrize("step_s", [0.0, -1.0, math.inf, -math.inf, math.nan])
def test_D003_a_step_time_that_no_step_has_is_no_unbeatable_best(step_s):
    study = open_pool(study_spec(search=SMALL))
    study.finish(study.propose(), completed(0.1))
    record = study.finish(study.propose(), TrialResult(Outcome.COMPLETED, "", steps_of(step_s)))
    assert (record.outcome, record.detail) == (Outcome.CRASHED, "no step after the warm-up says how long it took")
    assert all(math.isfinite(trial.value) for trial in optuna_study(study).trials)
    assert study.best.number == 0


def test_D007_what_is_known_of_a_trial_is_written_before_it_ends(monkeypatch):
    order = []
    for name in ("set_trial_user_attr", "set_trial_system_attr", "set_trial_state_values"):
        original = getattr(InMemoryStorage, name)
        monkeypatch.setattr(
            InMemoryStorage, name, lambda self, *args, _n=name, _o=original, **kw: (order.append(_n), _o(self, *args, **kw))[1]
        )
    study = open_pool(study_spec(search=SMALL))
    proposal = study.propose()
    order.clear()
    study.finish(proposal, completed())
    assert order[-1] == "set_trial_state_values"
    assert "set_trial_user_attr" in order[:-1]


def test_D008_nan_losses_survive_every_storage_and_no_intermediate_value_is_reported(storage):
    study = open_pool(study_spec(search=SMALL), storage())
    study.finish(study.propose(), TrialResult(Outcome.NAN, "nan", steps_of(0.1, loss=math.nan)))
    reopened = open_pool(study_spec(search=SMALL), storage())
    assert all(math.isnan(step.loss) for step in reopened.records[0].steps)
    assert optuna_study(reopened).trials[0].intermediate_values == {}


@pytest.mark.parametrize(
    "search",
    [{TP: [1, 2]}, {TP: [1, 2, 4], "micro_batch_size": [1, 2]}, {TP: [2, 4]}],
    ids=["D009_fewer_choices", "D010_another_range", "D011_other_ends"],
)
def test_D009_D010_D011_choices_that_change_between_runs_are_refused(storage, search):
    study = open_pool(study_spec(search=SMALL), storage())
    study.finish(study.propose(), completed())
    with pytest.raises(SpecError, match="the storage holds a study of this name with another choices"):
        open_pool(study_spec(search=search), storage())


def test_D009_parameters_have_the_same_distribution_in_every_trial():
    study = open_pool(study_spec())
    run_to_end(study, lambda proposal: failed(Outcome.OOM))
    distributions = [trial.distributions for trial in optuna_study(study).trials]
    assert all(found == distributions[0] for found in distributions)


def test_D012_choices_that_are_lists_are_stored_as_indices(storage):
    search = {"recompute": ["none", "selective:core_attn,mlp"], "micro_batch_size": [1, 2]}
    study = open_pool(study_spec(search=search), storage())
    run_to_end(study, lambda proposal: completed())
    reopened = open_pool(study_spec(search=search), storage())
    assert ("core_attn", "mlp") in {record.config.recompute_modules for record in reopened.records}
    assert reopened.candidates.left == 0


def test_D017_a_baseline_outside_the_choices_runs_and_is_remembered(storage):
    spec = study_spec(search=SMALL, baseline={"micro_batch_size": 2})
    spec_outside = study_spec(search={**SMALL, "micro_batch_size": [1]}, baseline={"micro_batch_size": 2})
    for case in (spec, spec_outside):
        study = open_pool(case, InMemoryStorage())
        record = study.finish(study.propose(), completed())
        assert record.config.micro_batch_size == 2
    study = open_pool(spec_outside, storage())
    record = study.finish(study.propose(), completed(0.01))
    assert optuna_study(study).trials[0].params == {}
    reopened = open_pool(spec_outside, storage())
    assert reopened.results().baseline == record == reopened.best
    assert reopened.propose().config != record.config


def test_D018_a_baseline_enqueued_twice_runs_once(storage):
    first = open_pool(study_spec(search=SMALL), storage())
    params = first.candidates.params(study_spec().baseline)
    for _ in range(2):
        optuna_study(first).enqueue_trial(params)
    study = open_pool(study_spec(search=SMALL), storage())
    proposals = run_to_end(study, lambda proposal: completed())
    assert [proposal.config for proposal in proposals].count(study_spec().baseline) == 1
    assert not [trial for trial in optuna_study(study).trials if not trial.state.is_finished()]


def test_D021_an_amount_that_is_nan_is_told_as_a_plain_refusal():
    class Unreadable(NoLauncher):
        def refusals(self, workload, config):
            return [Violation("power", math.nan, "unknown power")] if config == study_spec().baseline else []

    study = open_pool(study_spec(search=SMALL), launcher=Unreadable())
    assert study.propose() is not None
    assert optuna_study(study).trials[0].constraints == {"infeasible": 1.0}


def test_D023_the_best_is_optunas_feasible_best_even_where_a_failure_was_told_the_same_value():
    study = open_pool(study_spec(search=SMALL))
    study.finish(study.propose(), failed(Outcome.OOM))
    worse = study.finish(study.propose(), completed(1e9))
    assert optuna_study(study).best_trial.number == worse.number == study.best.number


@pytest.mark.parametrize("sampler", ["cmaes", "CmaEsSampler", "qmc", "brute_force"])
def test_D024_samplers_without_constraints_are_refused(tmp_path, sampler):
    code, message = refusal(tmp_path, sampler=sampler)
    assert code == 2
    assert f"sampler: must be 'residual', 'tpe', 'gp', 'nsga2', 'random' or 'grid' (got '{sampler}')" in message


def test_D027_D028_a_front_in_place_of_a_best_trial_and_never_a_wrong_number_of_values(storage, recwarn):
    terms = {"tokens_per_s_per_gpu": 1.0, "step_time_s": -1.0}
    study = open_pool(study_spec(search=SMALL, pareto=True, objective=terms), storage())
    run_to_end(study, lambda proposal: completed(0.1))
    with pytest.raises(RuntimeError):
        _ = optuna_study(study).best_trial
    front = {point.record.number for point in study.results().front}
    assert front == {trial.number for trial in optuna_study(study).best_trials}
    terms["gpu_mean_power_w"] = -1.0
    lacking = open_pool(study_spec(name="lacking", search=SMALL, pareto=True, objective=terms), storage())
    record = lacking.finish(lacking.propose(), completed(0.1))
    assert optuna_study(lacking).trials[record.number].state is TrialState.FAIL
    assert "gpu_mean_power_w_not_measured" in [violation.name for violation in record.violations]
    assert not [warning for warning in recwarn if "number of the values" in str(warning.message)]


@pytest.mark.parametrize("directions", [["minimize"], ["maximize", "minimize"]])
def test_D029_reopened_with_another_direction_is_refused(storage, directions):
    optuna.create_study(study_name="case/laptop/1x4", storage=storage(), directions=directions)
    with pytest.raises(SpecError, match="the storage holds a study of this name with another direction"):
        open_pool(study_spec(), storage())


def test_D029_terms_summed_before_and_separate_now_are_refused(storage):
    summed, separate = study_spec(), study_spec(pareto=True, objective={"tokens_per_s_per_gpu": 1, "step_time_s": -1})
    open_pool(summed, storage())
    with pytest.raises(SpecError, match="another direction \\(maximize, and this one has maximize, minimize\\)"):
        open_pool(separate, storage())


def test_D029_other_terms_of_the_same_directions_are_refused(storage):
    first, second = ({"tokens_per_s_per_gpu": 1, name: -1} for name in ("step_time_s", "peak_memory_gib"))
    open_pool(study_spec(pareto=True, objective=first), storage())
    with pytest.raises(SpecError, match="with another objective"):
        open_pool(study_spec(pareto=True, objective=second), storage())


def test_D029_a_study_of_another_program_is_not_taken_over(storage):
    other = optuna.create_study(study_name="case/laptop/1x4", storage=storage(), direction="maximize")
    other.add_trial(optuna.trial.create_trial(value=1e9))
    with pytest.raises(SpecError, match="that another program made"):
        open_pool(study_spec(), storage())


def test_D031_trials_that_a_dead_driver_left_running_fail_and_are_proposed_again(storage):
    killed = open_pool(study_spec(search=SMALL), storage())
    killed.finish(killed.propose(), completed())
    left = [killed.propose(), killed.propose()]
    study = open_pool(study_spec(search=SMALL), storage())
    states = [trial.state for trial in optuna_study(study).trials]
    assert TrialState.RUNNING not in states
    assert states.count(TrialState.FAIL) == 2
    again = run_to_end(study, lambda proposal: completed())
    assert {proposal.config for proposal in again} == {proposal.config for proposal in left}
    assert all(record_from_trial(optuna_study(study).trials[proposal.trial.number]) is None for proposal in left)


def test_D032_D034_no_heartbeat_declares_a_live_trial_dead(tmp_path):
    assert open_storage(f"sqlite:///{tmp_path}/study.db", tmp_path).heartbeat_interval is None


@pytest.mark.parametrize("url", ["grpc://host:13000", "grpc+sqlite://host/study.db"])
def test_D036_a_grpc_proxy_is_refused(tmp_path, url):
    code, message = refusal(tmp_path, storage=url)
    assert code == 2
    assert "storage: is not a URL that can be used here; known: sqlite://, postgresql://, mysql://, journal://" in message


def connection_refused(*_args, **_kwargs):
    raise OperationalError("SELECT 1", {}, OSError("connection refused"))


def test_D037_a_server_that_starts_late_is_waited_for(monkeypatch, tmp_path):
    answers = [connection_refused, connection_refused, lambda *args, **kwargs: "storage"]
    monkeypatch.setattr(storage_module, "RDBStorage", lambda *args, **kwargs: answers.pop(0)())
    monkeypatch.setattr(storage_module, "_RETRY_S", 0.01)
    assert open_storage("postgresql://user:secret@db.example:5432/studies", tmp_path, wait_s=5) == "storage"


def test_D037_a_server_that_stays_away_is_named_after_a_bounded_wait(monkeypatch, tmp_path):
    monkeypatch.setattr(storage_module, "RDBStorage", connection_refused)
    monkeypatch.setattr(storage_module, "_RETRY_S", 0.01)
    with pytest.raises(InfrastructureError) as caught:
        open_storage("postgresql://user:secret@db.example:5432/studies", tmp_path, wait_s=0.1)
    assert "Optuna's storage db.example:5432/studies does not answer" in str(caught.value)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(("races", "opened"), [(1, True), (5, True), (6, False)])
def test_another_driver_that_makes_the_tables_at_this_moment_is_waited_for(monkeypatch, tmp_path, races, opened):
    errors = [OperationalError("CREATE", {}, Exception("table studies already exists")), IntegrityError("INSERT", {}, Exception())]
    left = [errors[number % 2] for number in range(races)]

    def make(*_args, **_kwargs):
        if left:
            raise left.pop()
        return "storage"

    monkeypatch.setattr(storage_module, "RDBStorage", make)
    monkeypatch.setattr(storage_module, "_RETRY_S", 0.0)
    if opened:
        assert open_storage(f"sqlite:///{tmp_path}/study.db", tmp_path) == "storage"
    else:
        with pytest.raises(InfrastructureError, match="study.db does not answer"):
            open_storage(f"sqlite:///{tmp_path}/study.db", tmp_path)


def test_D039_sqlite_on_a_network_disk_is_refused_where_locks_do_not_hold(monkeypatch, tmp_path):
    report = storage_module.lock_report(tmp_path, worker=("false",))
    monkeypatch.setattr(storage_module, "lock_report", lambda folder: report)
    mounts = f"server:/export {tmp_path} nfs4 rw 0 0\n"
    with pytest.raises(InfrastructureError, match="is on a network disk whose file locks do not hold"):
        open_storage(f"sqlite:///{tmp_path}/study.db", tmp_path, mounts=mounts)
    assert not (tmp_path / "study.db").exists()


def test_D040_connections_to_a_server_are_tested_before_use(monkeypatch, tmp_path):
    seen = {}
    monkeypatch.setattr(storage_module, "RDBStorage", lambda url, engine_kwargs: seen.update(engine_kwargs))
    open_storage("postgresql://db.example/studies", tmp_path)
    assert seen == {"pool_pre_ping": True, "connect_args": {"connect_timeout": 15}}


def test_D040_idle_connections_that_were_closed_do_not_disturb(tmp_path):
    study = open_pool(study_spec(search=SMALL), open_storage(f"sqlite:///{tmp_path}/study.db", tmp_path))
    proposal = study.propose()
    optuna_study(study)._storage._backend.engine.dispose()
    assert study.finish(proposal, completed()).outcome is Outcome.COMPLETED


def test_D044_long_texts_are_kept_whole(storage):
    study = open_pool(study_spec(search=SMALL), storage())
    detail = "\n".join(f"line {number} of a stack trace" for number in range(3000))
    study.finish(study.propose(), TrialResult(Outcome.CRASHED, detail, steps_of(0.1, count=300)))
    record = open_pool(study_spec(search=SMALL), storage()).records[0]
    assert (record.detail, len(record.steps)) == (detail, 300)


def test_D045_an_illegal_proposal_is_never_told_as_pruned_or_failed():
    study = open_pool(study_spec())
    run_to_end(study, lambda proposal: completed())
    refused = [record.number for record in study.records if record.outcome is Outcome.REFUSED]
    assert refused
    trials = optuna_study(study).trials
    assert all(trials[number].state is TrialState.COMPLETE and trials[number].constraints["infeasible"] >= 1 for number in refused)


def test_a_sqlite_file_that_is_none_is_an_error_with_its_path(tmp_path):
    (tmp_path / "study.db").write_text("this is no database, and long enough to be read as one")
    with pytest.raises(InfrastructureError, match="study.db does not answer"):
        open_storage(f"sqlite:///{tmp_path}/study.db", tmp_path)


def test_open_study_keeps_the_fingerprint_as_plain_values(tmp_path):
    open_study(open_storage(f"sqlite:///{tmp_path}/s.db", tmp_path), "n", optuna.samplers.RandomSampler(), {"a": [1, None]})
    with sqlite3.connect(tmp_path / "s.db") as database:
        assert database.execute("select value_json from study_user_attributes").fetchall() == [('{"a": [1, null]}',)]
    assert isinstance(open_storage(f"sqlite:///{tmp_path}/s.db", tmp_path), RDBStorage)
