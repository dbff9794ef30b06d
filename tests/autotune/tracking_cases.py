"""What the tracking tests share: records by hand, a migrated store to copy, a real MLflow server, a gate before it."""

import contextlib
import functools
import http.client
import os
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from mlflow import MlflowClient

from autotune.records import Phase, TrialRecord
from autotune.tracking import ParentRun, Tracker, ui_environment
from launchers.base import StepRecord
from launchers.outcome import Outcome
from search_spaces.config import TrialConfig

ROOT = Path(__file__).resolve().parents[2]
STUDY = "gpt/laptop/1"
PARENT = ParentRun(STUDY, "gpt", "laptop", 1, {"seq_length": 128})
ARGV = ("--num-layers", "4", "--tensor-model-parallel-size", "1", "--bf16")


def step(iteration, loss=3.0, **changes):
    values = {"iteration": iteration, "time_s": 1000.0 + iteration, "step_s": 0.5, "loss": loss, "grad_norm": 1.0}
    return StepRecord(**{**values, "tokens": 512, "peak_memory_gib": 0.2, **changes})


def record(number=0, **changes):
    values = {
        "study": STUDY,
        "number": number,
        "phase": Phase.EXPLORE,
        "config": TrialConfig(),
        "argv": ARGV,
        "outcome": Outcome.COMPLETED,
        "value": 1.5,
        "metrics": {"tokens_per_s_per_gpu": 100.0 + number},
        "steps": (step(1), step(2)),
        "started_s": 1000.0,
        "ended_s": 1010.0,
        "environment": {"node": "a"},
    }
    return TrialRecord(**{**values, **changes})


def client(tracker):
    return MlflowClient(tracker.tracking_uri)


def runs(tracker, query="", experiment="gpt"):
    """Trial runs by number, as MLflow shows them."""
    mlflow = client(tracker)
    found = mlflow.search_runs([mlflow.get_experiment_by_name(experiment).experiment_id], query, max_results=5000)
    return {int(run.data.tags["autotune.number"]): run for run in found if "autotune.number" in run.data.tags}


def logged(tracker, *records, parent=PARENT):
    """The runs of `records`, written through the tracker and closed."""
    tracker.open_parent(parent)
    for item in records:
        tracker.log_trial(item)
    assert tracker.close(30) == 0
    return runs(tracker)


def artifact(tracker, run, name):
    """An artifact's text."""
    return Path(client(tracker).download_artifacts(run.info.run_id, name)).read_text()


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextlib.contextmanager
def server(command, folder):
    """A real MLflow server on loopback, not waited for; ended with its workers by its own process group."""
    with (folder / "server.log").open("w") as log:
        process = subprocess.Popen(command, cwd=folder, env=ui_environment(), stdout=log, stderr=log, start_new_session=True)
    try:
        yield f"http://127.0.0.1:{command[command.index('--port') + 1]}"
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def answering(uri):
    """`uri`, once its API answers."""
    deadline = time.monotonic() + 90
    while not _answers(int(uri.rpartition(":")[2])):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    return uri


def _answers(port):
    with contextlib.suppress(OSError), contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=5)) as link:
        link.request("GET", "/api/2.0/mlflow/experiments/search?max_results=1")
        return link.getresponse().status == 200
    return False


def server_command(folder, port):
    command = [sys.executable, "-m", "mlflow", "server", "--backend-store-uri", f"sqlite:///{folder / 'mlflow.db'}"]
    artifacts = ["--serve-artifacts", "--artifacts-destination", str(folder / "proxied")]
    return [*command, *artifacts, "--host", "127.0.0.1", "--port", str(port), "--workers", "1"]


class Gate:
    """A server before the real one: passes on, or answers `status`, or hides the server's own view of artifacts."""

    def __init__(self, target):
        self.status = None
        self.blind = False
        self.requests = []
        gate, port = self, int(target.rpartition(":")[2])

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def forward(self):
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                gate.requests.append((self.command, self.path, body))
                if gate.status is not None:
                    return self.reply(gate.status, b"away")
                if gate.blind and "/artifacts/list" in self.path:
                    return self.reply(200, b"{}")
                link = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
                headers = {name: value for name, value in self.headers.items() if name.lower() not in ("host", "connection")}
                link.request(self.command, self.path, body, headers)
                answer = link.getresponse()
                return self.reply(answer.status, answer.read(), answer.getheader("Content-Type", ""))

            def reply(self, status, body, kind="text/plain"):
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.send_header("Content-Type", kind)
                self.end_headers()
                self.wfile.write(body)

            do_GET = do_POST = do_PUT = do_PATCH = forward  # noqa: N815

            def log_message(self, *_):
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.uri = f"http://127.0.0.1:{self.http.server_address[1]}"
        threading.Thread(target=self.http.serve_forever, daemon=True).start()


@functools.cache
def migrated(base):
    """A new store below the session's folder, migrated once, to be copied by every test."""
    tracker = Tracker(None, base / "template")
    assert tracker.ready(60)
    tracker.close(5)
    return base / "template" / "mlflow.db"


def copied(database, folder):
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(database, folder / "mlflow.db")
    return folder


def script(text, state, **environ):
    """Run a driver of its own; its exit code and output."""
    code = "from tests.autotune.tracking_cases import *\nimport json, os, sys\nfrom pathlib import Path\n" + textwrap.dedent(text)
    outside = {name: value for name, value in os.environ.items() if name not in ("CI", "PYTEST_CURRENT_TEST", "PYTEST_VERSION")}
    done = subprocess.run(
        [sys.executable, "-c", code, str(state)],
        cwd=ROOT,
        env=outside | environ,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr
