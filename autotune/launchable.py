"""What of a pool's candidates may be launched: legal for Megatron, known to the launcher, and within the study's guards."""

from __future__ import annotations

from collections import Counter

import numpy as np
import numpy.typing as npt

from autotune.guards import check_someone_can, guards_of, keep
from autotune.refit import Refit
from autotune.spec import StudySpec
from launchers.base import Launcher
from search_spaces.candidates import CandidateTable
from search_spaces.columns import Columns
from search_spaces.config import TrialConfig
from search_spaces.hardware import PoolSpec
from search_spaces.legality import Violation, check
from search_spaces.prediction import predict


class Launchable:
    """Who may be launched.

    Attributes:
        allowed: bool (rows,), the rows of the table that may.
        refused: The others, by the first rule they break; refusals of the table itself are not among them.
    """

    def __init__(self, spec: StudySpec, pool: PoolSpec, launcher: Launcher, table: CandidateTable, refit: Refit) -> None:
        """Ask the launcher and the guards about every row.

        Raises:
            UnkeptGuardError: no candidate can keep a guard.
        """
        self.allowed, self.refused = accepted(table, launcher)
        self._spec, self._pool, self._launcher, self._table, self._refit = spec, pool, launcher, table, refit
        guards = guards_of(spec, pool, table.columns, refit.predictions()) if len(table) else []
        check_someone_can(guards)
        self.allowed, over = keep(self.allowed, guards)
        self.refused += over

    def violations(self, config: TrialConfig) -> list[Violation]:
        """Megatron's rules, the launcher's, or the study's guards that a configuration breaks, in the table or not."""
        workload = self._table.workload
        return check(workload, config) or self._launcher.refusals(workload, config) or self._over_guards(config)

    def why_nothing(self) -> str:
        """Why a study without any candidate ends: the rules that refused most."""
        worst = ", ".join(f"{name} refused {count}" for name, count in (Counter(self._table.refused) + self.refused).most_common(3))
        return f"no legal candidate: {worst}"

    def _over_guards(self, config: TrialConfig) -> list[Violation]:
        machines = self._refit.machines
        if self._pool.device == "cpu" or machines is None:
            return []
        columns = Columns.of(self._table.workload, config)
        found = guards_of(self._spec, self._pool, columns, predict(columns, machines))
        return [violation for guard in found if (violation := guard.violation(0))]


def accepted(table: CandidateTable, launcher: Launcher) -> tuple[npt.NDArray[np.bool_], Counter[str]]:
    """Which rows of the table the launcher can run, bool (rows,), and its refusals by rule."""
    refused: Counter[str] = Counter()
    allowed = np.ones(len(table), dtype=bool)
    for row in range(len(table)):
        if violations := launcher.refusals(table.workload, table.config(row)):
            allowed[row] = False
            refused[violations[0].name] += 1
    return allowed, refused
