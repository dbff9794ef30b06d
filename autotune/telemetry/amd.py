"""AMD GPUs through AMD SMI. The one module that imports `amdsmi` (extra [amd]).

Never import it unless AMD GPUs are asked for: without a matching libamd_smi.so that package fails in ways that stop other imports.
AMD SMI lists devices in an order of its own; HIP's number comes from the library (ROCm 6.4) or from the kernel's topology.
"""

from __future__ import annotations

import contextlib
import io
import os
import time
from pathlib import Path
from typing import Any

from autotune.telemetry.base import ALL_FIELDS, FAST_FIELDS, Fields, Gpu, GpuInfo, GpuProcess, PowerLimitError, TelemetryError
from autotune.telemetry.counters import EnergyCounter, number, plausible_power_w
from autotune.telemetry.kfd import hip_order
from autotune.telemetry.readings import Failure, Fault, Readings
from autotune.telemetry.violations import ViolationSeconds
from launchers.gpu_sample import GpuSample

with contextlib.redirect_stdout(io.StringIO()) as _said:  # the package prints where it should raise
    try:
        import amdsmi
    except (ImportError, OSError, KeyError, AttributeError) as error:
        # ImportError lets the caller tell an absent package from a failure of its own.
        raise ImportError(f"amdsmi cannot be used: {_said.getvalue().strip() or error!r}") from error

_GIB = 1024**3
_MIB_PER_GIB = 1024.0
_TWO_DIES = ("mi250",)
# amdsmi_status_t of amdsmi.h.
_FAULTS = {
    1: Fault.ABSENT,  # INVAL
    2: Fault.ABSENT,  # NOT_SUPPORTED
    3: Fault.ABSENT,  # NOT_YET_IMPLEMENTED
    10: Fault.PERMISSION,  # NO_PERM
    14: Fault.ABSENT,  # FILE_ERROR: the kernel offers no such file
    31: Fault.LOST,  # NOT_FOUND
}


def _translate(error: Exception) -> Failure:
    if isinstance(error, amdsmi.AmdSmiLibraryException):
        code = error.get_error_code()
        return Failure(_FAULTS.get(code, Fault.PASSING), f"AMD SMI: {error.get_error_info(detailed=False)}")
    return Failure(Fault.ABSENT, f"AMD SMI: {error!r}")


_ERRORS = (amdsmi.AmdSmiException, ValueError, KeyError, AttributeError)


def open_all(topology: Path = Path("/sys/class/kfd/kfd/topology/nodes")) -> list[Gpu]:
    """All AMD GPUs of this node in the library's order; each die of a package with two is one.

    Args:
        topology: Where the kernel lists compute devices in HIP's order.

    Raises:
        TelemetryError: where the library does not start.
    """
    try:
        amdsmi.amdsmi_init()
        handles = amdsmi.amdsmi_get_processor_handles()
    except _ERRORS as error:
        raise TelemetryError(
            _translate(error).text, "is the amdgpu driver loaded, and this user in the groups video and render?"
        ) from None
    order = hip_order(topology)
    gpus = [AmdGpu(index, handle, order) for index, handle in enumerate(handles)]
    _join_dies(gpus)
    if mismatch := _mismatch(amdsmi.__version__, Path(os.environ.get("ROCM_HOME", os.environ.get("ROCM_PATH", "/opt/rocm")))):
        for gpu in gpus:
            gpu.gaps["trust"] = mismatch
    return list(gpus)


def _mismatch(package: str, rocm: Path) -> str:
    """Why the binding's structures may not be the library's: they grow between releases; empty where both are alike or unknown."""
    try:
        installed = (rocm / ".info" / "version").read_text().strip()
    except OSError:
        return ""
    same = package.split(".")[:2] == installed.split(".")[:2]
    return "" if same else f"amdsmi {package} with ROCm {installed}: fields may be shifted, do not trust them"


def _join_dies(gpus: list[AmdGpu]) -> None:
    """The two dies of an MI250 follow each other on the bus and share one package's power, which the first one tells.

    A die that tells none and follows none that does is alone: its partner is hidden from this process.
    """
    waiting: AmdGpu | None = None
    for gpu in sorted(gpus, key=lambda gpu: gpu.info.pci_bus_id):
        if not any(name in gpu.info.name.lower() for name in _TWO_DIES):
            continue
        if waiting is not None and waiting.tells_power:
            gpu.package, waiting = waiting.info.uuid, None
        else:
            waiting = gpu


