"""Everything around one trial on one node: are its GPUs free, its power limit, and who disturbs it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

from autotune.contamination import Witness
from autotune.gpu_guard import GpuGuard, busy, wait_until_free
from autotune.host_load import HostWatch
from autotune.power_limits import PowerLimits
from autotune.spec_parts import Measurement
from autotune.telemetry import Gpu, PowerLimitError
from launchers.base import StepRecord
from launchers.outcome import Outcome, Verdict
from launchers.process import Supervised, TrialEnd
from search_spaces.hardware import PoolSpec

log = logging.getLogger(__name__)


class Surroundings:
    """The surroundings of one trial.

    Attributes:
        refusal: The end of a trial that must not be launched; None where it may.
    """

    def __init__(self, gpus: Sequence[Gpu], pool: PoolSpec, supervised: Supervised, roots: Callable[[], set[int]]) -> None:
        """Prepare.

        Args:
            gpus: The trial's GPUs, as far as they can be looked at.
            pool: Their pool.
            supervised: Gets the command that puts limits back where this process cannot.
            roots: Processes below which everything is the study's own.
        """
        self.refusal: TrialEnd | None = None
        self._gpus = [gpu for gpu in gpus if gpu.info.is_board]
        self._limits = PowerLimits(self._gpus, pool.power_limit_command or "")
        self._supervised = supervised
        self._roots = roots
        self._host = HostWatch(roots)
        self._guard: GpuGuard | None = None
        self._facts: dict[str, str] = {}
        self._fatal = ""
        self._step_s = 0.0

    @contextmanager
    def of(self, power_limit_w: int | None, measurement: Measurement, is_stopped: Callable[[], bool]) -> Iterator[None]:
        """Enter them: wait for the GPUs, set the limit, look around; afterwards put the limit back."""
        with ExitStack() as stack:
            problem = self._await_gpus(measurement, is_stopped) or self._set_limit(stack, power_limit_w)
            if problem:
                self.refusal = _not_launched(problem)
            else:
                self._facts = self._limits.facts()
                self._guard = stack.enter_context(GpuGuard(self._gpus, self._roots))
                stack.enter_context(self._host)
            yield

    def stepped(self, step: StepRecord) -> None:
        """A step ended."""
        self._step_s = step.step_s
        if self._guard:
            self._guard.stepped()

    def hangs(self, silent_s: float) -> str:
        """Why a trial that was silent for so long hangs; empty where nothing says so."""
        return self._guard.hangs(silent_s, self._step_s) if self._guard else ""

    def witness(self, node_rank: int) -> Witness:
        """What was seen; complete after they were left."""
        if self._guard is None:
            return Witness(node_rank, facts=self._facts, fatal=self._fatal)
        found = self._guard
        return Witness(node_rank, tuple(self._host.loads), self._facts, found.disturbances, found.foreign_memory, self._fatal)

    def _await_gpus(self, measurement: Measurement, is_stopped: Callable[[], bool]) -> str:
        waits = measurement.when_busy == "wait"
        problem = wait_until_free(self._gpus, measurement.busy_timeout_s, is_stopped) if waits else busy(self._gpus)
        if problem and measurement.when_busy == "fail":
            self._fatal = problem
        return problem

    def _set_limit(self, stack: ExitStack, watts: int | None) -> str:
        """Set the limit and see to its restoration; why it was not set."""
        if watts is None:
            return ""
        if not self._gpus:
            return f"a power limit of {watts} W cannot be set: the GPUs cannot be reached"
        self._supervised.set_exit_command(self._limits.exit_command())
        stack.callback(self._restore)
        try:
            self._limits.set(watts)
        except PowerLimitError as error:
            return str(error)
        return ""

    def _restore(self) -> None:
        """Put the limits back; where that fails, the exit command and the next start try again."""
        problems = self._limits.restore()
        for problem in problems:
            log.warning("%s", problem)
        if not problems:
            self._supervised.set_exit_command([])


def _not_launched(problem: str) -> TrialEnd:
    now_s = time.time()
    verdict = Verdict(Outcome.LOST, f"not launched: {problem}")
    return TrialEnd(verdict, num_steps=0, started_s=now_s, ended_s=now_s, exit_codes={}, killed=0, survivors=())
