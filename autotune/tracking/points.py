"""Point: one value of one MLflow metric."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Point:
    """One metric value. The step has no default: without one MLflow puts every point at step 0."""

    key: str
    value: float
    step: int
    time_ms: int
