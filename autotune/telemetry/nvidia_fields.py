"""NVML's numbered fields, many read in one call. Knows numbers and units; the binding itself is handed in by `nvidia`."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from autotune.telemetry.readings import Failure, Fault, Readings
from launchers.gpu_sample import Throttle

FieldId = tuple[int, int]
"""Number and scope; the binding takes a number alone, too, but by way of an exception each time."""
Query = Callable[[Sequence[FieldId]], Any]

# nvml.h, "Field Identifiers". Power in mW, energy in mJ, counters of throttling in ns.
_POWER = {"instant_power_w": 186, "average_power_w": 185}
_ENERGY = {"energy_j": 83}
COUNTERS: dict[Throttle, str] = {
    Throttle.POWER_CAP: "throttle_s.power_cap",
    Throttle.POWER_BRAKE: "throttle_s.power_brake",
    Throttle.SW_THERMAL: "throttle_s.sw_thermal",
    Throttle.HW_THERMAL: "throttle_s.hw_thermal",
    Throttle.SYNC_BOOST: "throttle_s.sync_boost",
    Throttle.OTHER: "throttle_s.other",
}
THERMAL_POLICY = "throttle_s.thermal"
_COUNTER_IDS = {
    "throttle_s.power_cap": 74,
    THERMAL_POLICY: 75,
    "throttle_s.sync_boost": 76,
    "throttle_s.sw_thermal": 269,
    "throttle_s.hw_thermal": 270,
    "throttle_s.power_brake": 271,
    "throttle_s.other": 79,  # reliability policy
}
_ALL_LINKS = 2**32 - 1
_SLOW: dict[str, FieldId] = {
    "memory_temperature_c": (82, 0),
    "pcie_tx": (197, 0),
    "pcie_rx": (198, 0),
    "nvlink_tx": (138, _ALL_LINKS),
    "nvlink_rx": (139, _ALL_LINKS),
}
_SHOWN_AS = {"pcie_tx": "pcie_bytes", "pcie_rx": "pcie_bytes", "nvlink_tx": "nvlink_bytes", "nvlink_rx": "nvlink_bytes"}
_TYPES = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")
_KIB = 1024


class FieldBatch:
    """The fields of one board that it really has; what one lacks is asked for once and its reason kept.

    Args:
        query: Reads numbered fields of the board; raises what its binding raises where that call does not exist.
        readings: Where reasons are kept.
        failure_of: What a field's own return code means.

    Attributes:
        read_at_s: Unix time of the last reading.
    """

    def __init__(self, query: Query, readings: Readings, failure_of: Callable[[int], Failure]) -> None:
        self._query = query
        self._readings = readings
        self._failure_of = failure_of
        self._fast_ids: dict[str, FieldId] = {name: (number, 0) for name, number in {**_POWER, **_ENERGY, **_COUNTER_IDS}.items()}
        self._slow_ids: dict[str, FieldId] = dict(_SLOW)
        self.read_at_s = 0.0

    @property
    def exists(self) -> bool:
        """Whether the driver has numbered fields at all."""
        return not self._readings.absent("fields")

    def has(self, name: str) -> bool:
        """Whether the board has this field, as far as readings showed."""
        return self.exists and (name in self._fast_ids or name in self._slow_ids)

    def fast(self) -> dict[str, float]:
        """Power, energy and counters in NVML's units, by name."""
        return self._read(self._fast_ids)

    def slow(self) -> dict[str, float]:
        """Memory temperature and the links' bytes, both directions together."""
        raw = self._read(self._slow_ids)
        values = {"memory_temperature_c": raw["memory_temperature_c"]} if "memory_temperature_c" in raw else {}
        if "pcie_tx" in raw and "pcie_rx" in raw:
            values["pcie_bytes"] = raw["pcie_tx"] + raw["pcie_rx"]
        if "nvlink_tx" in raw and "nvlink_rx" in raw:
            values["nvlink_bytes"] = (raw["nvlink_tx"] + raw["nvlink_rx"]) * _KIB
        return values

    def _read(self, ids: dict[str, FieldId]) -> dict[str, float]:
        if not ids:
            return {}
        names = list(ids)
        begin_s = time.time()
        answers = self._readings.get("fields", self._query, list(ids.values()))
        self.read_at_s = _stamp_s(answers, begin_s, time.time())
        values: dict[str, float] = {}
        for name, answer in zip(names, answers or (), strict=False):
            if answer.nvmlReturn:
                self._fail(ids, name, self._failure_of(answer.nvmlReturn))
            else:
                values[name] = getattr(answer.value, _TYPES[answer.valueType])
        return values

    def _fail(self, ids: dict[str, FieldId], name: str, failure: Failure) -> None:
        if name != THERMAL_POLICY:  # newer boards have two better ones in its place
            self._readings.note(_SHOWN_AS.get(name, name), failure)
        if failure.fault in (Fault.ABSENT, Fault.PERMISSION):
            del ids[name]


def _stamp_s(answers: Any, begin_s: float, end_s: float) -> float:
    """The driver's own time of the values where it lies within the call, else the call's middle: a host may stop us inside it."""
    if answers is not None and len(answers) and begin_s <= (stamp_s := answers[0].timestamp * 1e-6) <= end_s:
        return float(stamp_s)
    return (begin_s + end_s) / 2.0
