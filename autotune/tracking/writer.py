"""The thread that talks to MLflow: a bounded queue before it, a spool file behind it, retries with growing pauses."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as WaitTimeoutError
from dataclasses import dataclass, replace
from queue import Empty, Full, Queue
from typing import TYPE_CHECKING, Any

from autotune.errors import TrackingError
from autotune.records import TrialRecord
from autotune.tracking.spool import Spool
from autotune.tracking.upload import PREFIX, RunUpload, trial_upload

if TYPE_CHECKING:
    from autotune.tracking.store import MlflowStore, OpenStudy

log = logging.getLogger(__name__)

QUEUE_SIZE = 1000
FIRST_RETRY_S, LAST_RETRY_S = 0.5, 30.0
CLOSE_CHECK_S = 0.2

Item = TrialRecord | RunUpload


@dataclass(frozen=True, slots=True)
class _Call:
    """Something that the thread does for a waiting caller."""

    function: Callable[[MlflowStore], Any]
    answer: Future[Any]


class Writer:
    """Uploads items in order. An item that MLflow cannot take now waits in the spool; one that it refuses for ever is counted.

    Args:
        connect: Imports mlflow and opens the store; raises TrackingError.
        spool: Where uploads wait.
        driver: Who writes: a parent's end left by another driver does not end the parent again.
    """

    def __init__(self, connect: Callable[[], MlflowStore], spool: Spool, driver: str) -> None:
        self.opened: dict[str, OpenStudy] = {}
        self.rejected = 0
        self.failure: TrackingError | None = None
        self.store: MlflowStore | None = None
        self.tried = threading.Event()
        self._connect, self._spool, self._driver = connect, spool, driver
        self._queue: Queue[_Call | Item] = Queue(QUEUE_SIZE)
        self._busy: Item | None = None
        self._pause_s, self._retry_at = FIRST_RETRY_S, 0.0
        self._closing, self._deadline = threading.Event(), float("inf")
        self._thread = threading.Thread(target=self._work, name="mlflow-writer", daemon=True)
        self._thread.start()

    def ask(self, function: Callable[[MlflowStore], Any], timeout_s: float) -> Any:
        """What `function` answers in the writer's thread, or its error; TrackingError where it takes too long."""
        answer: Future[Any] = Future()
        try:
            self._queue.put(_Call(function, answer), timeout=timeout_s)
            return answer.result(timeout_s)
        except (WaitTimeoutError, Full):
            raise TrackingError(f"the MLflow store gave no answer in {timeout_s:g} s") from None

    def put(self, item: Item, wait_s: float = 0.0) -> None:
        """Queue one item; with a full queue after `wait_s`, or once closed, it goes to the spool instead."""
        try:
            if self._closing.is_set():
                raise Full
            self._queue.put(item, block=wait_s > 0, timeout=wait_s or None)
        except Full:
            self._keep(item)

    def missing(self) -> int:
        """Uploads that MLflow does not have: spooled or refused by it."""
        return len(self._spool) + self.rejected

    def close(self, timeout_s: float) -> None:
        """Upload what is left for at most `timeout_s`; the rest is in the spool when this returns."""
        self._deadline = time.monotonic() + timeout_s
        self._pause_s, self._retry_at = FIRST_RETRY_S, 0.0
        self._closing.set()
        with contextlib.suppress(Full):  # wakes a thread that waits
            self._queue.put_nowait(_Call(lambda store: None, Future()))
        self._thread.join(timeout_s + CLOSE_CHECK_S)
        held = self._busy if self._thread.is_alive() else None  # in a call that takes longer: kept too, a repeat is harmless
        for item in [*self._drained(), *([] if held is None else [held])]:
            self._keep(item)

    def _work(self) -> None:
        self._reconnect()
        self.tried.set()
        while not self._finished():
            try:
                item = self._queue.get(timeout=CLOSE_CHECK_S)
            except Empty:
                item = None
            if isinstance(item, _Call):
                self._answer(item)
            elif item is not None:
                self._take(item)
            if time.monotonic() >= self._retry_at and self._spool.holds(self.opened):
                self.replay()

    def _finished(self) -> bool:
        """Closing, and out of time or with nothing left that could be sent."""
        if not self._closing.is_set():
            return False
        return time.monotonic() >= self._deadline or not (self._queue.qsize() or self._spool.holds(self.opened))

    def _reconnect(self) -> None:
        try:
            self.store = self._connect()
            self.failure = None
        except TrackingError as error:
            self.failure = error
            self._back_off(error)

    def _answer(self, call: _Call) -> None:
        if self.store is None:
            self._reconnect()
        try:
            if self.store is None:
                raise self.failure or TrackingError("MLflow is not open")
            call.answer.set_result(call.function(self.store))
        except Exception as error:  # goes to the caller
            call.answer.set_exception(error)

    def _take(self, item: Item) -> None:
        self._busy = item
        try:
            upload = _as_upload(item)
            waits = upload.study not in self.opened or self._spool.holds({upload.study})
            if waits or not self._sent(upload, uncertain=False):
                self._spool.append(upload)
        except Exception:
            self._lose(item)
        self._busy = None

    def replay(self) -> None:
        """Send the spool's uploads of opened studies, until one fails."""
        uploads = self._spool.read()
        left: list[RunUpload] = []
        for index, upload in enumerate(uploads):
            if upload.study not in self.opened:
                left.append(upload)
            elif time.monotonic() >= self._deadline or not self._sent(self._own(upload), uncertain=True):
                left += uploads[index:]
                break
        self._spool.settle(len(uploads), left)

    def _own(self, upload: RunUpload) -> RunUpload:
        """An earlier driver's end of a parent that is open again: its figures, not its status."""
        stale = upload.number is None and upload.tags.get(PREFIX + "driver") != self._driver
        return replace(upload, status="RUNNING") if stale else upload

    def _sent(self, upload: RunUpload, *, uncertain: bool) -> bool:
        """Whether the upload is off our hands: in MLflow, or refused by it for ever."""
        store = self.store
        if store is None:
            return False
        try:
            store.write(self.opened[upload.study], upload, uncertain=uncertain)
        except Exception as error:  # no failure of MLflow may reach the study
            if not store.is_permanent(error):
                self._back_off(error)
                return False
            self.rejected += 1
            log.error("MLflow refuses trial %s of %s: %s", upload.number, upload.study, error)
        self._pause_s = FIRST_RETRY_S
        return True

    def _back_off(self, error: Exception) -> None:
        if self._pause_s == FIRST_RETRY_S:
            log.warning("MLflow is away, uploads are kept and sent later: %s", str(error).splitlines()[0])
        self._retry_at = time.monotonic() + self._pause_s
        self._pause_s = min(2 * self._pause_s, LAST_RETRY_S)

    def _keep(self, item: Item) -> None:
        try:
            self._spool.append(_as_upload(item))
        except Exception:
            self._lose(item)

    def _lose(self, item: Item) -> None:
        self.rejected += 1
        log.exception(
            "trial %s of %s can be neither uploaded nor spooled; MLflow can be rebuilt from the study's storage",
            item.number,
            item.study,
        )

    def _drained(self) -> list[Item]:
        items: list[Item] = []
        while True:
            try:
                item = self._queue.get_nowait()
            except Empty:
                return items
            if not isinstance(item, _Call):
                items.append(item)


def _as_upload(item: Item) -> RunUpload:
    return item if isinstance(item, RunUpload) else trial_upload(item)
