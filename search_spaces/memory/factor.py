"""Factor: the distinct combinations of a few knobs in a table, and which of them each row has.

A formula is evaluated once per combination and spread by index. Formulas of memory look at few knobs each, so that a table of a
million candidates costs a few thousand evaluations.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from search_spaces.columns import Column, Columns

_DENSE_KEYS = 2**20


class Factor(NamedTuple):
    """Combinations of some knobs.

    Attributes:
        columns: The distinct combinations, one per row.
        size: How many there are.
        codes: For each row of the whole table the row of its combination.
    """

    columns: Columns
    size: int
    codes: npt.NDArray[np.intp]


def rows_of(columns: Columns) -> int:
    """Rows of a table."""
    return max((len(column.codes) for column in columns.columns.values()), default=1)


def project(columns: Columns, knobs: Iterable[str]) -> Factor:
    """The distinct combinations of `knobs` in a table."""
    length = rows_of(columns)
    stored = {knob: columns.columns[knob] for knob in knobs if knob in columns.columns}
    varied = {knob: column for knob, column in stored.items() if len(column.values) > 1 and len(column.codes) > 1}
    key = np.zeros(length if varied else 1, dtype=np.int64)
    size = 1
    for column in varied.values():
        if size * len(column.values) > _DENSE_KEYS:
            key, size = _renumber(key)
        key *= len(column.values)
        key += column.codes
        size *= len(column.values)
    first, codes = _distinct(key, size)
    kept = {knob: Column(column.values, column.codes[first if len(column.codes) > 1 else [0]]) for knob, column in stored.items()}
    projected = columns.with_columns(kept)
    return Factor(projected, len(first), codes if len(codes) == length else np.zeros(length, dtype=np.intp))


def distinct_rows(fields: Iterable[npt.NDArray[Any]]) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.int64]]:
    """A row for each distinct combination of some whole numbers, and each row's place among the combinations."""
    key, size = np.zeros(1, dtype=np.int64), 1
    for field in fields:
        values, codes = np.unique(field, return_inverse=True)
        if size * len(values) > _DENSE_KEYS:
            key, size = _renumber(key)
        key = key * len(values) + codes
        size *= len(values)
    first, places = _distinct(key, size)
    return first, places.astype(np.int64)


def _renumber(key: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], int]:
    values, codes = np.unique(key, return_inverse=True)
    return codes.astype(np.int64), len(values)


def _distinct(key: npt.NDArray[np.int64], size: int) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.intp]]:
    """A row for each distinct key, and each row's place among the keys."""
    if size > max(_DENSE_KEYS, 4 * len(key)):
        _, first, codes = np.unique(key, return_index=True, return_inverse=True)
        return first, codes
    example = np.full(size, -1, dtype=np.intp)
    example[key] = np.arange(len(key))
    present = example >= 0
    place = np.cumsum(present) - 1
    return example[present], place[key]
