"""Racing: a running trial ends as soon as its steps show, beyond doubt, that its configuration cannot beat the best so far.

What it showed is a measurement like any other, only a shorter one: its median is told as it is, and the seconds saved are counted.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from autotune.objective import THROUGHPUT, Objective
from autotune.records import TrialRecord
from autotune.run_spread import RunSpread, other_runs
from autotune.spec_parts import Measurement
from autotune.steady_state import is_measured, steady, steady_interval
from search_spaces.model import Workload

SAVED = "raced_out_saved_s"
_FEWEST = 4


@dataclass(frozen=True, slots=True)
class Enough:
    """Why a running trial need not run on.

    Attributes:
        why: What its steps told.
        raced_out: Whether that is that it is of no use.
    """

    why: str
    raced_out: bool


def enough(step_s: Sequence[float], measurement: Measurement, beaten_s: float | None, spread: RunSpread) -> Enough | None:
    """Whether a running trial's steps tell enough; None where it must run on. Asked after every step.

    Args:
        step_s: Seconds of every step so far.
        measurement: Which steps count, and how narrow the median's interval has to be.
        beaten_s: Step seconds that it has to reach to be of use; None = it is not raced.
        spread: How much runs of one configuration differ.
    """
    if measurement.interval and is_measured(step_s, measurement.warmup_steps, measurement.interval):
        return Enough(f"measured well enough after {len(step_s)} steps", raced_out=False)
    if beaten_s is not None and is_beaten(step_s, measurement.warmup_steps, beaten_s, spread):
        return Enough(f"beaten beyond doubt after {len(step_s)} steps", raced_out=True)
    return None


def beaten_step_s(
    records: Sequence[TrialRecord], best: TrialRecord | None, objective: Objective, workload: Workload
) -> float | None:
    """Step seconds that no rival of the best trial may have at its fastest; None where nothing can be said yet.

    A configuration wins with `weight x ln(tokens/s) + other terms` above the best's score, at the lower end of the best's interval.
    The other terms (watts, throttling) are allowed to be better than any seen, by the whole range that was seen.

    Args:
        records: Ended trials.
        best: The best of them.
        objective: What they are worth.
        workload: What is trained.
    """
    weight = objective.weights.get(THROUGHPUT, 0.0)
    if best is None or weight <= 0 or THROUGHPUT not in objective.terms:
        return None
    others = [others_of(objective, record) for record in records if THROUGHPUT in record.metrics]
    allowed = max(others) + (max(others) - min(others)) - others_of(objective, best)
    lower_end = best.metrics.get(f"{THROUGHPUT}_low", best.metrics[THROUGHPUT])
    needed = lower_end * math.exp(-max(allowed, 0.0) / weight)
    return workload.tokens_per_step / needed / workload.world_size


def others_of(objective: Objective, record: TrialRecord) -> float:
    """What all terms but throughput add to a record's score."""
    return sum(part for name, part in objective.parts(record.metrics).items() if name != THROUGHPUT)


def is_beaten(step_s: Sequence[float], warmup_steps: int, beaten_s: float, spread: RunSpread) -> bool:
    """Whether a run of these steps cannot be as fast as `beaten_s` per step in 95 % of its repeats.

    Args:
        step_s: Seconds of every step so far.
        warmup_steps: First steps that never count.
        beaten_s: Step seconds that it would have to reach.
        spread: How much runs of one configuration differ.
    """
    values = steady(step_s, warmup_steps)
    if len(step_s) <= warmup_steps or len(values) < _FEWEST:
        return False
    return other_runs(steady_interval(values), spread).low > beaten_s


def saved_s(step_s: Sequence[float], warmup_steps: int, steps: int) -> float:
    """Seconds that the steps not run would have taken, at the median of those that were."""
    values = sorted(steady(step_s, warmup_steps))
    return max(0, steps - len(step_s)) * values[len(values) // 2] if values else 0.0
