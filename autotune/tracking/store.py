"""The one module that imports mlflow: runs are found, written once and ended, always by explicit run id.

Not for threads: one `Tracker` owns one `MlflowStore` and calls it from its writer thread only.
"""

from __future__ import annotations

import fcntl
import logging
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from mlflow import MlflowClient
from mlflow.entities import Metric, Param, Run, RunTag
from mlflow.exceptions import MlflowException
from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository
from sqlalchemy.exc import SQLAlchemyError

from autotune.errors import TrackingError
from autotune.tracking.points import Point
from autotune.tracking.server import local_database
from autotune.tracking.upload import PREFIX, RunUpload, clean_key, study_key

log = logging.getLogger(__name__)

PAGE_RUNS = 1000
MAX_FILE_BYTES = 256 * 1024
MAX_LOG_BYTES = 8 * 1024 * 1024
MAX_WHOLE_BYTES = 256 * 1024 * 1024


@dataclass(slots=True)
class OpenStudy:
    """One study's runs, by trial number; `ended` are those written to the end."""

    key: str
    run_id: str
    experiment_id: str
    artifact_uri: str
    runs: dict[int, str] = field(default_factory=dict)
    ended: set[int] = field(default_factory=set)
    artifact_uris: dict[str, str] = field(default_factory=dict)


