"""What a study's pools are made of: shipped figures, the study's own entries, and links between nodes."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence

from autotune.errors import SpecError
from autotune.spec_errors import nearest, wrong
from search_spaces import gpus
from search_spaces.config import TrialConfig
from search_spaces.device_rules import limit_ranges
from search_spaces.gpus import GpuSpec, OwnHardware
from search_spaces.hardware import PoolSpec
from search_spaces.prediction import Machines
from search_spaces.space import SearchSpace

_NO_OWN = OwnHardware()
LIMIT_KNOBS = ("gpu_power_limit_w", "sm_clock_limit_mhz")


def machines_of(pool: PoolSpec, own: OwnHardware = _NO_OWN, network: str | None = None, field: str = "") -> Machines:
    """The figures of a pool's GPU and links, with the shipped coefficients.

    Args:
        pool: The pool.
        own: The study's own devices and links.
        network: Link between the nodes, in place of the pool's.
        field: What named the GPU, for the message; none = the pool.

    Raises:
        SpecError: the GPU or the network is unknown.
    """
    device = find_gpu(pool.gpu, field or f"pools.{pool.name}.gpu", own)
    if network is not None and network not in _links(own):
        raise SpecError("--network", network, "is not a known link", nearest(network, _links(own)))
    return Machines.shipped(device, pool.gpus_per_node, network or pool.network, own_links=own.links)


def find_gpu(name: str, field: str, own: OwnHardware = _NO_OWN) -> GpuSpec:
    """A GPU by its name in the study or in hardware.yaml, or by a shorthand.

    Raises:
        SpecError: there is none; the nearest names are in the hint.
    """
    try:
        return gpus.gpu(name, own.gpus)
    except KeyError:
        raise SpecError(field, name, "is not a known GPU", _near(name, own)) from None


def check_hardware(own: OwnHardware, pools: Sequence[PoolSpec]) -> None:
    """For the study's validator: every link that a device or a pool names exists, and only `cpu` is a CPU.

    Raises:
        PydanticCustomError: with the field below the study.
    """
    for name, device in own.gpus.items():
        if (device.vendor == "cpu") != (name == "cpu"):
            hint = "name the entry `cpu`, or give the vendor that makes the device: nvidia or amd"
            raise wrong(f"hardware.gpus.{name}.vendor", device.vendor, "ranks on a CPU are the entry `cpu`, and no other", hint)
        for place in ("link", "host_link"):
            _check_link(f"hardware.gpus.{name}.{place}", getattr(device, place), own)
    for position, pool in enumerate(pools):
        if pool.network is not None:
            _check_link(f"pools[{position}].network", pool.network, own)


def check_limits(own: OwnHardware, pool: PoolSpec, space: SearchSpace) -> None:
    """For the study's validator: power and clock limits of the search and the baseline are ones that the pool's GPU takes.

    Nothing is said where the GPU is not known. What the boards themselves take is asked before a study starts (`power_rights`).

    Raises:
        PydanticCustomError: with the field below the study.
    """
    searched = {knob: [row[place] for row in part.rows] for part in space.dimensions for place, knob in enumerate(part.knobs)}
    for knob in LIMIT_KNOBS:
        if found := outside_of_range(own, pool, knob, searched.get(knob, [getattr(space.base, knob)])):
            raise wrong(f"{'search' if knob in searched else 'baseline'}.{knob}", *found)


def check_config_limits(own: OwnHardware, pools: Iterable[PoolSpec], config: TrialConfig, field: str) -> None:
    """The same for one configuration.

    Raises:
        SpecError: with `field` before the knob's name.
    """
    for pool in pools:
        for knob in LIMIT_KNOBS:
            if found := outside_of_range(own, pool, knob, [getattr(config, knob)]):
                raise SpecError(f"{field} {knob}", *found)


def outside_of_range(own: OwnHardware, pool: PoolSpec, knob: str, values: Iterable[float | None]) -> tuple[float, str, str] | None:
    """The first value that a pool's GPU does not take, what is wrong with it, and what it takes; None where all are taken."""
    try:
        device = gpus.gpu(pool.gpu, own.gpus)
    except KeyError:
        return None
    low, high, unit = limit_ranges(device).get(knob, (0.0, float("inf"), ""))
    outside = [value for value in values if value is not None and not low <= value <= high]
    hint = f"the GPUs of pool {pool.name!r} take {low:g} to {high:g} {unit} ({device.name}); describe others under hardware.gpus"
    return (outside[0], "is outside of what the devices take", hint) if outside else None


def _check_link(field: str, name: str, own: OwnHardware) -> None:
    if name not in _links(own):
        raise wrong(field, name, "is not a known link", f"{nearest(name, _links(own))}; or describe it under hardware.links")


def _links(own: OwnHardware) -> tuple[str, ...]:
    return (*own.links, *gpus.link_names())


def _near(name: str, own: OwnHardware) -> str:
    """The known GPUs whose names are nearest, or all of them; how to describe another."""
    known = (*own.gpus, *gpus.gpu_names(), *gpus.gpu_aliases())
    near = difflib.get_close_matches(name.lower(), known, n=3, cutoff=0.4)
    return f"did you mean {' or '.join(near)}?" if near else f"describe it under hardware.gpus; known: {', '.join(known)}"
