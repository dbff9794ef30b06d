"""Thinned telemetry of a trial as MLflow step metrics, at the times at which it was measured."""

from __future__ import annotations

import logging
from pathlib import Path

from autotune.tracking.points import Point

log = logging.getLogger(__name__)
_STEPS_PER_S = 10


def chart_points(samples: Path, started_s: float, limit: int) -> list[Point]:
    """At most `limit` points of each chart; the step counts tenths of a second since the trial's start.

    Args:
        samples: The trial's `telemetry.parquet`; without it there are no points.
        started_s: Unix time of the trial's start.
        limit: Points of each chart.
    """
    if not samples.is_file():
        return []
    from autotune.telemetry.storage import charts  # pyarrow takes a while to import, and few need it

    try:
        found = charts(samples, limit)
    except OSError as error:
        log.warning("%s cannot be read: %s", samples, error)
        return []
    return [
        Point(name, float(value), round((time_s - started_s) * _STEPS_PER_S), int(time_s * 1000))
        for name, (times, values) in found.items()
        for time_s, value in zip(times, values, strict=True)
    ]
