"""How a power sensor behaves: its update period, measured, and its duty, from published measurements."""

from __future__ import annotations

import time
from functools import cache
from pathlib import Path

import numpy as np
import yaml

from autotune.telemetry.base import FAST_FIELDS, Gpu
from autotune.telemetry.series import Array, Sensor

_FILE = Path(__file__).with_name("sensors.yaml")
_LOOK_S = 0.6
_PAUSE_S = 0.004
_MIN_CHANGES = 3


def sensor_of(gpu: Gpu) -> Sensor:
    """Look at a device for 0.6 s, faster than its sensor updates."""
    readings = []
    end_s = time.monotonic() + _LOOK_S
    while time.monotonic() < end_s and not gpu.lost:
        if (power_w := gpu.read(FAST_FIELDS).power_w) is None:
            break
        readings.append((time.monotonic(), power_w))
        time.sleep(_PAUSE_S)
    times, watts = np.array(readings).T if readings else (np.empty(0), np.empty(0))
    return Sensor(update_period_s(times, watts), duty_of(gpu.info.name))


def update_period_s(times: Array, values: Array) -> float | None:
    """Median time between two changes of the value; None where there were fewer than three."""
    changes = times[1:][np.diff(values) != 0.0]
    return float(np.median(np.diff(changes))) if len(changes) >= _MIN_CHANGES else None


def distinct(values: Array) -> int:
    """Readings that say something new: a sensor that is asked too often repeats itself."""
    return int(1 + np.count_nonzero(np.diff(values))) if len(values) else 0


def duty_of(name: str) -> float | None:
    """Fraction of time in which the product's sensor looks, where that is published."""
    return next((duty for part, duty in _duties().items() if part in name.upper()), None)


@cache
def _duties() -> dict[str, float]:
    found: dict[str, float] = yaml.safe_load(_FILE.read_text())["duty"]
    return found
