"""Series: one GPU's readings over a trial as columns, and what a node returns with a trial's end."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autotune.telemetry.base import BLOCKING_FIELDS, FAST_FIELDS, SLOW_FIELDS, Fields, GpuInfo
from launchers.gpu_sample import GpuSample, Throttle

Array = NDArray[np.float64]

REASONS = tuple(Throttle)
_SECONDS = tuple(f"throttle_s.{reason}" for reason in REASONS)
_COUNTS = tuple(f"throttle_counts.{reason}" for reason in REASONS)
_THROTTLE = ("throttling", *_SECONDS, *_COUNTS)
COLUMNS: dict[frozenset[Fields], tuple[str, ...]] = {
    FAST_FIELDS: (
        "power_w",
        "average_power_w",
        "energy_j",
        "sm_clock_mhz",
        "idle",
        "clocks_locked",
        "reason_bits",
        *_THROTTLE,
    ),
    SLOW_FIELDS: (
        "memory_clock_mhz",
        "temperature_c",
        "memory_temperature_c",
        "utilization",
        "memory_used_gib",
        "power_limit_w",
        "pcie_bytes",
        "nvlink_bytes",
    ),
    BLOCKING_FIELDS: _THROTTLE,
}
_BIT = {reason: 1 << index for index, reason in enumerate(REASONS)}


def has_reason(masks: Array, reason: Throttle) -> NDArray[np.bool_]:
    """Where a column of `throttling` holds a reason."""
    found: NDArray[np.bool_] = (masks.astype(np.int64) & _BIT[reason]) != 0
    return found


def row_of(sample: GpuSample, columns: tuple[str, ...]) -> list[float | None]:
    """A sample's values in the columns' order; `throttling` as a mask over `REASONS`."""
    active, seconds, counts = sample.throttling, sample.throttle_s, sample.throttle_counts
    special: dict[str, Any] = {"throttling": None if active is None else sum(map(_BIT.__getitem__, active))}
    if seconds:
        special |= {f"throttle_s.{reason}": value for reason, value in seconds.items()}
    if counts:
        special |= {f"throttle_counts.{reason}": value for reason, value in counts.items()}
    return [special.get(name) if name in _THROTTLE_SET else getattr(sample, name) for name in columns]


_THROTTLE_SET = frozenset(_THROTTLE)


class Ring:
    """The last readings of one group of fields, oldest first.

    Args:
        columns: Names.
        capacity: Readings kept; older ones are dropped.
    """

    def __init__(self, columns: tuple[str, ...], capacity: int) -> None:
        self._columns = columns
        self._rows = np.empty((capacity, len(columns) + 1))
        self._count = 0

    def append(self, sample: GpuSample) -> None:
        """Keep one."""
        self._rows[self._count % len(self._rows)] = [sample.time_s, *row_of(sample, self._columns)]
        self._count += 1

    @property
    def dropped(self) -> int:
        """Readings that found no room."""
        return max(0, self._count - len(self._rows))

    def recent_mean(self, name: str, window_s: float) -> float | None:
        """Mean of a column over the last `window_s` seconds of readings; None where they do not reach so far back."""
        column, last = 1 + self._columns.index(name), (self._count - 1) % len(self._rows)
        total, values = 0.0, 0
        for back in range(min(self._count, len(self._rows))):
            row = self._rows[last - back]
            if row[0] <= self._rows[last, 0] - window_s:
                return total / values if values else None
            if np.isfinite(row[column]):
                total, values = total + row[column], values + 1
        return None

    def columns(self) -> dict[str, tuple[Array, Array]]:
        """Times and values of each column that has any; rows without a value are left out."""
        kept = self._rows[: self._count] if not self.dropped else np.roll(self._rows, -(self._count % len(self._rows)), axis=0)
        times = kept[:, 0].copy()
        found: dict[str, tuple[Array, Array]] = {}
        for index, name in enumerate(self._columns, start=1):
            present = np.isfinite(kept[:, index])
            if present.all() and len(times):
                found[name] = (times, kept[:, index].copy())
            elif present.any():
                found[name] = (times[present], kept[present, index])
        return found


@dataclass(frozen=True, slots=True)
class Series:
    """One GPU's readings.

    Attributes:
        info: Which GPU.
        columns: Times (Unix, s) and values by field of `GpuSample`; throttle seconds and counts as `throttle_s.<reason>`,
            `throttling` as a mask over `REASONS`. A field that was never read is no key.
        charged: Whether the trial ran on it; else it is context.
        gaps: Why fields are missing.
        lost: Why it stopped answering.
        node: Its node's rank.
    """

    info: GpuInfo
    columns: Mapping[str, tuple[Array, Array]]
    charged: bool = True
    gaps: Mapping[str, str] = field(default_factory=dict)
    lost: str = ""
    node: int = 0

    def column(self, name: str) -> tuple[Array, Array]:
        """Times and values; empty where it was never read."""
        return self.columns.get(name, (_NONE, _NONE))


_NONE: Array = np.empty(0)


@dataclass(frozen=True, slots=True)
class Cost:
    """What measuring took.

    Attributes:
        cpu_s: CPU seconds of the sampler's threads, writing included.
        wall_s: Seconds that it ran.
        readings: Readings of fast fields, over all GPUs.
        late: Rounds that were skipped because the one before took too long.
        dropped: Readings that found no room.
    """

    cpu_s: float = 0.0
    wall_s: float = 0.0
    readings: int = 0
    late: int = 0
    dropped: int = 0

    @property
    def core_fraction(self) -> float:
        """Share of one core."""
        return self.cpu_s / self.wall_s if self.wall_s else 0.0


@dataclass(frozen=True, slots=True)
class Sensor:
    """How a product's power sensor behaves.

    Attributes:
        update_period_s: Time between two new values, as seen when the device was opened; None where it did not change.
        duty: Fraction of that time in which it looks; None where nobody has published it.
    """

    update_period_s: float | None
    duty: float | None


@dataclass(frozen=True, slots=True)
class NodeTelemetry:
    """What one node measured beside a trial.

    Attributes:
        node: Node rank.
        series: One per GPU and host zone, and one of the node's meter where its pool names a command for it.
        cost: What that took.
        sensors: By product name.
        problems: By vendor, why its GPUs could not be opened.
    """

    node: int = 0
    series: tuple[Series, ...] = ()
    cost: Cost = field(default_factory=Cost)
    sensors: Mapping[str, Sensor] = field(default_factory=dict)
    problems: Mapping[str, str] = field(default_factory=dict)


def series_of(info: GpuInfo, samples: Iterable[GpuSample], *, node: int = 0) -> Series:
    """A series from samples as they came, such as a twin emits."""
    kept = list(samples)
    columns: dict[str, tuple[Array, Array]] = {}
    for names in COLUMNS.values():
        ring = Ring(names, max(1, len(kept)))
        for sample in kept:
            ring.append(sample)
        columns = ring.columns() | columns
    return Series(info, columns, node=node)


def reported_series(samples: Sequence[GpuSample], node: int) -> tuple[Series, ...]:
    """The series of readings that a trial's own program reported, one for each GPU that it named; all are charged."""
    by_gpu: dict[str, list[GpuSample]] = {}
    for sample in samples:
        by_gpu.setdefault(sample.gpu, []).append(sample)
    infos = (
        GpuInfo(uuid, index, "reported", "reported", "", uuid.partition(".")[0], power_source="instant")
        for index, uuid in enumerate(by_gpu)
    )
    return tuple(series_of(info, by_gpu[info.uuid], node=node) for info in infos)
