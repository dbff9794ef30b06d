"""GpuSpec, LinkSpec, Links: what machines are made of. The figures and their sources are in hardware.yaml.

A user's own GPU or link is an entry of the same shape in the study (`OwnHardware`); it is looked up before the shipped ones.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, PositiveInt, model_validator

Precision = Literal["fp32", "tf32", "fp16", "bf16", "fp8", "fp4"]

_FILE = Path(__file__).with_name("hardware.yaml")
_NETWORK_OF_LINK = {"nvlink3": "ib-200", "nvlink4": "ib-400", "nvlink5": "ib-400", "nvl72": "ib-800", "loopback": "loopback"}


_SMALLEST = 1e-6


def _of_a_machine(value: float) -> float:
    if value < _SMALLEST:
        raise ValueError(f"must be at least {_SMALLEST:g}")
    return value


Figure = Annotated[float, Field(gt=0, le=1e9), AfterValidator(_of_a_machine)]
"""A figure of a device or a link in its unit, within bounds that no machine passes: times and watts stay finite numbers."""


class ClockRange(BaseModel):
    """Clocks of the multiprocessors in MHz: the lowest settable, the guaranteed, the highest."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    low: Figure
    base: Figure
    boost: Figure

    @model_validator(mode="after")
    def _rising(self) -> ClockRange:
        if not self.low <= self.base <= self.boost:
            raise ValueError(f"low <= base <= boost is needed, got {self.low:g}, {self.base:g} and {self.boost:g} MHz")
        return self


class GpuSpec(BaseModel):
    """One kind of device. Per device as a rank sees it, except watts, which are per package.

    Attributes:
        vendor: Who makes it.
        memory_gib: Device memory.
        memory_bandwidth_gb_s: Peak bandwidth of that memory, 10^9 bytes/s.
        last_cache_mib: The cache between that memory and the multiprocessors.
        peak_tflops: Dense peak by precision, 10^12 operations/s.
        multiprocessors: SMs or compute units.
        exponentials_per_clock: Exponentials that one of them finishes per clock.
        arch_major: CUDA compute capability, major number (7 Volta, 8 Ampere, 9 Hopper, 10 Blackwell); ROCm's gfx9 counts as 9.
        dies_per_package: Devices that share one package and its watts (MI250: 2).
        tdp_w: Board power the device is built for, per package.
        idle_w: Watts with a context open and nothing running, per package.
        power_limit_w: Lowest and highest power limit that can be set, per package.
        clock_mhz: Clocks of the multiprocessors.
        link: Name of the link to the other devices of the node.
        host_link: Name of the link to the host's memory.
        source: Where the figures are from.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    vendor: Literal["nvidia", "amd", "cpu"]
    memory_gib: Figure
    memory_bandwidth_gb_s: Figure
    last_cache_mib: Figure = 40
    peak_tflops: dict[Precision, Figure]
    multiprocessors: PositiveInt
    exponentials_per_clock: Figure = 16
    arch_major: PositiveInt = 9
    dies_per_package: PositiveInt = 1
    tdp_w: Figure
    idle_w: Figure
    power_limit_w: tuple[Figure, Figure]
    clock_mhz: ClockRange
    link: str
    host_link: str
    source: Annotated[str, Field(min_length=1)]
    name: str = ""

    @model_validator(mode="after")
    def _figures_agree(self) -> GpuSpec:
        low, high = self.power_limit_w
        if not self.idle_w < self.tdp_w or low > high:
            raise ValueError(f"idle_w={self.idle_w} < tdp_w={self.tdp_w} and a rising power_limit_w are needed, got {low}-{high}")
        if not low <= self.tdp_w <= high:
            raise ValueError(f"a power_limit_w around tdp_w={self.tdp_w:g} is needed, got {low:g} to {high:g}")
        if "fp32" not in self.peak_tflops:
            raise ValueError("peak_tflops needs at least fp32")
        return self

    @property
    def operations_per_clock(self) -> float:
        """Operations of 16-bit products that one multiprocessor finishes per clock."""
        return self.peak("bf16") / (self.multiprocessors * self.clock_mhz.boost * 1e6)

    @property
    def exponential_width(self) -> float:
        """Width of a head at which a score's two products take as long as its exponential."""
        return self.operations_per_clock / (4.0 * self.exponentials_per_clock)

    def peak(self, precision: Precision) -> float:
        """Dense operations/s; a precision the device lacks runs at the next wider one it has (fp4 -> fp8 -> bf16 -> fp32)."""
        wider: dict[Precision, Precision] = {"fp4": "fp8", "fp8": "bf16", "bf16": "fp16", "fp16": "fp32", "tf32": "fp32"}
        while precision not in self.peak_tflops:
            precision = wider[precision]
        return self.peak_tflops[precision] * 1e12


def power_unit(gpus_per_board: int) -> str:
    """What watts and power limits are of, in words."""
    return "GPU" if gpus_per_board == 1 else f"board of {gpus_per_board} GPUs"


