"""Fits the shipped power coefficients on published sweeps and writes power.yaml, with every source held out in turn.

python benchmarks/fit_power.py FOLDER
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import yaml

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.power_rows import FITTED, Sweep, fit_power, pools, read_sweeps  # noqa: E402  the repository is no package
from search_spaces.clock_power import PowerCoefficients  # noqa: E402


def main() -> None:
    """Fit everything and write the file."""
    sweeps = read_sweeps(Path(sys.argv[1]) / "power.csv")
    sources = sorted({sweep.source for sweep in sweeps})
    content: dict[str, Any] = {"fitted_on": sources, **_fit(sweeps)}
    content["without"] = {source: _fit([sweep for sweep in sweeps if sweep.source != source]) for source in sources}
    text = "# Power coefficients (search_spaces/clock_power.py). Written by benchmarks/fit_power.py; do not edit.\n"
    Path("search_spaces/power.yaml").write_text(text + yaml.safe_dump(content, sort_keys=False), encoding="utf-8")


def _fit(sweeps: list[Sweep]) -> dict[str, Any]:
    general = _fitted(sweeps, PowerCoefficients())
    gpus = {}
    for name in sorted({sweep.gpu.name for sweep in sweeps}):
        gpus[name] = _plain(_fitted([sweep for sweep in sweeps if sweep.gpu.name == name], general))
    return {"general": _plain(general), "gpus": gpus}


def _fitted(sweeps: list[Sweep], prior: PowerCoefficients) -> PowerCoefficients:
    return fit_power([[(sweep, list(range(len(sweep.slowdown)))) for sweep in pool] for pool in pools(sweeps)], prior)


def _plain(coefficients: PowerCoefficients) -> dict[str, float]:
    return {name: float(f"{getattr(coefficients, name):.4g}") for name in FITTED}


if __name__ == "__main__":
    main()
