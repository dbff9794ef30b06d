"""Optuna's storage: the only truth of a study. A journal file by default, any Optuna URL by option."""

from __future__ import annotations

import errno
import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Literal

import optuna
from optuna.exceptions import StorageInternalError
from optuna.samplers import BaseSampler
from optuna.storages import BaseStorage, JournalStorage, RDBStorage
from optuna.storages.journal import JournalFileBackend, JournalFileOpenLock
from sqlalchemy.exc import IntegrityError, OperationalError, SQLAlchemyError

from autotune.errors import NOTHING, InfrastructureError, SpecError, shown
from autotune.filesystem import is_network_filesystem, lock_report

Direction = Literal["maximize", "minimize"]
JOURNAL_NAME = "optuna-journal.log"
WAIT_S = 30.0
_RETRY_S = 1.0
_MOST_RACES = 5
_DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.ESTALE)
_CONNECT_S = 15
_FILE_LOCK_S = 60  # a backup or a viewer may lock an SQLite file for a while
_BLOCK_BYTES = 65536
_LOCK_SUFFIX = ".lock"  # of JournalFileOpenLock
# Where the parts of a fingerprint stand in a study file: a workload's fields are its own.
_FIELDS = {"workload": "", "choices": "search", "gpu": "pool's gpu"}


def open_storage(url: str | None, state_folder: Path, *, wait_s: float = WAIT_S, mounts: str | None = None) -> BaseStorage:
    """The storage at `url`, or the journal file in the state folder.

    Files on a network disk are used only after a two-process lock test there has passed.

    Args:
        url: Optuna storage URL; None = the journal file.
        state_folder: The study's folder.
        wait_s: How long a database server that does not answer yet is waited for.
        mounts: Text of /proc/self/mounts; None reads it.

    Raises:
        InfrastructureError: where locks do not hold or the database does not answer.
        SpecError: where the URL names something that would not outlive this process.
    """
    path = _file_of(url, state_folder)
    if path is None:
        assert url is not None
        return _open_database(url, wait_s)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        problem = f"Optuna's storage {path} cannot be created: {(error.strerror or 'error').lower()}"
        raise InfrastructureError(problem, "give another state folder or `storage:`") from None
    _check_locks(path.parent, mounts)
    return _open_database(url, 0.0) if url and url.startswith("sqlite") else _open_journal(path)


@contextmanager
def failing_as_ours() -> Iterator[None]:
    """A storage or disk that fails while a study runs ends it with one message; what it holds is there for `resume`.

    Raises:
        InfrastructureError: in place of the storage's error, or the disk's.
    """
    try:
        yield
    except StorageInternalError as error:
        cause = str(error.__cause__ or error).strip().splitlines()[0]
        raise InfrastructureError(f"Optuna's storage failed: {cause}", "mend it, then `autotune resume`") from error
    except OSError as error:
        if error.errno not in _DISK_ERRORS:
            raise
        where = f"{error.filename}: " if error.filename else ""
        problem = f"the disk failed: {where}{(error.strerror or 'error').lower()}"
        raise InfrastructureError(problem, "free space or mend it, then `autotune resume`") from error


def absolute_url(url: str) -> str:
    """The same storage with an absolute path, where it is a file."""
    path, (scheme, _, rest) = _file_of(url, Path()), url.partition("://")
    if path is None or path.is_absolute():
        return url
    _, question, options = rest.partition("?")
    slashes = "///" if scheme.startswith("sqlite") else "//"
    return f"{scheme}:{slashes}{path.resolve()}{question}{options}"


def _check_locks(folder: Path, mounts: str | None) -> None:
    if not is_network_filesystem(folder, mounts):
        return
    report = lock_report(folder)
    if not report.ok:
        raise InfrastructureError(
            f"{folder} is on a network disk whose file locks do not hold, so Optuna's storage would be corrupted there "
            f"({report.detail})",
            "give a state folder on a local disk, or `storage: postgresql://...`",
        )


def drop_stale_lock(url: str | None, state_folder: Path) -> None:
    """Remove the journal lock that a killed driver may have left in the state folder. Call it as the folder's only driver."""
    if url is None:
        (state_folder / (JOURNAL_NAME + _LOCK_SUFFIX)).unlink(missing_ok=True)


def _open_journal(path: Path) -> BaseStorage:
    lock = JournalFileOpenLock(str(path))
    _drop_partial_line(path, lock)
    try:
        return JournalStorage(JournalFileBackend(str(path), lock_obj=lock))
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError) as error:
        problem = f"Optuna's journal {path} cannot be read: {error}"
        raise InfrastructureError(
            problem, "move the file away to begin anew, or give a copy of it by `storage: journal://...`"
        ) from None


def _drop_partial_line(path: Path, lock: JournalFileOpenLock) -> None:
    """Cut off what a killed driver left half written: Optuna would append to it and could read no line from there on."""
    if not path.exists() or _is_whole(path):
        return
    lock.acquire()
    try:
        with path.open("rb+") as journal:
            end = journal.seek(0, os.SEEK_END)
            keep = _end_of_last_line(journal.fileno(), end)
            if keep < end:
                journal.truncate(keep)
    finally:
        lock.release()


def _is_whole(path: Path) -> bool:
    with path.open("rb") as journal:
        end = journal.seek(0, os.SEEK_END)
        return _end_of_last_line(journal.fileno(), end) == end


