"""Checks of what a study writes to: the MLflow server and Optuna's storage. Passwords never appear in an answer."""

from __future__ import annotations

import base64
import importlib.metadata
import importlib.util
import os
import ssl
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit, urlunsplit

from autotune.doctor.finding import Finding, Status
from autotune.doctor.machine import nearest_existing
from autotune.probes import Answer, ask

HTTP_TIMEOUT_S = 5.0
DATABASE_TIMEOUT_S = 8.0
# An API route on purpose: /health answers 200 even where the server refuses every real request.
API_ROUTE = "/api/2.0/mlflow/experiments/search?max_results=1"


@dataclass(frozen=True, slots=True)
class Reply:
    """A server's reply; `code` 0 where there was none, `body` is then the reason."""

    code: int
    body: str = ""


Get = Callable[[str, Mapping[str, str]], Reply]


def http_get(url: str, headers: Mapping[str, str]) -> Reply:
    """One GET within the time limit, with MLflow's own certificate settings."""
    context = ssl.create_default_context(cafile=os.environ.get("MLFLOW_TRACKING_SERVER_CERT_PATH"))
    if os.environ.get("MLFLOW_TRACKING_INSECURE_TLS", "").lower() in ("true", "1"):
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    try:
        with urllib.request.urlopen(
            urllib.request.Request(url, headers=dict(headers)), timeout=HTTP_TIMEOUT_S, context=context
        ) as reply:
            return Reply(reply.status, reply.read(65536).decode(errors="replace"))
    except urllib.error.HTTPError as error:
        return Reply(error.code, error.read(2048).decode(errors="replace"))
    except (OSError, ValueError) as error:
        return Reply(0, str(getattr(error, "reason", error)) or type(error).__name__)


def check_mlflow_package() -> Finding:
    """Whether `import mlflow` finds the real package, not merely a folder of that name."""
    spec = importlib.util.find_spec("mlflow")
    if spec is None or spec.origin is None:
        detail = "not installed" if spec is None else "a folder named mlflow is found in place of the package"
        return Finding("MLflow", Status.FAIL, detail, f"{sys.executable} -m pip install 'mlflow>=3,<4'")
    return Finding("MLflow", Status.OK, importlib.metadata.version("mlflow"))


def check_tracking(uri: str | None, get: Get = http_get) -> Finding:
    """Whether the tracking server answers an API call; a local store needs only its folder.

    Args:
        uri: MLflow tracking URI; None = embedded, below the state folder.
        get: How to ask a server.
    """
    name = "MLflow tracking"
    if uri is None:
        return Finding(name, Status.OK, "embedded: SQLite and a folder of artifacts below the state folder")
    scheme = urlsplit(uri).scheme
    if scheme in ("http", "https"):
        return _judge_reply(name, without_password(uri), get(_api_url(uri), _credentials(uri)))
    if scheme in ("", "file"):
        return _judge_folder(name, Path(unquote(urlsplit(uri).path)))
    if scheme == "databricks" or uri.startswith("databricks"):
        return Finding(name, Status.WARN, f"{uri}: not checked", "see whether `databricks auth describe` succeeds")
    return check_storage(uri, name=name)


def _api_url(uri: str) -> str:
    parts = urlsplit(uri)
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path.rstrip("/"), "", "")) + API_ROUTE


def _credentials(uri: str) -> dict[str, str]:
    """The Authorization header that MLflow's client would send."""
    parts = urlsplit(uri)
    user = unquote(parts.username or "") or os.environ.get("MLFLOW_TRACKING_USERNAME")
    password = unquote(parts.password or "") or os.environ.get("MLFLOW_TRACKING_PASSWORD")
    if user and password:
        return {"Authorization": "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()}
    token = os.environ.get("MLFLOW_TRACKING_TOKEN")
    return {"Authorization": f"Bearer {token}"} if token else {}


_REPLY_FIXES = {
    401: ("asks for credentials", "set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_TOKEN"),
    403: (
        "refuses API calls (a server reached by a DNS name does so by default, while /health answers)",
        "start it with --allowed-hosts or MLFLOW_SERVER_ALLOWED_HOSTS naming the host and port in this URI; else see your rights",
    ),
    404: ("has no MLflow API at this address", "give the address with the path prefix under which MLflow is served"),
}


def _judge_reply(name: str, shown: str, reply: Reply) -> Finding:
    if reply.code == 200 and reply.body.lstrip().startswith("{"):  # noqa: PLR2004
        return Finding(name, Status.OK, f"{shown} answers API calls")
    if reply.code == 0:
        return Finding(
            name, Status.FAIL, f"{shown}: {reply.body}", "see address, port and proxy settings; start the server (mlflow/README.md)"
        )
    if reply.code == 200:  # noqa: PLR2004
        return Finding(
            name, Status.FAIL, f"{shown} answers, but not as MLflow: a login page or another service", _REPLY_FIXES[404][1]
        )
    problem, fix = _REPLY_FIXES.get(reply.code, ("fails", "see the server's log"))
    return Finding(name, Status.FAIL, f"{shown}: HTTP {reply.code}, {problem}", fix)


_DATABASE_PROBE = "import sqlalchemy, sys; sqlalchemy.create_engine(sys.stdin.read()).connect().close()"


def _ask_database(url: str) -> Answer:
    # By standard input: a command line is visible to every user of the machine.
    return ask((sys.executable, "-c", _DATABASE_PROBE), DATABASE_TIMEOUT_S, stdin=url)


def check_storage(url: str | None, connect: Callable[[str], Answer] = _ask_database, name: str = "Optuna storage") -> Finding:
    """Whether Optuna's storage can be opened, without creating anything in it.

    Args:
        url: Database URL or path of a journal file; None = a journal file below the state folder.
        connect: Opens a database in a process of its own, within a time limit.
        name: Name of the finding.
    """
    if url is None:
        return Finding(name, Status.OK, "a journal file below the state folder")
    parts = urlsplit(url)
    if "://" not in url:
        return _judge_folder(name, Path(url).parent)
    if parts.scheme.partition("+")[0] == "sqlite":
        return _judge_folder(name, Path(unquote(parts.path.removeprefix("/"))).parent)
    answer, shown = connect(url), without_password(url)
    if answer.ok:
        return Finding(name, Status.OK, f"{shown} accepts the connection")
    if "ModuleNotFoundError" in answer.stderr:
        return Finding(
            name, Status.FAIL, f"{shown}: {answer.last_line}", "install that database driver, e.g. pip install psycopg2-binary"
        )
    reason = _error_line(answer).replace(url, shown)
    return Finding(name, Status.FAIL, f"{shown}: {reason}", "see host, port, user and password; is the server running?")


def _error_line(answer: Answer) -> str:
    """The line of a SQLAlchemy traceback that names the error."""
    lines = [line for line in answer.stderr.splitlines() if line.startswith("sqlalchemy.exc.")]
    return lines[-1] if lines else answer.last_line


def _judge_folder(name: str, folder: Path) -> Finding:
    place = nearest_existing(folder)
    if not os.access(place, os.W_OK | os.X_OK):
        return Finding(name, Status.FAIL, f"{place} cannot be written", "choose a folder of your own, or change its rights")
    return Finding(name, Status.OK, f"{folder.absolute()} can be written")


def without_password(url: str) -> str:
    """The URL with its password replaced, for messages."""
    parts = urlsplit(url)
    if not parts.password:
        return url
    user = parts.netloc.rpartition("@")[0].partition(":")[0]
    return urlunsplit(parts._replace(netloc=f"{user}:***@{parts.netloc.rpartition('@')[2]}"))
