"""Forecast: how many more trials a pool's study can pay for, what they cost, and what they are expected to gain."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from pydantic import TypeAdapter

from autotune.budget import affordable
from autotune.ledger import Ledger
from autotune.records import Phase, counted
from autotune.spec_parts import Budget
from launchers.outcome import Outcome

if TYPE_CHECKING:
    from autotune.acquisition import Choice

_MINUTE_S, _HOUR_S = 60.0, 3600.0
_TURN = 1.5  # of the larger unit, from which on it is used


@dataclass(frozen=True, slots=True)
class Gain:
    """What trials are expected to gain over the best so far, as fractions of its score.

    Attributes:
        following: Expected of the trial that was launched last.
        chance: Upper bound of the probability that any candidate gains 1 %.
        expected: Expected of all trials that the budget pays for.
        low: Lower end of the interval that holds 80 % of what these may gain.
        high: Upper end.
    """

    following: float
    chance: float
    expected: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Forecast:
    """What the rest of a study's budget buys, from the trial on that was launched last.

    Attributes:
        trials: Exploring trials that it pays for, that one included.
        limited_by: What ends first: `trials`, `GPU-hours`, `kWh`, `USD`, `wall time`, or `candidates` that are left to try.
        wall_s: Seconds that these trials take; None before one completed.
        gpu_hours: Their GPU-hours; this one and the next two are None where there is no such budget, or no cost is known yet.
        energy_kwh: Energy of their GPUs.
        usd: Their price.
        gain: What they are expected to gain; None where the sampler has no model, or there is no best yet.
    """

    trials: int
    limited_by: str
    wall_s: float | None
    gpu_hours: float | None
    energy_kwh: float | None
    usd: float | None
    gain: Gain | None

    @classmethod
    def from_json(cls, plain: Mapping[str, Any]) -> Self:
        """The forecast that was kept as a mapping."""
        return TypeAdapter(cls).validate_python(plain)

    def words(self) -> str:
        """In one line."""
        costs = [f"{lasting(self.wall_s)}"] if self.wall_s is not None else []
        amounts = (self.gpu_hours, "GPU-hours"), (self.energy_kwh, "kWh"), (self.usd, "USD")
        costs += [f"{amount:.3g} {unit}" for amount, unit in amounts if amount is not None]
        trials = f"about {counted(self.trials, 'trial')} (limited by {self.limited_by})"
        bought = f"{trials}: {', '.join(costs)}" if costs else trials
        if self.gain is None:
            return bought
        gain = self.gain
        expected = f"expected gain {gain.expected:.1%} (80 %: {gain.low:.1%} to {gain.high:.1%})"
        return f"{bought}; {expected}, of the next trial {gain.following:.1%}; at most {gain.chance:.0%} chance that any gains 1 %"


def forecast_of(
    budget: Budget, ledger: Ledger, left_s: float | None, running: int, untried: int, outlook: Choice | None
) -> Forecast:
    """What the rest of a budget buys when the next trials cost what the median completed one did.

    Args:
        budget: All budgets.
        ledger: What ended.
        left_s: Seconds left for exploring; None = no limit.
        running: Trials that run beside the one that is launched now; their cost is set aside.
        untried: Candidates that are left after it.
        outlook: What it promises.
    """
    each, pace_s = ledger.usual, _pace_s(ledger, running + 1)
    paid = [(trials - running, unit) for trials, unit in affordable(budget, ledger.spent, each)]
    in_time = [(math.ceil(left_s / pace_s), "wall time")] if left_s is not None and pace_s else []
    trials, limited_by = min([*paid, *in_time, (untried + 1, "candidates")], key=lambda bound: bound[0])
    trials = max(1, trials)

    def total(limit: float | None, cost: float | None) -> float | None:
        return None if limit is None or cost is None else trials * cost

    return Forecast(
        trials=trials,
        limited_by=limited_by,
        wall_s=trials * pace_s if pace_s else None,
        gpu_hours=total(budget.gpu_hours, each.gpu_hours or None),
        energy_kwh=total(budget.energy_kwh, each.energy_kwh),
        usd=total(budget.usd, each.usd),
        gain=_gain(outlook, trials),
    )


def lasting(seconds: float) -> str:
    """How long something takes, for people."""
    for unit_s, unit in ((_HOUR_S, "h"), (_MINUTE_S, "min")):
        if seconds >= _TURN * unit_s:
            return f"{seconds / unit_s:.{int(unit == 'h')}f} {unit}"
    return f"{seconds:.0f} s"


def _pace_s(ledger: Ledger, at_once: int) -> float:
    """Seconds from one launch to the next, the median where so many run at once; 0 before one completed.

    Launches tell it where a study shares its machines with another one and waits for its turn.
    """
    explored = [record for record in ledger.records if record.phase is not Phase.CONFIRM and record.outcome is not Outcome.REFUSED]
    starts = sorted(record.started_s for record in explored)
    gaps = [later - sooner for sooner, later in zip(starts, starts[at_once:], strict=False)]
    took = [record.took_s for record in explored if record.outcome is Outcome.COMPLETED]
    return statistics.median(gaps or took) / at_once if took else 0.0


def _gain(outlook: Choice | None, trials: int) -> Gain | None:
    if outlook is None or outlook.gains is None:
        return None
    gains = outlook.gains
    last = min(trials, len(gains.expected)) - 1
    expected, low, high = (math.expm1(curve[last]) for curve in (gains.expected, gains.low, gains.high))
    return Gain(math.expm1(outlook.improvement), outlook.chance_of_gain, expected, low, high)
