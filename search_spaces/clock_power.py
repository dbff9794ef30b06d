"""Watts against clock of one device, and the clock under a limit.

Dynamic power grows with frequency x voltage^2; below a knee the voltage stays at its floor, above it rises with the clock
(Mudge 2001; measured on A100 and A40 by Perseus, SOSP 2024). A power limit holds the mean of the busy phases, not of the step.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from pydantic import BaseModel, ConfigDict, PositiveFloat

from search_spaces.gpus import GpuSpec
from search_spaces.kernels import Floats, Number

_FILE = Path(__file__).with_name("power.yaml")
_GRID = np.linspace(0.02, 1.0, 400)
AT_LIMIT = 0.97


class PowerCoefficients(BaseModel):
    """What datasheets do not say about a kind of GPU's power. Shares of TDP or of the highest clock.

    Attributes:
        static: Watts of a busy device that no clock changes, over TDP.
        knee: Clock below which the voltage stays at its floor.
        rise: Relative rise of the voltage for a relative rise of the clock above the knee.
        demand: Dynamic watts of large matrix products at the highest clock, over TDP; above 1 - static, the limit binds.
        bound: Share of a busy phase's time that follows the clock.
        burst: Dynamic watts of busy phases over their mean in a step, where only the mean is known.
        floor: Lowest clock that a power limit sets.
        attention: Dynamic watts of attention over those of matrix products.
        memory: The same for element-wise kernels.
        communication: The same for collectives and transfers.
        waiting: The same for ranks that wait for others (kernels that spin).
        window_s: Averaging time of board power.
        overshoot: Extra watts at the change from idle to busy, over the size of that change.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    static: PositiveFloat = 0.28
    knee: PositiveFloat = 0.7
    rise: PositiveFloat = 0.8
    demand: PositiveFloat = 1.2
    bound: PositiveFloat = 0.85
    burst: PositiveFloat = 1.2
    floor: PositiveFloat = 0.24
    attention: PositiveFloat = 0.8
    memory: PositiveFloat = 0.45
    communication: PositiveFloat = 0.2
    waiting: PositiveFloat = 0.05
    window_s: PositiveFloat = 0.1
    overshoot: PositiveFloat = 4.0

    def dynamic(self, clock: Number) -> Floats:
        """Dynamic watts at a clock over those at the highest clock; 1 at 1."""
        voltage = np.maximum(1.0, 1.0 + self.rise * (np.asarray(clock) / self.knee - 1.0))
        highest = max(1.0, 1.0 + self.rise * (1.0 / self.knee - 1.0))
        return np.asarray(clock * (voltage / highest) ** 2)

    def clock(self, share: Number) -> Floats:
        """Highest clock whose dynamic watts are this share of those at the highest clock, not below the floor."""
        return np.asarray(np.maximum(np.interp(share, self.dynamic(_GRID), _GRID), self.floor))


@cache
def _file() -> dict[str, Any]:
    return dict(yaml.safe_load(_FILE.read_text(encoding="utf-8")))


def shipped_power(gpu: str, without: str | None = None) -> PowerCoefficients:
    """The power coefficients for a kind of GPU.

    Args:
        gpu: Name in hardware.yaml; a user's own GPU gets the general ones.
        without: Source of published rows that must not have been used to fit them.
    """
    held_out = _file().get("without", {}).get(without, _file())
    return PowerCoefficients(**{**held_out.get("general", {}), **held_out.get("gpus", {}).get(gpu, {})})


def under_limit(
    gpu: GpuSpec,
    coefficients: PowerCoefficients,
    draw_w: float,
    base_limit_w: float,
    limit_w: Number,
    clock: Number = 1.0,
) -> tuple[Floats, Floats]:
    """Slow-down and mean watts under a lower limit, from the mean watts measured under the base limit.

    Args:
        gpu: The device.
        coefficients: Its power coefficients.
        draw_w: Mean watts per package under the base limit.
        base_limit_w: The base limit.
        limit_w: The lower power limit.
        clock: The lower clock limit, over the highest clock.

    Returns:
        Step time over the time under the base limit, and mean watts per package.
    """
    c, tdp = coefficients, gpu.tdp_w
    static = c.static * tdp
    own = max(draw_w - static, 0.05 * tdp)
    busy = c.demand * tdp if draw_w > AT_LIMIT * base_limit_w else min(c.demand * tdp, c.burst * own)
    before = c.clock((base_limit_w - static) / busy)
    share = np.minimum(1.0, own / (busy * c.dynamic(before)))
    after = np.maximum(np.minimum(np.minimum(c.clock((np.asarray(limit_w) - static) / busy), clock), before), c.floor)
    busy_s = share * (1.0 + c.bound * (before / after - 1.0))
    slow = busy_s + 1.0 - share
    return slow, static + busy * c.dynamic(after) * busy_s / slow
