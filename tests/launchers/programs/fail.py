"""Each rank fails as its entry in the job says: {"<rank>": [seconds, kind, text]}; ranks without one wait for ever."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time


class OutOfMemoryError(RuntimeError):
    """Named as torch's."""


KINDS = {"runtime": RuntimeError, "oom": OutOfMemoryError, "assertion": AssertionError, "value": ValueError}


def main(job, context):
    seconds, kind, text = job.get(str(context.rank), [1000, "runtime", "too late"])
    time.sleep(seconds)
    if kind == "exit":
        sys.exit(int(text))
    if kind == "signal":
        os.kill(os.getpid(), getattr(signal, text))
    if kind == "stuck":
        threading.Thread(target=threading.Event().wait).start()
        raise AssertionError(text)
    if kind == "memory":
        bytearray(1 << 60)
    if kind == "chained":
        try:
            raise OutOfMemoryError(text)
        except OutOfMemoryError as error:
            raise ValueError("while cleaning up") from error
    raise KINDS[kind](text)
