"""Watts and seconds of one device against its clock, and the clock under a limit.

The dynamic energy of a piece of work goes with the square of the voltage. Below a knee the voltage stays at its floor, above it
rises with the clock (Mudge 2001; measured on A100 and A40 by Perseus, SOSP 2024). So far below the knee a step's dynamic energy is
constant, and its seconds are that energy over what a power limit leaves above the static watts. Seconds follow a smooth roofline:
work that waits for memory at the highest clock is bound by compute at a low one. A power limit holds the mean of the busy phases,
not of the step, of every device alone: where devices wait for each other, the one that needs most watts sets the pace.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
import yaml
from pydantic import BaseModel, ConfigDict, PositiveFloat

from search_spaces.gpus import GpuSpec
from search_spaces.kernels import Floats, Number

_FILE = Path(__file__).with_name("power.yaml")
NEWTON_STEPS = 5
INTENSITY_CACHE_MIB = 16.0


class PowerCoefficients(BaseModel):
    """What datasheets do not say about a kind of GPU's power.

    Attributes:
        static: Watts of a busy device that no clock changes, over its idle watts.
        knee_mhz: Clock below which the voltage stays at its floor.
        rise: Relative rise of the voltage for a relative rise of the clock above the knee.
        demand: Dynamic watts of large matrix products at the highest clock, over TDP; above 1 - static, the limit binds.
        intensity: Operations per byte of matrix products and attention behind a cache of `INTENSITY_CACHE_MIB`: with the device's
            own ratio, how far they follow the clock.
        burst: Dynamic watts of busy phases are at most so many times their mean in a step, where only the mean is known.
        attention: Dynamic watts of attention over those of matrix products.
        memory: The same for element-wise kernels.
        communication: The same for collectives and transfers.
        waiting: The same for ranks that wait for others (kernels that spin).
        window_s: Averaging time of board power.
        overshoot: Extra watts at the change from idle to busy, over the size of that change.
        spread: Standard deviation of the watts of devices of one kind, for the same work at the same clock, over their mean. V100
            under their limit differ by 8 % in matrix products (Sinha et al., SC 2022; taken as the whiskers of a box plot, 5.4
            standard deviations); there watts grow as the 2.6th power of the clock.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    static: PositiveFloat = 1.0
    knee_mhz: PositiveFloat = 1100.0
    rise: PositiveFloat = 0.8
    demand: PositiveFloat = 1.1
    intensity: PositiveFloat = 250.0
    burst: PositiveFloat = 2.0
    attention: PositiveFloat = 0.8
    memory: PositiveFloat = 0.45
    communication: PositiveFloat = 0.2
    waiting: PositiveFloat = 0.05
    window_s: PositiveFloat = 0.1
    overshoot: PositiveFloat = 8.0
    spread: PositiveFloat = 0.038


@dataclass(frozen=True, slots=True)
class ClockCurve:
    """Seconds and dynamic watts against the clock of one device. Clocks are shares of the highest; watts and seconds are 1 there.

    `follows` is the relative loss of time for a small relative loss of clock, at the highest clock.

    Attributes:
        knee: Clock below which the voltage stays at its floor.
        rise: Relative rise of the voltage for a relative rise of the clock above the knee.
        floor: Lowest clock.
        follows: `follows` of matrix products.
    """

    knee: float
    rise: float
    floor: float
    follows: float

    @classmethod
    def of(cls, gpu: GpuSpec, coefficients: PowerCoefficients) -> ClockCurve:
        """The curve of a device; compute and memory seconds of its matrix products are as operations and bytes over its peaks.

        A product in blocks that fit a cache of S elements moves at least 2 m n k / sqrt(S) of them (Hong and Kung 1981), so that
        its operations per byte go with the square root of the cache.
        """
        balance = gpu.peak("bf16") / (gpu.memory_bandwidth_gb_s * 1e9)
        clock = gpu.clock_mhz
        intensity = coefficients.intensity * math.sqrt(gpu.last_cache_mib / INTENSITY_CACHE_MIB)
        follows = 1.0 / (1.0 + (balance / intensity) ** 2)
        return cls(min(coefficients.knee_mhz / clock.boost, 0.99), coefficients.rise, clock.low / clock.boost, follows)

    def seconds(self, clock: Number, follows: Number) -> Floats:
        """Seconds of busy phases: root of the sum of squares of compute seconds, that grow as 1 / clock, and memory seconds."""
        return np.asarray(np.sqrt(1.0 + np.asarray(follows) * (np.asarray(clock) ** -2.0 - 1.0)))

    def voltage(self, clock: Number) -> Floats:
        """Voltage over that at the highest clock."""
        return np.maximum(1.0, 1.0 + self.rise * (np.asarray(clock) / self.knee - 1.0)) * self._floor_voltage

    def dynamic(self, clock: Number, follows: Number) -> Floats:
        """Dynamic watts of busy phases: voltage^2 for the same work in more seconds."""
        return np.asarray(self.voltage(clock) ** 2 / self.seconds(clock, follows))

    def clock(self, watts: Number, follows: Number) -> Floats:
        """Highest clock, not below the floor, whose dynamic watts are at most these: the inverse of `dynamic`."""
        wanted, own = np.maximum(watts, 1e-9), np.maximum(follows, 1e-6)
        below = (1.0 + np.maximum((self._floor_voltage**2 / wanted) ** 2 - 1.0, -own) / own + 1e-12) ** -0.5
        slope = self.rise / self.knee * self._floor_voltage
        above = np.ones(np.broadcast_shapes(wanted.shape, own.shape))
        for _ in range(NEWTON_STEPS):
            ratio = np.log(self.dynamic(above, own) / wanted)
            steepness = 2.0 * slope / self.voltage(above) + own * above**-3.0 / self.seconds(above, own) ** 2
            above = np.clip(above - ratio / steepness, self.knee, 1.0)
        return np.maximum(np.where(below <= self.knee, below, above), self.floor)

    @property
    def _floor_voltage(self) -> float:
        return 1.0 / (1.0 + self.rise * (1.0 / self.knee - 1.0))


