"""What a folder's file system can do: network or local disk, and whether locks hold between processes.

Optuna's journal file locks by symbolic link or exclusive create, SQLite by record locks; network disks often lack one of them.
Standard library only, because the lock test runs this very file as its two processes. Both run on one node: a disk that keeps
locks between processes of a node but not between nodes passes.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Self

MOUNTS = Path("/proc/self/mounts")
_NETWORK = """
nfs nfs4 cifs smb3 smbfs lustre gpfs beegfs ceph ceph-fuse glusterfs 9p afs wekafs panfs orangefs pvfs2 ocfs2 gfs2 virtiofs quobyte
vboxsf sshfs juicefs s3fs gcsfuse goofys mfs rclone
"""
# Names of the kernel's types and of FUSE's subtypes ("fuse.sshfs").
NETWORK_TYPES = frozenset(_NETWORK.split())
RACES = 100
# SQLite locks single bytes from this offset on (PENDING_BYTE in its os.h).
_LOCK_BYTE = 0x40000000
_WORKER = (sys.executable, "-I", __file__)


@dataclass(frozen=True, slots=True)
class LockReport:
    """What two processes found out about a folder.

    Attributes:
        record_locks: POSIX record locks, shared and exclusive, hold: SQLite may be used.
        exclusive_create: `O_CREAT | O_EXCL` has one winner: Optuna's JournalFileOpenLock may be used.
        symlinks: Making a symbolic link has one winner: Optuna's JournalFileSymlinkLock, its default, may be used.
        detail: What went wrong; empty where all three hold.
    """

    record_locks: bool
    exclusive_create: bool
    symlinks: bool
    detail: str = ""

    @property
    def ok(self) -> bool:
        """Whether every kind of lock holds."""
        return self.record_locks and self.exclusive_create and self.symlinks


def filesystem_type(path: Path, mounts: str | None = None) -> str:
    """Type of the file system that holds `path` (which need not exist yet), as the kernel names it; "unknown" where not found.

    Args:
        path: File or folder.
        mounts: Text of /proc/self/mounts; none reads it.
    """
    if mounts is None:
        mounts = MOUNTS.read_text() if MOUNTS.exists() else ""
    resolved = path.resolve()
    best, found = -1, "unknown"
    for line in mounts.splitlines():
        fields = line.split()
        if len(fields) < 3:  # noqa: PLR2004
            continue
        point = Path(re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), fields[1]))
        # A later mount on the same point hides the earlier one.
        if resolved.is_relative_to(point) and len(point.parts) >= best:
            best, found = len(point.parts), fields[2]
    return found


def is_network_filesystem(path: Path, mounts: str | None = None) -> bool:
    """Whether `path` lies on a disk that other machines serve. Arguments as in `filesystem_type`."""
    return filesystem_type(path, mounts).removeprefix("fuse.") in NETWORK_TYPES


def locks_work(path: Path, timeout_s: float = 5.0) -> bool:
    """Whether locks of every kind hold between two processes in folder `path`; see `lock_report`."""
    return lock_report(path, timeout_s).ok


def lock_report(path: Path, timeout_s: float = 5.0, worker: Sequence[str] = _WORKER) -> LockReport:
    """Tests locks between two processes in a temporary folder below `path`, which must exist.

    Args:
        path: Folder to test.
        timeout_s: Limit for the whole test; a lock that does not answer by then does not work.
        worker: Command of the two processes; for tests of this function.
    """
    deadline = time.monotonic() + timeout_s
    try:
        folder = Path(tempfile.mkdtemp(prefix=".lock-test-", dir=path))
    except OSError as error:
        return LockReport(False, False, False, f"cannot write into {path}: {error.strerror}")
    try:
        with _Worker(worker, folder, deadline) as one, _Worker(worker, folder, deadline) as two:
            record, create, symlink = _record_locks(one, two), _race(one, two, "create"), _race(one, two, "symlink")
    except TimeoutError:
        return LockReport(False, False, False, f"the lock test did not end within {timeout_s:g} s")
    except ConnectionError:
        return LockReport(False, False, False, "a process of the lock test died")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return LockReport(not record, not create, not symlink, "; ".join(filter(None, (record, create, symlink))))


def _record_locks(one: _Worker, two: _Worker) -> str:
    """What is wrong with record locks; empty where they hold. Each step: who, what, the answer that a correct disk gives."""
    script = (
        (one, "exclusive", "ok"),
        (two, "exclusive", "held"),
        (two, "shared", "held"),
        (one, "shared", "ok"),
        (two, "shared", "ok"),
        (two, "exclusive", "held"),
        (one, "unlock", "ok"),
        (two, "exclusive", "ok"),
        (two, "unlock", "ok"),
    )
    for step, (process, command, expected) in enumerate(script, 1):
        answer = process.ask(command)
        if answer != expected:
            return f"record locks: step {step}, {command}, answered {answer!r} instead of {expected!r}"
    return ""


def _race(one: _Worker, two: _Worker, kind: str) -> str:
    """What is wrong with making the same names from two processes at once; empty where each name has exactly one winner."""
    for process in (one, two):
        process.send(kind)
    answers = [one.answer(), two.answer()]
    wins = [set(answer.removeprefix("won").split()) for answer in answers]
    if not all(answer.startswith("won") for answer in answers):
        return f"{kind}: {' and '.join(sorted(set(answers)))}"
    if wins[0] & wins[1]:
        return f"{kind}: {len(wins[0] & wins[1])} of {RACES} names went to both processes"
    return "" if len(wins[0] | wins[1]) == RACES else f"{kind}: some names went to neither process"


class _Worker:
    """One of the two processes: a command per line in, an answer per line out, every wait bounded by the deadline."""

    def __init__(self, command: Sequence[str], folder: Path, deadline: float) -> None:
        self._deadline = deadline
        self._process = subprocess.Popen(
            [*command, str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        self._buffer = b""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for pipe in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(BrokenPipeError):
                _open(pipe).close()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        # A process stuck in a dead network disk cannot even be killed: leave it rather than wait for ever.
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(1.0)

    def ask(self, command: str) -> str:
        self.send(command)
        return self.answer()

    def send(self, command: str) -> None:
        stdin = _open(self._process.stdin)
        stdin.write(command.encode() + b"\n")
        stdin.flush()

    def answer(self) -> str:
        descriptor = _open(self._process.stdout).fileno()
        while b"\n" not in self._buffer:
            ready, _, _ = select.select([descriptor], [], [], max(0.0, self._deadline - time.monotonic()))
            if not ready:
                raise TimeoutError
            block = os.read(descriptor, 65536)
            if not block:
                raise ConnectionError
            self._buffer += block
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line.decode()


def _open(pipe: IO[bytes] | None) -> IO[bytes]:
    """The pipe of a process that was started with pipes."""
    if pipe is None:
        raise ConnectionError
    return pipe


def _serve(folder: Path) -> None:
    """The worker's side: answers commands until its input ends."""
    descriptor = os.open(folder / "record", os.O_RDWR | os.O_CREAT, 0o600)
    locks = {"exclusive": fcntl.LOCK_EX | fcntl.LOCK_NB, "shared": fcntl.LOCK_SH | fcntl.LOCK_NB, "unlock": fcntl.LOCK_UN}
    for line in sys.stdin:
        command = line.strip()
        answer = _try_lock(descriptor, locks[command]) if command in locks else _try_names(folder, command)
        sys.stdout.write(answer + "\n")
        sys.stdout.flush()


def _try_lock(descriptor: int, operation: int) -> str:
    try:
        fcntl.lockf(descriptor, operation, 1, _LOCK_BYTE)
    except OSError as error:
        return "held" if error.errno in (errno.EACCES, errno.EAGAIN) else f"{error.strerror}"
    return "ok"


def _try_names(folder: Path, kind: str) -> str:
    won = []
    for number in range(RACES):
        name = folder / f"{kind}-{number}"
        try:
            if kind == "symlink":
                os.symlink("target", name)
            else:
                os.close(os.open(name, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
        except FileExistsError:
            continue
        except OSError as error:
            return f"{error.strerror}"
        won.append(str(number))
    return "won " + " ".join(won)


if __name__ == "__main__":
    _serve(Path(sys.argv[1]))
