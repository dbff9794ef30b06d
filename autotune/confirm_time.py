"""How long confirming runs take, how long each of them may warm its GPUs up, and how many steps that may be."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence

from autotune.records import Phase, TrialRecord
from autotune.spec import StudySpec
from autotune.spec_parts import Soaking
from launchers.outcome import Outcome
from search_spaces.config import TrialConfig
from search_spaces.hardware import PoolSpec

_SPARE = 1.25  # steps may be faster than those that were measured


def confirming_s(spec: StudySpec, pool: PoolSpec, records: Sequence[TrialRecord]) -> float:
    """Seconds that all confirming runs still to come may take; 0 before anything completed."""
    run_s = confirming_run_s(spec, records)
    return _runs_to_come(spec, records) * (run_s + longest_soak_s(spec, pool)) if run_s else 0.0


def longest_soak_s(spec: StudySpec, pool: PoolSpec) -> float:
    """Longest time that a confirming run warms its GPUs up, where no budget shortens it."""
    return spec.confirm.soak.timeout_s if tells_temperature(pool) else 0.0


def soaking(spec: StudySpec, records: Sequence[TrialRecord], left_s: float | None) -> Soaking | None:
    """How the next confirming run warms its GPUs up; None where the study does not want that.

    Args:
        spec: The study.
        records: Ended trials.
        left_s: Seconds until the study ends: the runs still to come share what measuring leaves of them. None = no limit.
    """
    rule = spec.confirm.soak
    if not rule.timeout_s:
        return None
    if left_s is None:
        return rule
    share_s = left_s / max(1, _runs_to_come(spec, records)) - confirming_run_s(spec, records)
    return rule.model_copy(update={"timeout_s": min(rule.timeout_s, max(0.0, share_s))})


def steps_to_warm_up(
    rule: Soaking, pool: PoolSpec, config: TrialConfig, records: Sequence[TrialRecord], predicted: Mapping[str, float]
) -> int:
    """Most steps of a configuration until its GPUs are warm or the time for that is over, from its fastest run so far."""
    seen = [record.metrics["step_time_s"] for record in records if record.config == config and "step_time_s" in record.metrics]
    step_s = min(seen, default=predicted.get("predicted_step_time_s", 0.0))
    return math.ceil(_SPARE * rule.timeout_s / step_s) + 1 if tells_temperature(pool) and step_s > 0 else 0


def tells_temperature(pool: PoolSpec) -> bool:
    """Whether the pool's GPUs may tell how warm they are; where they do not after all, nothing is waited for."""
    return pool.device == "cuda" or bool(pool.telemetry.vendors)


def _runs_to_come(spec: StudySpec, records: Sequence[TrialRecord]) -> int:
    """The best `top` and the baseline, less the runs that have ended."""
    ended = sum(record.phase is Phase.CONFIRM and record.outcome is Outcome.COMPLETED for record in records)
    return max(0, (spec.confirm.top + 1) * spec.confirm.repeats - ended) if spec.confirm.top else 0


def confirming_run_s(spec: StudySpec, records: Sequence[TrialRecord]) -> float:
    """Seconds of a confirming run that does not warm up, from the median explored trial; 0 before any."""
    explored = [record for record in records if record.outcome is Outcome.COMPLETED and record.phase is not Phase.CONFIRM]
    lasting = [_lasting_s(record, spec.confirm_steps) for record in explored if "step_time_s" in record.metrics]
    return statistics.median(lasting) if lasting else 0.0


def _lasting_s(record: TrialRecord, steps: int) -> float:
    """Seconds that a trial would have taken with so many steps: what came besides its steps, and these at their median."""
    stepping_s = sum(step.step_s for step in record.steps)
    return max(0.0, record.took_s - stepping_s) + steps * record.metrics["step_time_s"]
