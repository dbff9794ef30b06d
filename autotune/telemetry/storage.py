"""Raw readings of a trial as one compressed Parquet file beside its logs, and thinned series of them for charts."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from autotune.telemetry.base import HOST, WALL
from autotune.telemetry.series import Array, NodeTelemetry, Series

log = logging.getLogger(__name__)
SAMPLES = "telemetry.parquet"
_CHARTS: Mapping[str, tuple[str, str]] = {
    "power_w": ("telemetry/power_w", "sum"),
    "sm_clock_mhz": ("telemetry/lowest_sm_clock_mhz", "min"),
    "temperature_c": ("telemetry/highest_temperature_c", "max"),
    "memory_temperature_c": ("telemetry/highest_memory_temperature_c", "max"),
}


def write_samples(nodes: Sequence[NodeTelemetry], folder: Path) -> Path | None:
    """Write all readings, a row per series and time, as `telemetry.parquet` into `folder`; None where there are none.

    Columns: node, gpu, vendor, index, charged, time_s (Unix), then the fields of `GpuSample` with null where one was not read.
    A disk that refuses it costs the raw readings, not the trial.
    """
    tables = [_table(one) for node in nodes for one in node.series if one.columns]
    if not tables:
        return None
    path = folder / SAMPLES
    try:
        folder.mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.concat_tables(tables, promote_options="default"), path, compression="zstd")
    except OSError as error:
        log.warning("the readings of this trial are lost: %s", error)
        return None
    return path


def _table(series: Series) -> pa.Table:
    times = np.unique(np.concatenate([stamps for stamps, _ in series.columns.values()]))
    info = series.info
    values: dict[str, object] = {
        "node": np.full(len(times), series.node),
        "gpu": pa.array([info.uuid] * len(times)).dictionary_encode(),
        "vendor": pa.array([info.vendor] * len(times)).dictionary_encode(),
        "index": np.full(len(times), info.index),
        "charged": np.full(len(times), series.charged),
        "time_s": times,
    }
    for name, (stamps, column) in series.columns.items():
        full = np.full(len(times), np.nan)
        full[np.searchsorted(times, stamps)] = column
        values[name] = pa.array(full, from_pandas=True)
    return pa.table(values)


def charts(path: Path, points: int) -> dict[str, tuple[Array, Array]]:
    """At most `points` means per chart of a trial's own GPUs: pool power, lowest clock, highest temperatures; Unix times.

    Args:
        path: What `write_samples` wrote.
        points: Points of each chart.
    """
    table = pq.read_table(path)
    wanted = np.asarray(table["charged"]) & ~np.isin(np.asarray(table["vendor"].cast(pa.string())), (HOST, WALL))
    if not np.any(wanted):
        return {}
    times, gpus = np.asarray(table["time_s"])[wanted], np.asarray(table["gpu"].cast(pa.string()))[wanted]
    edges = np.linspace(times.min(), times.max(), points + 1)
    found: dict[str, tuple[Array, Array]] = {}
    for column, (name, how) in _CHARTS.items():
        if column in table.column_names:
            values = table[column].to_numpy(zero_copy_only=False)[wanted]
            means = np.array([_binned(times[gpus == gpu], values[gpus == gpu], edges) for gpu in np.unique(gpus)])
            merged: Array = getattr(np, how)(means, axis=0)
            known = np.isfinite(merged)
            if np.any(known):
                found[name] = (((edges[1:] + edges[:-1]) / 2.0)[known], merged[known])
    return found


def _binned(times: Array, values: Array, edges: Array) -> Array:
    """Mean of each bin; not a number where a bin holds no reading."""
    known = np.isfinite(values)
    sums, _ = np.histogram(times[known], edges, weights=values[known])
    counts, _ = np.histogram(times[known], edges)
    means: Array = np.divide(sums, counts, out=np.full(len(counts), np.nan), where=counts > 0)
    return means
