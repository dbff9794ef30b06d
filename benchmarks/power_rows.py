"""Published slow-downs under power caps and fixed clocks, as sweeps of one workload on one GPU."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from benchmarks.ranking import Floats
from search_spaces.calibration import minimise
from search_spaces.clock_power import PowerCoefficients, under_limit
from search_spaces.gpus import GpuSpec, gpu

FITTED = ("static", "knee", "rise", "demand", "bound", "burst", "floor")
SPREAD = {"static": 0.2, "knee": 0.1, "rise": 0.4, "demand": 0.2, "bound": 0.2, "burst": 0.2, "floor": 0.3}
LIMITS = {
    "static": (0.1, 0.4),
    "knee": (0.4, 0.9),
    "rise": (0.1, 2.0),
    "demand": (0.4, 1.6),
    "bound": (0.2, 1.0),
    "burst": (1.0, 1.8),
    "floor": (0.1, 0.4),
}
NOISE = 0.02
WATTS_NOISE = 0.03
GPUS = (("A100-PCIe", "a100-pcie-80gb"), ("A100-SXM", "a100-sxm4-80gb"), ("A40", "a40"), ("V100", "v100-pcie-32gb"))


@dataclass(frozen=True, slots=True)
class Sweep:
    """One workload under several limits.

    Attributes:
        source: What is held out together.
        kind: Power caps or fixed clocks.
        gpu: The device.
        base_w: Power limit of the first row.
        draw_w: Mean watts of the first row: what a tuner measures before it sets a limit.
        limits_w: Power limit of every row.
        clocks: Clock of every row over the highest.
        slowdown: Measured slow-down of every row.
        watts: Measured mean watts of every row.
    """

    source: str
    kind: Literal["cap", "clock"]
    gpu: GpuSpec
    base_w: float
    draw_w: float
    limits_w: Floats
    clocks: Floats
    slowdown: Floats
    watts: Floats

    def predict(self, coefficients: PowerCoefficients) -> tuple[Floats, Floats]:
        """Slow-down and mean watts of every row."""
        return under_limit(self.gpu, coefficients, self.draw_w, self.base_w, self.limits_w, self.clocks)


def read_sweeps(path: Path) -> list[Sweep]:
    """All sweeps whose rows are measurements with a slow-down."""
    sweeps: dict[tuple[str, ...], list[dict[str, str]]] = {}
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            if row["slowdown"] and row["evidence"].startswith("raw"):
                config = "" if row["clock_mhz"] else row["config"]
                sweeps.setdefault((row["source"].split()[0], row["gpu"], row["workload"], config), []).append(row)
    return [_sweep(rows) for rows in sweeps.values() if len(rows) > 1]


def _sweep(rows: list[dict[str, str]]) -> Sweep:
    device = gpu(next(name for text, name in GPUS if rows[0]["gpu"].startswith(text)))
    draw = float(rows[0]["power_w"])
    base = float(rows[0]["cap_w"] or max(device.tdp_w, draw * 1.01))
    return Sweep(
        source=rows[0]["source"].split()[0].lower(),
        kind="clock" if rows[0]["clock_mhz"] else "cap",
        gpu=device,
        base_w=base,
        draw_w=draw,
        limits_w=np.array([float(row["cap_w"] or base) for row in rows]),
        clocks=np.array([float(row["clock_mhz"] or device.clock_mhz.boost) for row in rows]) / device.clock_mhz.boost,
        slowdown=np.array([float(row["slowdown"]) for row in rows]),
        watts=np.array([float(row["power_w"]) for row in rows]),
    )


def fit_power(sweeps: list[tuple[Sweep, list[int]]], prior: PowerCoefficients) -> PowerCoefficients:
    """Coefficients near the prior that explain the given rows of sweeps."""
    start = np.log([getattr(prior, name) for name in FITTED])
    spread = np.array([SPREAD[name] for name in FITTED])
    limits = np.log([LIMITS[name] for name in FITTED]) - start[:, None]

    def moved(shift: Floats) -> PowerCoefficients:
        return prior.model_copy(update=dict(zip(FITTED, np.exp(start + shift).tolist(), strict=True)))

    def residuals(shift: Floats) -> Floats:
        own = moved(shift)
        parts = []
        for sweep, rows in sweeps:
            slowdown, watts = sweep.predict(own)
            parts += [np.log(slowdown / sweep.slowdown)[rows] / NOISE, np.log(watts / sweep.watts)[rows] / WATTS_NOISE]
        return np.concatenate(parts)

    return moved(minimise(residuals, spread, (np.minimum(limits[:, 0], 0), np.maximum(limits[:, 1], 0)), 30))
