"""Uploads that MLflow could not take yet, one JSON line each, in a local file that survives the driver."""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Sequence
from pathlib import Path
from threading import Lock

from autotune.tracking.upload import RunUpload

log = logging.getLogger(__name__)


class Spool:
    """A first-in, first-out file. Any thread may append; one thread reads and settles."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = Lock()
        self._studies = [upload.study for upload in self.read()]

    def __len__(self) -> int:
        return len(self._studies)

    def holds(self, studies: Collection[str]) -> bool:
        """Whether an upload of one of these studies waits."""
        return any(study in studies for study in self._studies)

    def append(self, upload: RunUpload) -> None:
        """Put one upload at the end."""
        with self._lock:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(upload.to_json() + "\n")
            self._studies.append(upload.study)

    def read(self) -> list[RunUpload]:
        """All uploads, oldest first; a line that a killed driver left half written is dropped with a warning."""
        with self._lock:
            uploads = self._parsed()
            self._write(uploads)
        return uploads

    def settle(self, read: int, left: Sequence[RunUpload]) -> None:
        """Keep, of the first `read` uploads, those in `left`, and all that were appended since."""
        with self._lock:
            self._write([*left, *self._parsed()[read:]])

    def _parsed(self) -> list[RunUpload]:
        if not self._path.exists():
            return []
        uploads = []
        for line in self._path.read_text(encoding="utf-8", errors="replace").split("\n"):
            try:
                uploads += [RunUpload.from_json(line)] if line.strip() else []
            except (ValueError, TypeError, KeyError):
                log.warning("dropped an unreadable line of %s; MLflow can be rebuilt from the study's storage", self._path)
        return uploads

    def _write(self, uploads: Sequence[RunUpload]) -> None:
        self._studies = [upload.study for upload in uploads]
        if not uploads:
            self._path.unlink(missing_ok=True)
            return
        draft = self._path.with_suffix(".tmp")
        draft.write_text("".join(upload.to_json() + "\n" for upload in uploads), encoding="utf-8")
        os.replace(draft, self._path)
