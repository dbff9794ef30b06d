"""Accuracy of predicted step times by source: shipped (the source held out of the fit) and calibrated (five measured rows).

The five rows of a pool (source, GPU, one node or several, software version where ten rows or more have it) are chosen without
seeing any measurement: the middles of five clusters of the predicted shares of time by part (k-medoids, started with the row of
median predicted time and then the row farthest from those chosen so far). Each weighs as many rows as its cluster has. They are
never among the rows scored. A pool with fewer than ten rows gives half of them. Where ten rows or more of a pool have all their
settings stated by the source, the five are of these: whoever measures rows to calibrate on knows what was set.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.ranking import Floats, errors, ranking
from benchmarks.timed_rows import TimedRow, by_source, read
from search_spaces.calibration import Predictor, Sample, fit
from search_spaces.coefficients import Coefficients, shipped
from search_spaces.columns import Columns
from search_spaces.step_time import estimate

CALIBRATION_ROWS = 5
ROUNDS = 10


def groups(folder: Path) -> list[dict[str, Any]]:
    """One entry per source and mode."""
    return [entry for source, rows in by_source(read(folder)).items() for entry in groups_of(source, rows)]


def groups_of(source: str, rows: Sequence[TimedRow]) -> list[dict[str, Any]]:
    """The entries of one source."""
    predicted, calibrated, scored = _predict(source, rows)
    measured = np.array([row.measured.step_time_s for row in rows])
    found = [_entry(source, "shipped", rows, predicted, measured)]
    if scored.any() and not scored.all():
        kept = [row for row, keep in zip(rows, scored, strict=True) if keep]
        found.append(_entry(source, "calibrated", kept, calibrated[scored], measured[scored]))
    return found


def _predict(source: str, rows: Sequence[TimedRow]) -> tuple[Floats, Floats, np.ndarray]:
    """Seconds with the shipped and with calibrated coefficients, and which rows were not used to calibrate."""
    first, second, scored = np.zeros(len(rows)), np.zeros(len(rows)), np.ones(len(rows), dtype=bool)
    for places in _pools(rows):
        samples = [_sample(rows[place]) for place in places]
        prior = shipped(rows[places[0]].gpu.name, without=source)
        first[places] = Predictor(samples)(prior)
        known = _stated([rows[place] for place in places])
        chosen, weights = choose([samples[item] for item in known], prior)
        chosen = [known[item] for item in chosen]
        scored[[places[item] for item in chosen]] = False
        own = fit([samples[item] for item in chosen], prior, weights=weights)
        second[places] = Predictor(samples)(own)
    return first, second, scored


def _stated(rows: Sequence[TimedRow]) -> list[int]:
    """Places of the rows to choose from."""
    stated = [place for place, row in enumerate(rows) if row.stated]
    return stated if len(stated) >= 2 * CALIBRATION_ROWS else list(range(len(rows)))


def choose(samples: Sequence[Sample], prior: Coefficients) -> tuple[list[int], Floats]:
    """The rows to calibrate on and their weights, by the rule in the module's docstring."""
    count = min(CALIBRATION_ROWS, len(samples) // 2)
    if not count:
        return [], np.zeros(0)
    shares, seconds = _shares(samples, prior)
    chosen = [int(np.argsort(seconds, kind="stable")[len(seconds) // 2])]
    while len(chosen) < count:
        chosen.append(int(np.argmax(_distances(shares, chosen).min(axis=1))))
    for _ in range(ROUNDS):
        nearest = _distances(shares, chosen).argmin(axis=1)
        chosen = [_middle(shares, np.flatnonzero(nearest == place)) for place in range(count) if (nearest == place).any()]
        count = len(chosen)
    chosen = list(dict.fromkeys(chosen))
    stands_for = np.bincount(_distances(shares, chosen).argmin(axis=1), minlength=len(chosen))
    return chosen, stands_for / stands_for.mean()


def _distances(shares: Floats, rows: Sequence[int]) -> Floats:
    """Sum of the differences of all parts' shares, rows x chosen rows."""
    return np.stack([np.abs(shares - shares[row]).sum(axis=1) for row in rows], axis=1)


def _middle(shares: Floats, rows: np.ndarray) -> int:
    """The row of a cluster that is nearest to its mean."""
    return int(rows[np.abs(shares[rows] - shares[rows].mean(axis=0)).sum(axis=1).argmin()])


def _shares(samples: Sequence[Sample], prior: Coefficients) -> tuple[Floats, Floats]:
    rows, seconds = [], []
    for sample in samples:
        table = estimate(Columns.of(sample.measured.workload, sample.measured.config), sample.gpu, sample.links, prior)
        seconds.append(float(table.step_time_s[0]))
        rows.append([value / seconds[-1] for value in table.row(0).values()])
    return np.array(rows), np.array(seconds)


def _pools(rows: Sequence[TimedRow]) -> list[list[int]]:
    """Rows of one GPU, in one domain or several; a software version is a pool of its own where it has rows enough."""
    versions = Counter(row.pool for row in rows)
    pools: dict[Any, list[int]] = {}
    for place, row in enumerate(rows):
        pools.setdefault(row.pool if versions[row.pool] >= 2 * CALIBRATION_ROWS else row.pool[:2], []).append(place)
    return list(pools.values())


def _sample(row: TimedRow) -> Sample:
    return Sample(row.measured, row.gpu, row.links)


def _entry(source: str, mode: str, rows: Sequence[TimedRow], predicted: Floats, measured: Floats) -> dict[str, Any]:
    """One line of the table; the baselines rank by parameters x tokens / GPUs and by the number of model-parallel ranks."""
    names = [row.group for row in rows]
    own = ranking(names, predicted, measured)
    work = np.array([_parameters_tokens(row) for row in rows])
    ranks = np.array([_model_parallel(row) for row in rows])
    return {
        "source": source,
        "quantity": "step_time_s",
        "mode": mode,
        "n": len(rows),
        **errors(predicted, measured),
        "kendall_tau": own.median,
        "kendall_tau_min": own.worst,
        "tau_groups": own.groups,
        "tau_parameters_tokens": ranking(names, work, measured).median,
        "tau_fewest_ranks": ranking(names, ranks, measured).median,
    }


def _parameters_tokens(row: TimedRow) -> float:
    m, w = row.measured.workload.model, row.measured.workload
    return float(m.num_layers * m.hidden_size**2 * w.tokens_per_step / w.world_size)


def _model_parallel(row: TimedRow) -> float:
    c = row.measured.config
    return float(c.tensor_model_parallel_size * c.pipeline_model_parallel_size * c.context_parallel_size)
