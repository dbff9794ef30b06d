"""HIP's order of AMD devices, from the kernel's compute topology: for libraries before ROCm 6.4, which do not tell it."""

from __future__ import annotations

from pathlib import Path


def hip_order(topology: Path) -> dict[str, int]:
    """HIP's number of each device by PCI bus id, without any list of visible devices; empty where the kernel shows nothing.

    HIP numbers the topology's nodes that have SIMD units, in the order of the nodes.
    """
    found: dict[str, int] = {}
    try:
        nodes = sorted((node for node in topology.iterdir() if node.name.isdigit()), key=lambda node: int(node.name))
        for node in nodes:
            properties = _properties(node / "properties")
            if properties.get("simd_count"):
                found[_bus_id(properties)] = len(found)
    except OSError:
        return {}
    return found


def _properties(path: Path) -> dict[str, int]:
    pairs = (line.split() for line in path.read_text(encoding="ascii", errors="replace").splitlines())
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdigit()}


def _bus_id(properties: dict[str, int]) -> str:
    """`location_id` holds bus, device and function in 8, 5 and 3 bits."""
    location = properties.get("location_id", 0)
    return f"{properties.get('domain', 0):04x}:{location >> 8 & 0xFF:02x}:{location >> 3 & 0x1F:02x}.{location & 7:x}"
