"""Node clocks: how far apart they are, bounded by the time that a question and its answer take."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from autotune.telemetry.series import NodeTelemetry, Series


@dataclass(frozen=True, slots=True)
class ClockOffset:
    """A node's clock less ours, in seconds: `offset_s`, give or take `bound_s`."""

    offset_s: float
    bound_s: float


def clock_offset(ask: Callable[[], float], now: Callable[[], float], tries: int = 3) -> ClockOffset:
    """Ask another clock a few times; the quickest answer bounds it best.

    The answer was given between our two readings, so the offset lies within half the round trip of their middle (Cristian, 1989).

    Args:
        ask: Reads the other clock.
        now: Reads ours.
        tries: How often.
    """
    found = []
    for _ in range(tries):
        sent_s, theirs_s, received_s = now(), ask(), now()
        found.append(ClockOffset(theirs_s - (sent_s + received_s) / 2.0, (received_s - sent_s) / 2.0))
    return min(found, key=lambda offset: offset.bound_s)


def on_clock_of(nodes: Sequence[NodeTelemetry], clocks: Sequence[ClockOffset]) -> list[Series]:
    """All nodes' series on the clock of the last node, whose rank reports the steps."""
    series = [one for node in nodes for one in node.series]
    if len(clocks) < 2:  # noqa: PLR2004
        return series
    last = clocks[-1].offset_s
    return [_shifted(one, last - clocks[one.node].offset_s) if one.node < len(clocks) else one for one in series]


def _shifted(series: Series, seconds: float) -> Series:
    columns = {name: (times + seconds, values) for name, (times, values) in series.columns.items()}
    return replace(series, columns=columns)
