"""What the trials of a table showed, as far as a sampler learns from it, and what of the limits' risk is left."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from autotune.outlook import Limit

RISK = 0.08
"""Crossings of a limit that are afforded, as a share of the trials after the first `FREE`; a sure crossing costs one of them."""
FREE = 5
"""The first trials may cross limits: nothing tells yet where these lie."""


@dataclass(slots=True)
class Seen:
    """What the trials of the table showed.

    Attributes:
        rows: Measured candidates.
        scores: Their scores, a logarithm.
        noise: Standard deviations of these.
        metrics: Their metrics.
        metrics_noise: Standard deviations of the logarithms of these.
        running: Candidates that run now.
        failed: Candidates that failed.
        out_of_memory: Those of them that ran out of memory.
    """

    rows: list[int] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    noise: list[float] = field(default_factory=list)
    metrics: list[Mapping[str, float]] = field(default_factory=list)
    metrics_noise: list[float] = field(default_factory=list)
    running: list[int] = field(default_factory=list)
    failed: list[int] = field(default_factory=list)
    out_of_memory: list[int] = field(default_factory=list)

    def best(self, limits: tuple[Limit, ...]) -> float:
        """Best score within the limits; minus infinity where there is none."""
        within = (score for score, metrics in zip(self.scores, self.metrics, strict=True) if keep_all(limits, metrics))
        return max(within, default=-math.inf)

    def risk(self, limits: tuple[Limit, ...]) -> float:
        """Crossings of the limits that are left of what `RISK` affords: what the next trial may risk; below 0 where overdrawn."""
        launched = len(self.rows) + len(self.failed)
        if launched < FREE:
            return 1.0
        crossings = sum(not keep_all(limits, metrics) for metrics in self.metrics[max(0, FREE - len(self.failed)) :])
        return RISK * (launched + 1 - FREE) - crossings


def keep_all(limits: tuple[Limit, ...], metrics: Mapping[str, float]) -> bool:
    """Whether a measurement keeps the limits; one that was not measured is not shown to."""
    return all(limit.kept_by(metrics) for limit in limits)
