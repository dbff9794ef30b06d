"""The tracker against a real MLflow server over http, directly and through a gate that misbehaves."""

import os
import socket
import time
import urllib.request

import pytest

from autotune.errors import TrackingError
from autotune.tracking import Tracker, ui_command
from tests.autotune.tracking_cases import (
    PARENT,
    Gate,
    answering,
    artifact,
    client,
    copied,
    free_port,
    logged,
    migrated,
    record,
    runs,
    server,
    server_command,
    step,
)


@pytest.fixture(scope="module")
def database(tmp_path_factory):
    return migrated(tmp_path_factory.getbasetemp())


@pytest.fixture(scope="module")
def ui(database, tmp_path_factory):
    """A study's tracker, and MLflow's pages of it: still starting."""
    state = copied(database, tmp_path_factory.mktemp("state"))
    with server(ui_command(state, port=free_port()), state) as uri:
        yield Tracker(None, state), uri


@pytest.fixture(scope="module")
def server_uri(database, tmp_path_factory, ui):
    folder = copied(database, tmp_path_factory.mktemp("server"))
    with server(server_command(folder, free_port()), folder) as uri:
        yield answering(uri)


@pytest.fixture
def gate(server_uri):
    gate = Gate(server_uri)
    yield gate
    gate.http.shutdown()
    gate.http.server_close()


@pytest.fixture
def parent(request):
    return PARENT.__class__(PARENT.study, request.node.name, "laptop")


def test_a_trial_and_its_artifacts_reach_a_server(server_uri, tmp_path, parent):
    tracker = Tracker(server_uri, tmp_path)
    run_id = tracker.open_parent(parent)
    assert tracker.url(run_id).startswith(f"{server_uri}/#/experiments/")
    tracker.log_trial(record(0, steps=tuple(step(iteration) for iteration in range(1, 501))))
    tracker.close_parent(run_id, "FINISHED")
    assert tracker.close(30) == 0
    run = runs(tracker, experiment=parent.experiment)[0]
    assert run.info.status == "FINISHED"
    assert artifact(tracker, run, "argv.txt").startswith("--num-layers")
    assert [item.path for item in client(tracker).list_artifacts(run_id)] == ["autotune_probe.txt"]


def test_E005_a_trial_is_one_batch_and_few_requests(gate, tmp_path, parent):
    tracker = Tracker(gate.uri, tmp_path)
    tracker.open_parent(parent)
    gate.requests.clear()
    tracker.log_trial(record(0, steps=tuple(step(iteration) for iteration in range(1, 2001))))
    assert tracker.close(30) == 0
    api = [path for _, path, _ in gate.requests if "/mlflow-artifacts/" not in path]
    assert [path.rpartition("/")[2] for path in api] == ["create", "log-batch", "update"]


@pytest.mark.parametrize("status", [500, 503, 403])
def test_C041_a_server_that_fails_for_a_while_loses_nothing(gate, tmp_path, parent, status):
    tracker = Tracker(gate.uri, tmp_path)
    run_id = tracker.open_parent(parent)
    gate.status = status
    started = time.perf_counter()
    for number in range(3):
        tracker.log_trial(record(number))
    assert time.perf_counter() - started < 0.2
    deadline = time.monotonic() + 10
    while tracker.missing() < 3 and time.monotonic() < deadline:
        time.sleep(0.05)
    assert tracker.missing() == 3
    gate.status = None
    tracker.close_parent(run_id, "FINISHED")
    assert tracker.close(20) == 0
    assert set(runs(tracker, experiment=parent.experiment)) == {0, 1, 2}
    assert client(tracker).get_run(run_id).info.status == "FINISHED"


def test_C041_what_a_server_that_stays_away_misses_is_counted_and_sent_at_the_next_open(gate, tmp_path, parent):
    tracker = Tracker(gate.uri, tmp_path)
    tracker.open_parent(parent)
    gate.status = 500
    for number in range(2):
        tracker.log_trial(record(number))
    started = time.monotonic()
    assert tracker.close(0.5) == 2
    assert time.monotonic() - started < 2
    gate.status = None
    again = Tracker(gate.uri, tmp_path)
    again.open_parent(parent)
    assert again.close(20) == 0
    assert set(runs(again, experiment=parent.experiment)) == {0, 1}


def test_a_lost_answer_does_not_create_a_run_twice(gate, tmp_path, parent, monkeypatch):
    tracker = Tracker(gate.uri, tmp_path)
    tracker.open_parent(parent)
    original, answers = tracker._writer.store._client.create_run, []

    def create_run(*args, **kwargs):
        run = original(*args, **kwargs)
        if not answers:
            answers.append(run)
            raise ConnectionResetError("the answer was lost")
        return run

    monkeypatch.setattr(tracker._writer.store._client, "create_run", create_run)
    tracker.log_trial(record(0))
    assert tracker.close(20) == 0
    experiment = client(tracker).get_experiment_by_name(parent.experiment).experiment_id
    assert len(client(tracker).search_runs([experiment])) == 2


def test_E027_a_name_that_the_server_does_not_allow_fails_at_the_start(server_uri, tmp_path, monkeypatch):
    port = int(server_uri.rpartition(":")[2])
    original = socket.getaddrinfo
    monkeypatch.setattr(
        socket, "getaddrinfo", lambda host, *rest, **kw: original("127.0.0.1" if host == "tracker.internal" else host, *rest, **kw)
    )
    with urllib.request.urlopen(f"http://tracker.internal:{port}/health") as health:
        assert health.status == 200
    tracker = Tracker(f"http://tracker.internal:{port}", tmp_path)
    with pytest.raises(TrackingError, match=r"tracker\.internal") as caught:
        tracker.ready(20)
    assert f"--allowed-hosts tracker.internal:{port}" in caught.value.hint
    tracker.close(0)


def test_C053_no_server_fails_at_the_start_with_its_address(tmp_path):
    uri = f"http://127.0.0.1:{free_port()}"
    tracker = Tracker(uri, tmp_path)
    with pytest.raises(TrackingError, match=uri) as caught:
        tracker.ready(20)
    assert "server runs" in caught.value.hint
    with pytest.raises(TrackingError):
        tracker.open_parent(PARENT)
    tracker.log_trial(record(0))
    assert tracker.close(1) == 1


def test_E030_an_artifact_root_that_the_server_does_not_see_fails_at_the_start(gate, tmp_path, parent):
    tracker = Tracker(gate.uri, tmp_path / "state")
    client(tracker).create_experiment(parent.experiment, artifact_location=(tmp_path / "mlruns").as_uri())
    tracker.open_parent(parent)
    assert tracker.close(5) == 0
    gate.blind = True
    blind = Tracker(gate.uri, tmp_path / "state")
    with pytest.raises(TrackingError, match="artifact root") as caught:
        blind.open_parent(parent)
    assert "mlflow-artifacts" in caught.value.hint
    blind.close(0)


def test_the_ui_shows_a_study_without_a_server(ui):
    tracker, uri = ui
    run = logged(tracker, record(0))[0]
    with urllib.request.urlopen(f"{answering(uri)}/get-artifact?path=argv.txt&run_uuid={run.info.run_id}") as answer:
        assert answer.read().startswith(b"--num-layers")
    with urllib.request.urlopen(uri) as page:
        assert b"MLflow" in page.read()
    assert not os.path.exists("mlruns")
