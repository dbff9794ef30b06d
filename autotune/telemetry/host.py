"""Energy of the host's CPU packages and memory from RAPL, where the kernel lets this user read it (Linux powercap).

Each zone is read like a GPU of vendor "host". Wraps of its counter are undone by the range that the kernel states.
"""

from __future__ import annotations

import time
from pathlib import Path

from autotune.telemetry.base import ALL_FIELDS, HOST, Fields, Gpu, GpuInfo, GpuProcess, PowerLimitError, TelemetryError
from launchers.gpu_sample import GpuSample

POWERCAP = Path("/sys/class/powercap")
_MICRO = 1e-6


def open_all(root: Path = POWERCAP) -> list[Gpu]:
    """The zones of CPU packages and their memory.

    Raises:
        TelemetryError: where there are none, or this user may read none.
    """
    zones = [HostZone(index, path) for index, path in enumerate(_zones(root))]
    if not zones:
        raise TelemetryError(f"no RAPL zone below {root}", "virtual machines and most containers have none")
    readable = [zone for zone in zones if zone.read().energy_j is not None]
    if not readable:
        reason = next(iter(zones[0].gaps.values()))
        raise TelemetryError(f"RAPL cannot be read: {reason}", f"let this user read {root}/*/energy_uj")
    return list(readable)


def _zones(root: Path) -> list[Path]:
    """Packages and memory; cores and uncore lie inside their package, `psys` holds everything."""
    found = []
    for path in sorted(root.glob("intel-rapl:*")):
        try:
            name = (path / "name").read_text().strip()
        except OSError:
            continue
        if name.startswith("package") or name == "dram":
            found.append(path)
    return found


class HostZone:
    """One zone."""

    def __init__(self, index: int, path: Path) -> None:
        self._path = path
        self.gaps: dict[str, str] = {}
        self.lost = ""
        self._range_uj = self._read_uj("max_energy_range_uj")
        self._last_uj: int | None = None
        self._joules = 0.0
        self._power: tuple[float, float] | None = None
        name = (path / "name").read_text().strip()
        identity = f"{name}@{path.name}"
        self.info = GpuInfo(identity, index, HOST, name, "", identity, power_source="counter")

    def _read_uj(self, name: str) -> int | None:
        try:
            return int((self._path / name).read_text())
        except (OSError, ValueError) as error:
            self.gaps["energy_j"] = getattr(error, "strerror", None) or str(error)
            return None

    def read(self, fields: frozenset[Fields] = ALL_FIELDS) -> GpuSample:
        """Energy, and the mean power since the reading before."""
        if Fields.FAST not in fields:
            return GpuSample(time.time(), self.info.uuid)
        energy_uj, time_s = self._read_uj("energy_uj"), time.time()
        if energy_uj is None:
            return GpuSample(time_s, self.info.uuid)
        if self._last_uj is not None:
            step_uj = energy_uj - self._last_uj
            self._joules += _MICRO * (step_uj if step_uj >= 0 else step_uj + (self._range_uj or -step_uj))
        self._last_uj = energy_uj
        power_w = None
        if self._power is not None and time_s > self._power[0]:
            power_w = (self._joules - self._power[1]) / (time_s - self._power[0])
        self._power = (time_s, self._joules)
        return GpuSample(time_s, self.info.uuid, power_w=power_w, energy_j=self._joules)

    def enforced_power_limit_w(self) -> float:
        """Not offered."""
        raise PowerLimitError(f"{self.info.uuid}: power limits of the host are not read")

    def requested_power_limit_w(self) -> float:
        """Not offered."""
        return self.enforced_power_limit_w()

    def set_power_limit_w(self, watts: float) -> None:
        """Not offered."""
        raise PowerLimitError(f"{self.info.uuid}: power limits of the host are not set ({watts:g} W)")

    def processes(self) -> tuple[GpuProcess, ...] | None:
        """Not told by zone."""
        return None
