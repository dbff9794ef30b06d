"""The warm process: the pool's own Python with everything slow imported, from which the ranks of every trial are forked.

Run by path (`python launchers/entry.py warm`); commands on stdin, events on stdout. It stays single threaded and never touches a
GPU, so that forking it is safe. A rank leaves the serving loop and becomes the main program of its process.
"""

from __future__ import annotations

import faulthandler
import gc
import importlib
import importlib.util
import os
import select
import signal
import sys
import time
import types
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, NoReturn

from launchers.base import RankContext, Rendezvous
from launchers.json_lines import ATOMIC_BYTES, LineReader, from_line, to_line
from launchers.process_tree import become_subreaper, end_descendants, reap_children, signal_on_parent_death

_CLEAN_UP_S = 4.0
_OWN_EVENTS = ("supervisor", "supervisor_exit", "warm", "warm_exit", "launched", "launch_failed", "rank_exit", "idle", "ended")
_PROGRAM_NAME = "trial_program"


class Rank:
    """One rank of a trial, inside its own process."""

    def __init__(self, launch: dict[str, Any], rank: int, events: int) -> None:
        """Take what the launch command says for `rank`; `events` is the pipe that all ranks share."""
        self._launch = launch
        self._rank = rank
        self._events = events

    def emit(self, event: dict[str, Any]) -> None:
        """Send one event; a line longer than a pipe writes at once would be torn apart by other ranks, hence an error."""
        if event.get("event") in (None, *_OWN_EVENTS):
            raise ValueError(f"an event needs a name of its own in 'event', got {event.get('event')!r}")
        line = to_line({"trial": self._launch["trial"], "rank": self._rank, **event})
        if len(line) > ATOMIC_BYTES:
            raise ValueError(f"event of {len(line)} bytes; at most {ATOMIC_BYTES} fit")
        os.write(self._events, line)

    def run(self) -> NoReturn:
        """Run the program; an exception ends the process as in any Python program, with the traceback in the rank's log."""
        sys.excepthook = self._report
        faulthandler.enable()
        faulthandler.register(signal.SIGUSR1)
        rendezvous = Rendezvous(**self._launch["rendezvous"])
        local_rank = self._launch["ranks"].index(self._rank)
        self._set_environment(rendezvous, local_rank)
        os.chdir(self._launch["log_folder"])
        program = load_program(self._launch["program"])
        program.main(self._launch["job"], RankContext(self._rank, local_rank, rendezvous, self.emit))
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)

    def _set_environment(self, rendezvous: Rendezvous, local_rank: int) -> None:
        os.environ.update(self._launch["env"])
        os.environ.update(
            RANK=str(self._rank),
            LOCAL_RANK=str(local_rank),
            WORLD_SIZE=str(rendezvous.world_size),
            LOCAL_WORLD_SIZE=str(rendezvous.ranks_per_node),
            GROUP_RANK=str(rendezvous.node_rank),
            MASTER_ADDR=rendezvous.master_addr,
            MASTER_PORT=str(rendezvous.master_port),
        )

    def _report(self, kind: type[BaseException], error: BaseException, trace: types.TracebackType | None) -> None:
        sys.__excepthook__(kind, error, trace)
        text = f"{kind.__name__}: {error}"[:800]
        self.emit({"event": "rank_error", "error": text, "time_s": time.time()})


