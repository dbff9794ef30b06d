"""What a launched trial showed: metrics of its steps and of its GPUs in one window, who disturbed it, its readings as a file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite

from autotune.contamination import braked, contamination, foreign_cpu
from autotune.judge import judge
from autotune.metrics import readable, summarise
from autotune.racing import SAVED, saved_s
from autotune.records import TrialResult
from autotune.run_spread import RunSpread
from autotune.settling import SOAK_STEPS
from autotune.spec_parts import Measurement
from autotune.steady_state import steady_window
from autotune.telemetry_summary import summarise_telemetry
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


def measure(workload: Workload, result: TrialResult, measurement: Measurement, spread: RunSpread) -> Measured:
    """Measures and judges a trial over its steady window; writes the raw readings beside its logs.

    Args:
        workload: What was trained.
        result: What the nodes returned.
        measurement: Which first steps never count.
        spread: Run-to-run spread that its study has shown so far.
    """
    steps = readable(result.steps)
    left_out = max(measurement.warmup_steps, result.settled.steps if result.settled is not None else 0)
    window = steady_window(steps, left_out)
    telemetry = summarise_telemetry(result.telemetry, window)
    if result.log_folder is not None and any(node.series for node in result.telemetry.nodes):
        from autotune.telemetry.storage import write_samples  # pyarrow takes a while to import, and few need it

        write_samples(result.telemetry.nodes, result.log_folder)
    metrics = summarise(workload, steps, left_out, spread) | telemetry.metrics
    if window and any(witness.loads for witness in result.witnesses):
        metrics["foreign_cpu_fraction"] = foreign_cpu(result.witnesses, window)[0]
    if left_out > measurement.warmup_steps:
        metrics |= _soaked(steps[:left_out])
    if result.raced_out:
        metrics[SAVED] = saved_s([step.step_s for step in steps], measurement.warmup_steps, measurement.steps)
    told = telemetry.marks | ({"heat": result.settled.why} if result.settled is not None else {})
    marks = result.environment | {f"telemetry.{name}": text for name, text in told.items()}
    on_cpu, others = workload.device == "cpu", measurement.foreign_cpu_fraction
    disturbed = (contamination(result.witnesses, window, on_cpu=on_cpu, foreign_cpu_fraction=others), braked(metrics, window))
    return Measured(*judge(result, metrics), steps, metrics, marks, "; ".join(filter(None, disturbed)))


def _soaked(steps: Sequence[StepRecord]) -> dict[str, float]:
    """How many first steps warmed a trial up, and how long they took."""
    seconds = steps[-1].time_s - steps[0].time_s + steps[0].step_s
    return {SOAK_STEPS: float(len(steps))} | ({"soak_s": seconds} if isfinite(seconds) else {})
