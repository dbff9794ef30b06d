"""Distinct rows of a few knobs: a cost that depends on few knobs is worked out once per combination, then spread by index."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from search_spaces.columns import Columns
from search_spaces.config import TrialConfig

_DENSE_LIMIT = 2**22


class Distinct(NamedTuple):
    """The combinations of some knobs that occur in a table.

    Attributes:
        columns: One row per combination.
        rows: For each row of the table, its combination; length one where all rows are alike.
        size: Number of combinations.
    """

    columns: Columns
    rows: npt.NDArray[np.intp]
    size: int


def distinct(columns: Columns, knobs: Iterable[str]) -> Distinct:
    """The combinations of these knobs, in a table of their own."""
    names = [name for name in knobs if name in columns.columns]
    stored = [columns.columns[name] for name in names]
    size, keys = 1, np.zeros(1, dtype=np.int64)
    for column in stored:
        if size > 1 and size * len(column.values) > _DENSE_LIMIT:
            keys, size = _dense(keys, size)
        keys = keys * len(column.values) + column.codes
        size *= len(column.values)
    rows, combinations, first = _number(keys, size)
    fixed = {name: columns.column(name) for name in TrialConfig.model_fields if name not in columns.columns}
    for name, column in zip(names, stored, strict=True):
        fixed[name] = column if len(column.codes) == 1 else column._replace(codes=column.codes[first])
    return Distinct(Columns(columns.workload, fixed), rows, combinations)


def _number(keys: npt.NDArray[np.int64], size: int) -> tuple[npt.NDArray[np.intp], int, npt.NDArray[np.intp]]:
    """Consecutive numbers for the keys, how many, and a row that has each."""
    rows, count = _dense(keys, size)
    first = np.zeros(count, dtype=np.intp)
    first[rows] = np.arange(len(rows))
    return rows.astype(np.intp), count, first


def _dense(keys: npt.NDArray[np.int64], size: int) -> tuple[npt.NDArray[np.int64], int]:
    """The keys numbered without gaps."""
    if size > _DENSE_LIMIT:
        found, rows = np.unique(keys, return_inverse=True)
        return rows.astype(np.int64), len(found)
    present = np.zeros(size, dtype=np.bool_)
    present[keys] = True
    numbers = np.cumsum(present) - 1
    return numbers[keys], int(numbers[-1]) + 1
