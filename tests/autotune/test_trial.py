"""How the verdicts of a trial's nodes are read where it was ended because it is measured well enough."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from autotune.node_agent import SlotRequest
from autotune.settling import Settling
from autotune.spec_parts import Measurement, Soaking
from autotune.telemetry.clocks import ClockOffset
from autotune.trial import Merged, _slopes_c_per_min
from launchers.base import StepRecord
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


def test_a_confirming_trial_runs_on_until_its_gpus_are_warm_and_is_then_measured():
    """One step a second; the slope falls to 1 at second 30, 28 seconds after the two steps that never count."""
    wanted, soak = Measurement(steps=12, warmup_steps=2, interval=0.0), Soaking(timeout_s=100.0, window_s=20.0)
    request = SlotRequest("t", "p", {}, Limits(1.0, 1.0, 1.0), Path(), measurement=wanted, soak=soak, most_steps=200)
    merged = Merged(settling=Settling(soak, wanted, 200, lambda start_s, end_s: [1031.0 - end_s]), verdicts=[STOPPED])
    for number in range(1, 60):
        merged.take(StepRecord(number, 1000.0 + number, 1.0, 5.0, None, 512, None))
        merged.look(request)
    assert merged.why_enough == "measured over 10 steps; temperatures settled after 28 s: 1.00 C/min over 20 s"
    assert merged.settling.ended().steps == 30
    assert len(merged.steps) == 40, "steps until it was ended are none of its measurement"
    assert merged.verdict() == Verdict(Outcome.COMPLETED, merged.why_enough)


class Node:
    """An agent whose clock is ahead of ours."""

    def __init__(self, slope):
        self.slope, self.asked = slope, []
        self.slopes_c_per_min = SimpleNamespace(remote=self.ask)

    def ask(self, start_s, end_s):
        self.asked.append((start_s, end_s))
        return [self.slope]


def test_every_node_is_asked_for_the_same_time_on_its_own_clock(monkeypatch):
    """Steps are on the last node's clock, 2 s ahead of ours; the first node's is 5 s ahead."""
    monkeypatch.setattr("autotune.trial.ray.get", lambda answers, timeout: answers)
    first, last, alone = Node(0.5), Node(None), Node(0.1)
    clocks = (ClockOffset(5.0, 0.01), ClockOffset(2.0, 0.01))
    assert _slopes_c_per_min([first, last], clocks, 100.0, 160.0) == [0.5, None]
    assert (first.asked, last.asked) == ([(103.0, 163.0)], [(100.0, 160.0)])
    assert _slopes_c_per_min([alone], (), 100.0, 160.0) == [0.1]
    assert alone.asked == [(100.0, 160.0)]
