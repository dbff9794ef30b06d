"""The shared server's settings in mlflow/: as its files give them, tried with the real server on SQLite, not PostgreSQL."""

import os
import re
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from autotune.doctor import Status
from autotune.doctor.services import API_ROUTE, check_tracking

ROOT = Path(__file__).resolve().parent.parent.parent
COMPOSE = yaml.safe_load((ROOT / "mlflow/compose.yaml").read_text())
SERVER = COMPOSE["services"]["server"]
NAME = "mlflow.example.org"


def _filled(text: str, **values: str) -> str:
    """Compose's own substitution: ${NAME}, ${NAME:-default} and ${NAME:?message}."""
    return re.sub(r"\$\{(\w+)(?::[-?]([^}]*))?\}", lambda found: values.get(found[1], found[2] or ""), text)


def test_server_is_the_locked_release_of_mlflow():
    version = re.search(r"MLFLOW_VERSION=(\S+)", (ROOT / "mlflow/Dockerfile").read_text())[1]
    assert f"mlflow=={version}\n" in (ROOT / "requirements/lock.txt").read_text()


def test_nothing_is_published_beyond_this_host_unless_asked():
    assert [_filled(port) for port in SERVER["ports"]] == ["127.0.0.1:5000:5000"]
    assert "ports" not in COMPOSE["services"]["database"]


def test_password_has_no_default():
    assert ":?" in COMPOSE["services"]["database"]["environment"]["POSTGRES_PASSWORD"]


def test_both_data_folders_are_volumes():
    assert set(COMPOSE["volumes"]) == {"database", "artifacts"}
    assert SERVER["volumes"] == ["artifacts:/artifacts"]


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("server")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    settings = {name: _filled(value, MLFLOW_DNS_NAME=NAME) for name, value in SERVER["environment"].items()}
    settings |= {"MLFLOW_BACKEND_STORE_URI": f"sqlite:///{folder}/runs.db", "MLFLOW_ARTIFACTS_DESTINATION": f"{folder}/artifacts"}
    command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            command, env={**os.environ, **settings}, cwd=folder, stdout=log, stderr=log, start_new_session=True
        )
    try:
        deadline = time.monotonic() + 60
        while _code(f"http://127.0.0.1:{port}") != 200:
            assert process.poll() is None and time.monotonic() < deadline, (folder / "log").read_text()
            time.sleep(0.3)
        yield f"http://127.0.0.1:{port}"
    finally:
        os.killpg(process.pid, 9)
        process.wait(10)


def _code(address: str, host: str | None = None, route: str = API_ROUTE) -> int:
    return _answer(urllib.request.Request(address + route, headers={"Host": host} if host else {}))


def _answer(request: urllib.request.Request) -> int:
    try:
        with urllib.request.urlopen(request, timeout=5) as reply:
            return reply.status
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return 0


@pytest.mark.acceptance
def test_server_answers_under_the_names_it_was_told_and_no_other(server):
    assert check_tracking(server).status is Status.OK
    assert _code(server, NAME) == 200
    assert _code(server, f"{NAME}:5000") == 200
    assert _code(server, "localhost:5000") == 200
    assert _code(server, "other.example.org:5000") == 403
    assert _code(server, "other.example.org:5000", "/health") == 200


@pytest.mark.acceptance
@pytest.mark.parametrize(
    ("origin", "code"),
    [
        (f"http://{NAME}", 200),
        (f"http://{NAME}:5000", 200),
        (f"https://{NAME}", 200),
        (f"https://{NAME}:8443", 200),
        ("http://localhost:5000", 200),
        ("http://dash.example", 403),
    ],
)
def test_E028_a_page_of_another_origin_cannot_change_anything(server, origin, code):
    search = b'{"max_results": 1}'
    headers = {"Origin": origin, "Content-Type": "application/json"}
    assert _answer(urllib.request.Request(f"{server}/api/2.0/mlflow/experiments/search", search, headers)) == code


@pytest.mark.acceptance
def test_health_check_of_the_compose_file_passes_on_the_real_server(server):
    *_, code = SERVER["healthcheck"]["test"]
    port = server.rpartition(":")[2]
    found = subprocess.run(
        [sys.executable, "-c", code.replace("5000", port)], capture_output=True, text=True, timeout=30, check=False
    )
    assert found.returncode == 0, found.stderr


@pytest.mark.acceptance
def test_artifacts_go_through_the_server(server, tmp_path):
    """A client with no path to the artifacts' folder writes and reads one."""
    code = (
        "from mlflow import MlflowClient; c = MlflowClient(); r = c.create_run(c.create_experiment('e')).info;"
        "print(r.artifact_uri); c.log_text(r.run_id, 'hello', 'a.txt'); print(open(c.download_artifacts(r.run_id, 'a.txt')).read())"
    )
    environment = {**os.environ, "MLFLOW_TRACKING_URI": server}
    found = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert found.returncode == 0, found.stderr
    uri, content = found.stdout.strip().splitlines()
    assert uri.startswith("mlflow-artifacts:")
    assert content == "hello"
