"""A study has one driver, wherever it runs: a RUNNING trial of the study `<study>/drivers` in the same storage.

Optuna numbers trials atomically in every storage, and changes none that has ended. So of drivers that start at once the one with
the lowest number goes on, and one that was taken for dead learns of it when it next says that it lives. Optuna's own heartbeat of
trials is not used: a journal has none.
"""

from __future__ import annotations

import logging
import math
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from typing import Self

import optuna
from optuna.exceptions import StorageInternalError, UpdateFinishedTrialError
from optuna.storages import BaseStorage
from optuna.trial import FrozenTrial, TrialState

from autotune.errors import SpecError
from launchers.process_tree import boot_id, is_alive, read_process

log = logging.getLogger(__name__)
SEEN_EVERY_S = 10.0
DEAD_AFTER_S = 30.0
_LOOK_S = 0.5
_DRIVER, _SEEN = "driver", "seen_s"


@dataclass(frozen=True, slots=True)
class Driver:
    """A process that runs a study.

    Attributes:
        host: Name of its host, for people.
        machine: Boot and process namespace: where process numbers mean the same.
        pid: Its number.
        start_ticks: When it started, in clock ticks after boot.
    """

    host: str
    machine: str
    pid: int
    start_ticks: int

    @classmethod
    def here(cls) -> Self:
        """This process."""
        me = read_process(os.getpid())
        return cls(socket.gethostname(), _machine(), os.getpid(), me.start_ticks if me else 0)

    def lives(self) -> bool | None:
        """Whether the process is there; None on another machine, where only time can tell."""
        return is_alive((self.pid, self.start_ticks)) if self.machine == _machine() else None


def refusal(study: str, driver: Driver | None, seen_s_ago: float) -> SpecError:
    """What a second driver is told; `driver` is None where the first has not written who it is yet."""
    seen = f"seen {max(0.0, seen_s_ago):.0f} s ago"
    who = f"host {driver.host}, pid {driver.pid}, {seen}" if driver else seen
    stop = f"end it with `kill -INT {driver.pid}` on {driver.host}" if driver else "end it"
    hint = f"wait for its end, or {stop}, then `autotune resume`; for a study beside it, give another `name` or `storage`"
    return SpecError("study", study, f"another driver runs it ({who})", hint)


@contextmanager
def only_driver(storage: BaseStorage, studies: Sequence[str], on_lost: Callable[[str], None]) -> Iterator[None]:
    """Be the only driver of these studies.

    One that died on this machine is known at once. One on another machine counts as dead when it was not seen for `DEAD_AFTER_S`
    by this one's clock, and that is waited for; clocks of two machines are not compared.

    Args:
        storage: Where the studies are, or will be.
        studies: Their names.
        on_lost: Called in another thread where another driver has taken over, because this one was not seen for `DEAD_AFTER_S`.

    Raises:
        SpecError: where another driver lives; nothing of the studies was read or changed.
    """
    with ExitStack() as stack:
        for name in sorted(studies):  # in one order: of two drivers of several studies one gets all
            stack.enter_context(_Drivers(storage, name).joined(on_lost))
        yield


def running_driver(storage: BaseStorage, study: str) -> Driver | None:
    """The study's driver, as far as can be told at once: on another machine, one that was seen in the last `DEAD_AFTER_S`."""
    name = _name_of_drivers(study)
    if name not in optuna.get_all_study_names(storage):
        return None
    for trial in optuna.load_study(study_name=name, storage=storage).get_trials(states=(TrialState.RUNNING,)):
        driver, seen_s = _read(trial)
        lives = driver.lives()
        if lives or (lives is None and time.time() - seen_s < DEAD_AFTER_S):
            return driver
    return None


class _Drivers:
    """The drivers of one study."""

    def __init__(self, storage: BaseStorage, name: str) -> None:
        self._name = name
        self._study = optuna.create_study(study_name=_name_of_drivers(name), storage=storage, load_if_exists=True)
        self._first_look: dict[int, tuple[float, float]] = {}

    @contextmanager
    def joined(self, on_lost: Callable[[str], None]) -> Iterator[None]:
        """Be the only one.

        Raises:
            SpecError: where another one lives.
        """
        self._await_dead()
        with self._claimed(on_lost) as number:
            for dead in self._await_dead(before=number):
                self._study.tell(dead, state=TrialState.FAIL, skip_if_finished=True)
            yield

    @contextmanager
    def _claimed(self, on_lost: Callable[[str], None]) -> Iterator[int]:
        """A trial that says that we live, and is told for how many seconds we did; its number."""
        storage, begin_s = self._study._storage, time.time()
        about = {_DRIVER: asdict(Driver.here()), _SEEN: begin_s}
        claim = optuna.trial.create_trial(state=TrialState.RUNNING, user_attrs=about)
        trial_id = storage.create_new_trial(self._study._study_id, claim)
        number = storage.get_trial_number_from_id(trial_id)
        stop = threading.Event()
        thread = threading.Thread(target=self._say_alive, args=(trial_id, stop, on_lost), name="say-alive", daemon=True)
        thread.start()
        try:
            yield number
        finally:
            stop.set()
            thread.join(SEEN_EVERY_S)
            self._study.tell(number, time.time() - begin_s, skip_if_finished=True)

    def _say_alive(self, trial_id: int, stop: threading.Event, on_lost: Callable[[str], None]) -> None:
        while not stop.wait(SEEN_EVERY_S):
            try:
                self._study._storage.set_trial_user_attr(trial_id, _SEEN, time.time())
            except UpdateFinishedTrialError:
                on_lost(f"another driver has taken over {self._name}: this one was not seen for {DEAD_AFTER_S:g} s")
                return
            except (StorageInternalError, OSError, RuntimeError) as error:  # the next time may be in time
                log.debug("the storage does not take that this driver lives: %s", error)

    def _await_dead(self, before: float = math.inf) -> list[int]:
        """Numbers of those that ended without saying so, which is waited for.

        Raises:
            SpecError: where one lives.
        """
        while True:
            running = self._study.get_trials(deepcopy=False, states=(TrialState.RUNNING,))
            others = [trial for trial in running if trial.number < before]
            if all([self._is_dead(trial) for trial in others]):  # noqa: C419  each is looked at
                return [trial.number for trial in others]
            time.sleep(_LOOK_S)

    def _is_dead(self, trial: FrozenTrial) -> bool:
        """False where that is not known yet.

        Raises:
            SpecError: where it lives.
        """
        driver, seen_s = _read(trial)
        lives = driver.lives()
        if lives:
            raise refusal(self._name, driver, time.time() - seen_s)
        if lives is False:
            return True
        if trial.number not in self._first_look:
            log.warning("%s: waiting up to %g s for a sign of its driver on %s", self._name, DEAD_AFTER_S, driver.host)
        first_seen_s, since_s = self._first_look.setdefault(trial.number, (seen_s, time.monotonic()))
        if seen_s != first_seen_s:
            raise refusal(self._name, driver, 0.0)
        return time.monotonic() - since_s > DEAD_AFTER_S


def _name_of_drivers(study: str) -> str:
    return f"{study}/drivers"


def _read(trial: FrozenTrial) -> tuple[Driver, float]:
    """A driver, and when it last said that it lives, by its own clock."""
    return Driver(**trial.user_attrs[_DRIVER]), trial.user_attrs[_SEEN]


def _machine() -> str:
    return f"{boot_id()} {os.readlink('/proc/self/ns/pid')}"
