"""A node's process tree as its agent sees it: start it, launch trials in it, read its events. Uses no thread and no signal handler.

Events are dicts with their name in `event`; those of a trial carry `trial`, those of a rank `rank`:

* `supervisor`: supervisor_pid, guardian_pid. `warm`: pid, preload_s, threads. `launched`: pids {rank: pid}, fork_s.
* `step` and any other event that a rank emits; `rank_error`: error, time_s (an exception, before the rank has ended).
* `rank_exit`: code (negative: signal), time_s. `launch_failed`: detail.
* `warm_exit`: trial, code, ready (had preloaded), tail (of its stderr), killed, survivors. It is restarted where it had been ready,
  else by the next launch.
* `ended`: killed, survivors (phrases naming processes that cannot be killed).
* `supervisor_exit`: reason, killed, survivors, container_stop and exit_command {argv, exit_code, timed_out}; the last event.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from launchers.base import Rendezvous
from launchers.json_lines import LineReader, LineWriter, from_line, to_line, wait_for
from launchers.process_tree import Process, kill_exactly, read_process
from launchers.rank_environment import node_environment
from search_spaces.hardware import RankEnvironment

Event = dict[str, Any]

_SEND_S = 10.0
_START_S = 10.0
_END_S = 40.0
_CLOSE_S = 40.0
_EXIT_COMMAND_S = 10.0


@dataclass(frozen=True, slots=True)
class LaunchRequest:
    """One trial's ranks on this node.

    Attributes:
        trial: Identifies the trial in events; never used twice.
        program: Dotted module below `launchers`, or the path of a Python file.
        job: Plain values for the program.
        rendezvous: Where all ranks meet.
        ranks: The ranks that this node starts, by local rank.
        log_folder: Receives `rank<r>.log`; the ranks' working folder.
        env: Variables of this trial; they win over the pool's.
    """

    trial: str
    program: str
    job: Mapping[str, Any]
    rendezvous: Rendezvous
    ranks: tuple[int, ...]
    log_folder: Path
    env: Mapping[str, str] = field(default_factory=dict)

    @property
    def has_reporting_rank(self) -> bool:
        """True where the last rank, which reports the steps, runs on this node."""
        return self.rendezvous.world_size - 1 in self.ranks


class SupervisorLostError(RuntimeError):
    """The process tree does not answer; the node's fault, not the trial's."""


class Supervised:
    """The process tree of one slot, reused for all its trials. One caller at a time.

    Attributes:
        preloads: Warm processes that became ready so far.
        supervisors_started: Process trees started so far.
        warm_pid: Number of the current warm process, None before it is ready.
    """

    def __init__(self, environment: RankEnvironment, *, preload: Sequence[str] = (), raylet_pid: int | None = None) -> None:
        """Describe the tree; `start` starts it.

        Args:
            environment: Where the ranks run.
            preload: Modules that the warm process imports once.
            raylet_pid: The process whose end ends everything, too; None for none.
        """
        self.preloads = 0
        self.supervisors_started = 0
        self.warm_pid: int | None = None
        self._environment = environment
        self._preload = tuple(preload)
        self._raylet_pid = raylet_pid
        self._exit_command: Event | None = None
        self._commands: LineWriter | None = None
        self._reader: LineReader | None = None
        self._events: deque[Event] = deque()
        self._supervisor: Process | None = None
        self._reported_exit = False

    @property
    def guardian_pid(self) -> int | None:
        """The process that everything of a trial hangs below; None before it has reported."""
        return self._supervisor.parent if self._supervisor else None

    @property
    def alive(self) -> bool:
        """True until the supervisor's end was seen."""
        return self._commands is not None and self._reader is not None

    def start(self) -> None:
        """Start guardian, supervisor and warm process; returns before the warm process is ready.

        Raises:
            SupervisorLostError: Where they cannot be started.
        """
        if self.alive:
            return
        if self._reader is not None:
            self.close()
        entry = os.path.join(os.path.dirname(os.path.abspath(__file__)), "entry.py")
        argv = [sys.executable, "-I", "-S", entry, "supervise"]
        command_ends, event_ends = os.pipe(), os.pipe()
        self._commands, self._reader = LineWriter(command_ends[1]), LineReader(event_ends[0])
        try:
            subprocess.run(argv, stdin=command_ends[0], stdout=event_ends[1], check=True, timeout=_START_S)
        except (OSError, subprocess.SubprocessError) as error:
            self._hang_up()
            raise SupervisorLostError(f"the supervisor does not start: {error}") from error
        finally:
            os.close(command_ends[0])
            os.close(event_ends[1])
        self.supervisors_started += 1
        self.warm_pid = None
        self._supervisor = None
        self._reported_exit = False
        self._events.clear()
        self._send(self._start_command())
        if self._exit_command:
            self._send(self._exit_command)

    def _start_command(self) -> Event:
        pool, pool_env = self._environment, dict(self._environment.env)
        watch = {"agent": os.getpid()} | ({"raylet": self._raylet_pid} if self._raylet_pid else {})
        start = {name: getattr(pool, name) for name in ("setup", "container", "container_stop")} | {
            "python": pool.python or sys.executable
        }
        env = node_environment(self._raylet_pid) | pool_env
        return {"command": "start", **start, "env": env, "pool_env": pool_env, "preload": self._preload, "watch": watch}

    def set_exit_command(self, argv: Sequence[str], timeout_s: float = _EXIT_COMMAND_S) -> None:
        """Run this in the agent's environment after the last process of the tree has ended; an empty `argv` takes it back."""
        self._exit_command = {"command": "exit_command", "argv": list(argv), "timeout_s": timeout_s}
        if self.alive:
            self._send(self._exit_command)

    def launch(self, request: LaunchRequest) -> None:
        """Start a trial's ranks; its predecessor must have been ended.

        Raises:
            SupervisorLostError: Where the process tree does not answer.
        """
        request.log_folder.mkdir(parents=True, exist_ok=True)
        fields = {name: getattr(request, name) for name in ("trial", "program", "ranks")}
        mappings = {"job": dict(request.job), "env": dict(request.env), "rendezvous": asdict(request.rendezvous)}
        if not self._send({"command": "launch", **fields, **mappings, "log_folder": str(request.log_folder.resolve())}):
            raise SupervisorLostError("the supervisor takes no commands")

    def dump_stacks(self) -> None:
        """Let each rank write where it is into its log."""
        self._send({"command": "stacks"})

    def poll(self, timeout_s: float) -> Event | None:
        """The next event, or None where none came in time. After `supervisor_exit` none will come until the next `start`."""
        deadline_s = time.monotonic() + timeout_s
        while not self._events and self._reader is not None:
            if not wait_for(self._reader.descriptor, timeout_s=deadline_s - time.monotonic()):
                return None
            self._take(self._reader.read())
            if self._reader.closed or self._reported_exit:
                self._hang_up()
        return self._events.popleft() if self._events else None

    def end_trial(self, trial: str, timeout_s: float = _END_S) -> Event:
        """End every process of a trial; returns the event that tells what was done, `ended` or `supervisor_exit`.

        Raises:
            SupervisorLostError: Where no answer came in time.
        """
        self._send({"command": "end", "trial": trial})
        return self._await(lambda event: event["event"] == "ended" and event["trial"] == trial, timeout_s)

    def close(self, timeout_s: float = _CLOSE_S) -> Event:
        """End everything, run the exit command, and wait for both; returns `supervisor_exit`.

        Raises:
            SupervisorLostError: Where the tree had not ended in time; it goes on ending by itself.
        """
        if self._commands is not None:
            os.close(self._commands.descriptor)
            self._commands = None
        return self._await(lambda _event: False, timeout_s)

    def kill(self, timeout_s: float = _CLOSE_S) -> Event:
        """SIGKILL a supervisor that does not answer; the guardian ends everything. Returns `supervisor_exit`.

        Raises:
            SupervisorLostError: Where the guardian does not answer either.
        """
        if self._supervisor is not None:
            kill_exactly(self._supervisor)
        return self.close(timeout_s)

    def _await(self, wanted: Callable[[Event], bool], timeout_s: float) -> Event:
        deadline_s = time.monotonic() + timeout_s
        while self._reader is not None or self._events:
            event = self.poll(deadline_s - time.monotonic())
            if event is None:
                raise SupervisorLostError(f"the supervisor did not answer within {timeout_s:g} s")
            if wanted(event) or event["event"] == "supervisor_exit":
                return event
        return {"event": "supervisor_exit", "reason": "not running", "killed": 0, "survivors": []}

    def _send(self, command: Event) -> bool:
        deadline_s = time.monotonic() + _SEND_S
        writer = self._commands
        if writer is None:
            return False
        writer.add(to_line(command))
        while writer.pending_bytes and time.monotonic() < deadline_s:
            wait_for(writer.descriptor, write=True, timeout_s=0.1)
            writer.flush()
        return not writer.broken and not writer.pending_bytes

    def _take(self, lines: list[bytes]) -> None:
        for line in lines:
            if event := from_line(line):
                self._note(event)
                self._events.append(event)

    def _note(self, event: Event) -> None:
        match event["event"]:
            case "supervisor":
                self._supervisor = read_process(event["supervisor_pid"])
            case "warm":
                self.preloads, self.warm_pid = self.preloads + 1, event["pid"]
            case "warm_exit":
                self.warm_pid = None
            case "supervisor_exit":
                self._reported_exit = True

    def _hang_up(self) -> None:
        """Both guardian and supervisor have ended; say so where neither could."""
        if not self._reported_exit:
            reason = "guardian and supervisor died together"
            self._events.append({"event": "supervisor_exit", "reason": reason, "killed": 0, "survivors": []})
        for end in (self._commands, self._reader):
            if end is not None:
                os.close(end.descriptor)
        self._commands = self._reader = self.warm_pid = None
