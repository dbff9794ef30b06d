"""How a launched trial is judged."""

from __future__ import annotations

from collections.abc import Mapping

from autotune.records import TrialResult
from launchers.outcome import Outcome


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
