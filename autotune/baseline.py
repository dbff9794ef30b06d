"""The study's baseline, judged before anything is launched: it must be legal wherever it is to be compared with."""

from __future__ import annotations

from typing import Literal

from autotune.errors import SpecError
from autotune.spec import StudySpec, pool_title
from autotune.study import launcher_of
from search_spaces.check import Verdict, explain
from search_spaces.config import TrialConfig
from search_spaces.hardware import PoolSpec

_MOST = 2


def check_baseline(spec: StudySpec, megatron: Literal["0.16", "0.19"] | None = None) -> None:
    """Refuse a baseline that the study file gives and that Megatron or the launcher would not run.

    One that is legal and predicted not to fit is taken: what it shows is a result. So is one over a guard, which is never launched.
    A study that gives none starts from Megatron's defaults, and goes on without where these are not legal.

    Raises:
        SpecError: with rules that it breaks, where, and the nearest legal change.
    """
    if spec.baseline == TrialConfig():
        return
    verdicts = {pool_title(spec, pool): verdict_on(spec, pool, spec.baseline, megatron) for pool in spec.studied_pools}
    illegal = {title: verdict for title, verdict in verdicts.items() if not verdict.legal}
    if not illegal:
        return
    title, verdict = next(iter(illegal.items()))
    where = f" on pool {title}" if len(verdicts) > 1 else ""
    others = f"; also not on {', '.join(list(illegal)[1:])}" if len(illegal) > 1 else ""
    raise SpecError("baseline", spec.baseline.changed(), f"is not legal{where}: {_rules(verdict)}{others}", _hint(verdict))


def _rules(verdict: Verdict) -> str:
    told = "; ".join(f"{violation.name}: {violation.message}" for violation in verdict.violations[:_MOST])
    left = len(verdict.violations) - _MOST
    return f"{told}; and {left} more" if left > 0 else told


def _hint(verdict: Verdict) -> str:
    change = " ".join(f"{name}={value}" for name, value in verdict.change.items())
    return f"nearest legal: {change}" if change else "give a baseline that runs, or none"


def verdict_on(spec: StudySpec, pool: PoolSpec, config: TrialConfig, megatron: Literal["0.16", "0.19"] | None = None) -> Verdict:
    """What Megatron's rules say of a configuration on a pool, and, where they accept it, the launcher's.

    Args:
        spec: The study.
        pool: One of its pools, at one node count.
        config: The configuration.
        megatron: Version whose rules hold; none = the installed megatron-core's.
    """
    verdict = explain(workload := spec.workload(pool, megatron), config)
    if verdict.legal and (refusals := launcher_of(spec, pool).refusals(workload, config)):
        return Verdict(False, refusals, None, {})
    return verdict
