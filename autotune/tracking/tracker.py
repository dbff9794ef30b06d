"""One writer of MLflow for a whole study driver: the tuning loop never waits for it and never fails because of it.

log_trial -> queue -> writer thread -> MLflow
                         |  (store away, study not open yet, driver ending)
                         v
                       spool file -> MLflow, when the store is back or at the next open
"""

from __future__ import annotations

import importlib
import logging
import os
import socket
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from autotune.errors import TrackingError
from autotune.records import TrialRecord
from autotune.tracking.server import SERVERS, advice, artifact_root_of, quiet_settings, run_url, tracking_uri_of
from autotune.tracking.spool import Spool
from autotune.tracking.upload import PREFIX, RunUpload, as_text, parameters, study_key, summary
from autotune.tracking.writer import LAST_RETRY_S, Writer

if TYPE_CHECKING:
    from autotune.tracking.store import MlflowStore

log = logging.getLogger(__name__)

OPEN_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class ParentRun:
    """The run above all trials of one study, pool and node count.

    Attributes:
        study: Optuna study name, as in `TrialRecord.study`.
        experiment: MLflow experiment: the name in the study file, shared by all pools.
        pool: Pool name.
        nodes: Node count.
        params: What the whole study fixes; values of any type.
        tags: Anything to filter by; our prefix is put before each.
    """

    study: str
    experiment: str
    pool: str
    nodes: int = 1
    params: Mapping[str, object] = field(default_factory=dict)
    tags: Mapping[str, str] = field(default_factory=dict)


