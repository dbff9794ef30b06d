"""Parts of a study file that stand by themselves."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    FiniteFloat,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    model_validator,
)

from autotune.errors import NOTHING
from autotune.spec_errors import wrong


class Part(BaseModel):
    """A part of a study file: immutable, and no field that is not known."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Budget(Part):
    """When a study ends at the latest. Refused trials count against neither.

    Attributes:
        trials: Launched trials per pool and node count, the baseline included; confirming runs come on top.
        wall_time_s: Seconds for the whole study.
        confidence: A pool's study ends before its budget once it is so sure that no further candidate gains 1 %, by the sampler's
            own model (`residual` only); none = never.
        gpu_hours: GPU-hours per pool and node count, start-up included.
        energy_kwh: Energy of the GPUs per pool and node count, where it can be measured.
        usd: Money per pool and node count; needs the pool's `usd_per_gpu_hour`.
    """

    trials: PositiveInt = 30
    wall_time_s: PositiveFloat | None = None
    confidence: Annotated[float, Field(gt=0.0, lt=1.0)] | None = 0.95
    gpu_hours: PositiveFloat | None = None
    energy_kwh: PositiveFloat | None = None
    usd: PositiveFloat | None = None


class Measurement(Part):
    """How long a trial runs.

    Attributes:
        steps: Most optimiser steps of a trial.
        warmup_steps: First steps that are never measured (start-up, allocator, Adam's state); a longer warm-up is detected.
        interval: A trial ends early once the 95 % interval of its median step time reaches so far to either side, over the median;
            0 = always all steps.
        racing: Whether an exploring trial ends as soon as it cannot win.
        startup_timeout_s: Limit from launch to the end of the first step; doubled for a pool's first trial. None of these three
            given: 300, 120 and 1800 s, or longer where slower steps are predicted (see `autotune.time_limits`).
        step_timeout_s: A trial without a step for so long, after its first one, is HUNG.
        trial_timeout_s: Limit of the whole trial.
        when_busy: What happens where somebody else computes on a trial's GPUs, or holds their memory, before its launch: `wait`
            until they are free; `skip` the trial (LOST, tried again later; three in a row end the pool's study); `fail`: end the
            pool's study. The owner is named.
        foreign_cpu_fraction: On a CPU pool, share of the cores that others may use before a trial counts as disturbed.
        busy_timeout_s: Longest wait; then the trial is skipped.
    """

    steps: PositiveInt = 30
    warmup_steps: NonNegativeInt = 2
    interval: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.01
    racing: bool = True
    startup_timeout_s: PositiveFloat | None = None
    step_timeout_s: PositiveFloat | None = None
    trial_timeout_s: PositiveFloat | None = None
    when_busy: Literal["wait", "skip", "fail"] = "wait"
    foreign_cpu_fraction: Annotated[float, Field(gt=0.0, le=1.0)] = 0.10
    busy_timeout_s: PositiveFloat = 600.0

    @model_validator(mode="after")
    def _something_is_measured(self) -> Self:
        if self.steps <= self.warmup_steps:
            problem = f"leaves nothing to measure after warmup_steps={self.warmup_steps}"
            raise wrong("steps", self.steps, problem, f"give at least {self.warmup_steps + 6} steps: six tell an interval")
        return self


class Bound(Part):
    """Bounds of one metric, in the metric's unit.

    Attributes:
        max: It must not be above this.
        min: It must not be below this.
    """

    max: FiniteFloat | None = None
    min: FiniteFloat | None = None

    @model_validator(mode="after")
    def _something_is_bound(self) -> Self:
        if self.max is None and self.min is None:
            raise wrong("max", NOTHING, "neither max nor min is given", "give one, e.g. {max: 700}")
        if self.max is not None and self.min is not None and self.min > self.max:
            raise wrong("min", self.min, f"is above max={self.max:g}", "no value satisfies both")
        return self

    def __str__(self) -> str:
        """Such as `at most 700`."""
        parts = [f"at least {self.min:,g}"] if self.min is not None else []
        return " and ".join(parts + ([f"at most {self.max:,g}"] if self.max is not None else []))


class Soaking(Part):
    """How long the GPUs of a confirming trial warm up before its steps count, where their temperature can be read.

    Attributes:
        timeout_s: Longest warming up after the first steps that never count; then it is measured as it is, and says so. 0 = off.
        slope_c_per_min: GPUs are warm once the temperature of none of them changes faster than this.
        window_s: Seconds, and two steps at least, over which that is looked at.
    """

    timeout_s: NonNegativeFloat = 600.0
    slope_c_per_min: PositiveFloat = 1.0
    window_s: PositiveFloat = 60.0

    @model_validator(mode="after")
    def _can_settle(self) -> Self:
        if 0 < self.timeout_s < self.window_s:
            problem = f"is shorter than window_s={self.window_s:g}, so that nothing could settle"
            raise wrong("timeout_s", self.timeout_s, problem, "give several windows, or 0 to measure without warming up")
        return self


class Confirmation(Part):
    """How the best explored configurations are measured again before one is called the winner.

    Attributes:
        top: The best so many, and further ones whose 95 % interval reaches the best's; 0 = no confirmation.
        repeats: Runs of each, in turns, so that slow drift (heat, neighbours) hits all alike.
        steps: Optimiser steps of a confirming trial; none = twice those of an exploring one.
        soak: How warm its GPUs have to be before they count.
    """

    top: NonNegativeInt = 3
    repeats: Annotated[int, Field(ge=2)] = 3
    steps: PositiveInt | None = None
    soak: Soaking = Soaking()


class PowerDomain(Part):
    """Nodes that one feed, rack or room carries, and how many watts it may give them. Watts at the wall, not of boards.

    Attributes:
        name: Its name.
        nodes: How many nodes of a pool it carries at most, or the names of pools and of other domains that are in it.
        limit_w: Watts that it may give at most.
        window_s: Seconds over which these watts are a mean.
        bound: What a launch is held to: the power limits `enforced` on its GPUs, or the upper end of what is `predicted`.
    """

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,62}$")]
    nodes: PositiveInt | Annotated[tuple[str, ...], Field(min_length=1)]
    limit_w: PositiveFloat
    window_s: PositiveFloat = 1.0
    bound: Literal["enforced", "predicted"] = "enforced"
