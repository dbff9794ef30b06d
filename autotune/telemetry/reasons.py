"""What NVIDIA's event-reason bits mean. The mask is kept as it came: newer drivers may set bits that nobody knows yet."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from launchers.gpu_sample import Throttle

# nvml.h, "Clocks Event Reasons". Drivers before R530 call the same bits "throttle reasons" and know two more (0x200, 0x400).
REASON_BITS: dict[str, int] = {
    "GpuIdle": 0x1,
    "ApplicationsClocksSetting": 0x2,
    "SwPowerCap": 0x4,
    "HwSlowdown": 0x8,
    "SyncBoost": 0x10,
    "SwThermalSlowdown": 0x20,
    "HwThermalSlowdown": 0x40,
    "HwPowerBrakeSlowdown": 0x80,
    "DisplayClockSetting": 0x100,
}
_KNOWN = sum(REASON_BITS.values())
_IDLE, _LOCKED, _HW_SLOWDOWN = REASON_BITS["GpuIdle"], REASON_BITS["ApplicationsClocksSetting"], REASON_BITS["HwSlowdown"]
_THROTTLES = {
    REASON_BITS["SwPowerCap"]: Throttle.POWER_CAP,
    REASON_BITS["HwPowerBrakeSlowdown"]: Throttle.POWER_BRAKE,
    REASON_BITS["SwThermalSlowdown"]: Throttle.SW_THERMAL,
    REASON_BITS["HwThermalSlowdown"]: Throttle.HW_THERMAL,
    REASON_BITS["SyncBoost"]: Throttle.SYNC_BOOST,
}
_HARDWARE = REASON_BITS["HwThermalSlowdown"] | REASON_BITS["HwPowerBrakeSlowdown"]


@dataclass(frozen=True, slots=True)
class Reasons:
    """A mask, decoded.

    Attributes:
        names: NVIDIA's names of the bits that are known.
        unknown: The bits that are not.
        throttling: What of it is throttling; a hardware slowdown that names no cause is `OTHER`.
        idle: Whether the GPU idles.
        clocks_locked: Whether somebody set the clocks.
    """

    names: tuple[str, ...]
    unknown: int
    throttling: tuple[Throttle, ...]
    idle: bool
    clocks_locked: bool


@lru_cache(maxsize=64)
def decode(mask: int) -> Reasons:
    """Decode NVIDIA's mask; never raises."""
    throttling = tuple(reason for bit, reason in _THROTTLES.items() if mask & bit)
    if mask & _HW_SLOWDOWN and not mask & _HARDWARE:
        throttling += (Throttle.OTHER,)
    names = tuple(name for name, bit in REASON_BITS.items() if mask & bit)
    return Reasons(names, mask & ~_KNOWN, throttling, bool(mask & _IDLE), bool(mask & _LOCKED))
