"""Objective: what a measured trial is worth, and which bounds its measurement crosses.

The score is scale-free, relative to the measured reference (the baseline): the sum over terms of
`weight x ln(metric / reference)`, and of `weight x (metric - reference)` for metrics that may be zero. Limits are never part of it.
A limit on watts at the wall is judged on those measured where there are any, else on those estimated.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from autotune.metric_names import may_be_zero
from autotune.power_domains import DomainLimit
from autotune.spec_parts import Bound
from autotune.wall_metrics import judged_on
from search_spaces.legality import Violation

THROUGHPUT = "tokens_per_s_per_gpu"
DEFAULT_WEIGHTS: Mapping[str, float] = {THROUGHPUT: 1.0, "gpu_peak_power_w_1s": -0.1, "throttle_fraction": -1.0}
"""Ten per cent less peak power weighs as one per cent more throughput; a run throttled half of the time loses 39 % of its worth."""

_MOST_SLACK = 1.0


@dataclass(frozen=True, slots=True)
class Objective:
    """Terms that are summed, and limits that bind the answer.

    Attributes:
        weights: Weight by metric name; positive where more is better.
        limits: Bounds by metric name.
        reference: Metrics of the reference measurement.
        domains: Limits of the power domains, for trials that were measured at the wall.
        every_term: Whether a term that the reference lacks is missed in every trial, in place of dropped (`pareto: true`).
    """

    weights: Mapping[str, float]
    limits: Mapping[str, Bound]
    reference: Mapping[str, float]
    domains: tuple[DomainLimit, ...] = ()
    every_term: bool = False

    @property
    def terms(self) -> tuple[str, ...]:
        """Metrics that the score is made of: those that the reference has."""
        return tuple(name for name in self.weights if _usable(name, self.reference.get(name)))

    @property
    def dropped(self) -> tuple[str, ...]:
        """Metrics with a weight that the reference does not have: they cannot be measured here."""
        return tuple(name for name in self.weights if name not in self.terms)

    def changes(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Each measured term against the reference: the logarithm of the ratio, or the difference where a metric may be zero."""
        return {name: on_scale(name, metrics[name]) - on_scale(name, self.reference[name]) for name in self._measured(metrics)}

    def parts(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """What every term adds to the score; a term that this trial could not measure is left out."""
        return {name: self.weights[name] * change for name, change in self.changes(metrics).items()}

    def score(self, metrics: Mapping[str, float]) -> float:
        """The sum of the terms, 0 for the reference itself; higher is better."""
        return sum(self.parts(metrics).values())

    def violations(self, metrics: Mapping[str, float]) -> list[Violation]:
        """Limits that the measurement crosses, and terms or limits that it lacks although the reference has them."""
        wanted = self.weights if self.every_term else self.terms
        lacking = [name for name in wanted if name not in self._measured(metrics)]
        crossed = [violation for name, bound in self.limits.items() if (violation := _crossed(name, bound, metrics))]
        crossed += [violation for domain in self.domains if (violation := _over(domain, metrics))]
        return [Violation(f"{name}_not_measured", 1.0, f"{name} was not measured in this trial") for name in lacking] + crossed

    def slack(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """How far each limit is away, as a share of it: negative where it is crossed. Limits without a measurement are left out."""
        judged = [(judged_on(name, metrics), bound) for name, bound in self.limits.items()]
        slack = {name: -excess(bound, metrics[name]) for name, bound in judged if name in metrics}
        measured = [(domain, found) for domain in self.domains if (found := domain.measured(metrics))]
        return slack | {domain.name: 1.0 - watts / domain.limit_w for domain, (_, watts) in measured}

    def infeasibility(self, metrics: Mapping[str, float]) -> float:
        """Optuna's constraint of a completed trial: the largest relative excess over a limit, from -1; at most 0 within all."""
        violations = self.violations(metrics)
        if violations:
            return max(violation.amount for violation in violations)
        return max([-_MOST_SLACK, *(-slack for slack in self.slack(metrics).values())])

    def unmeasurable(self) -> list[str]:
        """Limits whose metric the reference lacks: nothing can be shown to keep them."""
        return [name for name in self.limits if judged_on(name, self.reference) not in self.reference]

    def _measured(self, metrics: Mapping[str, float]) -> list[str]:
        return [name for name in self.terms if _usable(name, metrics.get(name))]


def excess(bound: Bound, value: float) -> float:
    """How far a value is beyond its bound, relative to the bound (absolute for a bound of 0); negative within it."""
    over = [_relative(value - bound.max, bound.max)] if bound.max is not None else []
    under = [_relative(bound.min - value, bound.min)] if bound.min is not None else []
    return max(over + under)


def _relative(difference: float, bound: float) -> float:
    return difference / abs(bound) if bound else difference


def _crossed(limit: str, bound: Bound, metrics: Mapping[str, float]) -> Violation | None:
    name = judged_on(limit, metrics)
    if name not in metrics:
        return Violation(f"limit_{limit}", 1.0, f"{limit} was not measured, so its limit ({bound}) is not shown to hold")
    amount = excess(bound, metrics[name])
    if amount <= 0:
        return None
    return Violation(f"limit_{limit}", amount, f"{name} {metrics[name]:,.6g} is {amount:.1%} beyond its limit ({bound})")


def _over(domain: DomainLimit, metrics: Mapping[str, float]) -> Violation | None:
    found = domain.measured(metrics)
    if found is None or found[1] <= domain.limit_w:
        return None
    name, watts = found
    over = watts / domain.limit_w - 1.0
    text = f"{domain.name} gave {watts:,.0f} W measured at the wall ({name}), and {domain.limit_w:,.0f} W are allowed"
    return Violation(f"limit_{domain.name}", over, text)


def _usable(name: str, value: float | None) -> bool:
    return value is not None and math.isfinite(value) and (value > 0 or may_be_zero(name))


def on_scale(name: str, value: float) -> float:
    """A metric on the scale on which its changes count: its logarithm, or itself where it may be zero."""
    return value if may_be_zero(name) else math.log(value)
