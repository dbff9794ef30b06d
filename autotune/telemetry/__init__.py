"""Telemetry: power, energy, clocks, heat and throttling of a node's GPUs, beside a trial and never inside its processes.

A vendor's library is imported only when its GPUs are asked for.
"""

from __future__ import annotations

from autotune.telemetry.base import (
    ALL_FIELDS,
    BLOCKING_FIELDS,
    FAST_FIELDS,
    SLOW_FIELDS,
    Fields,
    Gpu,
    GpuInfo,
    GpuProcess,
    PowerLimitError,
    TelemetryError,
)

__all__ = [
    "ALL_FIELDS",
    "BLOCKING_FIELDS",
    "FAST_FIELDS",
    "SLOW_FIELDS",
    "Fields",
    "Gpu",
    "GpuInfo",
    "GpuProcess",
    "PowerLimitError",
    "TelemetryError",
]
