"""Optuna's storage: the only truth of a study. A journal file by default, any Optuna URL by option."""

from __future__ import annotations

from pathlib import Path

import optuna
from optuna.samplers import BaseSampler
from optuna.storages import BaseStorage, JournalStorage, RDBStorage
from optuna.storages.journal import JournalFileBackend, JournalFileOpenLock
from sqlalchemy.exc import SQLAlchemyError

from autotune.errors import InfrastructureError, SpecError
from autotune.filesystem import is_network_filesystem, locks_work

JOURNAL_NAME = "optuna-journal.log"
_LOCK_SUFFIX = ".lock"  # of JournalFileOpenLock


def open_storage(url: str | None, state_folder: Path) -> BaseStorage:
    """The storage at `url`, or the journal file in the state folder.

    Files on a network disk are used only after a two-process lock test there has passed.

    Raises:
        InfrastructureError: where locks do not hold or the database does not answer.
    """
    path = _file_of(url, state_folder)
    if path is not None and is_network_filesystem(path.parent) and not locks_work(path.parent):
        raise InfrastructureError(
            f"{path.parent} is on a network disk whose file locks do not hold, so Optuna's storage would be corrupted there",
            "give a state folder on a local disk, or `storage: postgresql://...`",
        )
    if url is None or url.startswith("journal:"):
        assert path is not None
        path.parent.mkdir(parents=True, exist_ok=True)
        return JournalStorage(JournalFileBackend(str(path), lock_obj=JournalFileOpenLock(str(path))))
    return _open_database(url)


def mend_journal(url: str | None, state_folder: Path) -> None:
    """Clear up what a killed driver may have left in the journal file: its lock, and the beginning of a line.

    Call it as the only driver of the state folder. A journal elsewhere may have other writers: its lock is waited for.
    """
    path = _file_of(url, state_folder)
    if path is None or not path.is_file() or not (url is None or url.startswith("journal:")):
        return
    if url is None:
        path.with_name(path.name + _LOCK_SUFFIX).unlink(missing_ok=True)
    lock = JournalFileOpenLock(str(path))
    lock.acquire()
    try:
        with path.open("rb+") as journal:
            journal.truncate(journal.read().rfind(b"\n") + 1)
    finally:
        lock.release()


def _open_database(url: str) -> BaseStorage:
    engine = {} if url.startswith("sqlite") else {"pool_pre_ping": True, "connect_args": {"connect_timeout": 15}}
    try:
        return RDBStorage(url, engine_kwargs=engine)
    except (SQLAlchemyError, ImportError) as error:
        raise InfrastructureError(
            f"Optuna's storage {url.rsplit('@', maxsplit=1)[-1]} does not answer: {str(error).splitlines()[0]}",
            "check address, credentials and the driver package (psycopg2, mysqlclient)",
        ) from error


def _file_of(url: str | None, state_folder: Path) -> Path | None:
    if url is None:
        return state_folder / JOURNAL_NAME
    scheme, _, rest = url.partition("://")
    if scheme == "journal":
        return Path("/" + rest.lstrip("/") if rest.startswith("/") else rest)
    return Path(rest.removeprefix("/")) if scheme.startswith("sqlite") else None


def open_study(storage: BaseStorage, name: str, sampler: BaseSampler, fingerprint: dict[str, object]) -> optuna.Study:
    """Create or reopen a study that maximises; `fingerprint` names what must not change between openings.

    Raises:
        SpecError: where the storage holds a study of this name over something else.
    """
    study = optuna.create_study(study_name=name, storage=storage, sampler=sampler, direction="maximize", load_if_exists=True)
    if study.direction is not optuna.study.StudyDirection.MAXIMIZE:
        raise SpecError("storage", name, "holds a study of this name that minimises", "give another name or another storage")
    known = study.user_attrs.get("fingerprint")
    if known is None:
        study.set_user_attr("fingerprint", fingerprint)
        return study
    changed = [key for key in fingerprint if known.get(key) != fingerprint[key]]
    if changed:
        raise SpecError(
            "name",
            name,
            f"the storage holds a study of this name with another {' and '.join(changed)}",
            "give the study another name, or another state folder",
        )
    return study
