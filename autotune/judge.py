"""How a launched trial is judged."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from autotune.records import TrialResult
from launchers.outcome import Outcome
from search_spaces.model import Workload


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


def as_asked(result: TrialResult, workload: Workload) -> TrialResult:
    """A trial whose ranks ran another batch or sequence length than they were given measured nothing: it crashed."""
    asked = workload.tokens_per_step
    other = next((step for step in result.steps if step.tokens != asked), None)
    if result.outcome is not Outcome.COMPLETED or other is None:
        return result
    detail = (
        f"step {other.iteration} trained {other.tokens} tokens and the study asks for {asked}: "
        "the ranks did not run the batch or sequence length that they were given"
    )
    return replace(result, outcome=Outcome.CRASHED, detail=detail)
