"""CandidateTable: the legal candidates of a search, as indices into ordered choices and as configurations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from search_spaces.choices import ordered
from search_spaces.columns import Column, Columns, Ints
from search_spaces.config import TrialConfig
from search_spaces.model import Workload
from search_spaces.normalise import normalise
from search_spaces.rules.base import Violation

_LARGEST_KEY = 2**62


class Counts(Protocol):
    """What was left out on the way to the table."""

    refused: dict[str, int]
    sample: list[tuple[TrialConfig, list[Violation]]]
    merged: int


class CandidateTable:
    """All legal candidates, each once, in a fixed order.

    Attributes:
        workload: What is trained.
        knobs: Names of the searched knobs, the columns of `index_matrix`.
        choices: Ordered values by knob, fixed for the study; a sampler sees the index into them.
        refused: Combinations refused by each rule. A combination that breaks several rules counts for each rule that was asked of
            it; once refused it is not asked again, so a rule that looks at more knobs sees fewer.
        sample: Some refused configurations with their violations, a few per rule.
        merged: Combinations that are another spelling of a candidate.
    """

    def __init__(
        self, workload: Workload, base: TrialConfig, knobs: Sequence[str], columns: Mapping[str, Column], counts: Counts
    ) -> None:
        self.workload = workload
        self.knobs = tuple(knobs)
        self._base = base
        self._columns = {name: _sorted(column) for name, column in columns.items()}
        self.choices = {name: self._columns[name].values for name in self.knobs}
        self.refused = dict(sorted(counts.refused.items(), key=lambda item: -item[1]))
        self.sample = counts.sample
        self.merged = counts.merged

    def __len__(self) -> int:
        return len(self._keys)

    @property
    def columns(self) -> Columns:
        """The candidates as columns, for asking a rule or a cost model about all of them at once."""
        return Columns(self.workload, self._columns, self._base)

    @cached_property
    def index_matrix(self) -> npt.NDArray[np.int16]:
        """Candidates x knobs: the index of each value in the knob's ordered choices."""
        if not self.knobs:
            return np.zeros((len(self), 0), dtype=np.int16)
        return np.stack([self._columns[name].codes for name in self.knobs], axis=1).astype(np.int16)

    def config(self, row: int) -> TrialConfig:
        """The candidate in a row.

        Raises:
            IndexError: there is no such row.
        """
        if not 0 <= row < len(self):
            raise IndexError(f"row {row} of a table of {len(self)} candidates")
        return self._base.model_copy(
            update={name: column.values[column.codes[row]] for name, column in self._columns.items()},
        )

    def find(self, config: TrialConfig) -> int | None:
        """The row of a configuration, in any of its spellings; None where it is not a candidate."""
        wanted = normalise(self.workload, config)
        fixed = wanted.model_dump(exclude=set(self._columns))
        if fixed != self._base.model_dump(exclude=set(self._columns)):
            return None
        codes = []
        for name, column in self._columns.items():
            value = getattr(wanted, name)
            if value not in column.values:
                return None
            codes.append(Column(column.values, np.array([column.values.index(value)])))
        key = self._pack(codes, 1)[0]
        place = int(np.searchsorted(self._keys, key, sorter=self._order))
        row = int(self._order[place]) if place < len(self) else -1
        return row if row >= 0 and self._keys[row] == key else None

    @cached_property
    def _keys(self) -> npt.NDArray[Any]:
        """One whole number per row, different for different candidates."""
        columns = list(self._columns.values())
        return self._pack(columns, len(columns[0].codes) if columns else 1)

    @cached_property
    def _order(self) -> Ints:
        """Rows in the order of their keys."""
        return np.argsort(self._keys, kind="stable")

    @staticmethod
    def _pack(columns: Sequence[Column], length: int) -> npt.NDArray[Any]:
        """Keys of rows, the same for the same values whatever the number of rows."""
        size = 1
        keys = np.zeros(length, dtype=np.int64)
        for column in columns:
            size *= len(column.values)
            if size > _LARGEST_KEY:
                keys = keys.astype(object)
            keys = keys * len(column.values) + column.codes
        return keys


def pack(columns: Sequence[Column], length: int) -> Ints:
    """One whole number per row, equal for equal rows of one table."""
    keys, size = np.zeros(length, dtype=np.int64), 1
    for column in columns:
        if size * len(column.values) > _LARGEST_KEY:
            keys = np.unique(keys, return_inverse=True)[1].astype(np.int64)
            size = length
        keys = keys * len(column.values) + column.codes
        size *= len(column.values)
    return keys


def _sorted(column: Column) -> Column:
    """A column with its values in the order that a sampler sees, and only those that occur."""
    used = np.unique(column.codes)
    values = ordered(column.values[code] for code in used)
    place = np.zeros(len(column.values), dtype=np.int16)
    for code in used:
        place[code] = values.index(column.values[code])
    return Column(values, place[column.codes])
