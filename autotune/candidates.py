"""The candidate table of one pool's study, and what of it has been proposed already."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from optuna.distributions import BaseDistribution, IntDistribution

from autotune.errors import NOTHING, SpecError
from autotune.simulation import is_simulated
from autotune.spec import StudySpec
from search_spaces.candidates import CandidateTable
from search_spaces.config import TrialConfig
from search_spaces.gpus import gpu
from search_spaces.hardware import PoolSpec
from search_spaces.normalise import normalise
from search_spaces.space import SearchSpace, SpaceTooLargeError


def candidate_table(spec: StudySpec, pool: PoolSpec, megatron: Literal["0.16", "0.19"] | None = None) -> CandidateTable:
    """Megatron's legal candidates of a pool; knobs that are not searched keep the baseline's value.

    Raises:
        SpecError: there are more of them than can be looked at.
    """
    try:
        return SearchSpace(spec.workload(pool, megatron), spec.search, base=spec.baseline).table()
    except SpaceTooLargeError as error:
        hint = f"give {error.knob} fewer choices, e.g. a list of some values in place of a range"
        raise SpecError("search", NOTHING, f"{error} (pool {pool.name})", hint) from None


def plain_choices(table: CandidateTable) -> dict[str, list[Any]]:
    """The choices as JSON keeps them."""
    return {
        name: [list(choice) if isinstance(choice, tuple) else choice for choice in choices]
        for name, choices in table.choices.items()
    }


def fingerprint(spec: StudySpec, pool: PoolSpec, table: CandidateTable) -> dict[str, object]:
    """What must not change while a study's trials are kept."""
    return {
        "workload": table.workload.model_dump(mode="json"),
        "choices": plain_choices(table),
        "baseline": normalise(table.workload, spec.baseline).model_dump(mode="json", exclude_defaults=True),
        "launcher": spec.launcher,
        "gpu": _gpu_name(spec, pool),
        **({"seed": spec.seed} if is_simulated(spec) else {}),  # a twin's own
        **({"objective": list(spec.objective)} if spec.pareto else {}),
    }


def _gpu_name(spec: StudySpec, pool: PoolSpec) -> str:
    """A pool's kind of GPU, under one name however it is spelled."""
    try:
        return gpu(pool.gpu, spec.hardware.gpus).name
    except KeyError:
        return pool.gpu


class Candidates:
    """The candidate table and what of it has been proposed already, refused points included.

    Attributes:
        table: The table.
        distributions: Optuna's view of it: an index per knob that has more than one choice.
    """

    def __init__(self, table: CandidateTable, base: TrialConfig, allowed: np.ndarray) -> None:
        """Start with everything open.

        Args:
            table: Megatron's legal candidates.
            base: Knobs that are not searched.
            allowed: bool (rows,), False where the launcher cannot run a row.
        """
        self.table = table
        self._base = base
        self.distributions: dict[str, BaseDistribution] = {
            name: IntDistribution(0, len(choices) - 1) for name, choices in table.choices.items() if len(choices) > 1
        }
        self._columns = [list(table.knobs).index(name) for name in self.distributions]
        self._open = allowed.copy()
        self._seen: set[TrialConfig] = set()
        # Samplers draw the same points again and again.
        self._configs: dict[tuple[int, ...], TrialConfig] = {}
        self._rows: dict[TrialConfig, int | None] = {}

    @property
    def left(self) -> int:
        """Candidates not proposed yet."""
        return int(self._open.sum())

    def open_rows(self) -> npt.NDArray[np.intp]:
        """Rows of the candidates not proposed yet, in the table's order."""
        return np.flatnonzero(self._open)

    def config(self, params: dict[str, Any]) -> TrialConfig:
        """The normalised configuration at these indices, legal or not."""
        point = tuple(int(params.get(name, 0)) for name in self.table.choices)
        if point not in self._configs:
            chosen = {name: choices[index] for (name, choices), index in zip(self.table.choices.items(), point, strict=True)}
            self._configs[point] = normalise(self.table.workload, self._base.model_copy(update=chosen))
        return self._configs[point]

    def params(self, config: TrialConfig) -> dict[str, int] | None:
        """The indices of a legal candidate; None where the table does not hold it."""
        row = self._row(config)
        return None if row is None else self.params_of_row(row)

    def params_of_row(self, row: int) -> dict[str, int]:
        """The indices of a row."""
        return {
            name: int(self.table.index_matrix[row, column]) for name, column in zip(self.distributions, self._columns, strict=True)
        }

    def row_of_params(self, params: dict[str, Any]) -> int | None:
        """The row at these indices; None for a trial that gives none, or where the table does not hold it."""
        return self._row(self.config(params)) if self.distributions.keys() <= params.keys() else None

    def is_open(self, config: TrialConfig) -> bool:
        """Whether it is a candidate that was not proposed yet."""
        row = self._row(config)
        return row is not None and bool(self._open[row])

    def is_seen(self, config: TrialConfig) -> bool:
        """Whether it was proposed before, run or refused."""
        return config in self._seen

    def mark_seen(self, config: TrialConfig) -> None:
        """It will not be proposed again."""
        self._seen.add(config)
        row = self._row(config)
        if row is not None:
            self._open[row] = False

    def reopen(self, config: TrialConfig, allowed: bool = True) -> None:
        """The infrastructure failed it: it may be proposed again."""
        self._seen.discard(config)
        row = self._row(config)
        if row is not None:
            self._open[row] = allowed

    def nearest_open(self, params: dict[str, Any]) -> dict[str, int] | None:
        """The open candidate with the smallest sum of index distances, each relative to the knob's range."""
        rows = np.flatnonzero(self._open)
        if len(rows) == 0:
            return None
        target = np.array([int(params.get(name, 0)) for name in self.distributions])
        ranges = np.array([max(1, len(self.table.choices[name]) - 1) for name in self.distributions])
        distance = (np.abs(self.table.index_matrix[rows][:, self._columns] - target) / ranges).sum(axis=1)
        return self.params_of_row(int(rows[int(distance.argmin())]))

    def first_open(self) -> dict[str, int] | None:
        """The first open candidate in the table's order."""
        rows = np.flatnonzero(self._open)
        return self.params_of_row(int(rows[0])) if len(rows) else None

    def _row(self, config: TrialConfig) -> int | None:
        if config not in self._rows:
            self._rows[config] = self.table.find(config)
        return self._rows[config]
