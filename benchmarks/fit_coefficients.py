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
MOST = 24
FITTED = tuple(name for name in NAMES if name != "step_ms")  # only a pool's own rows tell it
WEIGHT = 12.0


def chosen(rows: Sequence[TimedRow]) -> list[TimedRow]:
    """At most `MOST` rows of a source and GPU, whole groups of one workload, evenly spaced over the table."""
    groups: dict[Any, list[TimedRow]] = {}
    for row in rows:
        groups.setdefault(row.group, []).append(row)
    kept, every = list(groups.values()), max(1, round(len(rows) / MOST))
    return [row for group in kept[::every] for row in group]


def main() -> None:
    """Fit everything and write the file."""
    folder = Path(sys.argv[1])
    jobs = [(without, family) for without in (None, *SOURCES) for family in FAMILIES]
    with ProcessPoolExecutor(2) as pool:
        fits = dict(zip(jobs, pool.map(_fit_family, [folder] * len(jobs), *zip(*jobs, strict=True)), strict=True))
    text = (
        "# Coefficients of the step time (search_spaces/coefficients.py). Written by benchmarks/fit_coefficients.py; do not edit.\n"
    )
    text += "# Every value was fitted on the published rows of the sources in fitted_on; `without` holds each source out in turn.\n"
    content: dict[str, Any] = {"fitted_on": list(SOURCES), **_by_gpu(fits, None)}
    content["without"] = {source: _by_gpu(fits, source) for source in SOURCES}
    Path("search_spaces/coefficients.yaml").write_text(text + yaml.safe_dump(content, sort_keys=False), encoding="utf-8")


def _by_gpu(fits: dict[tuple[str | None, str], dict[str, float]], without: str | None) -> dict[str, Any]:
    """The fits of one choice of sources by kind of GPU; families without rows of the held-out source are as shipped."""
    own = {family: fits[without, family] for family in FAMILIES if fits[without, family]}
    return {"gpus": {name: dict(values) for family, values in own.items() for name in FAMILIES[family]}}


def _fit_family(folder: Path, without: str | None, family: str) -> dict[str, float]:
    """Coefficients of one family of GPUs; empty where the held-out source has no rows of it."""
    sources = {name: rows for name, rows in by_source(read(folder)).items() if name in SOURCES}
    if without and not any(row.gpu.name in FAMILIES[family] for row in sources[without]):
        return {}
    kept = [row for name, rows in sources.items() if name != without for row in _per_gpu(rows)]
    found = _plain(_fit([row for row in kept if row.gpu.name in FAMILIES[family]], Coefficients()))
    print(without, family, found, flush=True)
    return found


def _per_gpu(rows: Sequence[TimedRow]) -> list[TimedRow]:
    gpus = dict.fromkeys(row.gpu.name for row in rows)
    return [row for name in gpus for row in chosen([row for row in rows if row.gpu.name == name])]


def _fit(rows: Sequence[TimedRow], prior: Coefficients) -> Coefficients:
    counts: dict[tuple[str, str], int] = {}
    for row in rows:
        counts[row.source, row.gpu.name] = counts.get((row.source, row.gpu.name), 0) + 1
    weights = np.array([WEIGHT / max(counts[row.source, row.gpu.name], WEIGHT) for row in rows])
    samples = [Sample(row.measured, row.gpu, row.links) for row in rows]
    return fit(samples, prior, FITTED, weights, iterations=6)


def _plain(coefficients: Coefficients) -> dict[str, float]:
    return {name: float(f"{getattr(coefficients, name):.4g}") for name in NAMES}


if __name__ == "__main__":
    main()
