"""Telemetry: power, energy, clocks, heat and throttling of a node's GPUs, beside a trial and never inside its processes.

A vendor's library is imported only when its GPUs are asked for.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence

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
from autotune.telemetry.visible import select

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
    "open_gpus",
]

_MODULES = {"nvidia": "autotune.telemetry.nvidia", "amd": "autotune.telemetry.amd", "host": "autotune.telemetry.host"}


def open_gpus(vendor: str, ids: Sequence[str] | None = None) -> list[Gpu]:
    """The GPUs of one vendor on this node.

    Args:
        vendor: "nvidia", "amd", or "host" for the energy of CPU packages; only that vendor's library is imported.
        ids: The GPUs wanted, as Ray or CUDA_VISIBLE_DEVICES name them: numbers, UUIDs or unique starts of one; None = all.

    Raises:
        TelemetryError: where the library is absent or does not start, an id names no GPU, or none has a sensor.
    """
    try:
        module = importlib.import_module(_MODULES[vendor])
    except ImportError as error:
        raise TelemetryError(f"{vendor}: {error}", "`autotune doctor --telemetry` says what is missing") from None
    gpus: list[Gpu] = module.open_all()
    return gpus if ids is None else select(gpus, ids)
