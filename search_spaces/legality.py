"""Which configurations Megatron accepts: one small function per rule, in `search_spaces.rules` by subject.

A rule answers for a whole table of configurations at once. `check` asks all of them about a table of one row and collects every
reason, so that a person sees them together; `search_spaces.space` asks them about all candidates of a search.
"""

from __future__ import annotations

from search_spaces.columns import Columns
from search_spaces.config import TrialConfig
from search_spaces.model import Workload
from search_spaces.normalise import normalise
from search_spaces.rules import experts, graphs, mesh, optimizer, pipeline, precision, recompute, run, shapes
from search_spaces.rules.base import Finding, Rule, Violation

__all__ = ["RULES", "Finding", "Rule", "Violation", "check"]

RULES: tuple[Rule, ...] = (
    *mesh.RULES,
    *shapes.RULES,
    *pipeline.RULES,
    *experts.RULES,
    *recompute.RULES,
    *optimizer.RULES,
    *precision.RULES,
    *graphs.RULES,
    *run.RULES,
)


def check(workload: Workload, config: TrialConfig) -> list[Violation]:
    """Every rule that `config` breaks for `workload`; empty where Megatron accepts it."""
    columns = Columns.of(workload, normalise(workload, config))
    found = (rule(columns).violation(rule.__name__) for rule in RULES)
    return [violation for violation in found if violation is not None]
