"""What a launched trial showed: metrics of its steps and of its GPUs in one window, and its raw readings kept as a file."""

from __future__ import annotations

from autotune.metrics import readable, summarise
from autotune.records import TrialResult
from autotune.telemetry_summary import Summary, steady_window, summarise_telemetry
from launchers.base import StepRecord
from search_spaces.model import Workload


def measure(workload: Workload, result: TrialResult, warmup_steps: int) -> tuple[tuple[StepRecord, ...], Summary]:
    """Writes the raw readings beside the trial's logs.

    Args:
        workload: What was trained.
        result: What the nodes returned.
        warmup_steps: Steps that do not count.

    Returns:
        The steps as a record can be stored, and metrics by name with marks for the trial's environment.
    """
    steps = readable(result.steps)
    telemetry = summarise_telemetry(result.telemetry, steady_window(steps, warmup_steps))
    if result.log_folder is not None and any(node.series for node in result.telemetry.nodes):
        from autotune.telemetry.storage import write_samples  # pyarrow takes a while to import, and few need it

        write_samples(result.telemetry.nodes, result.log_folder)
    marks = result.environment | {f"telemetry.{name}": text for name, text in telemetry.marks.items()}
    return steps, Summary(summarise(workload, steps, warmup_steps) | telemetry.metrics, marks)
