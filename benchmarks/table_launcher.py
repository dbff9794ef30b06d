"""A launcher that launches nothing: what a table holds was measured, and everything else is refused."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

from launchers.base import Command
from search_spaces.config import TrialConfig
from search_spaces.legality import Violation
from search_spaces.model import Workload


class TableLauncher:
    """Refuses what was not measured. Whoever replays a table takes the results from it."""

    name = program = "table"
    preload: tuple[str, ...] = ()

    def __init__(self, measured: Collection[TrialConfig]) -> None:
        self._measured = measured

    def refusals(self, workload: Workload, config: TrialConfig) -> list[Violation]:
        """What is not in the table cannot be run."""
        return [] if config in self._measured else [Violation("not_measured", 1.0, "the table has no such configuration")]

    def job(self, workload: Workload, config: TrialConfig, *, steps: int, seed: int) -> dict[str, Any]:
        """Nothing to run."""
        return {}

    def command(self, workload: Workload, config: TrialConfig, folder: Path, *, steps: int, seed: int) -> Command:
        """Nothing to run."""
        return Command((), {})
