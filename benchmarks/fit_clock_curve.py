"""Static watts and the voltage's curve of one device, from kernels measured by others at locked clocks.

python benchmarks/fit_clock_curve.py v100-dvfs-real.csv

Columns: benchmark, core_frequency (MHz), average_power (W), time (of equal work, any unit), DRAMA (share of the seconds in which
the memory is active). Watts = static + memory x activity + a kernel's own dynamic watts, with the voltage's square and its rate:
the memory's clock and voltage do not change with the core's.
"""

from __future__ import annotations

import csv
import logging
import sys
from collections.abc import Iterable
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.ranking import Floats  # noqa: E402  the repository is no package
from search_spaces.calibration import minimise  # noqa: E402

START = {"static_w": 30.0, "knee_mhz": 1000.0, "rise": 0.7, "memory_w": 40.0}
NOISE = 0.03


def read_kernels(rows: Iterable[dict[str, str]]) -> list[Floats]:
    """One array per kernel, ascending in the clock: MHz, watts, seconds over those at the highest clock, activity of the memory."""
    kernels: dict[str, list[tuple[float, float, float, float]]] = {}
    for row in rows:
        point = (float(row["core_frequency"]), float(row["average_power"]), float(row["time"]), float(row["DRAMA"]))
        kernels.setdefault(row["benchmark"], []).append(point)
    found = [np.array(sorted(points)) for points in kernels.values()]
    for points in found:
        points[:, 2] /= points[-1, 2]
    return found


def fit(kernels: list[Floats]) -> tuple[dict[str, float], float]:
    """The common figures (static_w, knee_mhz, rise, memory_w), and the root mean square of the relative errors of the watts."""
    own = np.array([max(points[-1, 1] - sum(START[name] for name in ("static_w", "memory_w")), 10.0) for points in kernels])
    begin = np.log(np.concatenate([list(START.values()), own]))

    def errors(shift: Floats) -> Floats:
        static, knee, rise, memory, *kernel_w = np.exp(begin + shift)
        parts = []
        for points, dynamic in zip(kernels, kernel_w, strict=True):
            clock, watts, seconds, activity = points.T
            voltage = np.maximum(1.0, 1.0 + rise * (clock / knee - 1.0))
            parts.append(np.log((static + memory * activity + dynamic * (voltage / voltage[-1]) ** 2 / seconds) / watts))
        return np.concatenate(parts)

    free = np.full(len(begin), 3.0)
    shift = minimise(lambda at: errors(at) / NOISE, free, (-free, free), 200)
    figures = dict(zip(START, np.exp(begin + shift).tolist(), strict=False))
    return figures, float(np.sqrt((errors(shift) ** 2).mean()))


def main() -> None:
    """Fit the file and print the figures."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    with Path(sys.argv[1]).open(newline="") as file:
        kernels = read_kernels(csv.DictReader(file))
    figures, error = fit(kernels)
    for name, value in figures.items():
        logging.info("%s %.4g", name, value)
    logging.info("%d kernels, watts off by %.1f %% (root mean square)", len(kernels), 100 * error)


if __name__ == "__main__":
    main()
