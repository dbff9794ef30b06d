"""JSON lines over pipes, without blocking: the language between agent, supervisor and warm process."""

from __future__ import annotations

import json
import os
import select
from collections.abc import Iterator
from typing import Any

ATOMIC_BYTES = 4096
"""PIPE_BUF on Linux: a write of at most this many bytes is never torn apart by another writer."""

_READ_BYTES = 1 << 18
_LONGEST_STRAY_BYTES = 1 << 16


def to_line(value: dict[str, Any]) -> bytes:
    """One line of JSON, newline included."""
    return (json.dumps(value, separators=(",", ":")) + "\n").encode()


def from_line(line: bytes) -> dict[str, Any] | None:
    """The object on a line, or None where the line is something else, such as a banner of a container image."""
    try:
        value = json.loads(line)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def wait_for(descriptor: int, *, write: bool = False, timeout_s: float) -> bool:
    """True once the descriptor can be read (or written), or its other end is gone; also for numbers over select's 1024."""
    poll = select.poll()
    poll.register(descriptor, select.POLLOUT if write else select.POLLIN)
    return bool(poll.poll(max(0.0, timeout_s) * 1000))


class LineReader:
    """Cuts what arrives at a descriptor into lines.

    Attributes:
        descriptor: The read end.
        closed: True after the end of the stream.
    """

    def __init__(self, descriptor: int, longest_bytes: int | None = None) -> None:
        """Read lines from `descriptor`; an unfinished line over `longest_bytes` is given as it is (None: no limit)."""
        self.descriptor = descriptor
        self.closed = False
        self._longest_bytes = longest_bytes
        self._chunks: list[bytes] = []
        self._held_bytes = 0

    def read(self) -> list[bytes]:
        """The complete lines after one read; call it when the descriptor is readable."""
        try:
            chunk = os.read(self.descriptor, _READ_BYTES)
        except BlockingIOError:
            return []
        if not chunk:
            self.closed = True
            return list(self._rest())
        if b"\n" not in chunk and not self._too_long(chunk):
            self._hold(chunk)
            return []
        *lines, rest = b"".join([*self._chunks, chunk]).split(b"\n")
        self._chunks, self._held_bytes = [], 0
        self._hold(rest)
        return lines if lines else list(self._rest())

    def _too_long(self, chunk: bytes) -> bool:
        return self._longest_bytes is not None and self._held_bytes + len(chunk) > self._longest_bytes

    def _hold(self, chunk: bytes) -> None:
        self._chunks.append(chunk)
        self._held_bytes += len(chunk)

    def _rest(self) -> Iterator[bytes]:
        rest = b"".join(self._chunks)
        self._chunks, self._held_bytes = [], 0
        if rest:
            yield rest


def stray_safe_reader(descriptor: int) -> LineReader:
    """A reader for a stream into which foreign programs may write without ever ending a line."""
    return LineReader(descriptor, _LONGEST_STRAY_BYTES)


class LineWriter:
    """Queues lines for a descriptor and writes as much as it takes.

    Attributes:
        descriptor: The write end, made non-blocking.
        pending_bytes: Bytes not yet written.
        broken: True once nobody reads any more; later lines are dropped.
    """

    def __init__(self, descriptor: int) -> None:
        """Write lines to `descriptor`."""
        os.set_blocking(descriptor, False)
        self.descriptor = descriptor
        self.pending_bytes = 0
        self.broken = False
        self._queue: list[memoryview] = []

    def add(self, line: bytes) -> None:
        """Queue a line and write what can be written now."""
        if not self.broken:
            self._queue.append(memoryview(line))
            self.pending_bytes += len(line)
            self.flush()

    def flush(self) -> None:
        """Write until the pipe is full or nothing is left."""
        while self._queue:
            try:
                written = os.write(self.descriptor, self._queue[0][:_READ_BYTES])
            except BlockingIOError:
                return
            except OSError:
                self.broken, self._queue, self.pending_bytes = True, [], 0
                return
            self.pending_bytes -= written
            self._queue[0] = self._queue[0][written:]
            if not self._queue[0]:
                self._queue.pop(0)
