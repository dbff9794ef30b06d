"""Where a study's MLflow store is, and how a person looks at it. Imports no mlflow."""

from __future__ import annotations

import os
import re
import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import urlsplit

from autotune.errors import SpecError, TrackingError

DATABASES = ("sqlite", "postgresql", "mysql", "mssql")
SERVERS = ("http", "https", "databricks")

_SETTINGS: Mapping[str, str] = {
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "MLFLOW_ENABLE_SYSTEM_METRICS_LOGGING": "false",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "15",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
    "GIT_PYTHON_REFRESH": "quiet",
}


def quiet_settings(environ: Mapping[str, str]) -> dict[str, str]:
    """MLflow's settings to set before its import: no telemetry ever, short waits unless the person set longer ones."""
    return {name: value for name, value in _SETTINGS.items() if name not in environ} | {"MLFLOW_DISABLE_TELEMETRY": "true"}


def tracking_uri_of(tracking_uri: str | None, state_folder: Path) -> str:
    """The given tracking URI, or the study's own SQLite file.

    Raises:
        TrackingError: Neither a server nor a database: MLflow's folder store loses the race between writers and is frozen.
    """
    if tracking_uri is None:
        return f"sqlite:///{state_folder.absolute() / 'mlflow.db'}"
    scheme = tracking_uri.partition(":")[0].partition("+")[0] if ":" in tracking_uri else ""
    if scheme not in DATABASES + SERVERS:
        hint = "give http(s)://host:port of an MLflow server, or a database such as sqlite:////absolute/path/mlflow.db"
        raise TrackingError(f"{tracking_uri!r} is no tracking server and no database", hint)
    return tracking_uri


def artifact_root_of(tracking_uri: str, state_folder: Path) -> str | None:
    """The folder of artifacts beside a database; None where a server decides."""
    if tracking_uri.startswith(SERVERS):
        return None
    return (state_folder.absolute() / "mlartifacts").as_uri()


def local_database(tracking_uri: str) -> Path | None:
    """The file of a SQLite URI; None for everything else."""
    return Path(tracking_uri.partition(":///")[2]) if tracking_uri.startswith("sqlite:///") else None


def ui_command(store: Path | str, host: str = "127.0.0.1", port: int = 5000) -> list[str]:
    """The command that serves MLflow's pages for a study's state folder or a database URI; run it with `ui_environment`.

    Raises:
        TrackingError: The store is a server already: its address is the page to open.
    """
    uri = tracking_uri_of(store if isinstance(store, str) else None, Path(store))
    if uri.startswith(SERVERS):
        raise TrackingError(f"{uri} is an MLflow server already", f"open {uri} in a browser")
    command = [sys.executable, "-m", "mlflow", "server", "--backend-store-uri", uri]
    return [*command, "--no-serve-artifacts", "--host", host, "--port", str(port), "--workers", "1"]


def check_address(host: str, port: int) -> None:
    """Refuse an address that MLflow's server could not listen on.

    Raises:
        SpecError: with the system's reason.
    """
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        socket.create_server((host, port), family=family).close()
    except OSError as error:
        reason = str(error.strerror).split(" (")[0]
        problem, hint = f"cannot be listened on: {reason}", "give another --port or --host, e.g. --port 5001"
        raise SpecError("--host and --port", f"{host}:{port}", problem, hint) from None


def ui_environment(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment of `ui_command`: the caller's, with MLflow's telemetry and job runners off."""
    base = dict(os.environ if environ is None else environ)
    return base | quiet_settings(base)


def ui_tunnel(port: int = 5000, host: str | None = None) -> str:
    """What to type on one's own machine to see pages served on this machine's loopback."""
    return f"ssh -N -L {port}:127.0.0.1:{port} {host or socket.gethostname()}   # then open http://127.0.0.1:{port}"


def run_url(base: str, experiment_id: str, run_id: str) -> str:
    """The page of one run below a server's address."""
    return f"{base.rstrip('/')}/#/experiments/{experiment_id}/runs/{run_id}"


def advice(address: str, error: Exception) -> str:
    """What a person can do about a store that does not answer as MLflow does."""
    text = str(error)
    host = urlsplit(address).netloc
    codes = set(re.findall(r"\b\d{3}\b", text))
    if "403" in codes or "Invalid Host header" in text:
        return f"the server refuses this host name; start it with --allowed-hosts {host} (its /health page answers all the same)"
    if "401" in codes or "UNAUTHENTICATED" in text:
        return "set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_TOKEN"
    if "404" in codes:
        return f"{address} answers, but not as an MLflow server: check port and path prefix"
    if address.startswith(SERVERS):
        return f"check that the server runs and that {host} can be reached from this machine"
    return "check the database's address, rights and free space"
