"""Ends a private Ray when its driver has ended in any way. Standard library only; run by path as a process of its own.

Ray's daemons get a parent-death signal, its workers and per-node agents do not: after a SIGKILL of the driver some of them live on
for minutes. Every process of a private Ray inherits one environment variable with an id made for it; this program waits for the
end of its standard input, which the driver holds open, and then ends what carries that id. Nothing is ended by name.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time

SESSION_VARIABLE = "RAY_AUTOTUNE_SESSION"
_LIMIT_S = 20.0


def members(session_id: str) -> list[int]:
    """Processes (zombies left out) whose start environment carries the session's id, this one excepted."""
    entry = f"{SESSION_VARIABLE}={session_id}".encode()
    return [pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if pid != os.getpid() and _carries(pid, entry)]


def _carries(pid: int, entry: bytes) -> bool:
    try:
        with open(f"/proc/{pid}/environ", "rb") as environment:
            return entry in environment.read().split(b"\0")
    except OSError:
        return False


def end_session(session_id: str, folder: str) -> None:
    """SIGKILL all members until two scans in a row find none, then remove the session's folder."""
    deadline = time.monotonic() + _LIMIT_S
    clean_scans = 0
    while clean_scans < 2 and time.monotonic() < deadline:
        found = members(session_id)
        clean_scans = 0 if found else clean_scans + 1
        for pid in found:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        time.sleep(0.1)
    shutil.rmtree(folder, ignore_errors=True)


def main() -> None:
    """`session_guard.py ID FOLDER`, standard input held open by the driver."""
    session_id, folder = sys.argv[1:3]
    for ignored in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        signal.signal(ignored, signal.SIG_IGN)
    while os.read(0, 4096):
        continue
    end_session(session_id, folder)


if __name__ == "__main__":
    main()
