"""Cases aimed at one rule each: a legal case with that rule's feature in use, and one more field that breaks the rule."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from benchmarks import legality_aims_experts, legality_aims_features, legality_aims_layout
from benchmarks.legality_options import Case

AIMS = {**legality_aims_layout.AIMS, **legality_aims_experts.AIMS, **legality_aims_features.AIMS}
ATTEMPTS = 1500
"""Legal cases that are tried for one rule before it counts as one that this version does not have."""
PATIENCE = 300
"""Those after which cases that break a second rule as well will do."""


def aimed(
    rule: str, count: int, legal: list[Case], broken: Callable[[Case], list[str]], rng: random.Random
) -> Iterator[tuple[Case, Case]]:
    """Pairs of a legal case and its neighbour that breaks `rule`, where possible no other; fewer than `count` where none is found.

    Args:
        rule: Name of the rule.
        count: Pairs wanted.
        legal: Cases to start from.
        broken: Names of the rules that refuse a case.
        rng: Source of the draws.
    """
    spare: list[tuple[Case, Case]] = []
    for attempt in range(ATTEMPTS):
        if attempt > PATIENCE and len(spare) >= count:
            break
        aim = rng.choice(AIMS[rule])
        near = _changed(rng.choice(legal), aim.given, rng)
        case = _changed(near, aim.breaks, rng)
        names = broken(case)
        if rule not in names or broken(near):
            continue
        if names != [rule]:
            spare.append((near, case))
            continue
        yield near, case
        count -= 1
        if count <= 0:
            return
    yield from spare[:count]


def _changed(case: Case, changes: Mapping[str, Any], rng: random.Random) -> Case:
    """The case with some fields changed, one after the other."""
    case = dict(case)
    for name, value in changes.items():
        case[name] = value(case, rng) if callable(value) else value
    return case
