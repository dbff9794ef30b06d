"""The process tree that owns a node's ranks: agent -> guardian -> supervisor -> warm process -> ranks.

Run by path with the service's Python (`python -I -S launchers/entry.py supervise`), commands on stdin, events on stdout, both JSON
lines (their forms are in `launchers/process.py`). Guardian and supervisor are two so that either may be killed: whichever is left
ends every descendant, then runs the container's stop command and the exit command. Standard library only.
"""

from __future__ import annotations

import os
import select
import signal
import time
from typing import Any

from launchers.json_lines import LineReader, LineWriter, from_line, to_line
from launchers.process_tree import (
    Ended,
    become_subreaper,
    end_descendants,
    is_alive,
    read_process,
    reap_children,
    run_limited,
    signal_on_parent_death,
)
from launchers.warm_handle import WarmHandle

_CLEAN_UP_S = 10.0
_IDLE_S = 5.0
_CONTAINER_STOP_S = 10.0
_POLL_S = 0.5
_MOST_PENDING_BYTES = 1 << 20


class LastCommands:
    """What to run after the last descendant, in memory that guardian and supervisor share; the last whole line counts."""

    def __init__(self) -> None:
        """Begin with nothing to run."""
        self._descriptor = os.memfd_create("last_commands")

    def set(self, **commands: Any) -> None:
        """Replace some of the commands."""
        os.write(self._descriptor, to_line(self.get() | commands))

    def get(self) -> dict[str, Any]:
        """The commands as last set."""
        text = os.pread(self._descriptor, os.fstat(self._descriptor).st_size, 0)
        whole = text.split(b"\n")[:-1]
        return (from_line(whole[-1]) if whole else None) or {}


def end_everything(last: LastCommands, events: LineWriter) -> None:
    """End all descendants of this process, run the last commands, and report it."""
    ended = end_descendants(os.getpid(), limit_s=_CLEAN_UP_S, reap=reap_children)
    commands = last.get()
    report = {"reason": commands.get("reason", "the supervisor died"), **ended._asdict()}
    if stop := commands.get("container_stop"):
        report["container_stop"] = run_limited(stop, _CONTAINER_STOP_S)
    if argv := commands.get("exit_command"):
        report["exit_command"] = run_limited(argv, commands["exit_timeout_s"])
    events.add(b"\n" + to_line({"event": "supervisor_exit", **report}))  # the supervisor may have died within a line


class Watched:
    """A process whose end ends everything, such as the raylet."""

    def __init__(self, name: str, pid: int) -> None:
        """Watch the process that has this number now."""
        self.name = name
        process = read_process(pid)
        self._key = process.key if process else None
        self.descriptor = _pidfd(pid)

    def is_gone(self) -> bool:
        """True once it has ended."""
        return self._key is None or not is_alive(self._key)


def _pidfd(pid: int) -> int | None:
    try:
        return os.pidfd_open(pid)
    except OSError:  # it has ended, or a kernel before 5.3: `is_gone` is asked twice a second anyway
        return None


