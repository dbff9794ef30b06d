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


def _t(w,c):
    dp=c.data_parallel_size(w.world_size)
    m=w.model; pp=c.pipeline_model_parallel_size; v=c.num_virtual_stages_per_pipeline_rank
    if dp==0: return Violation("world",1,"world")
    if m.num_attention_heads%c.tensor_model_parallel_size: return Violation("heads",1,"heads")
    if m.num_layers%(pp*(v or 1)): return Violation("layers",1,"layers")
    if v and pp==1: return Violation("vpp",1,"vpp")
    if w.global_batch_size%(c.micro_batch_size*dp): return Violation("batch",1,"batch")
    if v and (w.global_batch_size//(c.micro_batch_size*dp))%pp: return Violation("vppmb",1,"vppmb")
    return None
RULES: tuple[Rule, ...] = (_t,)
