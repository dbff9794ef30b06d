"""Writes ended trials' runs again after something was attached to their records, also while a driver writes others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from autotune.errors import TrackingError
from autotune.records import TrialRecord
from autotune.tracking.server import advice, artifact_root_of, local_database, tracking_uri_of
from autotune.tracking.tracker import connect
from autotune.tracking.upload import PREFIX, trial_upload


def write_again(tracking_uri: str | None, state_folder: Path, experiment: str, records: Sequence[TrialRecord]) -> int:
    """Bring the runs of one study's trials up to their records; how many there are.

    Logs and readings stay as they were uploaded. A trial that MLflow does not have yet is left to the study's next driver, which
    writes it whole.

    Args:
        tracking_uri: MLflow's tracking URI; None = SQLite in the state folder.
        state_folder: The study's folder.
        experiment: MLflow experiment.
        records: Trials of one study.

    Raises:
        TrackingError: MLflow cannot be reached, or refuses a write.
    """
    uri = tracking_uri_of(tracking_uri, state_folder)
    database = local_database(uri)
    if not records or (database is not None and not database.exists()):
        return 0
    store = connect(uri, artifact_root_of(uri, state_folder))
    try:
        opened = store.find_study(experiment, records[0].study)
        if opened is None:
            return 0
        known = [record for record in records if record.number in opened.runs]
        for record in known:
            upload = trial_upload(record)
            tags = {f"{PREFIX}violations": "", **upload.tags}  # those of before may hold no more
            store.write(opened, replace(upload, tags=tags, files={}), uncertain=False)
    except Exception as error:  # whatever a driver, a socket or MLflow raises
        raise TrackingError(f"MLflow at {uri}: {error}", advice(uri, error)) from error
    return len(known)