class Supervisor:
    """Owns the warm process and the protocol; one turn of `run` handles whatever has happened."""

    def __init__(self, last: LastCommands, guardian: int) -> None:
        """Prepare to serve stdin and stdout."""
        self.events = LineWriter(1)
        self._last = last
        self._guardian = guardian
        self._commands = LineReader(0)
        self._start: dict[str, Any] = {}
        self._watched: list[Watched] = []
        self._warm: WarmHandle | None = None
        self._exit_codes: dict[int, int] = {}
        self._trial: str | None = None
        self._waiting_launch: bytes | None = None
        self._ended: Ended | None = None
        self._idle_deadline_s = 0.0
        self._reason: str | None = None
        self._wakeup = self._listen_for_signals()

    def run(self) -> str:
        """Serve until there is a reason to end."""
        while self._reason is None:
            self._turn(self._wait())
        return self._reason

    def _wait(self) -> list[int]:
        readers = [self._commands.descriptor, self._wakeup]
        readers += [watched.descriptor for watched in self._watched if watched.descriptor is not None]
        writers = [self.events] if self.events.pending_bytes else []
        if self._warm:
            readers += self._warm.readers(with_events=self.events.pending_bytes < _MOST_PENDING_BYTES)
            writers += [self._warm.commands] if self._warm.commands.pending_bytes else []
        readable, writable, _ = select.select(readers, [writer.descriptor for writer in writers], [], _POLL_S)
        for writer in writers:
            if writer.descriptor in writable:
                writer.flush()
        return readable

    def _turn(self, readable: list[int]) -> None:
        if self._wakeup in readable:
            os.read(self._wakeup, 4096)
        if self._commands.descriptor in readable:
            for line in self._commands.read():
                self._obey(line)
        if self._warm:
            self._warm.take(readable, self._pass_on)
        self._reap()
        if self._warm and (self._warm.pid in self._exit_codes or self._warm.hung_up):
            self._warm_ended()
        if self._ended and time.monotonic() > self._idle_deadline_s:
            self._warm_ended()
        self._look_for_reason()

    def _look_for_reason(self) -> None:
        if os.getppid() != self._guardian:
            self._reason = "the guardian died"
        elif self._commands.closed or self.events.broken:
            self._reason = "the agent hung up"
        for watched in self._watched:
            if watched.is_gone():
                self._reason = f"the {watched.name} died"

    def _obey(self, line: bytes) -> None:
        command = from_line(line) or {}
        match command.get("command"):
            case "start":
                self._begin(command)
            case "launch":
                self._launch(command["trial"], line)
            case "end":
                self._end(command["trial"])
            case "stacks" if self._warm:
                self._warm.commands.add(line + b"\n")
            case "exit_command":
                self._last.set(exit_command=command["argv"], exit_timeout_s=command["timeout_s"])

    def _begin(self, start: dict[str, Any]) -> None:
        self._start = start
        self._last.set(container_stop=start["container_stop"])
        self._watched = [Watched(name, pid) for name, pid in start["watch"].items()]
        self._emit("supervisor", supervisor_pid=os.getpid(), guardian_pid=self._guardian)
        self._warm = WarmHandle(start)

    def _launch(self, trial: str, line: bytes) -> None:
        if self._trial is not None:
            self._emit("launch_failed", trial=trial, detail=f"trial {self._trial} has not ended")
            return
        self._trial, self._waiting_launch = trial, line + b"\n"
        if self._warm is None:
            self._warm = WarmHandle(self._start)
        self._send_launch()

    def _send_launch(self) -> None:
        if self._warm and self._warm.keep is not None and self._waiting_launch:
            self._warm.commands.add(self._waiting_launch)
            self._waiting_launch = None

    def _end(self, trial: str) -> None:
        if self._trial is None or self._waiting_launch or self._warm is None or self._warm.keep is None:
            self._trial = self._waiting_launch = None
            self._emit("ended", trial=trial, killed=0, survivors=[])
            return
        self._ended = end_descendants(os.getpid(), keep=self._warm.keep, limit_s=_CLEAN_UP_S, reap=self._reap)
        self._idle_deadline_s = time.monotonic() + _IDLE_S
        self._warm.commands.add(to_line({"command": "end", "trial": trial}))

    def _pass_on(self, event: dict[str, Any]) -> None:
        if event["event"] == "idle":
            self._trial_ended(Ended(event["killed"], tuple(event["survivors"])))
            return
        if event["event"] == "warm" and self._warm:
            self._warm.settle()
        self.events.add(to_line(event))
        self._send_launch()

    def _trial_ended(self, inside: Ended) -> None:
        outside, keep = self._ended or Ended(0, ()), self._warm.keep if self._warm else None
        late = end_descendants(os.getpid(), keep=keep or (), limit_s=1.0, reap=self._reap)
        survivors = dict.fromkeys(late.survivors + inside.survivors)
        self._emit("ended", trial=self._trial, killed=outside.killed + inside.killed + late.killed, survivors=list(survivors))
        self._trial = self._ended = None

    def _warm_ended(self) -> None:
        """Clear up after a warm process that has ended or no longer answers; start another where this one was of use."""
        warm = self._warm
        if warm is None:
            return
        warm.drain(self._pass_on)
        ended = end_descendants(os.getpid(), limit_s=_CLEAN_UP_S, reap=self._reap)
        if self._start["container_stop"]:
            run_limited(self._start["container_stop"], _CONTAINER_STOP_S)
        warm.drain(self._pass_on)
        code = self._exit_codes.pop(warm.pid, None)
        self._emit("warm_exit", trial=self._trial, code=code, ready=warm.keep is not None, tail=warm.tail, **ended._asdict())
        if self._ended:
            self._emit("ended", trial=self._trial, killed=self._ended.killed + ended.killed, survivors=ended.survivors)
        self._trial = self._waiting_launch = self._ended = None
        warm.close()
        self._warm = WarmHandle(self._start) if warm.keep is not None else None

    def _reap(self) -> None:
        self._exit_codes.update(reap_children())

    def _emit(self, event: str, **fields: Any) -> None:
        self.events.add(to_line({"event": event, **fields}))

    def _listen_for_signals(self) -> int:
        read_end, write_end = os.pipe()
        os.set_blocking(write_end, False)
        signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
        for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._note_signal)
        return read_end

    def _note_signal(self, number: int, _frame: object) -> None:
        if number != signal.SIGCHLD:
            self._reason = f"signal {number}"


def _supervise(last: LastCommands, guardian: int) -> None:
    signal_on_parent_death(signal.SIGTERM)
    become_subreaper()
    supervisor = Supervisor(last, guardian)
    last.set(reason=supervisor.run())
    if os.getppid() != guardian:
        end_everything(last, supervisor.events)
    supervisor.events.flush()


def _guard() -> None:
    become_subreaper()
    last = LastCommands()
    guardian = os.getpid()
    supervisor = os.fork()
    if supervisor == 0:
        _supervise(last, guardian)
        return
    os.close(0)
    os.waitpid(supervisor, 0)
    end_everything(last, LineWriter(1))


def main() -> None:
    """Leave the agent's session and process tree, then guard."""
    if os.fork():
        return
    os.setsid()
    if os.fork() == 0:
        _guard()
