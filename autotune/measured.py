"""What a launched trial showed: metrics of its steps and of its GPUs in one window, who disturbed it, its readings as a file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from autotune.contamination import braked, contamination, foreign_cpu
from autotune.judge import judge
from autotune.metrics import readable, summarise
from autotune.racing import SAVED, saved_s
from autotune.records import TrialResult
from autotune.run_spread import RunSpread
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
    window = steady_window(steps, measurement.warmup_steps)
    telemetry = summarise_telemetry(result.telemetry, window)
    if result.log_folder is not None and any(node.series for node in result.telemetry.nodes):
        from autotune.telemetry.storage import write_samples  # pyarrow takes a while to import, and few need it

        write_samples(result.telemetry.nodes, result.log_folder)
    metrics = summarise(workload, steps, measurement.warmup_steps, spread) | telemetry.metrics
    if window and any(witness.loads for witness in result.witnesses):
        metrics["foreign_cpu_fraction"] = foreign_cpu(result.witnesses, window)[0]
    if result.raced_out:
        metrics[SAVED] = saved_s([step.step_s for step in steps], measurement.warmup_steps, measurement.steps)
    marks = result.environment | {f"telemetry.{name}": text for name, text in telemetry.marks.items()}
    on_cpu, others = workload.device == "cpu", measurement.foreign_cpu_fraction
    disturbed = (contamination(result.witnesses, window, on_cpu=on_cpu, foreign_cpu_fraction=others), braked(metrics, window))
    return Measured(*judge(result, metrics), steps, metrics, marks, "; ".join(filter(None, disturbed)))
