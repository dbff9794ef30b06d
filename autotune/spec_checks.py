"""Checks over several parts of a study file: names of metrics, and budgets that nothing could hold a study to."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from typing import Any

from autotune.metric_names import FAMILIES, metric_names
from autotune.spec_errors import wrong
from autotune.spec_parts import Budget, PowerDomain
from search_spaces.hardware import PoolSpec

_NEAR = 0.6
_MOST_NEAR = 3


def check_metrics(field: str, asked: dict[str, Any], domains: Iterable[PowerDomain]) -> None:
    """For the study's validator: every metric that a field names is one that a trial can carry.

    Args:
        field: `objective` or `limits`.
        asked: What it holds, by name of a metric.
        domains: The study's power domains, which have metrics of their own.

    Raises:
        PydanticCustomError: with the nearest names.
    """
    known = metric_names(domain.name for domain in domains)
    for name, value in asked.items():
        if name not in known:
            given = value if isinstance(value, float) else str(value)
            raise wrong(f"{field}.{name}", given, "is not a metric of a trial", _near(name, known))


def check_budget(budget: Budget, pools: Sequence[PoolSpec], launcher: str) -> None:
    """For the study's validator: every pool can tell what its budget is in.

    Raises:
        PydanticCustomError: a pool has no price, or no GPU that measures its energy.
    """
    for pool in pools:
        if budget.usd is not None and pool.usd_per_gpu_hour is None:
            hint = f"give the pool {pool.name} its `usd_per_gpu_hour`, or bound `gpu_hours`"
            raise wrong("budget.usd", budget.usd, f"cannot be kept: pool {pool.name} has no price", hint)
        unmetered = launcher == "megatron_core" and pool.device == "cpu" and not pool.telemetry.vendors
        if budget.energy_kwh is not None and unmetered:
            problem = f"cannot be kept: pool {pool.name} has no GPU that measures it"
            raise wrong("budget.energy_kwh", budget.energy_kwh, problem, "bound `gpu_hours` or `wall_time_s` instead")


def _near(name: str, known: Sequence[str]) -> str:
    """Up to three names that are near, or that hold this one; all where there are none."""
    near = difflib.get_close_matches(name, known, n=_MOST_NEAR, cutoff=_NEAR) or [full for full in known if name in full]
    if not near:
        return f"known: {', '.join(FAMILIES)}"
    return f"did you mean {' or '.join(repr(one) for one in near[:_MOST_NEAR])}?"
