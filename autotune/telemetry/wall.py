"""Watts at the wall of this node, from the site's own command: IPMI, Redfish, Slurm, or anything that prints a number.

The command is run again and again from a thread beside the sampler. One that fails or hangs is a gap with its reason and never the
trial's fault. Its child runs under coreutils' `timeout`, which ends it at the limit also where this process was killed.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import selectors
import subprocess
import threading
import time
from collections.abc import Sequence

import numpy as np

from autotune.telemetry.base import WALL, GpuInfo
from autotune.telemetry.series import Series

log = logging.getLogger(__name__)
LIMIT_S = 5.0
_KILL_AFTER_S = 1.0
_GRACE_S = 2.0
_END_S = 5.0
_MOST_BYTES = 65536
_MOST_W = 1e6
# What ipmitool, FreeIPMI's ipmi-dcmi, Redfish's Power resource and scontrol call the node's power now.
_NAMES = "Instantaneous power reading|Current Power|PowerConsumedWatts|CurrentWatts"
_NAMED = re.compile(rf'\b(?P<name>{_NAMES})"?\s*[:=]\s*"?(?P<watts>[^\s,;}}\]"]*)')
_WITH_UNIT = re.compile(r"(?<![\w.,+-])(\d+(?:\.\d+)?)\s*(?:W|watts?)\b", re.IGNORECASE)
_OFF = re.compile(r"(?:Power reading state is|Power Measurement)\s*:\s*(?P<state>deactivated|Not Available)", re.IGNORECASE)


def wall_watts(answer: str) -> float:
    """The watts that a command's output names.

    They stand after the name that a known tool gives them (`Instantaneous power reading`, `Current Power`, `PowerConsumedWatts`
    or `CurrentWatts`); else they are the only number before `W` or `Watts`, or the whole output is a number.

    Args:
        answer: What the command printed.

    Raises:
        ValueError: it names no watts, several, or what no node that answers can draw, such as 0, N/A or n/s.
    """
    if off := _OFF.search(answer):
        raise ValueError(f"power measurement is {off['state'].lower()}")
    named = list(_NAMED.finditer(answer))
    if len(named) > 1:
        raise ValueError(f"it names {named[0]['name']} {len(named)} times: let the command print one number")
    if named:
        return _possible(named[0]["watts"], f"{named[0]['name']} is ")
    found = _WITH_UNIT.findall(answer)
    if len(found) > 1:
        raise ValueError(f"it names {len(found)} numbers of watts: let the command print one number")
    return _possible(found[0] if found else answer.strip(), "it says ")


def _possible(text: str, where: str) -> float:
    try:
        watts = float(text)
    except ValueError:
        raise ValueError(f"{where}{text[:60]!r}, which is no number of watts") from None
    if not 0.0 < watts <= _MOST_W:
        raise ValueError(f"{where}{text}, which no node that answers can draw")
    return watts


class WallMeter:
    """Reads one node from `start` to `halt`."""

    def __init__(self, command: Sequence[str], period_s: float, limit_s: float = LIMIT_S) -> None:
        """Start nothing yet.

        Args:
            command: Words of the command.
            period_s: Time from one start of it to the next; a command that takes longer starts again when it has ended.
            limit_s: Time that it may take.
        """
        self._command = tuple(command)
        self._period_s = period_s
        self._limit_s = limit_s
        self._readings: list[tuple[float, float]] = []
        self._failed = 0
        self._why = ""
        self._stop = threading.Event()
        self._starting = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._thread = threading.Thread(target=self._loop, name="wall-power", daemon=True)

    def start(self) -> None:
        """Begin to read; returns at once."""
        self._thread.start()

    def halt(self) -> None:
        """End the reading; a command that is running is ended and its reading dropped."""
        self._stop.set()
        with self._starting:
            if self._process is not None:
                self._process.terminate()
        self._thread.join(_END_S)

    def series(self, node: int = 0) -> Series:
        """What was read, on this node's clock, and why readings failed.

        Args:
            node: The node's rank.
        """
        info = GpuInfo("wall", 0, WALL, "wall", "", "wall", power_source="command")
        readings = np.array(self._readings, dtype=float).reshape(-1, 2)
        columns = {"power_w": (readings[:, 0], readings[:, 1])} if len(readings) else {}
        gaps = {"power_w": f"{self._failed} of {self._failed + len(readings)} readings: {self._why}"} if self._failed else {}
        return Series(info, columns, gaps=gaps, node=node)

    def _loop(self) -> None:
        due_s = time.monotonic()
        while not self._stop.wait(max(0.0, due_s - time.monotonic())):
            begin_s = time.time()
            try:
                watts = wall_watts(self._answer())
            except (OSError, ValueError, subprocess.SubprocessError) as error:
                self._note_failure(str(error))
            else:
                # The meter looked at some time between: the middle is at most half of the command's time off.
                self._readings.append(((begin_s + time.time()) / 2.0, watts))
            due_s = max(due_s + self._period_s, time.monotonic())

    def _note_failure(self, why: str) -> None:
        if self._stop.is_set():
            return
        self._failed += 1
        if not self._why:
            self._why = why
            log.warning("no watts at the wall from %s: %s", self._command[0], why)

    def _answer(self) -> str:
        """The command's output.

        Raises:
            ValueError: it failed or did not end in time; the message says how.
            OSError: `timeout` cannot be started.
            subprocess.TimeoutExpired: its child cannot even be killed.
        """
        argv = ["timeout", "-k", f"{_KILL_AFTER_S:g}", f"{self._limit_s:g}", *self._command]
        pipe, begin_s = subprocess.PIPE, time.monotonic()
        with self._starting:
            if self._stop.is_set():
                raise ValueError("the trial has ended")
            # In "/" no file of a current folder is taken by accident; a session of its own gets no terminal's signals.
            self._process = subprocess.Popen(
                argv, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, cwd="/", start_new_session=True
            )
        output, errors = _printed(self._process, self._limit_s + _KILL_AFTER_S + _GRACE_S)
        code = _ended(self._process)
        if time.monotonic() - begin_s >= self._limit_s:
            raise ValueError(f"no answer within {self._limit_s:g} s")
        if code:
            words = [line.strip() for line in (errors or output).splitlines() if line.strip()]
            raise ValueError(f"it ended with {code}" + (f": {words[-1]}" if words else ""))
        return output


def _printed(process: subprocess.Popen[bytes], limit_s: float) -> tuple[str, str]:
    """What it prints to its output and as errors, until it closes both, has printed too much, or the time is over."""
    assert process.stdout is not None and process.stderr is not None
    found = {process.stdout.fileno(): b"", process.stderr.fileno(): b""}
    end_s = time.monotonic() + limit_s
    with process.stdout, process.stderr, selectors.DefaultSelector() as open_ends:
        for end in found:
            open_ends.register(end, selectors.EVENT_READ)
        while open_ends.get_map() and max(map(len, found.values())) < _MOST_BYTES and time.monotonic() < end_s:
            for key, _ in open_ends.select(max(0.0, end_s - time.monotonic())):
                chunk = os.read(key.fd, _MOST_BYTES)
                found[key.fd] += chunk
                if not chunk:
                    open_ends.unregister(key.fd)
    output, errors = (text.decode(errors="replace") for text in found.values())
    return output, errors


def _ended(process: subprocess.Popen[bytes]) -> int:
    """Its exit code. One that still runs although nobody reads it any more is ended."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        return process.wait(_GRACE_S)
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        return process.wait(_GRACE_S)
    process.kill()
    return process.wait(_GRACE_S)
