"""The study's baseline, judged before anything is launched: every pool must run it, at one of its node counts at least."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from autotune.errors import SpecError
from autotune.records import as_settings
from autotune.spec import StudySpec, pool_title
from autotune.study import launcher_of
from search_spaces.check import Verdict, explain
from search_spaces.config import TrialConfig
from search_spaces.hardware import PoolSpec
from search_spaces.legality import Violation

_MOST = 2


def check_baseline(spec: StudySpec, megatron: Literal["0.16", "0.19"] | None = None) -> None:
    """Refuse a baseline that the study file gives and that Megatron or the launcher runs on a pool at none of its node counts.

    Where it runs at another count of the pool, a count goes on without it, see `without_baseline`. One that is legal and predicted
    not to fit is taken: what it shows is a result. So is one over a guard, which is never launched. A study that gives none starts
    from Megatron's defaults, and goes on without where these are not legal.

    Raises:
        SpecError: with rules that it breaks, where, and the nearest legal change.
    """
    if spec.baseline == TrialConfig():
        return
    judged = [(pool, verdict_on(spec, pool, spec.baseline, megatron)) for pool in spec.studied_pools]
    running = {pool.name for pool, verdict in judged if verdict.legal}
    illegal = {pool_title(spec, pool): verdict for pool, verdict in judged if not verdict.legal and pool.name not in running}
    if not illegal:
        return
    title, verdict = next(iter(illegal.items()))
    where = f" on pool {title}" if len(judged) > 1 else ""
    others = f"; also not on {'; '.join(list(illegal)[1:])}" if len(illegal) > 1 else ""
    told = f"is not legal{where}: {_rules(verdict.violations)}{others}"
    raise SpecError("baseline", spec.baseline.changed(), told, _hint(verdict))


def without_baseline(violations: Sequence[Violation], candidates: int | None = None) -> str:
    """What a study does whose baseline cannot be launched, and why.

    Args:
        violations: What the baseline breaks there; at least one.
        candidates: What else can be launched there; none = not counted.
    """
    why = f"The baseline cannot be launched here: {_rules(violations)}"
    if candidates == 0:
        return f"{why}. Nor can anything else."
    return f"{why}. The study starts without it: scores are relative to its first measured trial."


def baseline_cautions(
    spec: StudySpec, pool: PoolSpec, candidates: int | None = None, megatron: Literal["0.16", "0.19"] | None = None
) -> tuple[str, ...]:
    """What to know of a baseline that the study file gives on a pool that goes on without it; nothing where it runs there.

    Args:
        spec: The study.
        pool: One of its pools, at one node count.
        candidates: What can be launched there; none = not counted.
        megatron: Version whose rules hold; none = the installed megatron-core's.
    """
    if spec.baseline == TrialConfig():
        return ()
    verdict = verdict_on(spec, pool, spec.baseline, megatron)
    return () if verdict.legal else (without_baseline(verdict.violations, candidates),)


def _rules(violations: Sequence[Violation]) -> str:
    told = "; ".join(f"{violation.name}: {violation.message}" for violation in violations[:_MOST])
    left = len(violations) - _MOST
    return f"{told}; and {left} more" if left > 0 else told


def _hint(verdict: Verdict) -> str:
    return f"nearest legal: {as_settings(verdict.change)}" if verdict.change else "give a baseline that runs, or none"


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