@cache
def _file() -> dict[str, Any]:
    return dict(yaml.safe_load(_FILE.read_text(encoding="utf-8")))


def shipped_power(gpu: GpuSpec, without: str | None = None) -> PowerCoefficients:
    """The power coefficients for a kind of GPU.

    Args:
        gpu: The device; one without entry, as a user's own, gets the general ones.
        without: Source of published rows that must not have been used to fit them.
    """
    held_out = _file().get("without", {}).get(without, _file())
    return PowerCoefficients(**{**held_out.get("general", {}), **held_out.get("gpus", {}).get(gpu.name, {})})


def hungriest(spread: float, devices: int) -> float:
    """Expected watts of the hungriest of so many devices at the same clock and work, over their mean.

    The largest of n normal values lies at the quantile (n - 3/8) / (n + 1/4) (Blom 1958); exactly the mean for one.
    """
    return 1.0 + spread * NormalDist().inv_cdf((devices - 0.375) / (devices + 0.25))


@dataclass(frozen=True, slots=True)
class Draw:
    """What is known of a running step before a limit is lowered.

    Attributes:
        mean_w: Mean watts per package.
        limit_w: The power limit then.
        matrix_share: Share of the busy seconds that are matrix products and attention.
        devices: Devices that wait for each other at every step.
    """

    mean_w: float
    limit_w: float
    matrix_share: float
    devices: int = 1


def under_limit(
    gpu: GpuSpec, coefficients: PowerCoefficients, draw: Draw, limit_w: Number, clock: Number = 1.0
) -> tuple[Floats, Floats]:
    """Slow-down and mean watts under a lower limit, from the mean watts measured before.

    Args:
        gpu: The device.
        coefficients: Its power coefficients.
        draw: What was measured.
        limit_w: The lower power limit.
        clock: The lower clock limit, over the highest clock.

    Returns:
        Step time over the time before, and mean watts per package.
    """
    curve = ClockCurve.of(gpu, coefficients)
    static, follows = coefficients.static * gpu.idle_w, curve.follows * draw.matrix_share
    own = max(draw.mean_w - static, 0.05 * gpu.tdp_w)
    busy = max(min(coefficients.demand * gpu.tdp_w, coefficients.burst * own), own)
    most = hungriest(coefficients.spread, draw.devices)

    def clocks(hunger: float) -> tuple[Floats, Floats]:
        """Clock before and after of a device that needs so many times the mean watts."""
        before = curve.clock((draw.limit_w / hunger - static) / busy, follows)
        held = curve.clock((np.asarray(limit_w) / hunger - static) / busy, follows)
        return before, np.minimum(np.minimum(held, clock), before)

    (before, after), (pace_before, pace) = clocks(1.0), clocks(most)
    share = np.minimum(1.0, own / (busy * curve.dynamic(before, follows)))
    slow = share * curve.seconds(pace, follows) / curve.seconds(pace_before, follows) + 1.0 - share
    busy_s = share * curve.seconds(after, follows) / curve.seconds(before, follows)
    return slow, static + busy * curve.dynamic(after, follows) * busy_s / slow
