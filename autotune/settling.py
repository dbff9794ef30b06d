"""Thermal settling: the steps of a confirming trial count once the temperatures of its GPUs have come to rest.

A heat sink follows its GPU within minutes, and exploring trials end before. The clock is the one inside records and readings.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from autotune.metrics import readable
from autotune.spec_parts import Measurement, Soaking
from launchers.base import StepRecord

SOAK_STEPS = "soak_steps"
"""Metric: first steps of a trial that do not count because it waited for temperatures, those that never count included."""

UNSETTLED = "not settled"
"""How `Settled.why` begins where temperatures can be read and had not come to rest."""

_UNKNOWN = "not waited for: no GPU of the trial tells its temperature"
_LEAST_PAUSE_S = 1.0  # temperatures are read once a second
_LOOKS_PER_WINDOW = 30

Slopes = Callable[[float, float], Sequence[float | None]]
"""Between two instants: degrees per minute of each of a trial's GPUs that tells its temperature; None where it told too little."""


@dataclass(frozen=True, slots=True)
class Settled:
    """From where on the steps of a confirming trial count.

    Attributes:
        steps: First steps that do not.
        why: What the temperatures had told by then.
    """

    steps: int
    why: str


class Settling:
    """Follows a confirming trial until it is measured.

    Attributes:
        settled: From where on its steps count; None before that is known.
    """

    def __init__(self, rule: Soaking, measurement: Measurement, most_steps: int, slopes: Slopes) -> None:
        """Start before the first step.

        Args:
            rule: When the GPUs are warm.
            measurement: How many steps are measured then: `steps` without `warmup_steps`.
            most_steps: Steps after which the trial ends by itself.
            slopes: Tells how fast temperatures change, on the steps' clock.
        """
        self.settled: Settled | None = None
        self._rule = rule
        self._warmup_steps = measurement.warmup_steps
        self._wanted = measurement.steps - measurement.warmup_steps
        self._most_steps = most_steps
        self._slopes = slopes
        self._steps = 0
        self._warmed_up_s = math.nan
        self._asked_s = -math.inf

    def stepped(self, step: StepRecord) -> str:
        """Take the next step; why the trial may end now, empty where it must run on."""
        (step,) = readable((step,))
        self._steps += 1
        if math.isnan(self._warmed_up_s):
            self._warmed_up_s = step.time_s - step.step_s
        if self._steps <= self._warmup_steps:
            self._warmed_up_s = step.time_s
        if self.settled is None and self._steps >= self._warmup_steps:
            self.settled = self._look(step)
        if self.settled is None or self._steps - self.settled.steps < self._wanted or self._steps >= self._most_steps:
            return ""
        return f"measured over {self._wanted} steps; temperatures {self.settled.why}"

    def ended(self) -> Settled:
        """What counts of the trial as it ended: as many last steps as are wanted where temperatures had not come to rest."""
        if self.settled is not None and self._steps > self.settled.steps:
            return self.settled
        return Settled(max(self._warmup_steps, self._steps - self._wanted), f"{UNSETTLED} before the trial ended")

    def _look(self, step: StepRecord) -> Settled | None:
        """Whether the steps after this one count. What differs within a step is no drift: the window holds two steps at least."""
        since_s = step.time_s - self._warmed_up_s
        window_s = max(self._rule.window_s, 2.0 * step.step_s)
        is_late = since_s >= self._rule.timeout_s
        is_first = math.isinf(self._asked_s)
        pause_s = max(_LEAST_PAUSE_S, window_s / _LOOKS_PER_WINDOW)
        if not (is_first or is_late) and (since_s < window_s or step.time_s < self._asked_s + pause_s):
            return None
        self._asked_s = step.time_s
        looked_s = min(window_s, since_s)
        slopes = self._slopes(step.time_s - looked_s, step.time_s)
        if not slopes:
            return Settled(self._warmup_steps, _UNKNOWN)
        fastest = max(math.inf if slope is None else abs(slope) for slope in slopes)
        seen = f"{fastest:.2f} C/min over {looked_s:.0f} s" if fastest < math.inf else "too few readings"
        if since_s >= window_s and fastest <= self._rule.slope_c_per_min:
            return Settled(self._steps, f"settled after {since_s:.0f} s: {seen}")
        return Settled(self._steps, f"{UNSETTLED} within {self._rule.timeout_s:.0f} s: {seen}") if is_late else None
