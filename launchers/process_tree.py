"""Descendants of a process on Linux: who they are, and ending every one of them. Nothing is ever ended by its name."""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_GONE_STATES = "Xx"
_PAUSE_S = 0.005
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")

_libc = ctypes.CDLL(None, use_errno=True)


def signal_on_parent_death(number: int) -> None:
    """Ask the kernel to send this process a signal when its parent ends, in whatever way."""
    _prctl(_PR_SET_PDEATHSIG, number)


def become_subreaper() -> None:
    """Become the parent of every descendant whose own parent ends, also of those that left the session."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _prctl(option: int, value: int) -> None:
    if _libc.prctl(option, value, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


class Process(NamedTuple):
    """A process, told apart from a later one with the same number by its start time (clock ticks after boot).

    `cpu_ticks` is the processor time of its own threads so far, `reaped_ticks` that of children that it has waited for.
    """

    pid: int
    start_ticks: int
    parent: int
    state: str
    num_threads: int
    name: str
    cpu_ticks: int = 0
    reaped_ticks: int = 0

    @property
    def key(self) -> tuple[int, int]:
        """What identifies the process for the life of the machine."""
        return self.pid, self.start_ticks

    @property
    def dead(self) -> bool:
        """True for a zombie, unless only its main thread has ended: the others may still hold the GPU."""
        return self.state in _GONE_STATES or (self.state == "Z" and self.num_threads <= 1)

    def describe(self) -> str:
        """One phrase for a report."""
        return f"{self.name} (pid {self.pid}, state {self.state})"


def read_process(pid: int) -> Process | None:
    """The process with this number, or None where there is none (any more)."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            head, _, tail = file.read().rpartition(")")
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return None
    fields = tail.split()
    own, reaped = int(fields[11]) + int(fields[12]), int(fields[13]) + int(fields[14])
    return Process(pid, int(fields[19]), int(fields[1]), fields[0], int(fields[17]), head.partition("(")[2], own, reaped)


def boot_id() -> str:
    """What identifies this boot of the machine, the same in all of its containers."""
    return _BOOT_ID.read_text(encoding="ascii").strip()


def is_alive(key: tuple[int, int]) -> bool:
    """True while the process with this number and start time exists and is no zombie."""
    process = read_process(key[0])
    return process is not None and process.key == key and not process.dead


def all_processes() -> list[Process]:
    """Every process of this machine (of its namespace) now, zombies included."""
    return [process for name in os.listdir("/proc") if name.isdigit() and (process := read_process(int(name)))]


def below(processes: Iterable[Process], roots: Iterable[int]) -> list[Process]:
    """Those of `processes` that hang below one of the `roots`, however deep; the roots themselves are left out."""
    children: dict[int, list[Process]] = {}
    for process in processes:
        children.setdefault(process.parent, []).append(process)
    found, queue = [], list(roots)
    while queue:
        next_level = children.pop(queue.pop(), [])
        found += next_level
        queue += [process.pid for process in next_level]
    return found


def descendants(root: int) -> list[Process]:
    """All living processes below `root`, zombies left out but not what hangs below them."""
    return [process for process in below(all_processes(), [root]) if not process.dead]


def kill_exactly(process: Process) -> bool:
    """SIGKILL this very process, never a later one that got its number; False where that was not possible."""
    try:
        descriptor = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return False
    except OSError:  # a kernel before 5.3 has no pidfd
        return is_alive(process.key) and _sent(lambda: os.kill(process.pid, signal.SIGKILL))
    try:
        return is_alive(process.key) and _sent(lambda: signal.pidfd_send_signal(descriptor, signal.SIGKILL))
    finally:
        os.close(descriptor)


def _sent(send: Callable[[], None]) -> bool:
    try:
        send()
    except (ProcessLookupError, PermissionError):
        return False
    return True


class Ended(NamedTuple):
    """What a clean-up did: how many processes it killed, and those that would not end."""

    killed: int
    survivors: tuple[str, ...]


def end_descendants(root: int, *, keep: Container[tuple[int, int]] = (), limit_s: float, reap: Callable[[], object]) -> Ended:
    """SIGKILL everything below `root` until nothing is left.

    Args:
        root: The process whose descendants end; a subreaper, so that none can escape.
        keep: Keys of the processes that stay.
        limit_s: Give up after this long; a process in uninterruptible sleep cannot be killed.
        reap: Collects the caller's own dead children.
    """
    killed: set[tuple[int, int]] = set()
    deadline_s = time.monotonic() + limit_s
    while True:
        reap()
        left = [process for process in descendants(root) if process.key not in keep]
        if not left or time.monotonic() > deadline_s:
            reap()  # those that died since, so that nobody meets them later
            return Ended(len(killed), tuple(process.describe() for process in left))
        killed.update(process.key for process in left if kill_exactly(process))
        time.sleep(_PAUSE_S)


def reap_children() -> dict[int, int]:
    """Collect every dead child: pid -> exit code, negative for a signal."""
    collected: dict[int, int] = {}
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return collected
        if pid == 0:
            return collected
        collected[pid] = os.waitstatus_to_exitcode(status)


def spawn(argv: Sequence[str], env: Mapping[str, str], *, stdin: int, stdout: int, stderr: int) -> int:
    """Start a program that dies with this process; where it cannot be executed its stderr says so and it exits with 127."""
    parent = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    signal_on_parent_death(signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(127)
    for target, source in enumerate([os.dup(stdin), os.dup(stdout), os.dup(stderr)]):
        os.dup2(source, target)
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGTERM, signal.SIGCHLD, signal.SIGINT, signal.SIGHUP, signal.SIGPIPE):
        signal.signal(number, signal.SIG_DFL)
    try:
        os.execvpe(argv[0], list(argv), dict(env))
    except OSError as error:
        os.write(2, f"cannot execute {argv[0]}: {error.strerror}\n".encode())
    os._exit(127)


def run_limited(argv: Sequence[str], timeout_s: float) -> dict[str, Any]:
    """Run a command in this process's environment for at most `timeout_s`, then end it and whatever it started.

    Only for a process that has no other descendants at that time.
    """
    null = os.open(os.devnull, os.O_RDWR)
    pid = spawn(argv, os.environ, stdin=null, stdout=null, stderr=2)
    os.close(null)
    codes: dict[int, int] = {}
    deadline_s = time.monotonic() + timeout_s
    while pid not in codes and time.monotonic() < deadline_s:
        codes.update(reap_children())
        time.sleep(_PAUSE_S)
    timed_out = pid not in codes
    end_descendants(os.getpid(), limit_s=1.0, reap=lambda: codes.update(reap_children()))
    return {"argv": list(argv), "exit_code": codes.get(pid), "timed_out": timed_out}
