"""What a pool's study has spent so far, and which budget is used up."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from autotune.records import Phase, TrialRecord
from autotune.spec_parts import Budget
from launchers.outcome import Outcome
from search_spaces.hardware import PoolSpec

_JOULES_PER_KWH = 3.6e6


@dataclass(frozen=True, slots=True)
class Spent:
    """What launched trials have cost; refused proposals cost nothing.

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


def used_up(budget: Budget, so_far: Spent) -> str:
    """Which budget is used up, as the reason of the study's end; empty while none is."""
    limits = (
        (budget.trials, so_far.trials, "trials"),
        (budget.gpu_hours, so_far.gpu_hours, "GPU-hours"),
        (budget.energy_kwh, so_far.energy_kwh, "kWh"),
        (budget.usd, so_far.usd, "USD"),
    )
    for limit, used, unit in limits:
        if limit is not None and used is not None and used >= limit:
            return f"budget: {used:.4g} {unit}"
    return ""
