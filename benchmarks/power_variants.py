"""How many published slow-downs lie within five points, with one rule or one figure of the power model left out or put in.

python benchmarks/power_variants.py FOLDER

Each variant is fitted anew with the source held out, and calibrated by the rule of accuracy_power.py. The last two lines see the
scored rows, and say what the model's curves can reach: coefficients of the device fitted with all rows, and of every pool with all
of its own.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.accuracy_power import NEAR, calibration_rows  # noqa: E402  the repository is no package
from benchmarks.fit_power import OUTSIDE, fit  # noqa: E402
from benchmarks.power_rows import Sweep, fit_power, pools, read_sweeps  # noqa: E402
from search_spaces.clock_power import INTENSITY_CACHE_MIB, PowerCoefficients  # noqa: E402

Figures = Mapping[str, Mapping[str, float]]
Prior = Callable[[Sweep], PowerCoefficients]

AMPERE = {"knee_mhz": 1010.0, "rise": 1.17}
A100: Figures = {"a100-sxm4-80gb": {"static": 1.06, **AMPERE}, "a100-pcie-80gb": {"static": 1.06, **AMPERE}}
A40: Figures = {"a40": {"static": 1.20, "knee_mhz": 1200.0, "rise": 0.93}}
"""Matrix products of FIRESTARTER at locked clocks on an A100-SXM4-40GB (58.5 W static over 55 W idle) and an A40 (85 W over 71 W).

Both from GPU-Energy-Sweetspot, the logs of "Modeling and chasing the energy-efficiency sweet spots in modern GPUs" (2026).
"""
MEMORY_WITHIN: Figures = {"v100-pcie-32gb": {"static": 0.76, "knee_mhz": 1029.0, "rise": 0.57}}
"""The V100's curve with the memory's watts taken for the core's."""


def alike(sweep: Sweep) -> Sweep:
    """The same sweep, were devices of one kind all the same."""
    return replace(sweep, draw=replace(sweep.draw, devices=1))


def same_cache(sweep: Sweep) -> Sweep:
    """The same sweep, had all devices one size of cache."""
    return replace(sweep, gpu=sweep.gpu.model_copy(update={"last_cache_mib": INTENSITY_CACHE_MIB}))


def held_out(sweeps: Sequence[Sweep], outside: Figures = OUTSIDE) -> Prior:
    """The coefficients of a sweep's device, fitted without its source."""
    fits = {source: fit([sweep for sweep in sweeps if sweep.source != source], outside) for source in {s.source for s in sweeps}}

    def prior(sweep: Sweep) -> PowerCoefficients:
        found = fits[sweep.source]
        return PowerCoefficients(**found["gpus"].get(sweep.gpu.name, found["general"]))

    return prior


def near(sweep: Sweep, coefficients: PowerCoefficients, left_out: Sequence[int] = ()) -> tuple[int, int]:
    """Rows within five points and rows scored; never the first of a sweep."""
    rows = [row for row in range(1, len(sweep.slowdown)) if row not in left_out]
    close = np.abs(sweep.predict(coefficients)[0] - sweep.slowdown)[rows] <= NEAR
    return int(close.sum()), len(rows)


def report(name: str, sweeps: Sequence[Sweep], prior: Prior) -> None:
    """Print one variant."""
    before, after = [], []
    for pool in pools(sweeps):
        start = prior(pool[0])
        chosen = calibration_rows([sweep.predict(start)[0] for sweep in pool])
        own = fit_power([list(zip(pool, chosen, strict=True))], start)
        before += [near(sweep, start) for sweep in pool]
        after += [near(sweep, own, rows) for sweep, rows in zip(pool, chosen, strict=True)]
    logging.info("%-58s shipped %s, calibrated %s", name, _share(before), _share(after))


def _share(counts: Sequence[tuple[int, int]]) -> str:
    return f"{sum(close for close, _ in counts)} of {sum(rows for _, rows in counts)}"


def main() -> None:
    """Print every variant."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    sweeps = read_sweeps(Path(sys.argv[1]) / "power.csv")
    report("as it is", sweeps, held_out(sweeps))
    report("no figures from outside for V100", sweeps, held_out(sweeps, {}))
    report("V100's with the memory's watts taken for the core's", sweeps, held_out(sweeps, MEMORY_WITHIN))
    report("figures from outside for A100 too", sweeps, held_out(sweeps, {**OUTSIDE, **A100}))
    report("figures from outside for A40 too", sweeps, held_out(sweeps, {**OUTSIDE, **A40}))
    for name, change in (("devices of one kind alike", alike), ("one size of cache", same_cache)):
        changed = [change(sweep) for sweep in sweeps]
        report(name, changed, held_out(changed))
    seen = fit(sweeps)["gpus"]
    counts = [near(sweep, PowerCoefficients(**seen[sweep.gpu.name])) for sweep in sweeps]
    logging.info("%-58s %s", "fitted with all rows, by device", _share(counts))
    counts = []
    for pool in pools(sweeps):
        whole = [(sweep, list(range(len(sweep.slowdown)))) for sweep in pool]
        own = fit_power([whole], PowerCoefficients(**seen[pool[0].gpu.name]))
        counts += [near(sweep, own) for sweep in pool]
    logging.info("%-58s %s", "fitted with all rows of a pool, by pool", _share(counts))


if __name__ == "__main__":
    main()
