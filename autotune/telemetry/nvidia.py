"""NVIDIA GPUs through NVML. The one module that imports `pynvml` (package nvidia-ml-py).

NVML ignores CUDA_VISIBLE_DEVICES and lists boards by PCI bus: a GPU is known by its UUID. Field numbers and units: nvml.h.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable
from typing import Any

import pynvml

from autotune.telemetry.base import ALL_FIELDS, Fields, Gpu, GpuInfo, GpuProcess, PowerLimitError, TelemetryError
from autotune.telemetry.counters import EnergyCounter, plausible_power_w
from autotune.telemetry.mig import MigInstance
from autotune.telemetry.nvidia_fields import COUNTERS, THERMAL_POLICY, FieldBatch
from autotune.telemetry.readings import Failure, Fault, Readings
from autotune.telemetry.reasons import decode
from launchers.gpu_sample import GpuSample, Throttle

log = logging.getLogger(__name__)
_GIB = 1024**3
_READY_TRIES, _READY_PAUSE_S = 3, 1.0
_FAULTS = {
    pynvml.NVML_ERROR_NOT_SUPPORTED: Fault.ABSENT,
    pynvml.NVML_ERROR_FUNCTION_NOT_FOUND: Fault.ABSENT,
    pynvml.NVML_ERROR_INVALID_ARGUMENT: Fault.ABSENT,
    pynvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH: Fault.ABSENT,
    pynvml.NVML_ERROR_NO_PERMISSION: Fault.PERMISSION,
    pynvml.NVML_ERROR_GPU_IS_LOST: Fault.LOST,
    pynvml.NVML_ERROR_GPU_NOT_FOUND: Fault.LOST,
    pynvml.NVML_ERROR_RESET_REQUIRED: Fault.LOST,
}


def failure_of(code: int) -> Failure:
    """What an NVML return code means."""
    name = next((name[11:] for name in dir(pynvml) if name.startswith("NVML_ERROR_") and getattr(pynvml, name) == code), str(code))
    return Failure(_FAULTS.get(code, Fault.PASSING), f"NVML: {name}")


def _translate(error: Exception) -> Failure:
    return failure_of(error.value if isinstance(error, pynvml.NVMLError) else pynvml.NVML_ERROR_UNKNOWN)


def open_all() -> list[Gpu]:
    """All NVIDIA GPUs and MIG instances of this node, boards in NVML's order, each followed by its instances.

    Raises:
        TelemetryError: where NVML is absent, too old for its driver, or does not become ready.
    """
    try:
        _when_ready(pynvml.nvmlInit)
        driver = _text(pynvml.nvmlSystemGetDriverVersion())
        handles = [(index, _handle(index)) for index in range(pynvml.nvmlDeviceGetCount())]
    except pynvml.NVMLError as error:
        hint = "reboot, or reload the driver, after its upgrade" if error.value == pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH else ""
        raise TelemetryError(f"{_translate(error).text}: {error}", hint) from None
    gpus: list[Gpu] = []
    for index, handle in handles:
        if handle is not None:
            board = NvidiaGpu(index, handle, driver)
            gpus += [board, *board.mig_instances()]
    return gpus


def _when_ready(call: Callable[[], Any]) -> Any:
    """Some boards answer NOT_READY for a moment after their start."""
    for left in reversed(range(_READY_TRIES)):
        try:
            return call()
        except pynvml.NVMLError as error:
            if error.value != pynvml.NVML_ERROR_NOT_READY or not left:
                raise
            time.sleep(_READY_PAUSE_S)
    raise AssertionError("unreachable")


def _handle(index: int) -> Any:
    """A board's handle; None for one that is already lost: the others still count."""
    try:
        return _when_ready(functools.partial(pynvml.nvmlDeviceGetHandleByIndex, index))
    except pynvml.NVMLError as error:
        log.warning("GPU %d cannot be opened: %s", index, error)
        return None


def _text(value: str | bytes) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else value


def _bus_id(handle: Any) -> str:
    """As the kernel writes it: NVML gives the domain eight digits and capitals."""
    domain, _, rest = _text(pynvml.nvmlDeviceGetPciInfo(handle).busId).lower().partition(":")
    return f"{domain[-4:]}:{rest}"


