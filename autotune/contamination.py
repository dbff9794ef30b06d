"""Whether somebody else disturbed a trial's measurement, judged over its steady window from what its nodes saw.

A contaminated trial is flagged and run once more; it is never dropped, and its value is told as measured.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from autotune.host_load import HostLoad, foreign_fraction
from autotune.steady_state import steady_from
from launchers.base import StepRecord

FOREIGN_CPU_LIMIT = 0.10
"""Share of a CPU trial's cores that others may use. One busy process of another user takes 1 / cores; the trial's ranks, which wait
for each other, lose more than that share."""


@dataclass(frozen=True, slots=True)
class Witness:
    """What one node's agent saw beside a trial.

    Attributes:
        node_rank: Which node.
        loads: Use of its processors.
        facts: What is kept with the trial's environment, by name.
        disturbances: What disturbed the trial for certain, each with its owner.
        lost: Why the trial's end says nothing of its configuration, e.g. somebody else's GPU memory; empty where it does.
    """

    node_rank: int = 0
    loads: tuple[HostLoad, ...] = ()
    facts: Mapping[str, str] = field(default_factory=dict)
    disturbances: tuple[str, ...] = ()
    lost: str = ""


def steady_window(steps: Sequence[StepRecord], warmup_steps: int) -> tuple[float, float] | None:
    """Unix times at which the first steady step began and the last step ended; None where there is no step."""
    if not steps:
        return None
    first = steps[min(steady_from([step.step_s for step in steps], warmup_steps), len(steps) - 1)]
    return first.time_s - first.step_s, steps[-1].time_s


def foreign_cpu(witnesses: Sequence[Witness], window: tuple[float, float] | None) -> tuple[float, str]:
    """The largest share of a node's cores that others used in the window, with the busiest of them; 0 where nobody looked."""
    shares = [foreign_fraction(witness.loads, *window) for witness in witnesses] if window else []
    return max(shares, default=(0.0, ""))


def contamination(witnesses: Sequence[Witness], window: tuple[float, float] | None, *, on_cpu: bool) -> str:
    """Who disturbed a trial, for a person; empty where nobody did."""
    found = [disturbance for witness in witnesses for disturbance in witness.disturbances]
    share, owner = foreign_cpu(witnesses, window)
    if on_cpu and share > FOREIGN_CPU_LIMIT:
        found.insert(0, f"others used {share:.0%} of the cores" + (f", most of it {owner}" if owner else ""))
    return "; ".join(found)
