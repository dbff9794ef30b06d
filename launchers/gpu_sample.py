"""GpuSample: what one GPU said at one instant. Standard library only: rank programs and the twin emit it too."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

SAMPLES_EVENT = "gpu_samples"
"""Name of the event with which a program reports readings itself; its `samples` are `GpuSample.to_dict`s."""


class Throttle(StrEnum):
    """Why a GPU ran below the clock that it was asked for, in one vocabulary for all vendors.

    `POWER_CAP` is a GPU at its power limit: deliberate, and no event to avoid. Idle GPUs and locked clocks are no throttling.
    """

    POWER_CAP = "power_cap"
    POWER_BRAKE = "power_brake"
    SW_THERMAL = "sw_thermal"
    HW_THERMAL = "hw_thermal"
    SYNC_BOOST = "sync_boost"
    OTHER = "other"


FAULTS = (Throttle.POWER_BRAKE, Throttle.SW_THERMAL, Throttle.HW_THERMAL, Throttle.SYNC_BOOST, Throttle.OTHER)
"""The reasons that count as throttle events: all but running at a power limit."""


@dataclass(frozen=True, slots=True)
class GpuSample:
    """One reading of one GPU. None: the device has no such sensor, or this reading did not ask for it.

    Attributes:
        time_s: Unix time of the reading on its node's clock; virtual where a twin emits it.
        gpu: UUID; in a trial's own reports `PACKAGE.DIE` where dies share a package, whose watts each of them tells.
        power_w: Board power: the instant sensor where there is one, else the device's own average (see `GpuInfo.power_source`).
        average_power_w: The device's own average, where it has that beside an instant sensor.
        energy_j: Energy since an arbitrary start, wraps undone; it decreases only where the device's counter started again.
        sm_clock_mhz: Clock of the compute units.
        memory_clock_mhz: Clock of the memory.
        temperature_c: Hottest point of the chip that the device tells (NVIDIA: GPU, AMD: hotspot).
        memory_temperature_c: Memory.
        utilization: Fraction of time in which a kernel ran, 0 to 1, as the driver says.
        memory_used_gib: Memory in use by anybody.
        power_limit_w: Enforced power limit: the lowest of all that apply.
        pcie_bytes: Bytes sent and received over PCIe since an arbitrary start.
        nvlink_bytes: The same over NVLink or xGMI.
        throttle_s: Seconds throttled since an arbitrary start, by reason, from the device's own counters; a reason that is not a
            key has no counter.
        throttle_counts: Events since an arbitrary start, by reason, where something counts them.
        throttling: Reasons active at this instant; an empty tuple where there are none.
        idle: Whether the device says that it idles.
        clocks_locked: Whether somebody fixed the clocks below their maximum.
        reason_bits: The vendor's own bit mask, as it came.
    """

    time_s: float
    gpu: str
    power_w: float | None = None
    average_power_w: float | None = None
    energy_j: float | None = None
    sm_clock_mhz: float | None = None
    memory_clock_mhz: float | None = None
    temperature_c: float | None = None
    memory_temperature_c: float | None = None
    utilization: float | None = None
    memory_used_gib: float | None = None
    power_limit_w: float | None = None
    pcie_bytes: float | None = None
    nvlink_bytes: float | None = None
    throttle_s: Mapping[Throttle, float] | None = None
    throttle_counts: Mapping[Throttle, int] | None = None
    throttling: tuple[Throttle, ...] | None = None
    idle: bool | None = None
    clocks_locked: bool | None = None
    reason_bits: int | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain values without the absent ones, for one JSON line."""
        return {name: value for name, value in asdict(self).items() if value is not None}


def sample_from_dict(values: Mapping[str, Any]) -> GpuSample:
    """The sample that `to_dict` wrote, back from JSON; names that are not known are left out."""
    known = {name: value for name, value in values.items() if name in GpuSample.__slots__}
    for name in ("throttle_s", "throttle_counts"):
        if (by_reason := known.get(name)) is not None:
            known[name] = {Throttle(reason): value for reason, value in by_reason.items()}
    if (reasons := known.get("throttling")) is not None:
        known["throttling"] = tuple(Throttle(reason) for reason in reasons)
    return GpuSample(**known)
