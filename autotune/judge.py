"""How a launched trial is measured and judged."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from autotune.contamination import contamination, foreign_cpu, steady_window
from autotune.metrics import readable, summarise
from autotune.records import TrialResult
from autotune.run_spread import RunSpread
from autotune.spec_parts import Measurement
from launchers.base import StepRecord
from launchers.outcome import Outcome
from search_spaces.model import Workload


@dataclass(frozen=True, slots=True)
class Measured:
    """What a trial's record says of its measurement; the fields are the record's own."""

    outcome: Outcome
    detail: str
    steps: tuple[StepRecord, ...]
    metrics: Mapping[str, float]
    environment: Mapping[str, str]
    contaminated: str


def measured(result: TrialResult, workload: Workload, measurement: Measurement, spread: RunSpread) -> Measured:
    """Measure and judge a launched trial over its steady window."""
    steps = readable(result.steps)
    metrics = summarise(workload, steps, measurement.warmup_steps, spread)
    outcome, detail = judge(result, metrics)
    window = steady_window(steps, measurement.warmup_steps)
    if any(witness.loads for witness in result.witnesses) and window:
        metrics["foreign_cpu_fraction"] = foreign_cpu(result.witnesses, window)[0]
    disturbed = contamination(result.witnesses, window, on_cpu=workload.device == "cpu")
    return Measured(outcome, detail, steps, metrics, result.environment, disturbed)


def judge(result: TrialResult, metrics: Mapping[str, float]) -> tuple[Outcome, str]:
    """Outcome and detail: a trial counts as completed only with a measurement and a finite loss.

    Where somebody else's use of the node explains a failure, the configuration is not blamed for it.
    """
    lost = "; ".join(witness.lost for witness in result.witnesses if witness.lost)
    if lost and result.outcome in (Outcome.OOM, Outcome.HUNG, Outcome.TIMEOUT):
        return Outcome.LOST, f"{result.outcome.value} is not the configuration's fault: {lost}\n{result.detail}"
    if result.outcome is not Outcome.COMPLETED:
        return result.outcome, result.detail
    if not result.steps:
        return Outcome.CRASHED, "all ranks ended without reporting a step"
    if "tokens_per_s_per_gpu" not in metrics:
        return Outcome.CRASHED, "no step after the warm-up says how long it took"
    if "loss_last" not in metrics:
        return Outcome.NAN, f"the loss of step {result.steps[-1].iteration} is {result.steps[-1].loss!r}"
    return Outcome.COMPLETED, result.detail
