"""`autotune check`: how many candidates a study has, and which rules refused the rest."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.table import Table

from autotune.candidates import candidate_table, launchable
from autotune.spec import StudySpec
from autotune.study import load_launcher
from launchers.base import Launcher
from search_spaces.hardware import PoolSpec


@dataclass(frozen=True, slots=True)
class CheckedPool:
    """One pool's candidates.

    Attributes:
        pool: Pool name.
        world_size: Ranks of a trial.
        legal: Candidates that would be launched.
        refused: Points refused, by Megatron's or the launcher's rule; each counted under the first rule that it broke.
    """

    pool: str
    world_size: int
    legal: int
    refused: dict[str, int]

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


def check_study(spec: StudySpec) -> list[CheckedPool]:
    """Count every pool's candidates."""
    launcher = load_launcher(spec.launcher)
    return [_check_pool(spec, pool, launcher) for pool in spec.pools]


def _check_pool(spec: StudySpec, pool: PoolSpec, launcher: Launcher) -> CheckedPool:
    table = candidate_table(spec, pool)
    allowed, refused = launchable(table, launcher)
    return CheckedPool(pool.name, pool.world_size, int(allowed.sum()), dict(Counter(table.refused) + refused))


def check_table(checked: Sequence[CheckedPool]) -> Table:
    """The same for a person."""
    table = Table("pool", "ranks", "legal", "refused", "by rule")
    for pool in checked:
        rules = ", ".join(f"{name} {count:,}" for name, count in Counter(pool.refused).most_common())
        table.add_row(pool.pool, str(pool.world_size), f"{pool.legal:,}", f"{sum(pool.refused.values()):,}", rules)
    return table
