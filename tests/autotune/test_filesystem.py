"""Network disks are recognised, and the two-process lock test tells a disk that keeps locks from one that does not."""

import os
import sys
import time
from pathlib import Path

import pytest

from autotune import filesystem
from autotune.filesystem import LockReport, filesystem_type, is_network_filesystem, lock_report, locks_work

MOUNTS = """\
proc /proc proc rw 0 0
/dev/sda1 / ext4 rw 0 0
server:/home /home nfs4 rw,vers=4.2 0 0
/dev/nvme0n1p1 /home/fast xfs rw 0 0
mds@tcp:/scratch /scratch lustre rw 0 0
server:/one /mnt/with\\040space cifs rw 0 0
tmpfs /data tmpfs rw 0 0
server:/two /data nfs rw 0 0
person@host: /mnt/ssh fuse.sshfs rw 0 0
broken line
"""


@pytest.mark.parametrize(
    ("path", "kind", "network"),
    [
        ("/srv/study", "ext4", False),
        ("/home/person/study", "nfs4", True),
        ("/home/fast/study", "xfs", False),
        ("/homeless/study", "ext4", False),
        ("/scratch", "lustre", True),
        ("/mnt/with space/study", "cifs", True),
        ("/data/study", "nfs", True),
        ("/mnt/ssh", "fuse.sshfs", True),
    ],
)
def test_type_is_that_of_the_innermost_mount(path, kind, network):
    assert filesystem_type(Path(path), MOUNTS) == kind
    assert is_network_filesystem(Path(path), MOUNTS) is network


def test_path_through_a_link_is_judged_where_it_leads(tmp_path):
    (tmp_path / "far").mkdir()
    (tmp_path / "near").symlink_to(tmp_path / "far")
    mounts = f"disk / ext4 rw 0 0\nserver:/x {tmp_path / 'far'} nfs rw 0 0\n"
    assert is_network_filesystem(tmp_path / "near" / "study", mounts)


def test_mount_table_of_this_machine_is_read():
    assert filesystem_type(Path("/proc/self")) == "proc"


def test_unknown_without_a_mount_table():
    assert filesystem_type(Path("/anything"), "") == "unknown"


def test_locks_hold_on_a_local_disk_and_nothing_is_left(tmp_path):
    assert lock_report(tmp_path) == LockReport(True, True, True)
    assert locks_work(tmp_path)
    assert list(tmp_path.iterdir()) == []


def _worker(patch: str) -> tuple[str, ...]:
    """The lock test's process on a disk that misbehaves as `patch` says."""
    run = "import runpy; sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"
    code = f"import errno, fcntl, os, sys, time\n{patch}\n{run}"
    return (sys.executable, "-I", "-c", code, filesystem.__file__)


BLIND_CREATE = "real = os.open\nos.open = lambda path, flags, mode=0o777: real(path, flags & ~os.O_EXCL, mode)"
NO_LOCKS = "def refuse(*a): raise OSError(errno.ENOLCK, 'No locks available')\nfcntl.lockf = refuse"


@pytest.mark.parametrize(
    ("patch", "broken", "word"),
    [
        ("fcntl.lockf = lambda *a: None", "record_locks", "instead of 'held'"),
        (NO_LOCKS, "record_locks", "No locks available"),
        (BLIND_CREATE, "exclusive_create", "went to both"),
        ("os.symlink = lambda *a: None", "symlinks", "went to both"),
        ("def refuse(*a): raise OSError(errno.EPERM, 'Operation not permitted')\nos.symlink = refuse", "symlinks", "not permitted"),
        ("def refuse(*a): raise FileExistsError\nos.symlink = refuse", "symlinks", "neither"),
    ],
)
def test_disk_that_does_not_keep_one_kind_of_lock_is_found_out(tmp_path, patch, broken, word):
    report = lock_report(tmp_path, worker=_worker(patch))
    held = {name: getattr(report, name) for name in ("record_locks", "exclusive_create", "symlinks")}
    assert held == {name: name != broken for name in held}
    assert word in report.detail
    assert not report.ok


def test_lock_that_never_answers_ends_at_the_limit(tmp_path):
    started = time.monotonic()
    report = lock_report(tmp_path, 0.7, worker=_worker("fcntl.lockf = lambda *a: time.sleep(60)"))
    assert time.monotonic() - started < 4
    assert not report.ok
    assert "did not end" in report.detail


def test_process_that_dies_is_a_report_not_an_exception(tmp_path):
    report = lock_report(tmp_path, worker=_worker("raise SystemExit(1)"))
    assert report == LockReport(False, False, False, "a process of the lock test died")


def test_folder_that_cannot_be_written_is_a_report(tmp_path):
    report = lock_report(tmp_path / "absent")
    assert not report.ok
    assert os.fspath(tmp_path / "absent") in report.detail
