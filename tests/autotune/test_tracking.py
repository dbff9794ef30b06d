"""The tracker on its own SQLite store."""

import asyncio
import json
import math
import os
import signal
import sqlite3
import subprocess
import sys
import textwrap
import threading
import time
from dataclasses import replace

import pytest
from mlflow.exceptions import MlflowException

from autotune.errors import TrackingError
from autotune.tracking import ParentRun, Tracker
from launchers.outcome import Outcome
from search_spaces.config import TrialConfig
from search_spaces.legality import Violation
from tests.autotune.tracking_cases import PARENT, STUDY, artifact, client, copied, logged, migrated, record, runs, step


@pytest.fixture(scope="module")
def database(tmp_path_factory):
    return migrated(tmp_path_factory.getbasetemp())


@pytest.fixture
def state(database, tmp_path):
    return copied(database, tmp_path / "state")


@pytest.fixture
def tracker(state):
    tracker = Tracker(None, state)
    yield tracker
    tracker.close(0)


def script(text, state, **environ):
    """Run a driver of its own; its exit code and output."""
    code = "from tests.autotune.tracking_cases import *\nimport json, os, sys\nfrom pathlib import Path\n" + textwrap.dedent(text)
    outside = {name: value for name, value in os.environ.items() if name not in ("CI", "PYTEST_CURRENT_TEST", "PYTEST_VERSION")}
    done = subprocess.run(
        [sys.executable, "-c", code, str(state)], env=outside | environ, capture_output=True, text=True, timeout=60, check=False
    )
    return done.returncode, done.stdout, done.stderr


def test_a_trial_is_one_nested_run_with_everything_in_it(tracker, tmp_path):
    logs = tmp_path / "logs"
    logs.mkdir()
    (logs / "rank0.log").write_bytes(b"early" + b"x" * 300_000 + b"the reason")
    parent = tracker.open_parent(PARENT)
    run = logged(tracker, record(3, log_folder=logs))[3]
    assert run.data.tags["mlflow.parentRunId"] == parent
    assert (run.info.status, run.info.start_time, run.info.end_time) == ("FINISHED", 1_000_000, 1_010_000)
    assert run.info.run_name == "trial-0003"
    assert run.data.params["micro_batch_size"] == "1"
    assert run.data.metrics["tokens_per_s_per_gpu"] == 103.0
    assert run.data.tags["autotune.env.node"] == "a"
    history = client(tracker).get_metric_history(run.info.run_id, "step/loss")
    assert [(point.step, point.timestamp) for point in history] == [(1, 1_001_000), (2, 1_002_000)]
    for name in ("config.json", "argv.txt", "environment.json", "violations.json"):
        assert artifact(tracker, run, name)
    log = artifact(tracker, run, "logs/rank0.log")
    assert len(log) == 256 * 1024
    assert log.endswith("the reason")


def test_refused_and_failed_trials_are_runs_with_their_reason(tracker):
    refused = record(0, outcome=Outcome.REFUSED, metrics={}, steps=(), value=None, violations=(Violation("heads", 1.0, "12 % 8"),))
    found = logged(tracker, refused, record(1, outcome=Outcome.OOM, detail="out of memory"), record(2, outcome=Outcome.LOST))
    assert [found[number].info.status for number in range(3)] == ["FAILED", "FAILED", "KILLED"]
    assert found[0].data.tags["autotune.violations"] == "heads"
    assert json.loads(artifact(tracker, found[0], "violations.json"))[0]["message"] == "12 % 8"
    assert found[1].data.tags["autotune.outcome"] == "OOM"
    assert found[1].data.tags["autotune.detail"] == "out of memory"


def test_E002_C045_a_long_parameter_is_cut_by_us(tracker):
    found = logged(tracker, record(0, argv=("--data-path", "d" * 7000)))
    assert len(found[0].data.params["data_path"]) == 6000


def test_E003_a_long_trace_is_cut(tracker):
    assert len(logged(tracker, record(0, detail="t" * 9000))[0].data.tags["autotune.detail"]) == 2000


def test_E007_E015_a_missing_sensor_is_named_not_logged(tracker):
    run = logged(tracker, record(0, metrics={"power_w": math.nan, "amd_w": "N/A", "none_w": None, "good": 1.0}))[0]
    assert not {"power_w", "amd_w", "none_w"} & set(run.data.metrics)
    assert run.data.tags["autotune.metric_missing"] == "power_w,amd_w,none_w"


def test_E008_infinite_metric_is_never_logged(tracker):
    found = logged(tracker, record(0, metrics={"tput": math.inf}, value=math.inf), record(1, metrics={"tput": 5.0}))
    assert "tput" not in found[0].data.metrics
    experiment = client(tracker).get_experiment_by_name("gpt").experiment_id
    best = client(tracker).search_runs([experiment], "metrics.tput > 0", order_by=["metrics.tput DESC"])
    assert [run.data.tags["autotune.number"] for run in best] == ["1"]


