"""What every vendor's module offers: GPUs that can be read, and their power limits. One bad field never stops a reading."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import Protocol

from autotune.errors import InfrastructureError
from launchers.gpu_sample import GpuSample

HOST, WALL = "host", "wall"
"""Vendors, so to say, of what is no board: the host's CPU packages, and the meter that a whole node hangs on."""


class TelemetryError(InfrastructureError):
    """A vendor's library, or a GPU, cannot be used at all; the message says why."""


class PowerLimitError(TelemetryError):
    """A power limit cannot be read or set.

    Attributes:
        permission: Whether only the right is missing: the fix is the administrator's.
    """

    def __init__(self, message: str, hint: str = "", *, permission: bool = False) -> None:
        super().__init__(message, hint)
        self.permission = permission


class Fields(Enum):
    """Fields that are read together, each group at its own period."""

    FAST = auto()
    """Power, energy, clocks, throttle reasons and NVIDIA's throttle counters."""
    SLOW = auto()
    """Temperatures, utilisation, memory, enforced limit, link counters."""
    BLOCKING = auto()
    """What blocks its caller for about 100 ms: the violation counters of AMD's MI300."""


ALL_FIELDS = frozenset(Fields)
FAST_FIELDS = frozenset({Fields.FAST})
SLOW_FIELDS = frozenset({Fields.SLOW})
BLOCKING_FIELDS = frozenset({Fields.BLOCKING})


@dataclass(frozen=True, slots=True)
class GpuInfo:
    """What does not change about a GPU. None: the device does not say; `Gpu.gaps` has the reason.

    Attributes:
        uuid: Identity; for a MIG instance its own.
        index: Position in the vendor's own list; not the number that CUDA or HIP gives it.
        vendor: "nvidia", "amd", `HOST` or `WALL`; "reported" where a trial's own program reports the readings.
        name: Product name.
        pci_bus_id: domain:bus:device.function, lower case, four-digit domain.
        package: Key of the package whose power is measured; the two dies of an MI250 share one, MIG instances share their board's.
        power_source: Which sensor `power_w` is: "instant", "average" or "current"; empty where there is none.
        driver: Version of its driver.
        mig: Whether this is a MIG instance, or a board cut into such: its power cannot be told from its neighbours'.
        default_power_limit_w: Limit from the factory.
        min_power_limit_w: Lowest limit that can be set.
        max_power_limit_w: Highest limit that can be set.
        max_sm_clock_mhz: Highest clock of the compute units.
        max_memory_clock_mhz: Highest clock of the memory.
        aliases: Other names of the GPU in lists of visible devices, such as its HIP number.
    """

    uuid: str
    index: int
    vendor: str
    name: str
    pci_bus_id: str
    package: str
    power_source: str = ""
    driver: str = ""
    mig: bool = False
    default_power_limit_w: float | None = None
    min_power_limit_w: float | None = None
    max_power_limit_w: float | None = None
    max_sm_clock_mhz: float | None = None
    max_memory_clock_mhz: float | None = None
    aliases: tuple[str, ...] = ()

    @property
    def is_board(self) -> bool:
        """Whether its power is that of a board."""
        return self.vendor not in (HOST, WALL)


@dataclass(frozen=True, slots=True)
class GpuProcess:
    """A process that uses a GPU: number in the host's namespace, and its memory there where the driver says it."""

    pid: int
    memory_gib: float | None


class Gpu(Protocol):
    """One GPU. Its methods may be called from several threads."""

    @property
    def info(self) -> GpuInfo:
        """What does not change."""
        ...

    @property
    def gaps(self) -> Mapping[str, str]:
        """Why a field of `GpuSample` or `GpuInfo` cannot be read, by its name; grows as reasons show."""
        ...

    @property
    def lost(self) -> str:
        """Why the GPU does not answer any more (fallen off its bus, XID); empty while it does."""
        ...

    def read(self, fields: frozenset[Fields] = ALL_FIELDS) -> GpuSample:
        """One reading. Never raises for a device's fault: what cannot be read is None, and `gaps` says why."""
        ...

    def enforced_power_limit_w(self) -> float:
        """The limit that holds now: the lowest of what was requested, the VBIOS, the host and out-of-band tools.

        Raises:
            PowerLimitError: where it cannot be read.
        """
        ...

    def requested_power_limit_w(self) -> float:
        """The limit that was set last through the driver (the default if nobody did): what a restore puts back.

        Raises:
            PowerLimitError: where it cannot be read.
        """
        ...

    def set_power_limit_w(self, watts: float) -> None:
        """Ask for a limit; what is enforced may be lower.

        Raises:
            PowerLimitError: where the device, its range or the process's rights do not allow it.
        """
        ...

    def processes(self) -> tuple[GpuProcess, ...] | None:
        """Processes that compute on it now; None where the driver does not say."""
        ...
