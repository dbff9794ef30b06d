"""How long a trial may take: as its study says, else by what is predicted of its configuration.

A limit only bounds what a hang may waste: one that a healthy trial reaches loses its measurement, so that it lies far above what is
predicted (benchmarks/accuracy_time.py: most predictions are within a third of what is measured).
"""

from __future__ import annotations

from collections.abc import Mapping

from autotune.errors import SpecError
from autotune.spec_parts import Measurement
from launchers.limits import Limits
from search_spaces.hardware import PoolSpec

STARTUP_S, STEP_S, TRIAL_S = 300.0, 120.0, 1800.0
"""The limits where nothing slower is predicted."""
_STEP, _FIRST_STEP, _TRIAL = 5.0, 10.0, 3.0
"""Times the predicted seconds. First steps compile, allocate and connect; the mean of many steps strays less than one of them."""
_FEWEST_STEPS = 6
"""Steps after the warm-up that tell an interval."""


def predicted_step_s(pool: PoolSpec, predicted: Mapping[str, float]) -> float:
    """Seconds of a step by what is predicted of a configuration; 0 where nothing is, and on CPU, where it is not predicted well."""
    return predicted.get("predicted_step_time_s", 0.0) if pool.device == "cuda" else 0.0


def limits_of(measurement: Measurement, predicted_step_s: float, *, steps: int, exploring_steps: int, first: bool) -> Limits:
    """The limits of one trial, its soaking apart.

    Args:
        measurement: Limits that the study gives are obeyed.
        predicted_step_s: Seconds of a step as predicted of its configuration; 0 where nothing is.
        steps: Steps of the trial.
        exploring_steps: Steps of an exploring one, for which the study's limit of a whole trial is meant.
        first: Whether it is its pool's first trial, which has twice the time to start.
    """
    longer = max(1.0, steps / exploring_steps)
    startup_s = measurement.startup_timeout_s or max(STARTUP_S, _FIRST_STEP * predicted_step_s)
    startup_s *= 2 if first else 1
    trial_s = (
        measurement.trial_timeout_s * longer
        if measurement.trial_timeout_s
        else max(TRIAL_S * longer, startup_s + _TRIAL * steps * predicted_step_s)
    )
    return Limits(startup_s, measurement.step_timeout_s or max(STEP_S, _STEP * predicted_step_s), trial_s)


def check_time_limits(measurement: Measurement, predicted_step_s: float) -> None:
    """Refuse limits of the study that its own baseline cannot keep: it would only show, an hour later, that it timed out.

    Args:
        measurement: The study's limits.
        predicted_step_s: Seconds of a step as predicted of its baseline; 0 where nothing is.

    Raises:
        SpecError: a limit lies below what is predicted.
    """
    fewest = measurement.warmup_steps + _FEWEST_STEPS
    takes = {"startup_timeout_s": 1, "step_timeout_s": 1, "trial_timeout_s": min(fewest, measurement.steps)}
    for name, steps in takes.items():
        limit_s, needed_s = getattr(measurement, name), steps * predicted_step_s
        if limit_s is not None and limit_s < needed_s:
            what = "a step" if steps == 1 else f"the {steps} steps that tell a result"
            problem = f"is less than the {needed_s:,.0f} s predicted for {what} of the baseline"
            hint = f"leave it out, then it follows what is predicted; or give at least {_STEP * needed_s:,.0f}"
            raise SpecError(f"measurement.{name}", limit_s, problem, hint)