def test_E004_a_long_trial_is_written_in_one_call(tracker, monkeypatch):
    tracker.open_parent(PARENT)
    store, calls = tracker._writer.store, []
    original = store._client.log_batch
    monkeypatch.setattr(store._client, "log_batch", lambda *args, **kwargs: (calls.append(args), original(*args, **kwargs)))
    tracker.log_trial(record(0, steps=tuple(step(iteration) for iteration in range(1, 2001))))
    assert tracker.close(30) == 0
    assert len(calls) == 1
    found = runs(tracker)
    assert len(client(tracker).get_metric_history(found[0].info.run_id, "step/step_s")) == 200


def test_E010_the_latest_value_is_that_of_the_last_step(tracker):
    found = logged(tracker, record(0, steps=(step(5, loss=10.0), step(2, loss=99.0))))
    assert found[0].data.metrics["step/loss"] == 10.0


def test_E021_people_filter_knobs_by_number(tracker):
    sizes = (1, 2, 4, 16)
    logged(tracker, *(record(n, config=TrialConfig(tensor_model_parallel_size=size)) for n, size in enumerate(sizes)))
    assert set(runs(tracker, "metrics.`knob/tensor_model_parallel_size` >= 4")) == {2, 3}


def test_E022_every_run_beyond_one_page_is_found(tracker, state):
    logged(tracker, record(0))
    with sqlite3.connect(state / "mlflow.db") as link:
        columns = [row[1] for row in link.execute("PRAGMA table_info(runs)")]
        first = dict(zip(columns, link.execute("SELECT * FROM runs WHERE name = 'trial-0000'").fetchone(), strict=True))
        tags = dict(link.execute("SELECT key, value FROM tags WHERE run_uuid = ?", (first["run_uuid"],)))
        for number in range(1, 1500):
            row = first | {"run_uuid": f"{number:032x}", "name": f"trial-{number:04d}", "start_time": number}
            link.execute(f"INSERT INTO runs VALUES ({','.join('?' * len(columns))})", [row[name] for name in columns])
            new = tags | {"autotune.number": str(number)}
            keep = [(key, new[key], row["run_uuid"]) for key in ("autotune.key", "autotune.number", "autotune.role")]
            link.executemany("INSERT INTO tags (key, value, run_uuid) VALUES (?, ?, ?)", keep)
    again = Tracker(None, state)
    again.open_parent(PARENT)
    assert all(again.is_logged(STUDY, number) for number in range(1500))
    assert not again.is_logged(STUDY, 1500)
    again.close(5)


def test_E024_a_study_key_cannot_rename_the_run(tracker):
    parent = tracker.open_parent(replace(PARENT, tags={"mlflow.runName": "mine", "role": "trial"}))
    run = client(tracker).get_run(parent)
    assert run.info.run_name == "laptop x1"
    assert run.data.tags["autotune.mlflow.runName"] == "mine"
    assert run.data.tags["autotune.role"] == "parent"


def test_E026_several_openings_of_a_new_store_create_it_once(tmp_path):
    trackers = [Tracker(None, tmp_path / "new") for _ in range(3)]
    assert [tracker.ready(60) for tracker in trackers] == [True] * 3
    for tracker in trackers:
        tracker.close(5)


def test_E029_an_artifact_cannot_leave_its_run(tracker, state):
    run_id = tracker.open_parent(PARENT)
    tracker.close_parent(run_id, "FINISHED", artifacts={"../../../escaped.txt": "x"})
    assert tracker.close(10) == 0
    assert [path.parent.name for path in state.parent.rglob("escaped.txt")] == ["artifacts"]


def test_E033_C048_threads_and_coroutines_write_to_their_own_runs(tracker):
    others = [ParentRun(f"gpt/pool{index}/1", "gpt", f"pool{index}") for index in range(4)]
    for parent in others:
        tracker.open_parent(parent)

    async def trial(parent, number):
        await asyncio.sleep(0)
        tracker.log_trial(record(number, study=parent.study, metrics={"who": number}))

    async def trials(index):
        await asyncio.gather(*(trial(others[index], 10 * index + offset) for offset in range(3)))

    threads = [threading.Thread(target=lambda index=index: asyncio.run(trials(index))) for index in range(4)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert tracker.close(30) == 0
    found = runs(tracker)
    assert len(found) == 12
    assert all(run.data.metrics["who"] == number for number, run in found.items())
    assert all(run.data.tags["autotune.study"] == f"gpt/pool{number // 10}/1" for number, run in found.items())


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


def test_nothing_connects_to_the_outside_or_writes_elsewhere(state, tmp_path):
    code, output, errors = script(
        """
        seen = []
        def watch(event, args):
            if event in ("socket.connect", "socket.getaddrinfo") or (event == "subprocess.Popen" and "git" in str(args[0])):
                seen.append((event, str(args)))

        sys.addaudithook(watch)
        tracker = Tracker(None, Path(sys.argv[1]))
        logged(tracker, record(0))
        time.sleep(1.0)
        print(json.dumps(seen))
        """,
        state,
        PYTHONPATH=os.getcwd(),
    )
    assert code == 0, errors
    assert json.loads(output.splitlines()[-1]) == []
    assert {path.name for path in state.iterdir()} == {"mlflow.db", "mlartifacts", "mlflow.lock"}
    assert not os.path.exists("mlruns")
