"""`autotune doctor --telemetry` and `--watch`: what this node can measure, by device and field, with the reason for every gap."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from autotune.telemetry import Gpu, PowerLimitError, TelemetryError, open_gpus
from autotune.telemetry.sensors import sensor_of
from launchers.gpu_sample import GpuSample

VENDORS = ("nvidia", "amd", "host")
_OPEN_S = 20.0
_FIELDS = tuple(item.name for item in fields(GpuSample) if item.name not in ("time_s", "gpu", "throttle_counts"))
_HOST_FIELDS = ("power_w", "energy_j")
_NOT_TOLD = "the device does not tell it"


@dataclass(frozen=True, slots=True)
class DeviceReport:
    """What one device can tell.

    Attributes:
        vendor: Its vendor.
        index: Its number there.
        name: Product.
        uuid: Identity.
        values: What was read now, by field.
        gaps: Why a field cannot be read.
        sensor: How its power sensor behaves, in words.
    """

    vendor: str
    index: int
    name: str
    uuid: str
    values: dict[str, Any]
    gaps: dict[str, str]
    sensor: str = ""

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class TelemetryReport:
    """All devices, and by vendor why there are none."""

    devices: tuple[DeviceReport, ...]
    problems: dict[str, str]

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {"devices": [device.to_json() for device in self.devices], "problems": self.problems}

    def for_person(self) -> RenderableType:
        """A column per device, a row per field, and below it every gap with its reason."""
        table = Table("field", *(f"{device.vendor} {device.index}" for device in self.devices), box=None, pad_edge=False)
        for name in _FIELDS:
            if any(name in device.values or name in device.gaps for device in self.devices):
                table.add_row(name, *(_cell(device.values.get(name)) for device in self.devices))
        names = [f"{device.vendor} {device.index}: {device.name} {device.uuid} {device.sensor}" for device in self.devices]
        reasons: dict[tuple[str, str], list[str]] = {}
        for device in self.devices:
            for name, why in device.gaps.items():
                reasons.setdefault((name, why), []).append(f"{device.vendor} {device.index}")
        gaps = [Text(f"no {name}: {why} ({', '.join(who)})", style="yellow") for (name, why), who in reasons.items()]
        absent = [Text(f"no {vendor}: {why}", style="yellow") for vendor, why in self.problems.items()]
        return Group(*(Text(line) for line in names), *([table] if self.devices else []), *gaps, *absent)


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, dict):
        return " ".join(f"{reason}={seconds:.1f}s" for reason, seconds in value.items())
    if isinstance(value, tuple | list):
        return ",".join(value) or "none"
    return f"{value:,.1f}" if isinstance(value, float) else str(value)


def open_all(vendors: Sequence[str] = VENDORS) -> tuple[list[Gpu], dict[str, str]]:
    """All devices of this node, and by vendor why there are none; a driver that does not answer within 20 s is a reason, too."""
    gpus: list[Gpu] = []
    problems: dict[str, str] = {}
    for vendor in vendors:
        found = _within(_OPEN_S, lambda vendor=vendor: open_gpus(vendor))  # type: ignore[misc]
        if isinstance(found, TelemetryError):
            problems[vendor] = f"{found}{f' ({found.hint})' if found.hint else ''}"
        elif found is None:
            problems[vendor] = f"its driver did not answer within {_OPEN_S:g} s"
        else:
            gpus += found
    return gpus, problems


def _within(limit_s: float, call: Callable[[], list[Gpu]]) -> list[Gpu] | TelemetryError | None:
    answers: list[list[Gpu] | TelemetryError] = []

    def run() -> None:
        try:
            answers.append(call())
        except TelemetryError as error:
            answers.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(limit_s)
    return answers[0] if answers else None


def examine_telemetry(vendors: Sequence[str] = VENDORS) -> TelemetryReport:
    """Open every device of this node and read each field once."""
    gpus, problems = open_all(vendors)
    return TelemetryReport(tuple(map(_device, gpus)), problems)


def _device(gpu: Gpu) -> DeviceReport:
    sample = gpu.read()
    wanted = _HOST_FIELDS if gpu.info.vendor == "host" else _FIELDS
    values = {name: value for name in wanted if (value := getattr(sample, name)) is not None}
    gaps = {name: gpu.gaps.get(name, _NOT_TOLD) for name in wanted if name not in values}
    gaps |= {name: why for name, why in gpu.gaps.items() if name not in values}
    if gpu.info.vendor == "host":
        return DeviceReport("host", gpu.info.index, gpu.info.name, gpu.info.uuid, values, gaps)
    try:
        values["power_limit_w"] = gpu.enforced_power_limit_w()
        gaps.pop("power_limit_w", None)
    except PowerLimitError as error:
        gaps["power_limit_w"] = str(error)
    sensor = sensor_of(gpu)
    period = f"{sensor.update_period_s:.3f} s" if sensor.update_period_s else "unknown (its value did not change)"
    duty = "" if sensor.duty is None else f", looks {sensor.duty:.0%} of the time"
    words = f"[power: {gpu.info.power_source or 'none'}, update period {period}{duty}]"
    return DeviceReport(gpu.info.vendor, gpu.info.index, gpu.info.name, gpu.info.uuid, values, gaps, words)


def watch(console: Console, period_s: float = 1.0, rounds: int | None = None, vendors: Sequence[str] = VENDORS) -> None:
    """Show all GPUs live until Ctrl-C, or for so many rounds."""
    gpus, problems = open_all(vendors)
    with Live(console=console, auto_refresh=False, transient=False) as live:
        done = 0
        while rounds is None or done < rounds:
            live.update(live_table(gpus, problems), refresh=True)
            done += 1
            time.sleep(period_s if rounds is None or done < rounds else 0.0)


def live_table(gpus: Sequence[Gpu], problems: dict[str, str]) -> RenderableType:
    """One row per device: power against its limit, clock against its highest, heat, load, throttle reasons."""
    table = Table("device", "power W", "limit W", "clock MHz", "of", "temp C", "mem C", "load", "memory GiB", "throttled by")
    for gpu in gpus:
        sample = gpu.read()
        cells = (
            sample.power_w,
            sample.power_limit_w,
            sample.sm_clock_mhz,
            gpu.info.max_sm_clock_mhz,
            sample.temperature_c,
            sample.memory_temperature_c,
        )
        load = "-" if sample.utilization is None else f"{sample.utilization:.0%}"
        table.add_row(
            f"{gpu.info.vendor} {gpu.info.index} {gpu.info.name}",
            *("-" if cell is None else f"{cell:,.0f}" for cell in cells),
            load,
            _cell(sample.memory_used_gib),
            Text(gpu.lost or _state(sample), style="red" if gpu.lost or sample.throttling else ""),
        )
    notes = [Text(f"no {vendor}: {why}", style="yellow") for vendor, why in problems.items()]
    return Group(table, *notes)


def _state(sample: GpuSample) -> str:
    if sample.throttling is None:
        return "not told"
    return ", ".join(sample.throttling) or ("idle" if sample.idle else "nothing")