class NvidiaGpu:
    """One board."""

    def __init__(self, index: int, handle: Any, driver: str) -> None:
        self._handle = handle
        self._readings = Readings((pynvml.NVMLError,), _translate)
        self._fields = FieldBatch(functools.partial(pynvml.nvmlDeviceGetFieldValues, handle), self._readings, failure_of)
        self._power_source = self._find_power()
        self.info = self._describe(index, driver)
        self._energy = EnergyCounter(1e-3, self.info.max_power_limit_w)

    @property
    def gaps(self) -> dict[str, str]:
        """Why fields cannot be read."""
        return self._readings.gaps

    @property
    def lost(self) -> str:
        """Why the board is gone."""
        return self._readings.lost

    def _find_power(self) -> str:
        """Which sensor there is: the instant one, the average one, or the old call, an average over 1 s since Ampere."""
        self._fields.fast()
        if self._fields.has("instant_power_w"):
            return "instant"
        if self._fields.has("average_power_w"):
            return "average"
        usable = self._readings.get("power_usage", pynvml.nvmlDeviceGetPowerUsage, self._handle) is not None
        if not usable and "power_usage" in self.gaps:
            self.gaps["power_w"] = self.gaps["power_usage"]
        return "average" if usable else ""

    def _describe(self, index: int, driver: str) -> GpuInfo:
        get, handle = self._readings.get, self._handle
        uuid = _text(get("uuid", pynvml.nvmlDeviceGetUUID, handle) or f"nvidia-{index}")
        low_mw, high_mw = get("min_power_limit_w", pynvml.nvmlDeviceGetPowerManagementLimitConstraints, handle) or (None, None)
        mode = get("mig", pynvml.nvmlDeviceGetMigMode, handle)
        self.gaps.pop("mig", None)  # a board without MIG lacks nothing
        return GpuInfo(
            uuid=uuid,
            index=index,
            vendor="nvidia",
            name=_text(get("name", pynvml.nvmlDeviceGetName, handle) or ""),
            pci_bus_id=get("pci_bus_id", _bus_id, handle) or "",
            package=uuid,
            power_source=self._power_source,
            driver=driver,
            mig=bool(mode and mode[0]),
            default_power_limit_w=_watts(get("default_power_limit_w", pynvml.nvmlDeviceGetPowerManagementDefaultLimit, handle)),
            min_power_limit_w=_watts(low_mw),
            max_power_limit_w=_watts(high_mw),
            max_sm_clock_mhz=get("max_sm_clock_mhz", pynvml.nvmlDeviceGetMaxClockInfo, handle, pynvml.NVML_CLOCK_SM),
            max_memory_clock_mhz=get("max_memory_clock_mhz", pynvml.nvmlDeviceGetMaxClockInfo, handle, pynvml.NVML_CLOCK_MEM),
        )

    def mig_instances(self) -> list[Gpu]:
        """The MIG instances of this board."""
        if not self.info.mig:
            return []
        count = self._readings.get("mig", pynvml.nvmlDeviceGetMaxMigDeviceCount, self._handle) or 0
        found: list[Gpu] = []
        for number in range(count):
            try:
                handle = pynvml.nvmlDeviceGetMigDeviceHandleByIndex(self._handle, number)
            except pynvml.NVMLError:
                continue  # not every number is in use
            uuid = _text(self._readings.get("mig", pynvml.nvmlDeviceGetUUID, handle) or f"MIG-{self.info.uuid}/{number}")
            found.append(MigInstance(self, uuid, functools.partial(self._memory_gib, handle, f"memory_used_gib.{uuid}")))
        return found

    def _memory_gib(self, handle: Any, name: str = "memory_used_gib") -> float | None:
        memory = self._readings.get(name, pynvml.nvmlDeviceGetMemoryInfo, handle)
        return None if memory is None else memory.used / _GIB

    def read(self, fields: frozenset[Fields] = ALL_FIELDS) -> GpuSample:
        """One reading: one batched call and two more for the fast fields."""
        values: dict[str, Any] = {"time_s": time.time()}
        if Fields.FAST in fields:
            values |= self._fast()
        if Fields.SLOW in fields:
            values |= self._slow()
        return GpuSample(gpu=self.info.uuid, **values)

    def _fast(self) -> dict[str, Any]:
        fast, limit_w = self._fields.fast(), self.info.max_power_limit_w
        time_s = self._fields.read_at_s
        energy_mj = fast.get("energy_j")
        if energy_mj is None and not self._fields.has("energy_j"):
            energy_mj = self._readings.get("total_energy", pynvml.nvmlDeviceGetTotalEnergyConsumption, self._handle)
        average_mw = fast.get("average_power_w")
        if average_mw is None and not self._fields.has("average_power_w"):
            average_mw = self._readings.get("power_usage", pynvml.nvmlDeviceGetPowerUsage, self._handle)
        power_mw = fast.get("instant_power_w") if self._power_source == "instant" else average_mw
        values: dict[str, Any] = {
            "time_s": time_s,
            "power_w": plausible_power_w(_watts(power_mw), limit_w),
            "average_power_w": plausible_power_w(_watts(average_mw), limit_w),
            "energy_j": None if energy_mj is None else self._energy.update(time_s, int(energy_mj)),
            "sm_clock_mhz": self._readings.get("sm_clock_mhz", pynvml.nvmlDeviceGetClockInfo, self._handle, pynvml.NVML_CLOCK_SM),
            "throttle_s": self._throttle_s(fast),
        }
        mask = self._reason_mask()
        if mask is not None:
            reasons = decode(mask)
            values |= {
                "throttling": reasons.throttling,
                "idle": reasons.idle,
                "clocks_locked": reasons.clocks_locked,
                "reason_bits": mask,
            }
        return values

    def _throttle_s(self, fast: dict[str, float]) -> dict[Throttle, float] | None:
        """Seconds by reason; on boards with one thermal counter only, all of it is called software thermal."""
        seconds = {reason: fast[name] * 1e-9 for reason, name in COUNTERS.items() if name in fast}
        if THERMAL_POLICY in fast and Throttle.SW_THERMAL not in seconds and Throttle.HW_THERMAL not in seconds:
            seconds[Throttle.SW_THERMAL] = fast[THERMAL_POLICY] * 1e-9
        return seconds or None

    def _reason_mask(self) -> int | None:
        """Active reasons; drivers before R530 have the same bits under the old name."""
        mask = self._readings.get("throttling", pynvml.nvmlDeviceGetCurrentClocksEventReasons, self._handle)
        if mask is None and self._readings.absent("throttling"):
            mask = self._readings.get("throttle_reasons", pynvml.nvmlDeviceGetCurrentClocksThrottleReasons, self._handle)
        return mask

    def _slow(self) -> dict[str, Any]:
        get, handle = self._readings.get, self._handle
        slow = self._fields.slow()
        utilization = get("utilization", pynvml.nvmlDeviceGetUtilizationRates, handle)
        temperature = functools.partial(pynvml.nvmlDeviceGetTemperature, handle, pynvml.NVML_TEMPERATURE_GPU)
        return {
            "memory_clock_mhz": get("memory_clock_mhz", pynvml.nvmlDeviceGetClockInfo, handle, pynvml.NVML_CLOCK_MEM),
            "temperature_c": get("temperature_c", temperature),
            "utilization": None if utilization is None else utilization.gpu / 100.0,
            "memory_used_gib": self._memory_gib(handle),
            "power_limit_w": _watts(get("power_limit_w", pynvml.nvmlDeviceGetEnforcedPowerLimit, handle)),
            **slow,
        }

    def enforced_power_limit_w(self) -> float:
        """The lowest of all limits."""
        return self._limit_w(pynvml.nvmlDeviceGetEnforcedPowerLimit)

    def requested_power_limit_w(self) -> float:
        """The limit set last."""
        return self._limit_w(pynvml.nvmlDeviceGetPowerManagementLimit)

    def _limit_w(self, call: Callable[[Any], int]) -> float:
        try:
            return call(self._handle) / 1e3
        except pynvml.NVMLError as error:
            raise PowerLimitError(f"{self.info.uuid}: the power limit cannot be read: {_translate(error).text}") from None

    def set_power_limit_w(self, watts: float) -> None:
        """Ask for a limit, in whole milliwatts."""
        try:
            pynvml.nvmlDeviceSetPowerManagementLimit(self._handle, round(watts * 1e3))
        except pynvml.NVMLError as error:
            failure = _translate(error)
            permission = failure.fault is Fault.PERMISSION
            low_w, high_w = self.info.min_power_limit_w, self.info.max_power_limit_w
            hint = (
                "the administrator must allow it (root, or a command of the site's own)" if permission else f"{low_w} to {high_w} W"
            )
            message = f"{self.info.uuid}: a power limit of {watts:g} W cannot be set: {failure.text}"
            raise PowerLimitError(message, hint, permission=permission) from None

    def processes(self) -> tuple[GpuProcess, ...] | None:
        """Compute processes."""
        found = self._readings.get("processes", pynvml.nvmlDeviceGetComputeRunningProcesses, self._handle)
        if found is None:
            return None
        sizes = ((entry.pid, entry.usedGpuMemory) for entry in found)
        return tuple(GpuProcess(int(pid), None if size is None else size / _GIB) for pid, size in sizes)


def _watts(milliwatts: float | None) -> float | None:
    return None if milliwatts is None else milliwatts / 1e3
