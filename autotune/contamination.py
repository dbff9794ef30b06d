"""Whether somebody else disturbed a trial's measurement, judged over its steady window from what its nodes saw.

A contaminated trial is flagged and run once more; it is never dropped, and its value is told as measured.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from autotune.host_load import HostLoad, foreign_fraction
from autotune.steady_state import Window

FOREIGN_CPU_LIMIT = 0.10
"""Share of a CPU trial's cores that others may use. One busy process of another user takes 1 / cores; the trial's ranks, which wait
for each other, lose more than that share."""

BRAKE_LIMIT = 0.05
"""Share of a trial's window that a GPU may be held back by its node's power supply."""


@dataclass(frozen=True, slots=True)
class Witness:
    """What one node's agent saw beside a trial.

    Attributes:
        node_rank: Which node.
        loads: Use of its processors.
        facts: What is kept with the trial's environment, by name.
        disturbances: What disturbed the trial for certain, each with its owner.
        lost: Why the trial's end says nothing of its configuration, e.g. somebody else's GPU memory; empty where it does.
        fatal: Why nothing more shall run on this node; empty where trials may.
        broken: Why the node runs no more trials and others may take its place; empty where it is sound.
    """

    node_rank: int = 0
    loads: tuple[HostLoad, ...] = ()
    facts: Mapping[str, str] = field(default_factory=dict)
    disturbances: tuple[str, ...] = ()
    lost: str = ""
    fatal: str = ""
    broken: str = ""


def foreign_cpu(witnesses: Sequence[Witness], window: Window | None) -> tuple[float, str]:
    """The largest share of a node's cores that others used in the window, with the busiest of them; 0 where nobody looked."""
    shares = [foreign_fraction(witness.loads, window.start_s, window.end_s) for witness in witnesses] if window else []
    return max(shares, default=(0.0, ""))


def braked(metrics: Mapping[str, float], window: Window | None) -> str:
    """How a node's power supply held a trial back, which says nothing of its configuration; empty where it did not."""
    share = metrics.get("throttle_s_power_brake", 0.0) / window.length_s if window and window.length_s > 0 else 0.0
    return f"a node's power brake held a GPU back for {share:.0%} of the time" if share > BRAKE_LIMIT else ""


def contamination(
    witnesses: Sequence[Witness], window: Window | None, *, on_cpu: bool, foreign_cpu_fraction: float = FOREIGN_CPU_LIMIT
) -> str:
    """Who disturbed a trial, for a person; empty where nobody did. On a CPU pool others may use so much of the cores."""
    found = [disturbance for witness in witnesses for disturbance in witness.disturbances]
    share, owner = foreign_cpu(witnesses, window)
    if on_cpu and share > foreign_cpu_fraction:
        found.insert(0, f"others used {share:.0%} of the cores" + (f", most of it {owner}" if owner else ""))
    return "; ".join(found)
