"""Ctrl-C, SIGTERM, SIGHUP: the first asks a study to end cleanly, a second Ctrl-C or SIGTERM ends this process at once."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any, Self

EXIT_CODE = 130
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_REPEAT_S = 0.5
_SHOW_CURSOR = b"\x1b[?25h"


class StopSignals:
    """Handles the signals while it is entered, on the main thread.

    A thread counts them as they arrive: Python runs handlers on the main thread only, which may be inside a long call into Ray, and
    merges signals that arrive meanwhile.

    Attributes:
        asked: Set by the first signal.
    """

    def __init__(self) -> None:
        self.asked = threading.Event()
        self._raises = False
        self._before: dict[int, Any] = {}
        self._wakeup_before = -1
        self._arrivals, self._arriving = os.pipe()
        self._terminals = [descriptor for descriptor in (0, 1, 2) if os.isatty(descriptor)]

    def __enter__(self) -> Self:
        """Begin to handle them."""
        self._before = {number: signal.getsignal(number) for number in _SIGNALS}
        os.set_blocking(self._arriving, False)
        threading.Thread(target=self._count, name="count-signals", daemon=True).start()
        self._wakeup_before = signal.set_wakeup_fd(self._arriving, warn_on_full_buffer=False)
        self.arm()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Put the earlier handlers back."""
        signal.set_wakeup_fd(self._wakeup_before)
        os.close(self._arriving)
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def arm(self) -> None:
        """Take the signals back from a library that has set handlers of its own."""
        for number in _SIGNALS:
            signal.signal(number, self._handle)

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """Inside, the first signal raises KeyboardInterrupt; so does the entry after one. Elsewhere it only sets `asked`."""
        self._raises = True
        try:
            if self.asked.is_set():
                raise KeyboardInterrupt
            yield
        finally:
            self._raises = False

    @contextmanager
    def calling(self, stop: Callable[[], None]) -> Iterator[None]:
        """Call `stop` in another thread from the first signal on, again and again until this is left.

        Again, because something may start just while the first call looks at what is running.
        """
        left = threading.Event()

        def work() -> None:
            while not left.wait(_REPEAT_S):
                if self.asked.is_set():
                    stop()

        thread = threading.Thread(target=work, name="stop-on-signal", daemon=True)
        thread.start()
        try:
            yield
        finally:
            left.set()
            thread.join()

    def _handle(self, _number: int, _frame: FrameType | None) -> None:
        self.asked.set()
        if self._raises:
            raise KeyboardInterrupt

    def _count(self) -> None:
        arrived = 0
        while numbers := os.read(self._arrivals, 1):
            if numbers[0] not in _SIGNALS:
                continue
            signal.alarm(0)  # while Ray starts, its C++ handler runs before ours and would abort the process after three seconds
            arrived += 1
            if numbers[0] == signal.SIGHUP:
                # A terminal that closes sends it twice: its shell does, and the kernel when the shell has ended.
                self._leave_terminals()
            elif arrived > 1:
                end_process(EXIT_CODE)
            self.asked.set()
        os.close(self._arrivals)

    def _leave_terminals(self) -> None:
        """What is printed to a terminal that is gone would raise."""
        null = os.open(os.devnull, os.O_RDWR)
        for descriptor in self._terminals:
            os.dup2(null, descriptor)
        os.close(null)


def give_up(why: str) -> None:
    """End now, where going on would block or spoil: the storage is safe, and the next driver closes what is open."""
    print(f"error: {why}", file=sys.stderr, flush=True)
    end_process(1)


def end_process(code: int) -> None:
    """End at once, without any clean-up: the session guard and the supervisors end what is left."""
    if os.isatty(1):
        os.write(1, _SHOW_CURSOR)
    os._exit(code)
