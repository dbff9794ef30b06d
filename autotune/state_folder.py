"""A study's folder: its spec, storage, logs, best configuration so far, and the lock of the one driver that may write."""

from __future__ import annotations

import fcntl
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import yaml

from autotune.errors import SpecError
from autotune.one_driver import Driver, refusal
from autotune.records import TrialRecord
from autotune.spec import StudySpec, load_study
from autotune.storage import absolute_url

DEFAULT_ROOT = Path(".autotune")
_SPEC = "study.yaml"
_LOCK = "driver.lock"
_DRIVER = "driver.json"


class StateFolder:
    """Paths and files of one study.

    Attributes:
        path: The folder, absolute.
    """

    def __init__(self, path: Path) -> None:
        self.path = path.resolve()

    @property
    def log_root(self) -> Path:
        """Below it one folder per pool and trial with the ranks' logs."""
        return self.path / "trials"

    def write_spec(self, spec: StudySpec) -> None:
        """Keep the study's spec, so that `resume` needs no other file and works from any folder."""
        self._make()
        kept = spec.model_dump(mode="json", exclude_defaults=True)
        for field in ("storage", "tracking_uri"):
            if field in kept:
                kept[field] = absolute_url(kept[field])
        _write(self.path / _SPEC, yaml.safe_dump(kept, sort_keys=False))

    def read_spec(self) -> StudySpec:
        """The kept spec.

        Raises:
            SpecError: where the folder holds no study.
        """
        return load_study(self.path / _SPEC)

    def write_best(self, pool: str, record: TrialRecord | None, notes: Sequence[str] = ()) -> None:
        """The best configuration so far of one pool, with what must be said of it; no file where nothing is."""
        path = self.path / f"best-{pool}.json"
        if record is None:
            path.unlink(missing_ok=True)
            return
        best = {"trial": record.number, "config": record.config.changed(), "argv": record.argv, "metrics": dict(record.metrics)}
        _write(path, json.dumps({**best, "notes": list(notes)}, indent=2) + "\n")

    def driver(self) -> Driver | None:
        """The driver that is running on this machine now; None where none is."""
        known = self._last_driver()
        return known if known is not None and known.lives() else None

    def _last_driver(self) -> Driver | None:
        try:
            return Driver(**json.loads((self.path / _DRIVER).read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):
            return None

    def detach(self, address: str | None) -> tuple[int, Path]:
        """Go on with the kept study in a process of its own, which survives this terminal; its process id and its log."""
        command = [sys.executable, "-m", "autotune.cli", "resume", str(self.path)]
        command += ["--address", address] if address else []
        log = self.path / "driver.log"
        with log.open("ab") as output:
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True)
        return process.pid, log

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the folder as its only driver.

        Raises:
            SpecError: where another driver holds it, or no files can be written there.
        """
        self._make()
        with open(self.path / _LOCK, "a", encoding="utf-8") as lock:
            try:
                fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise refusal(self.path.name, self._last_driver(), 0.0) from None
            _write(self.path / _DRIVER, json.dumps(asdict(Driver.here())))
            try:
                yield
            finally:
                (self.path / _DRIVER).unlink(missing_ok=True)

    def _make(self) -> None:
        """Make the folder where it is missing, and see that files can be written in it.

        Raises:
            SpecError: they cannot.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            (self.path / _LOCK).open("a", encoding="utf-8").close()
        except OSError as error:
            problem = f"cannot hold the study's state: {(error.strerror or 'error').lower()}"
            raise SpecError("--state", self.path, problem, "give a folder that can be written, or that can be made") from None


def find_study(text: str, root: Path = DEFAULT_ROOT) -> StateFolder:
    """The state folder that a person means: a folder, a study file, or a study's name under `root`.

    Raises:
        SpecError: where there is none.
    """
    path = Path(text)
    if path.is_file():
        path = root / load_study(path).name
    elif not (path / _SPEC).is_file():
        path = root / text
    if not (path / _SPEC).is_file():
        known = sorted(folder.parent.name for folder in root.glob(f"*/{_SPEC}"))
        hint = f"studies in {root}: {', '.join(known)}" if known else f"there are no studies in {root} yet"
        raise SpecError("study", text, "no such study", hint)
    return StateFolder(path)


def _write(path: Path, text: str) -> None:
    """Whole or not at all."""
    partial = path.with_suffix(path.suffix + ".partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)