def _end_of_last_line(descriptor: int, end: int) -> int:
    """Offset behind the last newline; 0 where there is none."""
    while end > 0:
        start = max(0, end - _BLOCK_BYTES)
        found = os.pread(descriptor, end - start, start).rfind(b"\n")
        if found >= 0:
            return start + found + 1
        end = start
    return 0


def _open_database(url: str, wait_s: float) -> BaseStorage:
    """Connect, waiting for a server that is still starting, and for another driver that is making the tables."""
    is_file = url.startswith("sqlite")
    # Connections idle for the length of a trial may have been closed by the server.
    on_server = {"pool_pre_ping": True, "connect_args": {"connect_timeout": _CONNECT_S}}
    engine = {"connect_args": {"timeout": _FILE_LOCK_S}} if is_file else on_server
    deadline, races = time.monotonic() + wait_s, 0
    while True:
        try:
            return RDBStorage(url, engine_kwargs=engine)
        except (SQLAlchemyError, ImportError, RuntimeError) as error:
            starting = isinstance(error, OperationalError) and time.monotonic() < deadline
            races += (racing := _tables_are_being_made(error))
            if not starting and not (racing and races <= _MOST_RACES):
                raise _unreachable(url, error) from error
        time.sleep(_RETRY_S)


def _tables_are_being_made(error: Exception) -> bool:
    return isinstance(error, IntegrityError) or "already exists" in str(error)


def _unreachable(url: str, error: Exception) -> InfrastructureError:
    return InfrastructureError(
        f"Optuna's storage {url.rsplit('@', maxsplit=1)[-1]} does not answer: {str(error).splitlines()[0]}",
        "check address, credentials and the driver package (psycopg2, mysqlclient)",
    )


def _file_of(url: str | None, state_folder: Path) -> Path | None:
    """The file that a URL names; None for a database server."""
    if url is None:
        return state_folder / JOURNAL_NAME
    scheme, _, rest = url.partition("://")
    if scheme != "journal" and not scheme.startswith("sqlite"):
        return None
    text = rest.partition("?")[0]
    name = text if scheme == "journal" else text.removeprefix("/")
    if name in ("", ":memory:"):
        raise SpecError("storage", url, "names no file", f"e.g. {scheme}:///path/to/study; a study must outlive its driver")
    return Path(name)


def open_study(
    storage: BaseStorage,
    name: str,
    sampler: BaseSampler,
    fingerprint: dict[str, object],
    directions: Sequence[Direction] = ("maximize",),
    attributes: Mapping[str, object] = MappingProxyType({}),
) -> optuna.Study:
    """Create or reopen a study.

    Args:
        storage: Where it is kept.
        name: Its name.
        sampler: What proposes.
        fingerprint: What must not change between openings; a study of an earlier version need not hold all of it.
        directions: One for each value that a trial is told.
        attributes: What is kept with a study that is created.

    Raises:
        SpecError: where the storage holds a study of this name over something else.
    """
    study = optuna.create_study(study_name=name, storage=storage, sampler=sampler, directions=list(directions), load_if_exists=True)
    hint = "give the study another name, or another storage"
    kept, wanted = ", ".join(direction.name.lower() for direction in study.directions), ", ".join(directions)
    if kept != wanted:
        problem = f"the storage holds a study of this name with another direction ({kept}, and this one has {wanted})"
        raise SpecError("name", name, problem, f"{hint}; `pareto: true` gives one for each term of the objective")
    known = study.user_attrs.get("fingerprint")
    if known is None and study.get_trials(deepcopy=False):
        raise SpecError("name", name, "the storage holds a study of this name that another program made", hint)
    if known is None:
        for attribute, value in {**attributes, "fingerprint": fingerprint}.items():
            study.set_user_attr(attribute, value)
        return study
    changed = [key for key in fingerprint if key in known and _differs(key, known[key], fingerprint[key])]
    if changed:
        parts = (part for key in changed for part in _changes(_FIELDS.get(key, key), known.get(key), fingerprint[key]))
        problem = f"the storage holds a study of this name with another {' and '.join(changed)}: {'; '.join(parts)}"
        raise SpecError("name", name, problem, "give the study another name, or another state folder; or undo the change")
    return study


def _differs(name: str, kept: object, wanted: object) -> bool:
    """Whether a part of a fingerprint is another one; a workload that an earlier version kept need not hold all fields."""
    return _contradict(kept, wanted) if name == "workload" else kept != wanted


def _contradict(kept: object, wanted: object) -> bool:
    if not (isinstance(kept, Mapping) and isinstance(wanted, Mapping)):
        return kept != wanted
    return any(_contradict(kept[field], wanted[field]) for field in kept.keys() & wanted.keys())


def _changes(name: str, kept: object, wanted: object) -> Iterator[str]:
    """What differs below a field of the study file, each innermost field with the kept and the wanted value."""
    if not (isinstance(kept, Mapping) and isinstance(wanted, Mapping)):
        yield f"{name.removeprefix('.') or 'workload'} was {_shown(kept)}, now {_shown(wanted)}"
        return
    for key in dict.fromkeys((*kept, *wanted)):
        if kept.get(key, NOTHING) != wanted.get(key, NOTHING):
            yield from _changes(f"{name}.{key}", kept.get(key, NOTHING), wanted.get(key, NOTHING))


def _shown(value: object) -> str:
    return "not given" if value is NOTHING else shown(value)