class Tracker:
    """Writes a study's trials to MLflow from one thread. Call `close` at the end.

    Args:
        tracking_uri: MLflow server or database; None keeps SQLite and artifacts under `state_folder`.
        state_folder: The study's folder; also holds the spool.
        artifact_root: Where a database's new experiments put artifacts; None: `mlartifacts` under `state_folder`.

    Raises:
        TrackingError: The tracking URI is neither a server nor a database.
    """

    def __init__(self, tracking_uri: str | None, state_folder: Path, *, artifact_root: str | None = None) -> None:
        state_folder.mkdir(parents=True, exist_ok=True)
        self.tracking_uri = tracking_uri_of(tracking_uri, state_folder)
        self.driver = _driver_id(os.getpid())
        self._artifact_root = artifact_root or artifact_root_of(self.tracking_uri, state_folder)
        self._checked = False
        self._writer = Writer(self._connect, Spool(state_folder / "mlflow_spool.jsonl"), self.driver)

    def ready(self, timeout_s: float) -> bool:
        """Whether the store answered its API within the time; a new SQLite store needs seconds, once.

        Raises:
            TrackingError: It does not answer, with address, cause and what to do.
        """
        tried = self._writer.tried.wait(timeout_s)
        if tried and self._writer.store is None and self._writer.failure is not None:
            raise self._writer.failure
        return self._writer.store is not None

    def open_parent(self, parent: ParentRun, timeout_s: float = OPEN_TIMEOUT_S) -> str:
        """The parent's run id: found again by our own tag, else created. Ends what a dead driver left, then sends the spool.

        Raises:
            TrackingError: The store does not answer in time, or cannot keep artifacts.
        """
        return str(self._writer.ask(lambda store: self._open(store, parent), timeout_s))

    def log_trial(self, record: TrialRecord) -> None:
        """Have the whole trial written, once. Returns at once and never raises; a repeat updates the same run."""
        self._writer.put(record)

    def rebuild(self, records: Iterable[TrialRecord]) -> int:
        """Log those of the opened studies' trials that MLflow does not hold complete yet; their number."""
        missing = [record for record in records if not self.is_logged(record.study, record.number)]
        for record in missing:
            self._writer.put(record, wait_s=LAST_RETRY_S)
        return len(missing)

    def is_logged(self, study: str, number: int) -> bool:
        """Whether the opened study's trial was written to its end."""
        opened = self._writer.opened.get(study)
        return opened is not None and number in opened.ended

    def tag_parent(self, run_id: str, tags: Mapping[str, str]) -> None:
        """Have an open parent's tags set, our prefix before each; returns at once and never raises."""
        own = {PREFIX + name: as_text(text) for name, text in tags.items()} | {PREFIX + "driver": self.driver}
        if (study := self._study_of(run_id)) is not None:
            self._writer.put(RunUpload(study, number=None, name="", status="RUNNING", start_ms=0, end_ms=0, tags=own))

    def close_parent(
        self,
        run_id: str,
        status: str,
        metrics: Mapping[str, float] | None = None,
        tags: Mapping[str, str] | None = None,
        artifacts: Mapping[str, str | Path] | None = None,
    ) -> None:
        """Have the parent ended: `status` is FINISHED, FAILED or KILLED; an artifact is its text or the path of a file."""
        if (study := self._study_of(run_id)) is None:
            log.warning("no open study has the MLflow run %s: it is not closed", run_id)
            return
        now_ms = int(time.time() * 1000)
        points, missing = summary(metrics or {}, step=len(self._writer.opened[study].runs), time_ms=now_ms)
        own = {PREFIX + name: as_text(text) for name, text in (tags or {}).items()}
        texts = {name: content for name, content in (artifacts or {}).items() if isinstance(content, str)}
        files = {name: str(content) for name, content in (artifacts or {}).items() if isinstance(content, Path)}
        self._writer.put(
            RunUpload(
                study=study,
                number=None,
                name="",
                status=status,
                start_ms=0,
                end_ms=now_ms,
                tags=own | missing | {PREFIX + "driver": self.driver},
                points=tuple(points),
                texts=texts,
                files=files,
            )
        )

    def reconcile(self, experiment: str, timeout_s: float = OPEN_TIMEOUT_S) -> int:
        """End, as KILLED, runs of the experiment whose driver on this machine is dead; their number."""
        return int(self._writer.ask(lambda store: store.reconcile(experiment, _is_dead), timeout_s))

    def url(self, run_id: str) -> str | None:
        """The page of an open study's parent run on the tracking server; None where the store is a database (see `ui_command`)."""
        opened = next((opened for opened in list(self._writer.opened.values()) if opened.run_id == run_id), None)
        if opened is None or not self.tracking_uri.startswith(SERVERS):
            return None
        return run_url(self.tracking_uri, opened.experiment_id, run_id)

    def missing(self) -> int:
        """Uploads that MLflow does not have: spooled or refused by it."""
        return self._writer.missing()

    def close(self, timeout_s: float) -> int:
        """Upload what is left for at most `timeout_s`, spool the rest; how many uploads are missing in MLflow."""
        self._writer.close(timeout_s)
        missing = self._writer.missing()
        if missing:
            log.warning("%d uploads are missing in MLflow at %s; the next resume sends what it can", missing, self.tracking_uri)
        return missing

    def _study_of(self, run_id: str) -> str | None:
        """The open study whose parent run this is."""
        return next((name for name, opened in list(self._writer.opened.items()) if opened.run_id == run_id), None)

    def _connect(self) -> MlflowStore:
        """In the writer's thread: it takes seconds."""
        return connect(self.tracking_uri, self._artifact_root)

    def _open(self, store: MlflowStore, parent: ParentRun) -> str:
        own = {"role": "parent", "key": study_key(parent.study), "study": parent.study, "driver": self.driver}
        tags = {**parent.tags, "pool": parent.pool, "nodes": str(parent.nodes), **own}
        try:
            opened = store.open_study(
                parent.experiment,
                parent.study,
                f"{parent.pool} x{parent.nodes}",
                parameters(parent.params),
                {PREFIX + name: as_text(text) for name, text in tags.items()},
            )
            if not self._checked:
                store.check_artifacts(opened)
                self._checked = True
        except TrackingError:
            raise
        except Exception as error:  # as in _connect
            raise TrackingError(f"MLflow at {self.tracking_uri}: {error}", advice(self.tracking_uri, error)) from error
        self._writer.opened[parent.study] = opened
        self._writer.replay()
        return opened.run_id


def connect(tracking_uri: str, artifact_root: str | None) -> MlflowStore:
    """Import mlflow, quiet, and open the store.

    Raises:
        TrackingError: It does not answer, with address, cause and what to do.
    """
    os.environ.update(quiet_settings(os.environ))
    store_module = importlib.import_module("autotune.tracking.store")
    try:
        store: MlflowStore = store_module.MlflowStore(tracking_uri, artifact_root)
    except Exception as error:  # whatever a driver, a socket or MLflow raises: no store
        raise TrackingError(f"no MLflow store at {tracking_uri}: {error}", advice(tracking_uri, error)) from error
    return store


def _driver_id(pid: int) -> str:
    """Host, process id and start time: a process id alone is soon somebody else's."""
    return f"{socket.gethostname()}/{pid}/{psutil.Process(pid).create_time():.2f}"


def _is_dead(driver: str) -> bool:
    """Whether a driver ran on this machine and is gone; False where that cannot be known."""
    host, pid, _ = [*driver.split("/"), "", ""][:3]
    if host != socket.gethostname() or not pid.isdigit():
        return False
    try:
        return _driver_id(int(pid)) != driver
    except psutil.NoSuchProcess:
        return True
