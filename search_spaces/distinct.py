"""Distinct rows: what depends on few knobs is worked out once per combination of them, then spread by index.

Formulas of memory and time look at few knobs each, so that a table of a million candidates costs a few thousand evaluations.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from search_spaces.columns import Columns, Places

_DENSE_LIMIT = 2**20


class Distinct(NamedTuple):
    """The combinations of some knobs that occur in a table.

    Attributes:
        columns: One row per combination.
        rows: For each row of the table, its combination; length one where all rows are alike.
        size: Number of combinations.
    """

    columns: Columns
    rows: Places
    size: int

    def spread(self, rows: int) -> Places:
        """`rows` at the length of the table."""
        return np.broadcast_to(self.rows, (rows,))


def distinct(columns: Columns, knobs: Iterable[str]) -> Distinct:
    """The combinations of these knobs, in a table of their own."""
    stored = {knob: columns.columns[knob] for knob in knobs if knob in columns.columns}
    first, rows = _number((column.codes, len(column.values)) for column in stored.values() if len(column.values) > 1)
    kept = {
        knob: column if len(column.codes) == 1 else column._replace(codes=column.codes[first]) for knob, column in stored.items()
    }
    return Distinct(columns.with_columns(kept), rows, len(first))


def distinct_rows(fields: Iterable[npt.NDArray[Any]]) -> tuple[Places, Places]:
    """A row for each distinct combination of some whole numbers, and each row's place among the combinations."""
    found = (np.unique(field, return_inverse=True) for field in fields)
    return _number((codes, len(values)) for values, codes in found)


def _number(fields: Iterable[tuple[npt.NDArray[Any], int]]) -> tuple[Places, Places]:
    """The same for codes, each with the number of values that it may have."""
    keys, size = np.zeros(1, dtype=np.int64), 1
    for codes, values in fields:
        if size * values > _DENSE_LIMIT:
            kept, keys = _dense(keys, size)
            size = len(kept)
        keys = keys * values + codes
        size *= values
    return _dense(keys, size)


def _dense(keys: npt.NDArray[np.int64], size: int) -> tuple[Places, Places]:
    """A row for each distinct key, and each row's place among the keys."""
    if size > max(_DENSE_LIMIT, 4 * len(keys)):
        _, first, places = np.unique(keys, return_index=True, return_inverse=True)
        return first, places
    example = np.full(size, -1, dtype=np.intp)
    example[keys] = np.arange(len(keys))
    present = example >= 0
    numbers = np.cumsum(present) - 1
    return example[present], numbers[keys]
