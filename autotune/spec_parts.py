"""Parts of a study file that stand by themselves."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from autotune.spec_errors import wrong


class Part(BaseModel):
    """A part of a study file: immutable, and no field that is not known."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Budget(Part):
    """When a study ends at the latest. Refused trials count against neither.

    Attributes:
        trials: Launched trials per pool, the baseline included.
        wall_time_s: Seconds for the whole study.
    """

    trials: PositiveInt = 30
    wall_time_s: PositiveFloat | None = None


class Measurement(Part):
    """How long a trial runs.

    Attributes:
        steps: Most optimiser steps of a trial.
        warmup_steps: First steps that are never measured (start-up, allocator, Adam's state); a longer warm-up is detected.
        interval: A trial ends early once the 95 % interval of its median step time reaches so far to either side, over the median;
            0 = always all steps.
        startup_timeout_s: Limit from launch to the end of the first step; doubled for a pool's first trial.
        step_timeout_s: A trial without a step for so long, after its first one, is HUNG.
        trial_timeout_s: Limit of the whole trial.
        when_busy: What happens where somebody else computes on a trial's GPUs, or holds their memory, before its launch: `wait`
            until they are free; `skip` the trial (LOST, tried again later; three in a row end the pool's study); `fail`: end the
            pool's study. The owner is named.
        busy_timeout_s: Longest wait; then the trial is skipped.
    """

    steps: PositiveInt = 30
    warmup_steps: NonNegativeInt = 2
    interval: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.01
    startup_timeout_s: PositiveFloat = 300.0
    step_timeout_s: PositiveFloat = 120.0
    trial_timeout_s: PositiveFloat = 1800.0
    when_busy: Literal["wait", "skip", "fail"] = "wait"
    busy_timeout_s: PositiveFloat = 600.0

    @model_validator(mode="after")
    def _something_is_measured(self) -> Self:
        if self.steps <= self.warmup_steps:
            problem = f"leaves nothing to measure after warmup_steps={self.warmup_steps}"
            raise wrong("steps", self.steps, problem, f"give at least {self.warmup_steps + 6} steps: six tell an interval")
        return self
