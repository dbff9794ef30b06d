"""Which configurations Megatron accepts: one small function per rule.

A rule returns a `Violation` or None. `check` collects all of them, so that a person sees every reason at once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from search_spaces.config import TrialConfig
from search_spaces.model import Workload


@dataclass(frozen=True, slots=True)
class Violation:
    """One broken rule or limit.

    Attributes:
        name: The rule's name, stable over versions; also the name of the Optuna constraint.
        amount: How far over the rule: <= 0 is slack, > 0 infeasible.
        message: One sentence with the values and what would be legal.
    """

    name: str
    amount: float
    message: str


Rule = Callable[[Workload, TrialConfig], "Violation | None"]


def check(workload: Workload, config: TrialConfig) -> list[Violation]:
    """Every rule that `config` breaks for `workload`; empty where Megatron accepts it."""
    found = (rule(workload, config) for rule in RULES)
    return [violation for violation in found if violation is not None]


RULES: tuple[Rule, ...] = ()
