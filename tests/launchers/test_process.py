"""Trials in a process tree: limits, first causes, logs, environments, and what a failed trial costs the next."""

from __future__ import annotations

from launchers.base import StepRecord
from launchers.outcome import Outcome
from launchers.process import Limits, run_trial

LIMITS = Limits(startup_s=10, step_s=5, trial_s=30)


def finish(tree, request, limits=LIMITS):
    *steps, end = run_trial(tree, request, limits)
    assert all(isinstance(step, StepRecord) for step in steps)
    return steps, end


def test_steps_come_back_and_the_trial_completes(tree, request_of):
    steps, end = finish(tree, request_of("steps", {"steps": 4}, num_ranks=4))
    assert [step.iteration for step in steps] == [1, 2, 3, 4]
    assert end.outcome is Outcome.COMPLETED, end.detail
    assert end.exit_codes == dict.fromkeys(range(4), 0)
