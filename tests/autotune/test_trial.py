"""How the verdicts of a trial's nodes are read where it was ended because it is measured well enough."""

from __future__ import annotations

from pathlib import Path

import pytest

from autotune.node_agent import SlotRequest
from autotune.spec_parts import Measurement
from autotune.trial import Merged
from launchers.outcome import Outcome, Verdict
from launchers.process import Limits

from .study_cases import steps_of

MEASURED_S = 1000.0
STOPPED = Verdict(Outcome.STOPPED, "ended after step 9")


@pytest.mark.parametrize(
    ("verdicts", "measured_s", "outcome"),
    [
        ([STOPPED, STOPPED], MEASURED_S, Outcome.COMPLETED),
        ([STOPPED, STOPPED], None, Outcome.STOPPED),
        # A node whose ranks saw the others go, or broke while they were being ended.
        (
            [STOPPED, Verdict(Outcome.LOST, "another rank went away", 1, MEASURED_S - 1, secondary=True)],
            MEASURED_S,
            Outcome.COMPLETED,
        ),
        ([STOPPED, Verdict(Outcome.CRASHED, "abort", 1, MEASURED_S + 0.1)], MEASURED_S, Outcome.COMPLETED),
        # What broke before is a result.
        ([STOPPED, Verdict(Outcome.OOM, "memory", 1, MEASURED_S - 0.1)], MEASURED_S, Outcome.OOM),
        ([STOPPED, Verdict(Outcome.NAN, "nan")], MEASURED_S, Outcome.NAN),
        ([Verdict(Outcome.COMPLETED, ""), Verdict(Outcome.COMPLETED, "")], MEASURED_S, Outcome.COMPLETED),
        ([STOPPED, Verdict(Outcome.LOST, "an agent died")], MEASURED_S, Outcome.LOST),
    ],
)
def test_the_end_of_a_measured_trial(verdicts, measured_s, outcome):
    merged = Merged(steps=list(steps_of(0.1)), verdicts=verdicts, enough_s=measured_s)
    assert merged.verdict().outcome is outcome


@pytest.mark.parametrize(
    ("interval", "beaten_s", "why", "raced_out"),
    [
        (0.0, None, "", False),
        (0.0, 0.5, "", False),
        (0.0, 0.05, "beaten beyond doubt after 12 steps", True),
        (0.2, 0.05, "measured well enough after 12 steps", False),
    ],
)
def test_a_running_trial_that_told_enough_is_ended(interval, beaten_s, why, raced_out):
    wanted = Measurement(steps=30, warmup_steps=0, interval=interval)
    request = SlotRequest("t", "p", {}, Limits(1.0, 1.0, 1.0), Path(), measurement=wanted, beaten_s=beaten_s)
    merged = Merged(steps=list(steps_of(0.1, count=12)))
    merged.look(request)
    assert (merged.why_enough, merged.raced_out, merged.enough_s is None) == (why, raced_out, not why)
