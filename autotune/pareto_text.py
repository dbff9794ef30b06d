"""A Pareto front in words and for scripts."""

from __future__ import annotations

import math
from typing import Any

from autotune.metric_names import may_be_zero
from autotune.pareto import Point
from autotune.records import Phase, counted, short
from autotune.results import PoolResults


def front_lines(result: PoolResults) -> list[str]:
    """The front, a line per configuration, and how much it covers; empty without one."""
    if not result.front:
        return []
    confirmed = "confirmed" if _is_confirmed(result.front[0]) else "explored, none confirmed"
    volume = f"{result.hypervolume:.3g}" if result.hypervolume is not None else "unknown"
    size = counted(len(result.front), "configuration")
    heading = f"Pareto front: {size} ({confirmed}); hypervolume {volume}, of the baseline alone 1."
    return [heading, *(_line(point) for point in result.front)]


def front_json(result: PoolResults) -> list[dict[str, Any]]:
    """The front for scripts, the knee first; `changes` are fractions, or differences where a metric may be zero."""
    return [
        {
            "trial": point.record.number,
            "knee": point.knee,
            "confirmed": _is_confirmed(point),
            "changes": {name: _plain(name, value) for name, value in point.changes.items()},
            "config": point.record.config.changed(),
            "argv": list(point.record.argv),
            "metrics": dict(point.record.metrics),
        }
        for point in result.front
    ]


def _line(point: Point) -> str:
    changes = ", ".join(f"{name} {_change(name, value)}" for name, value in point.changes.items())
    return f"  trial {point.record.number}{' (knee)' if point.knee else ''}: {changes}   {short(point.record.config)}"


def _change(name: str, value: float) -> str:
    return f"{value:+.3g}" if may_be_zero(name) else f"{_plain(name, value):+.1%}"


def _plain(name: str, value: float) -> float:
    """A difference where the metric may be zero, else the logarithm of a ratio as a fraction."""
    return value if may_be_zero(name) else math.expm1(value)


def _is_confirmed(point: Point) -> bool:
    return point.record.phase is Phase.CONFIRM