def load_program(program: str) -> types.ModuleType:
    """The module that a launcher names: dotted below `launchers`, or the path of a Python file."""
    if not program.endswith(".py"):
        return importlib.import_module(program)
    spec = importlib.util.spec_from_file_location(_PROGRAM_NAME, program)
    if spec is None or spec.loader is None:
        raise ImportError(f"cannot load {program}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[_PROGRAM_NAME] = module
    spec.loader.exec_module(module)
    return module


class WarmProcess:
    """Serves the supervisor's commands."""

    def __init__(self, commands: int, events: int) -> None:
        """Serve the commands of one pipe and report to another."""
        self._commands = LineReader(commands)
        self._events = events
        self._ranks: dict[int, tuple[str, int]] = {}
        self._wakeup = _wake_on_dead_child()

    def serve(self) -> Rank | None:
        """Serve until the supervisor hangs up; in the process of a new rank, return that rank."""
        while not self._commands.closed:
            readable = select.select([self._commands.descriptor, self._wakeup], [], [])[0]
            if self._wakeup in readable:
                os.read(self._wakeup, 4096)
                self._report_exits()
            if self._commands.descriptor in readable:
                for line in self._commands.read():
                    if rank := self._obey(from_line(line) or {}):
                        return rank
        return None

    def _obey(self, command: dict[str, Any]) -> Rank | None:
        match command.get("command"):
            case "preload":
                self._preload(command["modules"], command["env"])
            case "launch":
                return self._launch(command)
            case "end":
                self._end(command["trial"])
            case "stacks":
                for pid in self._ranks:
                    os.kill(pid, signal.SIGUSR1)
        return None

    def _preload(self, modules: list[str], env: dict[str, str]) -> None:
        start_s = time.monotonic()
        for name, value in env.items():  # a container may not have passed them on
            os.environ.setdefault(name, value)
        with _one_blas_thread():
            for module in modules:
                importlib.import_module(module)
        gc.collect()
        gc.freeze()
        threads = len(os.listdir("/proc/self/task"))
        self._emit("warm", pid=os.getpid(), preload_s=time.monotonic() - start_s, threads=threads)

    def _launch(self, launch: dict[str, Any]) -> Rank | None:
        trial = launch["trial"]
        start_s = time.monotonic()
        try:
            logs = {rank: _open_log(launch["log_folder"], rank) for rank in launch["ranks"]}
        except OSError as error:
            self._emit("launch_failed", trial=trial, detail=f"cannot open a rank's log: {error}")
            return None
        sys.stdout.flush()
        warm_pid = os.getpid()
        for rank in launch["ranks"]:
            pid = os.fork()
            if pid == 0:
                self._become_rank(warm_pid, logs[rank])
                return Rank(launch, rank, self._events)
            self._ranks[pid] = (trial, rank)
        for log in logs.values():
            os.close(log)
        pids = {str(rank): pid for pid, (of_trial, rank) in self._ranks.items() if of_trial == trial}
        self._emit("launched", trial=trial, pids=pids, fork_s=time.monotonic() - start_s)
        return None

    def _become_rank(self, warm_pid: int, log: int) -> None:
        signal_on_parent_death(signal.SIGKILL)
        if os.getppid() != warm_pid:
            os._exit(1)
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.close(self._commands.descriptor)
        _offer_to_oom_killer()

    def _end(self, trial: str) -> None:
        ended = end_descendants(os.getpid(), limit_s=_CLEAN_UP_S, reap=self._report_exits)
        self._emit("idle", trial=trial, **ended._asdict())

    def _report_exits(self) -> None:
        for pid, code in reap_children().items():
            if pid in self._ranks:
                trial, rank = self._ranks.pop(pid)
                self._emit("rank_exit", trial=trial, rank=rank, code=code, time_s=time.time())

    def _emit(self, event: str, **fields: Any) -> None:
        os.write(self._events, to_line({"event": event, **fields}))


@contextmanager
def _one_blas_thread() -> Iterator[None]:
    """Keep numpy's BLAS from starting threads when it is loaded; a process with threads is not safe to fork."""
    name = "OPENBLAS_NUM_THREADS"
    given = os.environ.get(name)
    os.environ.setdefault(name, "1")
    yield
    if given is None:
        del os.environ[name]


def _open_log(folder: str, rank: int) -> int:
    return os.open(os.path.join(folder, f"rank{rank}.log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)


def _offer_to_oom_killer() -> None:
    """Where the host runs out of memory, a rank shall end, not what supervises it."""
    with suppress(OSError), open("/proc/self/oom_score_adj", "w", encoding="ascii") as file:
        file.write("1000")


def _wake_on_dead_child() -> int:
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda _number, _frame: None)
    return read_end


def _take_over(descriptor: int, replacement: int) -> int:
    """Move a standard stream elsewhere, so that no library's print can reach it; later writes go to `replacement`."""
    moved = os.dup(descriptor)
    os.dup2(replacement, descriptor)
    return moved


def main() -> None:
    """Serve as the warm process, then, in a rank's process, run the rank."""
    signal_on_parent_death(signal.SIGKILL)
    become_subreaper()
    null = os.open(os.devnull, os.O_RDONLY)
    sys.stdout = open(1, "w", buffering=1, encoding="utf-8", errors="replace", closefd=False)  # noqa: SIM115
    rank = WarmProcess(_take_over(0, null), _take_over(1, 2)).serve()
    if rank is not None:
        rank.run()