class MlflowStore:
    """An MLflow tracking store behind the few operations that a study needs.

    Raises what MLflow raises; `is_permanent` sorts it.
    """

    def __init__(self, tracking_uri: str, artifact_root: str | None) -> None:
        logging.getLogger("mlflow").setLevel(logging.WARNING)
        logging.getLogger("alembic").setLevel(logging.WARNING)
        self._uri = tracking_uri
        self._artifact_root = artifact_root
        with _migration_lock(tracking_uri):
            self._client = MlflowClient(tracking_uri)
            self._client.search_experiments(max_results=1)

    def open_study(self, experiment: str, study: str, name: str, params: Mapping[str, str], tags: Mapping[str, str]) -> OpenStudy:
        """The study's parent run, found again or created, and its trials' runs; those left RUNNING are ended as KILLED."""
        experiment_id = self._experiment(experiment)
        found = list(self._runs(experiment_id, f"tags.`{PREFIX}key` = '{study_key(study)}'"))
        parents = [run for run in found if run.data.tags.get(PREFIX + "role") == "parent"]
        parent = parents[0] if parents else self._client.create_run(experiment_id, tags=dict(tags), run_name=name)
        opened = OpenStudy(study_key(study), parent.info.run_id, experiment_id, parent.info.artifact_uri)
        new = {key: value for key, value in params.items() if key not in parent.data.params}
        self._client.log_batch(opened.run_id, params=_params(new), tags=_tags(tags) if parents else [])
        if parents:
            self._client.update_run(opened.run_id, status="RUNNING")
        for run in found:
            if "number" in (run_tags := _own_tags(run)):
                self._adopt(opened, run, run_tags)
        return opened

    def find_study(self, experiment: str, study: str) -> OpenStudy | None:
        """The study's runs as they are, for a second writer: nothing is created, begun or ended. None where there are none."""
        known = self._client.get_experiment_by_name(experiment)
        if known is None:
            return None
        found = list(self._runs(known.experiment_id, f"tags.`{PREFIX}key` = '{study_key(study)}'"))
        parent = next((run.info for run in found if _own_tags(run).get("role") == "parent"), None)
        if parent is None:
            return None
        runs = {int(tags["number"]): run.info.run_id for run in found if "number" in (tags := _own_tags(run))}
        return OpenStudy(study_key(study), parent.run_id, known.experiment_id, parent.artifact_uri, runs)

    def check_artifacts(self, opened: OpenStudy) -> None:
        """Upload one small file to a remote artifact store and see that the server's side lists it."""
        local = _is_local(opened.artifact_uri)
        if local and not self._uri.startswith("http"):
            return
        name = "autotune_probe.txt"
        try:
            self._upload(opened.artifact_uri, {name: "The tuner can store artifacts.\n"}, {})
            listed = self._listed_by_server(opened.run_id) if local else self._listed(opened.artifact_uri)
        except (MlflowException, OSError) as error:
            raise TrackingError(f"artifacts cannot be stored at {opened.artifact_uri}: {error}", _PROXY_HINT) from error
        if name not in listed:
            raise TrackingError(f"{self._uri} does not see a file uploaded to its artifact root {opened.artifact_uri}", _PROXY_HINT)

    def write(self, opened: OpenStudy, upload: RunUpload, *, uncertain: bool) -> None:
        """Write one run whole. `uncertain`: an earlier attempt may have created it, look before creating."""
        run_id = opened.run_id if upload.number is None else self._trial_run(opened, upload.number, uncertain)
        if run_id is None:
            run_id = self._create(opened, upload)
            self._log(run_id, upload.params, {}, upload.points)
        else:
            self._update(run_id, upload)
        uri = opened.artifact_uri if upload.number is None else self._artifact_uri(opened, run_id)
        if upload.texts or upload.files:
            self._upload(uri, upload.texts, upload.files)
        if upload.status != "RUNNING":
            self._client.set_terminated(run_id, upload.status, upload.end_ms)
        opened.artifact_uris.pop(run_id, None)
        if upload.number is not None:
            opened.ended.add(upload.number)

    def is_permanent(self, error: Exception) -> bool:
        """Whether the same write would fail again for ever: the store understood and refused it, or the fault is ours."""
        if isinstance(error, MlflowException):
            return error.error_code in _REFUSALS
        return not isinstance(error, OSError | SQLAlchemyError)

    def reconcile(self, experiment: str, is_dead: Callable[[str], bool]) -> int:
        """End, as KILLED, the experiment's RUNNING runs whose driver is dead; their number."""
        found = self._client.get_experiment_by_name(experiment)
        if found is None:
            return 0
        running = list(self._runs(found.experiment_id, "attributes.status = 'RUNNING'"))
        dead = [run for run in running if (driver := _own_tags(run).get("driver")) is not None and is_dead(driver)]
        for run in dead:
            self._kill(run.info.run_id)
        return len(dead)

    def _experiment(self, name: str) -> str:
        found = self._client.get_experiment_by_name(name)
        if found is None:
            # Else MLflow's pages open as those of a language model application.
            kind = {"mlflow.experimentKind": "custom_model_development"}
            return str(self._client.create_experiment(name, artifact_location=self._artifact_root, tags=kind))
        if found.lifecycle_stage != "active":
            hint = f"restore it (mlflow experiments restore --experiment-id {found.experiment_id}) or rename the study"
            raise TrackingError(f"the experiment {name!r} was deleted in {self._uri}", hint)
        return str(found.experiment_id)

    def _runs(self, experiment_id: str, query: str) -> Iterator[Run]:
        """Every run that matches, over all pages: one page ends at 1000."""
        token = None
        while True:
            page = self._client.search_runs([experiment_id], query, max_results=PAGE_RUNS, page_token=token)
            yield from page
            token = page.token
            if not token:
                return

    def _adopt(self, opened: OpenStudy, run: Run, tags: Mapping[str, str]) -> None:
        number = int(tags["number"])
        opened.runs[number] = run.info.run_id
        if run.info.status == "RUNNING":
            self._kill(run.info.run_id)
        elif "reconciled" not in tags:
            opened.ended.add(number)

    def _kill(self, run_id: str) -> None:
        note = {PREFIX + "reconciled": "true", PREFIX + "detail": "its driver ended before the run did"}
        self._client.log_batch(run_id, tags=_tags(note))
        self._client.set_terminated(run_id, "KILLED")

    def _trial_run(self, opened: OpenStudy, number: int, uncertain: bool) -> str | None:
        if number not in opened.runs and uncertain:
            query = f"tags.`{PREFIX}key` = '{opened.key}' and tags.`{PREFIX}number` = '{number}'"
            for run in self._runs(opened.experiment_id, query):
                opened.runs[number] = run.info.run_id
        return opened.runs.get(number)

    def _create(self, opened: OpenStudy, upload: RunUpload) -> str:
        tags = {**upload.tags, "mlflow.parentRunId": opened.run_id}
        run = self._client.create_run(opened.experiment_id, upload.start_ms, tags, upload.name)
        opened.artifact_uris[run.info.run_id] = run.info.artifact_uri
        if upload.number is not None:
            opened.runs[upload.number] = run.info.run_id
        return str(run.info.run_id)

    def _update(self, run_id: str, upload: RunUpload) -> None:
        """Add what is missing, correct what changed. Parameters cannot change in MLflow: a trial's never do."""
        data = self._client.get_run(run_id).data
        params = {key: value for key, value in upload.params.items() if key not in data.params}
        if PREFIX + "reconciled" in data.tags:
            self._client.delete_tag(run_id, PREFIX + "reconciled")
        self._log(run_id, params, upload.tags, changed_points(upload.points, data.metrics, int(time.time() * 1000)))

    def _log(self, run_id: str, params: Mapping[str, str], tags: Mapping[str, str], points: tuple[Point, ...]) -> None:
        metrics = [Metric(point.key, point.value, point.time_ms, point.step) for point in points]
        self._client.log_batch(run_id, metrics, _params(params), _tags(tags))

    def _artifact_uri(self, opened: OpenStudy, run_id: str) -> str:
        known = opened.artifact_uris.get(run_id)
        return known if known is not None else str(self._client.get_run(run_id).info.artifact_uri)

    def _upload(self, artifact_uri: str, texts: Mapping[str, str], files: Mapping[str, str]) -> None:
        limit = min(MAX_FILE_BYTES, MAX_LOG_BYTES // max(1, len(files)))
        with tempfile.TemporaryDirectory(prefix="autotune-run-") as folder:
            for name, text in texts.items():
                _placed(folder, name).write_text(text, encoding="utf-8")
            for name, source in files.items():
                if Path(source).is_file():
                    _placed(folder, name).write_bytes(_tail(Path(source), limit if name.startswith("logs/") else MAX_WHOLE_BYTES))
            get_artifact_repository(artifact_uri, tracking_uri=self._uri).log_artifacts(folder)

    def _listed(self, artifact_uri: str) -> set[str]:
        repository = get_artifact_repository(artifact_uri, tracking_uri=self._uri)
        return {item.path for item in repository.list_artifacts()}

    def _listed_by_server(self, run_id: str) -> set[str]:
        """What the server itself sees: the client would list its own disk for a plain path."""
        from mlflow.utils.credentials import get_default_host_creds  # noqa: PLC0415
        from mlflow.utils.rest_utils import http_request  # noqa: PLC0415

        creds = get_default_host_creds(self._uri)
        answer = http_request(creds, "/api/2.0/mlflow/artifacts/list", "GET", params={"run_id": run_id})
        return {item["path"] for item in answer.json().get("files", [])} if answer.ok else set()


_REFUSALS = frozenset({"INVALID_PARAMETER_VALUE", "BAD_REQUEST", "RESOURCE_DOES_NOT_EXIST", "INVALID_STATE"})

_PROXY_HINT = (
    "let the server proxy artifacts (mlflow server --serve-artifacts --artifacts-destination ..., so that the root is"
    " mlflow-artifacts:/), or use an artifact root that this machine can write"
)


def changed_points(points: tuple[Point, ...], latest: Mapping[str, float], now_ms: int) -> tuple[Point, ...]:
    """The points of every metric whose last value differs from the stored one.

    A corrected last point gets the present time: at the same step and time MLflow would show the larger value.
    """
    last = {point.key: point for point in points}
    changed = [point for point in points if latest.get(point.key) != last[point.key].value]
    return tuple(replace(point, time_ms=now_ms) if point.key in latest and point is last[point.key] else point for point in changed)


def _is_local(uri: str) -> bool:
    return uri.startswith("file:") or "://" not in uri and not uri.startswith("mlflow-artifacts:")


def _own_tags(run: Run) -> dict[str, str]:
    return {key.removeprefix(PREFIX): value for key, value in run.data.tags.items() if key.startswith(PREFIX)}


def _params(values: Mapping[str, str]) -> list[Any]:
    return [Param(key, value) for key, value in values.items()]


def _tags(values: Mapping[str, str]) -> list[Any]:
    return [RunTag(key, value) for key, value in values.items()]


def _placed(folder: str, name: str) -> Path:
    path = Path(folder, clean_key(name))  # a name such as ../../x stays inside
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def _tail(path: Path, limit: int) -> bytes:
    """The last `limit` bytes of a file: a failure's reason stands at the end."""
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - limit))
        return file.read(limit)


@contextmanager
def _migration_lock(tracking_uri: str) -> Iterator[None]:
    """Two processes that create one SQLite schema at once break each other: the first one migrates, the other waits."""
    database = local_database(tracking_uri)
    if database is None:
        yield
        return
    database.parent.mkdir(parents=True, exist_ok=True)
    with database.with_suffix(".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
