"""Accuracy of predicted slow-downs by source, caps and fixed clocks apart, rows with a slow-down above 1.05 apart.

A pool is one workload on one kind of GPU, under caps or under fixed clocks, with all its batch sizes. A sweep's first row (no
limit) gives the measured draw and is never scored. Shipped: the source held out of the fit. Calibrated: with at most five more
rows of the pool and never more than half of them, chosen from the shipped predictions alone; they are never scored.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.power_rows import Sweep, fit_power, pools, read_sweeps
from benchmarks.ranking import Floats, errors
from search_spaces.clock_power import PowerCoefficients, shipped_power

CALIBRATION_ROWS = 5
NEAR = 0.05
SLOW = 1.05


def groups(folder: Path) -> list[dict[str, Any]]:
    """One entry per source, kind and mode, for all rows and for those with a slow-down above 1.05."""
    scored: dict[tuple[str, str], list[tuple[Floats, Floats]]] = {}
    for pool in pools(read_sweeps(folder / "power.csv")):
        prior = shipped_power(pool[0].gpu, without=pool[0].source)
        chosen = calibration_rows([sweep.predict(prior)[0] for sweep in pool])
        own = fit_power([list(zip(pool, chosen, strict=True))], prior)
        for mode, coefficients, kept in (("shipped", prior, [[] for _ in pool]), ("calibrated", own, chosen)):
            pairs = [_scored(sweep, coefficients, rows) for sweep, rows in zip(pool, kept, strict=True)]
            scored.setdefault((f"{pool[0].source}-{pool[0].kind}s", mode), []).extend(pairs)
    found = []
    for (source, mode), pairs in scored.items():
        predicted, measured = np.concatenate([p for p, _ in pairs]), np.concatenate([m for _, m in pairs])
        found.append(_entry(source, mode, predicted, measured))
        slow = measured > SLOW
        if slow.any():
            found.append(_entry(f"{source} above {SLOW}", mode, predicted[slow], measured[slow]))
    return found


def _scored(sweep: Sweep, coefficients: PowerCoefficients, without: list[int]) -> tuple[Floats, Floats]:
    """Predicted and measured slow-downs without a sweep's first row and these rows."""
    rows = [row for row in range(1, len(sweep.slowdown)) if row not in without]
    return sweep.predict(coefficients)[0][rows], sweep.slowdown[rows]


def calibration_rows(predicted: list[Floats]) -> list[list[int]]:
    """Rows of a pool to measure: those whose predicted slow-downs are evenly spaced, on a log scale, down from the largest.

    The sweeps of a pool take turns; at most five rows, at most half of the pool's, and never the first of a sweep.

    Args:
        predicted: Predicted slow-downs of every sweep.

    Returns:
        Chosen rows of every sweep, ascending.
    """
    logs = [np.log(slow) for slow in predicted]
    count = min(CALIBRATION_ROWS, sum(len(slow) - 1 for slow in predicted) // 2)
    highest = max(float(slow.max()) for slow in logs)
    chosen: list[list[int]] = [[] for _ in predicted]
    for turn in range(count):
        sweep = turn % len(predicted)
        wanted = highest * (count - turn) / count
        left = [row for row in range(1, len(logs[sweep])) if row not in chosen[sweep]]
        chosen[sweep].append(min(left, key=lambda row: (abs(logs[sweep][row] - wanted), -row)))
    return [sorted(rows) for rows in chosen]


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
