"""Published slow-downs under power caps and fixed clocks, as sweeps of one workload on one GPU."""

from __future__ import annotations

import csv
import logging
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from benchmarks.power_workloads import share_of
from benchmarks.ranking import Floats
from search_spaces.calibration import minimise
from search_spaces.clock_power import Draw, PowerCoefficients, under_limit
from search_spaces.gpus import GpuSpec, gpu

_LOG = logging.getLogger(__name__)

FITTED = ("static", "knee_mhz", "rise", "demand", "intensity", "spread")
SPREAD = {"static": 0.3, "knee_mhz": 0.08, "rise": 0.3, "demand": 0.15, "intensity": 0.4, "spread": 0.5}
LIMITS = {
    "static": (0.3, 2.0),
    "knee_mhz": (700.0, 1600.0),
    "rise": (0.2, 2.0),
    "demand": (0.4, 1.6),
    "intensity": (30.0, 2000.0),
    "spread": (0.005, 0.15),
}
OF_WORKLOAD = ("static", "demand", "intensity")
NOISE = 0.02
WATTS_NOISE = 0.04
_NUMBER = re.compile(r"\d+(\.\d+)?")
GPUS = (("A100-PCIe", "a100-pcie-80gb"), ("A100-SXM", "a100-sxm4-80gb"), ("A40", "a40"), ("V100", "v100-pcie-32gb"))


@dataclass(frozen=True, slots=True)
class Sweep:
    """One workload under several limits.

    Attributes:
        source: What is held out together.
        kind: Power caps or fixed clocks.
        gpu: The device.
        workload: What ran, as the rows name it.
        draw: The row with the highest limit: what a tuner measures before it sets one.
        limits_w: Power limit of every row.
        clocks: Clock of every row over the highest.
        slowdown: Measured slow-down of every row.
        watts: Measured mean watts of every row.
    """

    source: str
    kind: Literal["cap", "clock"]
    gpu: GpuSpec
    workload: str
    draw: Draw
    limits_w: Floats
    clocks: Floats
    slowdown: Floats
    watts: Floats

    def predict(self, coefficients: PowerCoefficients) -> tuple[Floats, Floats]:
        """Slow-down and mean watts of every row."""
        return under_limit(self.gpu, coefficients, self.draw, self.limits_w, self.clocks)


def read_sweeps(path: Path) -> list[Sweep]:
    """All sweeps of measured slow-downs on GPUs of hardware.yaml; other GPUs are named in a warning.

    A sweep's first row is the one with the highest limit, wherever it stands in the table.
    """
    sweeps: dict[tuple[str, ...], list[dict[str, str]]] = {}
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            if row["evidence"].startswith("raw") and all(_NUMBER.fullmatch(row[name]) for name in ("slowdown", "power_w")):
                config = "" if row["clock_mhz"] else row["config"]
                sweeps.setdefault((row["source"].split()[0], row["gpu"], row["workload"], config), []).append(row)
    known = {key: device for key in sweeps if (device := _device(key[1]))}
    for name in sorted({key[1] for key in sweeps.keys() - known}):
        _LOG.warning("rows on %s are left out: not in hardware.yaml", name)
    return [_sweep(sorted(sweeps[key], key=_limit), device) for key, device in known.items() if len(sweeps[key]) > 1]


def _limit(row: dict[str, str]) -> tuple[float, float]:
    """A row's place in its sweep: from no limit down to the lowest."""
    return -float(row["cap_w"] or math.inf), -float(row["clock_mhz"] or math.inf)


def _device(text: str) -> GpuSpec | None:
    return next((gpu(name) for start, name in GPUS if text.startswith(start)), None)


def pools(sweeps: Iterable[Sweep]) -> list[list[Sweep]]:
    """Sweeps of one workload on one kind of GPU, under caps or under fixed clocks."""
    found: dict[tuple[str, str, str, str], list[Sweep]] = {}
    for sweep in sweeps:
        found.setdefault((sweep.source, sweep.gpu.name, sweep.workload, sweep.kind), []).append(sweep)
    return list(found.values())


def _sweep(rows: list[dict[str, str]], device: GpuSpec) -> Sweep:
    draw = float(rows[0]["power_w"])
    base = float(rows[0]["cap_w"] or max(device.tdp_w, draw * 1.01))
    return Sweep(
        source=rows[0]["source"].split()[0].lower(),
        kind="clock" if rows[0]["clock_mhz"] else "cap",
        gpu=device,
        workload=rows[0]["workload"],
        draw=Draw(draw, base, share_of(rows[0]["workload"], rows[0]["config"], device), _devices(rows[0])),
        limits_w=np.array([float(row["cap_w"] or base) for row in rows]),
        clocks=np.array([float(row["clock_mhz"] or device.clock_mhz.boost) for row in rows]) / device.clock_mhz.boost,
        slowdown=np.array([float(row["slowdown"]) for row in rows]),
        watts=np.array([float(row["power_w"]) for row in rows]),
    )


def _devices(row: dict[str, str]) -> int:
    """How many devices a row's configuration names, as "8 GPUs; ..."; one if none."""
    found = re.match(r"(\d+) GPU", row["config"])
    return int(found[1]) if found else 1


@dataclass(frozen=True, slots=True)
class _Shifts:
    """A vector of logarithmic shifts from a prior: of the common coefficients, then of each pool's own where there are several."""

    prior: PowerCoefficients
    pools: int

    def names(self) -> tuple[str, ...]:
        return FITTED + OF_WORKLOAD * (self.pools if self.pools > 1 else 0)

    def coefficients(self, shifts: Floats, pool: int | None = None) -> PowerCoefficients:
        """The common coefficients, or those of a pool."""
        logs = {name: math.log(getattr(self.prior, name)) + shift for name, shift in zip(FITTED, shifts, strict=False)}
        if pool is not None and self.pools > 1:
            first = len(FITTED) + len(OF_WORKLOAD) * pool
            for name, shift in zip(OF_WORKLOAD, shifts[first:], strict=False):
                logs[name] += shift
        return self.prior.model_copy(update={name: math.exp(value) for name, value in logs.items()})

    def bounds(self) -> tuple[Floats, Floats]:
        """How far each shift may go: the common ones as far as is physical, a pool's own by a factor of e."""
        ends = np.log([LIMITS[name] for name in FITTED]) - np.log([[getattr(self.prior, name)] for name in FITTED])
        own = np.ones(len(self.names()) - len(FITTED))
        return np.concatenate([np.minimum(ends[:, 0], 0), -own]), np.concatenate([np.maximum(ends[:, 1], 0), own])


def fit_power(pools: Sequence[Sequence[tuple[Sweep, list[int]]]], prior: PowerCoefficients) -> PowerCoefficients:
    """Coefficients near the prior that explain the given rows of sweeps.

    Args:
        pools: Sweeps of one workload on one kind of GPU each. Where there are several, static watts, demand and intensity of each
            lie around the common ones: chips and workloads differ.
        prior: Where nothing says otherwise.
    """
    shifts = _Shifts(prior, len(pools))

    def residuals(shift: Floats) -> Floats:
        parts = []
        for place, sweeps in enumerate(pools):
            coefficients = shifts.coefficients(shift, place)
            for sweep, rows in sweeps:
                slowdown, watts = sweep.predict(coefficients)
                parts += [np.log(slowdown / sweep.slowdown)[rows] / NOISE, np.log(watts / sweep.watts)[rows] / WATTS_NOISE]
        return np.concatenate(parts)

    spread = np.array([SPREAD[name] for name in shifts.names()])
    return shifts.coefficients(minimise(residuals, spread, shifts.bounds(), 40))
