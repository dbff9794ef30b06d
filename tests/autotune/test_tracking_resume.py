"""What survives drivers that are resumed, killed or cut off."""

import math
import signal
import threading
import time
from dataclasses import replace

import pytest
from mlflow.exceptions import MlflowException

from autotune.errors import TrackingError
from autotune.tracking import Tracker
from launchers.outcome import Outcome
from tests.autotune.tracking_cases import PARENT, STUDY, artifact, client, record, runs, script


def test_a_repeat_updates_the_same_run(tracker, state):
    tracker.open_parent(PARENT)
    for value in (5.0, 4.0):
        tracker.log_trial(record(0, metrics={"tput": value}))
    assert tracker.close(10) == 0
    again = Tracker(None, state)
    again.open_parent(PARENT)
    assert again.rebuild([record(0), record(1)]) == 1
    again.log_trial(record(0, metrics={"tput": 3.0}, outcome=Outcome.CRASHED))
    assert again.close(10) == 0
    found = runs(again)
    assert set(found) == {0, 1}
    assert found[0].data.metrics["tput"] == 3.0
    assert found[0].info.status == "FAILED"
    mlflow = client(again)
    assert len(mlflow.search_runs([found[0].info.experiment_id])) == 3
    assert len(mlflow.get_metric_history(found[0].info.run_id, "step/loss")) == 2


def test_the_parent_is_found_again_and_closed_with_its_summary(tracker, state, tmp_path):
    run_id = tracker.open_parent(PARENT)
    tracker.close_parent(run_id, "FAILED", {"best": 1.0})
    assert tracker.close(10) == 0
    again = Tracker(None, state)
    assert again.open_parent(replace(PARENT, params={"seq_length": 256, "budget": 3})) == run_id
    run = client(again).get_run(run_id)
    assert (run.info.status, run.data.params) == ("RUNNING", {"seq_length": "128", "budget": "3"})
    other = again.open_parent(replace(PARENT, study="gpt/laptop/2", nodes=2))
    assert other != run_id
    (tmp_path / "report.html").write_text("<html>")
    artifacts = {"report.html": tmp_path / "report.html", "winner.txt": "tp=2"}
    again.close_parent(run_id, "FINISHED", {"best": 2.0, "bad": math.nan}, {"winner": "3"}, artifacts)
    assert again.close(10) == 0
    run = client(again).get_run(run_id)
    assert (run.info.status, run.data.metrics) == ("FINISHED", {"best": 2.0})
    assert run.data.tags["autotune.winner"] == "3"
    assert artifact(again, run, "winner.txt") == "tp=2"
    assert artifact(again, run, "report.html") == "<html>"


def test_an_open_parent_is_tagged_and_stays_open_until_it_is_closed(tracker, state):
    run_id = tracker.open_parent(PARENT)
    tracker.tag_parent(run_id, {"forecast": "14 trials"})
    tracker.tag_parent("unknown", {"forecast": "none"})
    assert tracker.close(10) == 0
    run = client(tracker).get_run(run_id)
    assert (run.info.status, run.data.tags["autotune.forecast"]) == ("RUNNING", "14 trials")
    again = Tracker(None, state)
    again.open_parent(PARENT)
    again.close_parent(run_id, "FINISHED", tags={"forecast": ""})
    assert again.close(10) == 0
    run = client(again).get_run(run_id)
    assert (run.info.status, run.data.tags["autotune.forecast"]) == ("FINISHED", "")


def test_E017_runs_of_a_killed_driver_are_ended(state):
    code, _, errors = script(
        """
        tracker = Tracker(None, Path(sys.argv[1]))
        run_id = tracker.open_parent(PARENT)
        tracker.open_parent(ParentRun("gpt/other/1", "gpt", "other"))
        client(tracker).create_run("1", tags={"autotune.key": tracker._writer.opened[STUDY].key, "autotune.number": "7"})
        os.kill(os.getpid(), 9)
        """,
        state,
    )
    assert code == -signal.SIGKILL, errors
    tracker = Tracker(None, state)
    parent = tracker.open_parent(PARENT)
    statuses = {run.info.status for run in runs(tracker).values()}
    assert statuses == {"KILLED"}
    assert not tracker.is_logged(STUDY, 7)
    assert tracker.reconcile("gpt") == 1
    assert tracker.reconcile("gpt") == 0
    assert client(tracker).get_run(parent).info.status == "RUNNING"
    tracker.log_trial(record(7))
    assert tracker.close(10) == 0
    assert runs(tracker)[7].info.status == "FINISHED"


def test_the_loop_never_waits_and_nothing_is_lost(tracker, state, monkeypatch):
    tracker.open_parent(PARENT)
    release = threading.Event()
    original = tracker._writer.store.write
    monkeypatch.setattr(tracker._writer, "_queue", type(tracker._writer._queue)(5))
    tracker._writer.ask(lambda store: None, 10)
    monkeypatch.setattr(tracker._writer.store, "write", lambda *args, **kw: (release.wait(20), original(*args, **kw)))
    started = time.perf_counter()
    for number in range(20):
        tracker.log_trial(record(number))
    assert time.perf_counter() - started < 0.5
    assert tracker.close(0.1) == 20
    release.set()
    again = Tracker(None, state)
    again.open_parent(PARENT)
    assert again.close(20) == 0
    assert set(runs(again)) == set(range(20))


def test_a_study_not_opened_yet_is_spooled_until_it_is(tracker, state):
    tracker.log_trial(record(0))
    assert tracker.close(5) == 1
    tracker.log_trial(record(1))
    again = Tracker(None, state)
    again.open_parent(replace(PARENT, study="gpt/other/1"))
    assert again.missing() == 2
    again.open_parent(PARENT)
    assert again.missing() == 0
    assert set(runs(again)) == {0, 1}
    again.close(5)


def test_an_end_left_by_an_earlier_driver_does_not_end_the_parent_again(tracker, state, monkeypatch):
    run_id = tracker.open_parent(PARENT)
    monkeypatch.setattr(tracker._writer.store, "write", lambda *_, **__: (_ for _ in ()).throw(ConnectionError("away")))
    tracker.close_parent(run_id, "KILLED", {"best": 2.0})
    assert tracker.close(0.5) == 1
    again = Tracker(None, state)
    monkeypatch.setattr(again._writer, "_driver", "another")
    again.open_parent(PARENT)
    run = client(again).get_run(run_id)
    assert (run.info.status, run.data.metrics) == ("RUNNING", {"best": 2.0})
    again.close(5)


def test_what_mlflow_refuses_for_ever_is_counted_and_blocks_nothing(tracker):
    tracker.open_parent(PARENT)
    store = tracker._writer.store
    assert store.is_permanent(MlflowException.invalid_parameter_value("no"))
    assert store.is_permanent(TypeError())
    assert not store.is_permanent(ConnectionError())
    tracker.log_trial(replace(record(0), outcome="nonsense"))
    tracker.log_trial(record(1))
    assert tracker.close(10) == 1
    assert set(runs(tracker)) == {1}


def test_a_deleted_experiment_is_explained(tracker):
    tracker.open_parent(PARENT)
    client(tracker).delete_experiment(client(tracker).get_experiment_by_name("gpt").experiment_id)
    with pytest.raises(TrackingError, match="deleted") as caught:
        tracker.open_parent(PARENT)
    assert "restore" in caught.value.hint
