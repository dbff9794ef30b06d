"""Fits the shipped power coefficients on published sweeps and writes power.yaml, with every source held out in turn.

python benchmarks/fit_power.py FOLDER
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.power_rows import FITTED, Sweep, fit_power, pools, read_sweeps  # noqa: E402  the repository is no package
from search_spaces.clock_power import PowerCoefficients  # noqa: E402

VOLTA = {"knee_mhz": 1019.0, "rise": 0.74}
OUTSIDE = {
    "v100-pcie-32gb": {"static": 0.76, **VOLTA},
    "v100-sxm2-32gb": {"static": 0.73, **VOLTA},
}
"""Measured by others, on no machine of the fitted rows: priors of these devices, in place of what the other devices say.

PCIe: 20 kernels at ten locked clocks (Wang and Chu, NV-DVFS-Benchmark), `python benchmarks/fit_clock_curve.py v100-dvfs-real.csv`:
26 W static, over 34 W idle. SXM2: 15 workloads above 150 W at thirteen locked clocks (GPU-DVFS-Dataset, of "Improving GPU energy
efficiency through an application-transparent frequency scaling policy with performance assurance", EuroSys 2024): 33 W, over 45 W.
That set lacks the memory's activity, without which the rise of the voltage comes out too low: the chip's curve is the PCIe board's.
"""


def main() -> None:
    """Fit everything and write the file."""
    sweeps = read_sweeps(Path(sys.argv[1]) / "power.csv")
    sources = sorted({sweep.source for sweep in sweeps})
    content: dict[str, Any] = {"fitted_on": sources, **fit(sweeps)}
    content["without"] = {source: fit([sweep for sweep in sweeps if sweep.source != source]) for source in sources}
    text = "# Power coefficients (search_spaces/clock_power.py). Written by benchmarks/fit_power.py; do not edit.\n"
    Path("search_spaces/power.yaml").write_text(text + yaml.safe_dump(content, sort_keys=False), encoding="utf-8")


def fit(sweeps: Sequence[Sweep], outside: Mapping[str, Mapping[str, float]] = OUTSIDE) -> dict[str, Any]:
    """The general coefficients and those of every device with sweeps or with figures from outside, as power.yaml holds them."""
    general = _fitted(sweeps, PowerCoefficients())
    gpus = {}
    for name in sorted({sweep.gpu.name for sweep in sweeps} | set(outside)):
        own = [sweep for sweep in sweeps if sweep.gpu.name == name]
        prior = general.model_copy(update=outside.get(name, {}))
        gpus[name] = _plain(_fitted(own, prior) if own else prior)
    return {"general": _plain(general), "gpus": gpus}


def _fitted(sweeps: Sequence[Sweep], prior: PowerCoefficients) -> PowerCoefficients:
    return fit_power([[(sweep, list(range(len(sweep.slowdown)))) for sweep in pool] for pool in pools(sweeps)], prior)


def _plain(coefficients: PowerCoefficients) -> dict[str, float]:
    return {name: float(f"{getattr(coefficients, name):.4g}") for name in FITTED}


if __name__ == "__main__":
    main()
