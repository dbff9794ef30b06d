"""How long a rehearsed trial takes, in virtual seconds, and the limits that end it as they would end a real one."""

from __future__ import annotations

from operator import itemgetter

from launchers.limits import Limits
from launchers.outcome import Outcome, Verdict
from launchers.simulated import STARTUP_S


class VirtualTrial:
    """The time of one trial on a twin, step by step.

    Attributes:
        took_s: Virtual seconds so far: the start-up, the steps, and the wait for one that came too late.
        cut: How a limit ended the trial; None while none has.
    """

    def __init__(self, limits: Limits) -> None:
        """Start it; a trial that shows no step, such as one that runs out of memory, has taken its start-up."""
        self.took_s = STARTUP_S
        self.cut: Verdict | None = None
        self._limits = limits
        self._steps = 0

    def stepped(self, step_s: float) -> bool:
        """Take the next step; whether it came within the limits."""
        if self.cut is None:
            deadlines = self._limits.deadlines(0.0, self.took_s, self._steps)
            deadline_s, outcome, why = min(deadlines, key=itemgetter(0))
            if self.took_s + step_s > deadline_s:
                self.took_s, self.cut = deadline_s, Verdict(Outcome(outcome), f"{why} (virtual time)")
            else:
                self.took_s, self._steps = self.took_s + step_s, self._steps + 1
        return self.cut is None
