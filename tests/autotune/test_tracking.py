"""The tracker on its own SQLite store."""

import asyncio
import json
import math
import os
import sqlite3
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from autotune.tracking import ParentRun, Tracker
from launchers.outcome import Outcome
from search_spaces.config import TrialConfig
from search_spaces.legality import Violation
from tests.autotune.tracking_cases import PARENT, STUDY, artifact, client, logged, record, runs, script, step


def test_a_trial_is_one_nested_run_with_everything_in_it(tracker, tmp_path):
    logs = tmp_path / "logs"
    logs.mkdir()
    (logs / "rank0.log").write_bytes(b"early" + b"x" * 300_000 + b"the reason")
    parent = tracker.open_parent(PARENT)
    run = logged(tracker, record(3, log_folder=logs))[3]
    assert run.data.tags["mlflow.parentRunId"] == parent
    assert (run.info.status, run.info.start_time, run.info.end_time) == ("FINISHED", 1_000_000, 1_010_000)
    assert run.info.run_name == "0003 Megatron's defaults"
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


def test_C046_E018_refused_and_failed_trials_are_runs_with_their_reason(tracker):
    refused = record(0, outcome=Outcome.REFUSED, metrics={}, steps=(), value=None, violations=(Violation("heads", 1.0, "12 % 8"),))
    found = logged(tracker, refused, record(1, outcome=Outcome.OOM, detail="out of memory"), record(2, outcome=Outcome.LOST))
    assert [found[number].info.status for number in range(3)] == ["FAILED", "FAILED", "KILLED"]
    assert found[0].data.tags["autotune.violations"] == "heads"
    assert json.loads(artifact(tracker, found[0], "violations.json"))[0]["message"] == "12 % 8"
    assert found[1].data.tags["autotune.outcome"] == "OOM"
    assert found[1].data.tags["autotune.detail"] == "out of memory"


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
    assert 150 <= len(client(tracker).get_metric_history(found[0].info.run_id, "step/step_s")) <= 200


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
        first = dict(zip(columns, link.execute("SELECT * FROM runs WHERE name LIKE '0000 %'").fetchone(), strict=True))
        tags = dict(link.execute("SELECT key, value FROM tags WHERE run_uuid = ?", (first["run_uuid"],)))
        for number in range(1, 1500):
            row = first | {"run_uuid": f"{number:032x}", "name": f"{number:04d}", "start_time": number}
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


def test_E026_processes_that_open_a_new_store_at_once_create_it_once(tmp_path):
    code = """
        from autotune.tracking.store import MlflowStore
        state = Path(sys.argv[1])
        (state / str(os.getpid())).touch()
        while len(list(state.glob("[0-9]*"))) < 2:
            time.sleep(0.001)
        MlflowStore(f"sqlite:///{state}/mlflow.db", None)
    """
    with ThreadPoolExecutor() as pool:
        ended = list(pool.map(lambda _: script(code, tmp_path), range(2)))
    assert [code for code, _, _ in ended] == [0, 0], ended


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