class LinkSpec(BaseModel):
    """One kind of connection between devices.

    Attributes:
        bandwidth_gb_s: Peak per port and direction, 10^9 bytes/s.
        latency_us: One step of a collective over it.
        domain: Devices that reach each other over it; none = the devices of a node.
        devices_per_port: Devices of a node that share one port (networks).
        rail_optimised: Whether equal positions of all nodes share a switch, so that every device uses its own port at once.
        source: Where the figures are from.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    bandwidth_gb_s: Figure
    latency_us: Figure
    domain: PositiveInt | None = None
    devices_per_port: Figure = 1
    rail_optimised: bool = True
    source: Annotated[str, Field(min_length=1)]
    name: str = ""

    @property
    def bytes_per_s(self) -> float:
        """Peak bytes/s of one device and direction."""
        return self.bandwidth_gb_s * 1e9 / self.devices_per_port

    @property
    def latency_s(self) -> float:
        """One step of a collective, in seconds."""
        return self.latency_us * 1e-6


class Links(BaseModel):
    """How the devices of a pool are joined: inside a domain, between domains, and to their hosts.

    Attributes:
        domain: Devices that reach each other over `inside`.
        inside: Link inside a domain (NVLink, Infinity Fabric, PCIe).
        between: Network between domains.
        host: Link from a device to its host's memory.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    domain: PositiveInt
    inside: LinkSpec
    between: LinkSpec
    host: LinkSpec


def _named(entries: Any) -> Any:
    """Entries that carry their own names, and say where their figures are from."""
    if not isinstance(entries, Mapping):
        return entries
    return {
        name: {"source": "the study", **entry, "name": name} if isinstance(entry, Mapping) else entry
        for name, entry in entries.items()
    }


Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,62}$")]


class OwnHardware(BaseModel):
    """A user's own devices and links: entries as in hardware.yaml. One named as a shipped one replaces it.

    Attributes:
        gpus: Devices by name.
        links: Links by name.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    gpus: Annotated[dict[Name, GpuSpec], BeforeValidator(_named)] = Field(default_factory=dict)
    links: Annotated[dict[Name, LinkSpec], BeforeValidator(_named)] = Field(default_factory=dict)


@cache
def _shipped() -> dict[str, Any]:
    return dict(yaml.safe_load(_FILE.read_text(encoding="utf-8")))


def gpu(name: str, own: Mapping[str, GpuSpec] | None = None) -> GpuSpec:
    """A device by its name in hardware.yaml, by a shorthand, or from the user's own; "H100 80GB" is "h100-80gb".

    Raises:
        KeyError: no such device.
    """
    if own and name in own:
        return own[name]
    shipped = _shipped()
    spelled = re.sub(r"[\s_]+", "-", name.strip().lower())
    known = shipped["aliases"].get(spelled, spelled)
    if known not in shipped["gpus"]:
        raise KeyError(f"unknown gpu {name!r}; known: {', '.join(gpu_names())}")
    return GpuSpec.model_validate({**shipped["gpus"][known], "name": known})


def arch_major(name: str, own: Mapping[str, GpuSpec] | None = None) -> int:
    """A device's `arch_major` by its name; the default for a device that is not known."""
    try:
        return gpu(name, own).arch_major
    except KeyError:
        return int(GpuSpec.model_fields["arch_major"].default)


def gpu_names() -> tuple[str, ...]:
    """Names of the shipped devices."""
    return tuple(_shipped()["gpus"])


def gpu_aliases() -> tuple[str, ...]:
    """Shorthands of the shipped devices."""
    return tuple(_shipped()["aliases"])


def link_names() -> tuple[str, ...]:
    """Names of the shipped links."""
    return tuple(_shipped()["links"])


def node_defaults() -> dict[str, float]:
    """`overhead_over_tdp` and `psu_efficiency` of nodes that say nothing else."""
    return {name: float(value) for name, value in _shipped()["nodes"].items() if name != "source"}


def link(name: str, own: Mapping[str, LinkSpec] | None = None) -> LinkSpec:
    """A link by its name in hardware.yaml or from the user's own.

    Raises:
        KeyError: no such link.
    """
    if own and name in own:
        return own[name]
    if name not in _shipped()["links"]:
        raise KeyError(f"unknown link {name!r}; known: {', '.join(link_names())}")
    return LinkSpec.model_validate({**_shipped()["links"][name], "name": name})


def links_of(
    device: GpuSpec,
    gpus_per_node: int,
    network: str | None = None,
    inside: str | None = None,
    own: Mapping[str, LinkSpec] | None = None,
) -> Links:
    """How a pool of this device is joined where nothing else is said.

    Args:
        device: The device.
        gpus_per_node: Devices of a node.
        network: Link between nodes; none = the one usual for the device's generation.
        inside: Link inside a node; none = the device's own.
        own: The user's own links by name.
    """
    inner = link(inside or device.link, own)
    outer = link(network or _NETWORK_OF_LINK.get(inner.name, "ib-200"), own)
    return Links(domain=inner.domain or gpus_per_node, inside=inner, between=outer, host=link(device.host_link, own))
