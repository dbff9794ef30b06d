"""How long a trial may take: one rule for the clock on the wall and for the virtual time of a rehearsal."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from launchers.outcome import Outcome


@dataclass(frozen=True, slots=True)
class Limits:
    """How long a trial may take, in seconds: by the wall clock, or in virtual time where it is rehearsed.

    Attributes:
        startup_s: Until the first step; TIMEOUT beyond.
        step_s: Between two steps after the first; HUNG beyond.
        trial_s: The whole trial; TIMEOUT beyond.
    """

    startup_s: float
    step_s: float
    trial_s: float

    def deadlines(
        self, begin_s: float, last_step_s: float, num_steps: int, *, sees_steps: bool = True
    ) -> Iterator[tuple[float, Outcome, str]]:
        """When a trial ends at the latest if nothing more comes of it: the time, how it ended then, and why.

        Args:
            begin_s: Time of its launch, on any clock; the deadlines are on the same.
            last_step_s: Time of its last step.
            num_steps: Steps so far.
            sees_steps: Whether its steps are seen; where they are not, only the whole trial has a limit.
        """
        yield begin_s + self.trial_s, Outcome.TIMEOUT, f"the trial took over {self.trial_s:g} s"
        if sees_steps and not num_steps:
            yield begin_s + self.startup_s, Outcome.TIMEOUT, f"no first step within {self.startup_s:g} s"
        elif sees_steps:
            yield last_step_s + self.step_s, Outcome.HUNG, f"no step within {self.step_s:g} s after step {num_steps}"
