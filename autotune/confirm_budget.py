"""What confirming costs: what exploring leaves it of GPU-hours, kWh and money, and how many configurations that pays for.

Confirming runs are longer than exploring ones and on warm GPUs, so that a budget without a part of its own for them is overrun by
a multiple. Everything here is a function of the records, so that a resumed study goes on where it was.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from autotune.budget import Spent, less, runs_paid, spent
from autotune.confirm import Contender
from autotune.confirm_time import confirming_run_s, longest_soak_s
from autotune.objective import Objective
from autotune.records import Phase, TrialRecord
from autotune.spec import StudySpec
from autotune.spec_parts import Budget
from launchers.outcome import Outcome
from search_spaces.hardware import PoolSpec

MOST_FOR_CONFIRMING = 1 / 3
_JOULES_PER_KWH = 3.6e6
_BEGUN = 1 - 1e-9  # a run may begin while anything is left
_FEWEST = 2  # the baseline, and one that is compared with it


def exploring_budget(spec: StudySpec, pool: PoolSpec, records: Sequence[TrialRecord]) -> Budget:
    """The study's budget without what is kept for confirming: what that may cost, warming up included, of each at most a third.

    Nothing is kept where a third does not pay for one configuration and the baseline.
    """
    third = less(spec.budget, Spent(0, math.inf, math.inf, math.inf), 1.0 - MOST_FOR_CONFIRMING)
    run = _run_cost(spec, pool, records)
    several = _paid(spec, runs_paid(third, run), spec.confirm.top + 1 if spec.confirm.top else 0)
    return less(spec.budget, run.times(several * spec.confirm.repeats)) if several >= _FEWEST else spec.budget


def affordable_contenders(
    chosen: Sequence[Contender], objective: Objective, spec: StudySpec, pool: PoolSpec, records: Sequence[TrialRecord]
) -> list[Contender]:
    """The best of those to be confirmed, and the baseline, as many as what exploring left of the budget pays for; none for less.

    Those that failed there count no more.
    """
    explored = [record for record in records if record.phase is not Phase.CONFIRM]
    left = less(spec.budget, spent(explored, pool))
    holding = [contender for contender in chosen if not contender.failed(objective)]
    runs = runs_paid(left, _run_cost(spec, pool, records))
    several = _paid(spec, runs + _BEGUN, len(holding))
    if several == len(holding):
        return list(chosen)
    if several < _FEWEST:
        return []
    best = _best(holding, several)
    return [contender for contender in chosen if contender in best or contender not in holding]


def fewest_confirming_s(spec: StudySpec, records: Sequence[TrialRecord]) -> float:
    """Seconds that confirming one configuration and the baseline takes, without warming up; 0 before anything completed."""
    return _FEWEST * spec.confirm.repeats * confirming_run_s(spec, records)


def contenders_in_time(
    chosen: Sequence[Contender], objective: Objective, spec: StudySpec, records: Sequence[TrialRecord], left_s: float | None
) -> list[Contender]:
    """The best of those to be confirmed, and the baseline, as many as can end all of their runs.

    Args:
        chosen: Who would be confirmed, given time.
        objective: What says who failed.
        spec: The study.
        records: Ended trials.
        left_s: Seconds until the study ends; None = no limit. The last run may begin while anything is left.
    """
    if left_s is None:
        return list(chosen)
    run_s, repeats = confirming_run_s(spec, records), spec.confirm.repeats
    holding = [contender for contender in chosen if not contender.failed(objective)]
    for several in range(len(holding), min(_FEWEST, len(holding)) - 1, -1):
        best = _best(holding, several)
        if (sum(max(0, repeats - len(contender.runs)) for contender in best) - 1) * run_s < left_s:
            return [contender for contender in chosen if contender in best or contender not in holding]
    return []


def _best(holding: Sequence[Contender], several: int) -> list[Contender]:
    """The first so many of those that have not failed, the baseline among them where there is one."""
    baselines = [contender for contender in holding if contender.explored.phase is Phase.BASELINE]
    others = [contender for contender in holding if contender.explored.phase is not Phase.BASELINE]
    return [*others[: several - len(baselines)], *baselines]


def _paid(spec: StudySpec, runs: float, wanted: int) -> int:
    """How many configurations, `wanted` at most, so many confirming runs are enough for."""
    return wanted if runs >= wanted * spec.confirm.repeats else int(runs // spec.confirm.repeats)


def _run_cost(spec: StudySpec, pool: PoolSpec, records: Sequence[TrialRecord]) -> Spent:
    """What a confirming run costs that warms its GPUs up as long as it may; nothing before anything completed.

    Energy is that of the steps that count, as in `budget.spent`: warming up takes none.
    """
    run_s = confirming_run_s(spec, records)
    gpu_hours = (run_s + longest_soak_s(spec, pool)) / 3600.0 * pool.world_size if run_s else 0.0
    usd = None if pool.usd_per_gpu_hour is None else gpu_hours * pool.usd_per_gpu_hour
    return Spent(0, gpu_hours, _run_kwh(spec, records), usd)


def _run_kwh(spec: StudySpec, records: Sequence[TrialRecord]) -> float | None:
    """Energy of a confirming run's steps, from the median step that was explored; None where none was measured."""
    explored = [record for record in records if record.outcome is Outcome.COMPLETED and record.phase is not Phase.CONFIRM]
    metered = [record.metrics for record in explored if {"pool_gpu_energy_j", "steady_steps"} <= record.metrics.keys()]
    joules = [metrics["pool_gpu_energy_j"] / metrics["steady_steps"] for metrics in metered]
    steps = spec.confirm_steps - spec.measurement.warmup_steps
    return statistics.median(joules) * steps / _JOULES_PER_KWH if joules else None
