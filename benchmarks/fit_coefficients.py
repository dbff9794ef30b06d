"""Fits the shipped coefficients of the step time on published rows and writes coefficients.yaml.

    python benchmarks/fit_coefficients.py FOLDER

Every source is also held out in turn: its entry under `without` was fitted without any of its rows. Each (source, GPU) counts
equally, whatever its number of rows; nothing is fitted to single rows.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import yaml

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.timed_rows import TimedRow, by_source, read  # noqa: E402  the repository is no package
from search_spaces.calibration import Sample, fit  # noqa: E402
from search_spaces.coefficients import NAMES, Coefficients  # noqa: E402

SOURCES = (
    "vtrain",
    "bigscience-bloom",
    "sc21-table1",
    "internevo",
    "llm-foundry",
    "nemo-launcher",
    "megatron-bridge-perf",
    "megatron-bridge-skills",
    "simumax-b200",
)
FAMILIES = {
    "a100": ("a100-sxm4-40gb", "a100-sxm4-80gb", "a100-pcie-40gb", "a100-pcie-80gb"),
    "h100": ("h100-sxm-80gb", "h100-pcie-80gb", "h200-sxm-141gb", "gh200-144gb"),
    "b200": ("b200-sxm-180gb", "b300-sxm-270gb", "gb200-186gb", "gb300-279gb"),
}
FOLLOWS = {"b200": "h100"}  # whose fit is the prior: Blackwell's process and kernels come from Hopper's, not Hopper's from Ampere's
MOST = 14
FITTED = tuple(name for name in NAMES if name != "step_ms")  # only a pool's own rows tell it
WEIGHT = 4.0  # rows that a source and GPU counts for: two sources differ by more than their rows do


def chosen(rows: Sequence[TimedRow]) -> list[TimedRow]:
    """At most `MOST` groups of rows of one workload of a source and GPU, evenly spaced over the table."""
    groups: dict[Any, list[TimedRow]] = {}
    for row in rows:
        groups.setdefault(row.group, []).append(row)
    kept = list(groups.values())
    places = np.unique(np.linspace(0, len(kept) - 1, min(MOST, len(kept))).round().astype(int))
    return [row for place in places for row in kept[place]]


def main() -> None:
    """Fit everything and write the file."""
    write(content(Path(sys.argv[1])))


def content(folder: Path) -> dict[str, Any]:
    """The coefficients by GPU fitted on all sources, and with each source held out."""
    sources = {name: rows for name, rows in by_source(read(folder)).items() if name in SOURCES}
    whole = _fit_families(sources, None, {})
    with ProcessPoolExecutor(2) as pool:
        held_out = list(pool.map(_fit_families, [sources] * len(sources), sources, [whole] * len(sources)))
    without = {name: _by_gpu(fits) for name, fits in zip(sources, held_out, strict=True)}
    return {"fitted_on": list(sources), **_by_gpu(whole), "without": without}


def write(content: dict[str, Any]) -> None:
    """Write the file of the package."""
    text = (
        "# Coefficients of the step time (search_spaces/coefficients.py). Written by benchmarks/fit_coefficients.py; do not edit.\n"
        "# Every value was fitted on the published rows of the sources in fitted_on; `without` holds each source out in turn.\n"
    )
    Path("search_spaces/coefficients.yaml").write_text(text + yaml.safe_dump(content, sort_keys=False), encoding="utf-8")


def _fit_families(
    sources: dict[str, list[TimedRow]], without: str | None, whole: dict[str, Coefficients]
) -> dict[str, Coefficients]:
    """Coefficients by family, each fit the prior of the one that follows; without those that the held-out source does not touch."""
    kept = [row for name, rows in sources.items() if name != without for row in _per_gpu(rows)]
    held_out = {row.gpu.name for row in sources.get(without or "", [])}
    found: dict[str, Coefficients] = {}
    for family, gpus in FAMILIES.items():
        before = FOLLOWS.get(family, "")
        if without is None or held_out & set(gpus) or before in found:
            prior = found.get(before, whole.get(before, Coefficients()))
            found[family] = _fit([row for row in kept if row.gpu.name in gpus], prior)
            print(without, family, flush=True)
    return found


def _by_gpu(fits: dict[str, Coefficients]) -> dict[str, Any]:
    return {"gpus": {name: _plain(own) for family, own in fits.items() for name in FAMILIES[family]}}


def _per_gpu(rows: Sequence[TimedRow]) -> list[TimedRow]:
    gpus = dict.fromkeys(row.gpu.name for row in rows)
    return [row for name in gpus for row in chosen([row for row in rows if row.gpu.name == name])]


def _fit(rows: Sequence[TimedRow], prior: Coefficients) -> Coefficients:
    counts: dict[tuple[str, str], int] = {}
    for row in rows:
        counts[row.source, row.gpu.name] = counts.get((row.source, row.gpu.name), 0) + 1
    weights = np.array([WEIGHT / counts[row.source, row.gpu.name] for row in rows])
    samples = [Sample(row.measured, row.gpu, row.links) for row in rows]
    return fit(samples, prior, FITTED, weights, iterations=5, pools=[row.source for row in rows])


def _plain(coefficients: Coefficients) -> dict[str, float]:
    return {name: float(f"{getattr(coefficients, name):.4g}") for name in NAMES}


if __name__ == "__main__":
    main()
