"""The supervisor's hold on the warm process: how it is started, its pipes, and which processes belong to it."""

from __future__ import annotations

import os
import select
from collections.abc import Callable
from typing import Any

from launchers.json_lines import LineWriter, from_line, stray_safe_reader, to_line
from launchers.process_tree import descendants, spawn

_TAIL_BYTES = 8192
_MOST_READS = 1000
_SOURCE_SETUP = """
setup=$1; shift
source "$setup" </dev/null >&2
status=$?
if [ $status -ne 0 ]; then
  echo "setup file $setup ended with status $status; where that is no failure, let its last line be: true" >&2
  exit 97
fi
exec "$@"
"""


def warm_argv(start: dict[str, Any]) -> list[str]:
    """The command of the warm process: container prefix, setup file, the pool's Python."""
    entry = os.path.join(os.path.dirname(os.path.abspath(__file__)), "entry.py")
    program = [start["python"], entry, "warm"]
    if start["setup"]:
        program = ["bash", "-c", _SOURCE_SETUP, "setup", start["setup"], *program]
    return [*start["container"], *program]


class WarmHandle:
    """One warm process.

    Attributes:
        pid: The direct child: the warm process, or the container prefix around it.
        commands: Lines to it.
        keep: Keys of the processes that outlive a trial; None while it is preloading.
    """

    def __init__(self, start: dict[str, Any]) -> None:
        """Start it as the agent's `start` command says."""
        inputs, outputs, errors = os.pipe(), os.pipe(), os.pipe()
        self.pid = spawn(warm_argv(start), start["env"], stdin=inputs[0], stdout=outputs[1], stderr=errors[1])
        for descriptor in (inputs[0], outputs[1], errors[1]):
            os.close(descriptor)
        self.commands = LineWriter(inputs[1])
        self.keep: set[tuple[int, int]] | None = None
        self._events = stray_safe_reader(outputs[0])
        self._errors = stray_safe_reader(errors[0])
        self._tail = b""
        self.commands.add(to_line({"command": "preload", "modules": start["preload"], "env": start["pool_env"]}))

    @property
    def hung_up(self) -> bool:
        """True once its events have ended."""
        return self._events.closed

    @property
    def tail(self) -> str:
        """The end of what it wrote to stderr, and to stdout without being an event."""
        return self._tail.decode(errors="replace")

    def settle(self) -> None:
        """It is ready: whatever runs below this process now, belongs to it and not to a trial."""
        self.keep = {process.key for process in descendants(os.getpid())}

    def readers(self, with_events: bool) -> list[int]:
        """Descriptors to wait for."""
        readers = [self._errors, self._events] if with_events else [self._errors]
        return [reader.descriptor for reader in readers if not reader.closed]

    def take(self, readable: list[int], handle: Callable[[dict[str, Any]], None]) -> None:
        """Read what is there; each event goes to `handle`, anything else to the tail."""
        if self._errors.descriptor in readable:
            self._note(self._errors.read())
        if self._events.descriptor in readable:
            for line in self._events.read():
                event = from_line(line)
                if event is not None and "event" in event:
                    handle(event)
                else:
                    self._note([line])

    def drain(self, handle: Callable[[dict[str, Any]], None]) -> None:
        """Read everything that was written before its end."""
        for _ in range(_MOST_READS):
            readable = select.select(self.readers(with_events=True), [], [], 0)[0]
            if not readable:
                return
            self.take(readable, handle)

    def close(self) -> None:
        """Close the pipes."""
        for descriptor in (self.commands.descriptor, self._events.descriptor, self._errors.descriptor):
            os.close(descriptor)

    def _note(self, lines: list[bytes]) -> None:
        self._tail = b"".join([self._tail, *(line + b"\n" for line in lines)])[-_TAIL_BYTES:]
