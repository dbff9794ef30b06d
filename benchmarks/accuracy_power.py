"""Accuracy of predicted slow-downs by source, caps and fixed clocks apart, rows with a slow-down above 1.05 apart.

A sweep's first row (no limit) gives the measured draw and is never scored. Shipped: the source held out of the fit. Calibrated: up
to five more rows of the sweep, evenly spaced over the table from the last one; they are never scored.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.power_rows import Sweep, fit_power, read_sweeps
from benchmarks.ranking import Floats, errors
from search_spaces.clock_power import shipped_power

CALIBRATION_ROWS = 5
NEAR = 0.05
SLOW = 1.05


def groups(folder: Path) -> list[dict[str, Any]]:
    """One entry per source, kind and mode, for all rows and for those with a slow-down above 1.05."""
    scored: dict[tuple[str, str], list[tuple[Floats, Floats]]] = {}
    for sweep in read_sweeps(folder / "power.csv"):
        for mode, predicted, rows in _predictions(sweep):
            if rows:
                scored.setdefault((f"{sweep.source}-{sweep.kind}s", mode), []).append((predicted[rows], sweep.slowdown[rows]))
    found = []
    for (source, mode), pairs in scored.items():
        predicted, measured = np.concatenate([p for p, _ in pairs]), np.concatenate([m for _, m in pairs])
        found.append(_entry(source, mode, predicted, measured))
        slow = measured > SLOW
        if slow.any():
            found.append(_entry(f"{source} above {SLOW}", mode, predicted[slow], measured[slow]))
    return found


def _predictions(sweep: Sweep) -> list[tuple[str, Floats, list[int]]]:
    """Predictions of both modes with the rows to score."""
    prior = shipped_power(sweep.gpu.name, without=sweep.source)
    size = len(sweep.slowdown)
    chosen = calibration_rows(size)
    own = fit_power([(sweep, chosen)], prior)
    rest = [row for row in range(1, size) if row not in chosen]
    return [("shipped", sweep.predict(prior)[0], list(range(1, size))), ("calibrated", sweep.predict(own)[0], rest)]


def calibration_rows(size: int) -> list[int]:
    """Up to five rows of a sweep without its first, evenly spaced, the last one among them; at least two are left to score."""
    count = min(CALIBRATION_ROWS, max(size - 3, 0))
    return sorted({int(place) for place in np.round(np.linspace(0, size - 1, count + 1))[1:]})


def _entry(source: str, mode: str, predicted: Floats, measured: Floats) -> dict[str, Any]:
    return {
        "source": source,
        "quantity": "slowdown",
        "mode": mode,
        "n": len(measured),
        **errors(predicted, measured),
        "kendall_tau": None,
        "tau_groups": 0,
        "within_5_points": int((np.abs(predicted - measured) <= NEAR).sum()),
    }
