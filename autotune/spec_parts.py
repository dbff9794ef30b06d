"""Parts of a study file that stand by themselves."""

from __future__ import annotations

from typing import Annotated, Self

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
        steps: Optimiser steps of a trial.
        warmup_steps: First steps that are not measured (start-up, allocator, Adam's state).
        startup_timeout_s: Limit from launch to the end of the first step; doubled for a pool's first trial.
        step_timeout_s: A trial without a step for so long, after its first one, is HUNG.
        trial_timeout_s: Limit of the whole trial.
    """

    steps: PositiveInt = 12
    warmup_steps: NonNegativeInt = 2
    startup_timeout_s: PositiveFloat = 300.0
    step_timeout_s: PositiveFloat = 120.0
    trial_timeout_s: PositiveFloat = 1800.0

    @model_validator(mode="after")
    def _something_is_measured(self) -> Self:
        if self.steps <= self.warmup_steps:
            problem = f"leaves nothing to measure after warmup_steps={self.warmup_steps}"
            raise wrong("steps", self.steps, problem, f"give at least {self.warmup_steps + 6} steps: six tell an interval")
        return self


class PowerDomain(Part):
    """Nodes that one feed, rack or room carries, and how many watts it may give them. Watts at the wall, not of boards.

    Attributes:
        name: Its name.
        nodes: How many nodes of a pool it carries at most, or the names of pools and of other domains that are in it.
        limit_w: Watts that it may give at most.
        window_s: Seconds over which these watts are a mean.
    """

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,62}$")]
    nodes: PositiveInt | Annotated[tuple[str, ...], Field(min_length=1)]
    limit_w: PositiveFloat
    window_s: PositiveFloat = 1.0
