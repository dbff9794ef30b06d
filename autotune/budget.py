"""What a pool's study has spent so far, and which budget is used up."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable
from dataclasses import dataclass, replace

from autotune.records import Phase, TrialRecord
from autotune.spec_parts import Budget
from launchers.outcome import Outcome
from search_spaces.hardware import PoolSpec

_JOULES_PER_KWH = 3.6e6
_ROUNDING = 1e-9
_TRIALS = "trials"
_AMOUNTS = ("gpu_hours", "energy_kwh", "usd")


@dataclass(frozen=True, slots=True)
class Spent:
    """What launched trials cost; refused proposals cost nothing.

    Attributes:
        trials: Exploring trials that showed a result, the baseline included; confirming runs come on top.
        gpu_hours: Hours from proposal to end, times the pool's GPUs (ranks on CPU). Lost trials count: the GPUs were held.
            Virtual hours in a rehearsal.
        energy_kwh: Energy of the GPUs during the steps where it was measured; None where no trial measured it.
        usd: `gpu_hours` at the pool's price; None without a price.
    """

    trials: int
    gpu_hours: float
    energy_kwh: float | None
    usd: float | None

    def words(self) -> str:
        """GPU-hours, energy and money, as far as they are known."""
        amounts = (self.gpu_hours, "GPU-hours"), (self.energy_kwh, "kWh"), (self.usd, "USD")
        return ", ".join(f"{amount:,.4g} {unit}" for amount, unit in amounts if amount is not None)

    def times(self, count: float) -> Spent:
        """What so many cost."""
        kwh, usd = (None if amount is None else count * amount for amount in (self.energy_kwh, self.usd))
        return replace(self, gpu_hours=count * self.gpu_hours, energy_kwh=kwh, usd=usd)


def spent(records: Iterable[TrialRecord], pool: PoolSpec) -> Spent:
    """Add up a study's records."""
    launched = [record for record in records if record.outcome is not Outcome.REFUSED]
    gpu_hours = sum(record.took_s for record in launched) / 3600.0 * pool.world_size
    joules = [record.metrics["pool_gpu_energy_j"] for record in launched if "pool_gpu_energy_j" in record.metrics]
    return Spent(
        trials=sum(record.outcome is not Outcome.LOST and record.phase is not Phase.CONFIRM for record in launched),
        gpu_hours=gpu_hours,
        energy_kwh=sum(joules) / _JOULES_PER_KWH if joules else None,
        usd=None if pool.usd_per_gpu_hour is None else gpu_hours * pool.usd_per_gpu_hour,
    )


def usual(records: Iterable[TrialRecord], pool: PoolSpec) -> Spent:
    """What the median completed exploring trial has cost, by each measure; before one completed, no GPU-hours and else None."""
    explored = [record for record in records if record.outcome is Outcome.COMPLETED and record.phase is not Phase.CONFIRM]
    each = [spent([record], pool) for record in explored]
    return Spent(
        trials=1,
        gpu_hours=_median(one.gpu_hours for one in each) or 0.0,
        energy_kwh=_median(one.energy_kwh for one in each),
        usd=_median(one.usd for one in each),
    )


def used_up(budget: Budget, so_far: Spent, exploring: Budget | None = None) -> str:
    """Which budget is used up, as the reason of the study's end; empty while none is.

    Args:
        budget: All budgets.
        so_far: What was spent.
        exploring: The part of them that is not kept for confirming; none = all.
    """
    for (unit, limit, used), (_, most, _) in zip(_kept(budget, so_far), _kept(exploring or budget, so_far), strict=True):
        if used >= most:
            of = "" if unit == _TRIALS else f" of {limit:.4g}"
            rest = ", the rest is for confirming" if used < limit else ""
            return f"budget: {used:.4g} {unit}{of}{rest}"
    return ""


def less(budget: Budget, taken: Spent, most: float = 1.0) -> Budget:
    """What is left of GPU-hours, kWh and money where `taken` is set aside, of each budget at most the share `most`."""
    limits = {name: getattr(budget, name) for name in _AMOUNTS}
    left = {name: limit - min(getattr(taken, name) or 0.0, most * limit) for name, limit in limits.items() if limit is not None}
    return budget.model_copy(update=left)


def runs_paid(budget: Budget, each: Spent) -> float:
    """How many runs of this cost GPU-hours, kWh and money pay for; infinite where none of them is bound or known."""
    amounts = [(limit, cost) for unit, limit, cost in _kept(budget, each) if unit != _TRIALS and cost > 0]
    return min((max(0.0, limit) / cost for limit, cost in amounts), default=math.inf)


def affordable(budget: Budget, so_far: Spent, each: Spent) -> list[tuple[int, str]]:
    """How many trials what is left of each budget pays for, with its unit, where both are known.

    A trial may begin while anything is left, so the last one counts whole.

    Args:
        budget: All budgets.
        so_far: What was spent.
        each: What a trial costs.
    """
    costs = {unit: cost for unit, _, cost in _kept(budget, each) if cost > 0}
    left = [(limit - used, unit) for unit, limit, used in _kept(budget, so_far) if unit in costs]
    return [(math.ceil(amount / costs[unit] - _ROUNDING), unit) for amount, unit in left]


def _kept(budget: Budget, amounts: Spent) -> list[tuple[str, float, float]]:
    """Unit, limit and amount of every budget whose amount is known."""
    every = (
        (_TRIALS, budget.trials, amounts.trials),
        ("GPU-hours", budget.gpu_hours, amounts.gpu_hours),
        ("kWh", budget.energy_kwh, amounts.energy_kwh),
        ("USD", budget.usd, amounts.usd),
    )
    return [(unit, limit, amount) for unit, limit, amount in every if limit is not None and amount is not None]


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None