class AmdGpu:
    """One device: a board, or one die of a board with two."""

    def __init__(self, index: int, handle: Any, hip_by_bus: dict[str, int]) -> None:
        self._handle = handle
        self._readings = Readings(_ERRORS, _translate)
        self._hip_by_bus = hip_by_bus
        self.package = ""
        self._cap = self._readings.get("power_limit_w", amdsmi.amdsmi_get_power_cap_info, handle) or {}
        self._described = self._describe(index)
        self._energy: EnergyCounter | None = None
        self._violations = ViolationSeconds()

    @property
    def info(self) -> GpuInfo:
        """What does not change."""
        if not self.package:
            return self._described
        values = {name: getattr(self._described, name) for name in GpuInfo.__slots__}
        return GpuInfo(**values | {"package": self.package})

    @property
    def gaps(self) -> dict[str, str]:
        """Why fields cannot be read."""
        return self._readings.gaps

    @property
    def lost(self) -> str:
        """Why the device is gone."""
        return self._readings.lost

    def _describe(self, index: int) -> GpuInfo:
        get, handle = self._readings.get, self._handle
        uuid = get("uuid", amdsmi.amdsmi_get_gpu_device_uuid, handle) or f"amd-{index}"
        bus_id = get("pci_bus_id", amdsmi.amdsmi_get_gpu_device_bdf, handle) or ""
        clock = get("max_sm_clock_mhz", amdsmi.amdsmi_get_clock_info, handle, amdsmi.AmdSmiClkType.GFX) or {}
        memory = get("max_memory_clock_mhz", amdsmi.amdsmi_get_clock_info, handle, amdsmi.AmdSmiClkType.MEM) or {}
        driver = get("driver", amdsmi.amdsmi_get_gpu_driver_info, handle) or {}
        return GpuInfo(
            uuid=uuid,
            index=index,
            vendor="amd",
            name=(get("name", amdsmi.amdsmi_get_gpu_asic_info, handle) or {}).get("market_name", ""),
            pci_bus_id=bus_id,
            package=uuid,
            power_source=self._power_source(),
            driver=str(driver.get("driver_version", "")),
            default_power_limit_w=_cap_w(self._cap, "default_power_cap"),
            min_power_limit_w=_cap_w(self._cap, "min_power_cap"),
            max_power_limit_w=_cap_w(self._cap, "max_power_cap"),
            max_sm_clock_mhz=number(clock.get("max_clk")),
            max_memory_clock_mhz=number(memory.get("max_clk")),
            aliases=self._hip_names(bus_id),
        )

    def _hip_names(self, bus_id: str) -> tuple[str, ...]:
        """HIP's number and UUID: the library tells them since ROCm 6.4, the kernel the number."""
        told = self._readings.get("hip_number", amdsmi.amdsmi_get_gpu_enumeration_info, self._handle) or {}
        known = number(told.get("hip_id"))
        hip = self._hip_by_bus.get(bus_id) if known is None else int(known)
        return tuple(str(name) for name in (hip, told.get("hip_uuid") or None) if name is not None)

    def _power_source(self) -> str:
        """MI300 and newer tell the current power, MI200 only an average."""
        power = self._readings.get("power_w", amdsmi.amdsmi_get_power_info, self._handle) or {}
        for source in ("current", "average"):
            if number(power.get(f"{source}_socket_power")) is not None:
                return source
        if number(power.get("socket_power")) is not None:
            return "socket"
        self.gaps.setdefault("power_w", "AMD SMI: N/A")
        return ""

    @property
    def tells_power(self) -> bool:
        """Whether it says watts now."""
        return self.read(FAST_FIELDS).power_w is not None

    def read(self, fields: frozenset[Fields] = ALL_FIELDS) -> GpuSample:
        """One reading."""
        values: dict[str, Any] = {"time_s": time.time()}
        if Fields.FAST in fields:
            values |= self._fast()
        if Fields.SLOW in fields:
            values |= self._slow()
        if Fields.BLOCKING in fields:
            values |= self._blocking()
        return GpuSample(gpu=self._described.uuid, **values)

    def _fast(self) -> dict[str, Any]:
        time_s, energy_j = self._read_energy()
        get, handle, limit_w = self._readings.get, self._handle, self._described.max_power_limit_w
        power = get("power_w", amdsmi.amdsmi_get_power_info, handle) or {}
        watts = power_of(power, limit_w)
        if watts is None and power:
            self.gaps.setdefault("power_w", "reports no watts; the package's other die does" if self.package else "AMD SMI: N/A")
        clock = get("sm_clock_mhz", amdsmi.amdsmi_get_clock_info, handle, amdsmi.AmdSmiClkType.GFX) or {}
        locked = clock.get("clk_locked")
        return {
            "time_s": time_s,
            "power_w": watts,
            "average_power_w": plausible_power_w(number(power.get("average_socket_power")), limit_w),
            "energy_j": energy_j,
            "sm_clock_mhz": number(clock.get("clk")),
            "clocks_locked": locked if isinstance(locked, bool) else None,
        }

    def _read_energy(self) -> tuple[float, float | None]:
        """The middle of the call, as a busy host may stop us inside it, and accumulator times its resolution in microjoules."""
        begin_s = time.time()
        count = self._readings.get("energy_j", amdsmi.amdsmi_get_energy_count, self._handle)
        time_s = (begin_s + time.time()) / 2.0
        if count is None or not count["counter_resolution"]:
            return time_s, None
        if self._energy is None:
            self._energy = EnergyCounter(count["counter_resolution"] * 1e-6, self._described.max_power_limit_w)
        return time_s, self._energy.update(time_s, count["energy_accumulator"])

    def _slow(self) -> dict[str, Any]:
        get, handle = self._readings.get, self._handle
        activity = number((get("utilization", amdsmi.amdsmi_get_gpu_activity, handle) or {}).get("gfx_activity"))
        vram = number((get("memory_used_gib", amdsmi.amdsmi_get_gpu_vram_usage, handle) or {}).get("vram_used"))
        clock = get("memory_clock_mhz", amdsmi.amdsmi_get_clock_info, handle, amdsmi.AmdSmiClkType.MEM) or {}
        return {
            "memory_clock_mhz": number(clock.get("clk")),
            "temperature_c": self._celsius("temperature_c", amdsmi.AmdSmiTemperatureType.HOTSPOT),
            "memory_temperature_c": self._celsius("memory_temperature_c", amdsmi.AmdSmiTemperatureType.VRAM),
            "utilization": None if activity is None or activity > 100 else activity / 100.0,
            "memory_used_gib": None if vram is None else vram / _MIB_PER_GIB,
            "power_limit_w": _cap_w(get("power_limit_w", amdsmi.amdsmi_get_power_cap_info, handle) or {}, "power_cap"),
        }

    def _celsius(self, name: str, sensor: Any) -> float | None:
        current = amdsmi.AmdSmiTemperatureMetric.CURRENT
        return number(self._readings.get(name, amdsmi.amdsmi_get_temp_metric, self._handle, sensor, current))

    def _blocking(self) -> dict[str, Any]:
        """MI300's violation counters; the call takes about 100 ms. Boards before MI300 have none."""
        status = self._readings.get("throttle_s", amdsmi.amdsmi_get_violation_status, self._handle)
        if status is None:
            return {}
        time_s = time.time()
        seconds, active = self._violations.update(time_s, status)
        return {"time_s": time_s, "throttle_s": seconds, "throttling": active}

    def enforced_power_limit_w(self) -> float:
        """The cap that holds."""
        return self._limit_w("power_cap")

    def requested_power_limit_w(self) -> float:
        """The cap set last: AMD SMI keeps no other."""
        return self._limit_w("power_cap")

    def _limit_w(self, name: str) -> float:
        try:
            watts = _cap_w(amdsmi.amdsmi_get_power_cap_info(self._handle), name)
        except _ERRORS as error:
            raise PowerLimitError(f"{self.info.uuid}: the power limit cannot be read: {_translate(error).text}") from None
        if watts is None:
            raise PowerLimitError(f"{self.info.uuid}: the power limit cannot be read: N/A")
        return watts

    def set_power_limit_w(self, watts: float) -> None:
        """Ask for a cap, in whole microwatts."""
        try:
            amdsmi.amdsmi_set_power_cap(self._handle, 0, round(watts * 1e6))
        except _ERRORS as error:
            failure = _translate(error)
            permission = failure.fault is Fault.PERMISSION
            low_w, high_w = self.info.min_power_limit_w, self.info.max_power_limit_w
            hint = "the administrator must allow it (root, or a command of the site's own)"
            message = f"{self.info.uuid}: a power limit of {watts:g} W cannot be set: {failure.text}"
            raise PowerLimitError(message, hint if permission else f"{low_w} to {high_w} W", permission=permission) from None

    def processes(self) -> tuple[GpuProcess, ...] | None:
        """Processes on the device."""
        found = self._readings.get("processes", amdsmi.amdsmi_get_gpu_process_list, self._handle)
        return None if found is None else tuple(GpuProcess(int(one["pid"]), one["mem"] / _GIB) for one in found)


def power_of(power: dict[str, Any], limit_w: float | None) -> float | None:
    """Watts of a package: the first of current, average and either that is a number. "N/A" in one never hides the other."""
    for source in ("current_socket_power", "average_socket_power", "socket_power"):
        if (watts := plausible_power_w(number(power.get(source)), limit_w)) is not None:
            return watts
    return None


def _cap_w(cap: dict[str, Any], name: str) -> float | None:
    """A limit in watts: AMD SMI gives limits in microwatts, power in watts."""
    value = number(cap.get(name))
    return value / 1e6 if value else None
