"""Heat, clocks and watts of a pool's GPUs under a load, step by step, in virtual time. Needs numpy and the standard library only.

Each GPU is one thermal mass, R x C from junction to inlet (heat sinks answer within one to two minutes), with its own silicon and
place in the chassis: rear GPUs breathe warmer air. Its clock obeys the power limit (dynamic watts follow clock^2.4: voltage falls
with the clock) and a thermal governor. All GPUs wait for the slowest at every collective.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

_EXPONENT = 2.4
_INLET_C, _ROOM_C, _REAR_C = 28.0, 3.0, 9.0
_RISE_C = 38.0
_SECONDS = 75.0
_SLOW_C, _HOT_C = 87.0, 95.0
_DOWN, _UP = 0.03, 0.01
_SILICON, _COOLING = 0.03, 0.06
_NOISE = 0.008
_FAULT_CLOCK = 0.25


def generator(*names: object) -> np.random.Generator:
    """Random numbers that depend on these names alone, alike in every process."""
    return np.random.default_rng([zlib.crc32(str(name).encode()) for name in names])


@dataclass(frozen=True, slots=True)
class Demand:
    """What a configuration asks of the machines when nothing limits them.

    Attributes:
        step_s: Seconds of an optimiser step.
        clocked: Share of it that follows the clock of the compute units.
        mean_w: Mean watts of an average GPU.
        peak_w: Watts of its busiest stretches.
        memory_gib: What the fullest GPU has to hold.
    """

    step_s: float
    clocked: float
    mean_w: float
    peak_w: float
    memory_gib: float


@dataclass(frozen=True, slots=True)
class Gpus:
    """The GPUs of a pool, arrays of length `gpus`.

    Attributes:
        idle_w: Watts of one that waits.
        own_w: Watts that one is built for.
        lowest_clock: Relative to the highest.
        silicon: Dynamic watts relative to an average GPU.
        inlet_c: Air before the heat sink.
        rise_c: Degrees over the inlet at the device's own power, in equilibrium.
        faulty: Whether the node's power supply holds it back (power brake).
    """

    idle_w: float
    own_w: float
    lowest_clock: float
    silicon: Floats
    inlet_c: Floats
    rise_c: Floats
    faulty: npt.NDArray[np.bool_]

    @classmethod
    def of(cls, gpu: Mapping[str, Any], nodes: int, per_node: int, seed: int, faulty_node: int | None = None) -> Gpus:
        """The pool of that seed, of GPUs with these `name`, `idle_w`, `tdp_w` and `lowest_clock`; half of a node is at the rear."""
        numbers = generator(seed, "gpus", gpu["name"], nodes, per_node)
        count = nodes * per_node
        place = np.arange(count)
        rear = (place % per_node) >= (per_node + 1) // 2
        return cls(
            idle_w=gpu["idle_w"],
            own_w=gpu["tdp_w"],
            lowest_clock=gpu["lowest_clock"],
            silicon=np.exp(_SILICON * numbers.standard_normal(count)),
            inlet_c=_INLET_C + numbers.normal(0.0, _ROOM_C) + _REAR_C * rear + numbers.normal(0.0, 1.0, count),
            rise_c=_RISE_C * np.exp(_COOLING * numbers.standard_normal(count)),
            faulty=np.full(count, False) if faulty_node is None else place // per_node == faulty_node,
        )


@dataclass(slots=True)
class Soak:
    """What a run of steps did, arrays (steps,) or (steps, gpus).

    Attributes:
        end_s: Virtual seconds from the start to the end of each step.
        step_s: Seconds of each step.
        mean_w: Mean watts of each GPU over the step.
        burst_w: Watts of its busy stretches.
        clock: Clock relative to the highest.
        temperature_c: At the end of the step.
        cap_s: Seconds at the power limit so far.
        thermal_s: Seconds held back by heat so far.
        brake_s: Seconds held back by the power brake so far.
    """

    end_s: list[float] = field(default_factory=list)
    step_s: list[float] = field(default_factory=list)
    mean_w: list[Floats] = field(default_factory=list)
    burst_w: list[Floats] = field(default_factory=list)
    clock: list[Floats] = field(default_factory=list)
    temperature_c: list[Floats] = field(default_factory=list)
    cap_s: list[Floats] = field(default_factory=list)
    thermal_s: list[Floats] = field(default_factory=list)
    brake_s: list[Floats] = field(default_factory=list)


def soak(load: Demand, gpus: Gpus, steps: int, noise_seed: object, limit_w: float | None = None, clock: float = 1.0) -> Soak:
    """Run a load.

    Args:
        load: What the configuration asks for.
        gpus: Where it runs; they start idle and cool.
        steps: Optimiser steps.
        noise_seed: Of the steps' scatter; None = steps without any.
        limit_w: Enforced power limit of every GPU; none = the device's own.
        clock: Highest clock allowed, relative to the device's highest.
    """
    idle, own_w, lowest = gpus.idle_w, gpus.own_w, gpus.lowest_clock
    limit = own_w if limit_w is None else limit_w
    dynamic = (load.mean_w - idle) * gpus.silicon
    burst = max(load.peak_w - load.mean_w, 0.0)
    by_power = np.clip(((limit - idle) / (dynamic + burst * 0.5)), 0.0, 1.0) ** (1 / _EXPONENT)
    noise = np.exp((0.0 if noise_seed is None else _NOISE) * generator(noise_seed, "steps").standard_normal(steps))
    temperature, governor = gpus.inlet_c + gpus.rise_c * idle / own_w, np.ones(len(gpus.silicon))
    seconds, shown = np.zeros((3, len(gpus.silicon))), Soak()
    now_s = 0.0
    for scatter in noise:
        governor = np.clip(np.where(temperature > _SLOW_C, governor - _DOWN, governor + _UP), lowest, 1.0)
        governor = np.where(temperature > _HOT_C, np.minimum(governor, 0.5), governor)
        own = np.minimum(np.minimum(by_power, governor), clock)
        own = np.where(gpus.faulty, np.minimum(own, _FAULT_CLOCK), np.maximum(own, lowest))
        alone_s = load.step_s * (load.clocked / own + 1.0 - load.clocked)
        alone_s = np.where(gpus.faulty, load.step_s / _FAULT_CLOCK, alone_s)
        step_s = float(alone_s.max() * scatter)
        watts = idle + dynamic * own**_EXPONENT * np.minimum(alone_s / step_s, 1.0)
        reached = gpus.inlet_c + gpus.rise_c * watts / own_w
        temperature = reached + (temperature - reached) * np.exp(-step_s / _SECONDS)
        reasons = (by_power <= np.minimum(governor, clock)) & (by_power < 1.0), governor < np.minimum(by_power, clock), gpus.faulty
        seconds = seconds + step_s * np.array(reasons)
        now_s += step_s
        shown.end_s.append(now_s)
        shown.step_s.append(step_s)
        shown.mean_w.append(watts)
        shown.burst_w.append(np.minimum(watts + burst * own**_EXPONENT, np.maximum(limit * 1.03, watts)))
        shown.clock.append(own)
        shown.temperature_c.append(temperature)
        for kept, so_far in zip((shown.cap_s, shown.thermal_s, shown.brake_s), seconds, strict=True):
            kept.append(so_far)
    return shown
