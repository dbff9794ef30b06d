"""SearchSpace: choices per knob -> the table of all legal candidates.

The cross product is never built. Dimensions are joined one after the other; a rule is asked as soon as all knobs that it looks at
are joined, and refused rows are dropped before the next dimension multiplies them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from search_spaces.candidates import CandidateTable, pack
from search_spaces.choices import Dimension, dimensions
from search_spaces.columns import Bools, Column, Columns
from search_spaces.config import TrialConfig, knobs
from search_spaces.legality import RULES, Violation, check
from search_spaces.model import Workload
from search_spaces.normalise import NORMALISERS, normalise
from search_spaces.rules.base import Rule

SAMPLE_PER_RULE = 3
MOST_ROWS = 5_000_000
"""Combinations that are held at once; with their predictions they take about 1 kB each."""


class SpaceTooLargeError(ValueError):
    """More combinations than can be held.

    Attributes:
        knob: The searched knob with the most choices.
        choices: How many it has.
    """

    def __init__(self, rows: int, largest: Dimension) -> None:
        self.knob, self.choices = largest.knobs[0], len(largest.rows)
        super().__init__(
            f"has {rows:,} combinations that no rule refused so far, and at most {MOST_ROWS:,} can be looked at; "
            f"{self.knob} alone has {self.choices:,} choices"
        )


class SearchSpace:
    """All combinations of the chosen knobs, legal or not.

    Attributes:
        workload: What is trained.
        base: Values of the knobs that are not searched.
        dimensions: Knobs that are chosen together, and their values.
        size: Combinations before any rule is asked.
    """

    def __init__(self, workload: Workload, choices: Mapping[str, Any] | str, base: TrialConfig | None = None) -> None:
        """Read the choices.

        Args:
            workload: What is trained.
            choices: Knob name to a list, one value, "powers_of_two", {"powers_of_two": [low, high]}, {"range": [low, high]} or
                "auto"; or a group's name (`search_spaces.choices.GROUPS`) to a list of its items; or just "auto".
            base: Values of the knobs that are not searched.

        Raises:
            ValueError: a name or value is not one that Megatron knows.
        """
        self.workload = workload
        self.base = base or TrialConfig()
        self.dimensions = dimensions(workload, choices, self.base)
        self.size = math.prod(len(dimension.rows) for dimension in self.dimensions)

    @property
    def knobs(self) -> tuple[str, ...]:
        """Names of the searched knobs."""
        return tuple(knob for dimension in self.dimensions for knob in dimension.knobs)

    @property
    def changes_learning(self) -> tuple[str, ...]:
        """Searched knobs that change what is learned: a report names them beside the winner."""
        return tuple(name for name in self.knobs if knobs()[name].changes_learning)

    def table(self) -> CandidateTable:
        """Every legal candidate once, and what was refused.

        Raises:
            SpaceTooLargeError: there are more than `MOST_ROWS` of them, or on the way to them.
        """
        join = _Join(self)
        for dimension in self.dimensions:
            join.add(dimension)
        return join.finish()


class _Join:
    """The table while it grows: the rows that are legal so far as the joined knobs can tell."""

    def __init__(self, space: SearchSpace) -> None:
        self.space = space
        self.columns = Columns(space.workload, {}, space.base)
        self.length = 1
        self.left = space.size
        self.joined: set[str] = set()
        self.refused: dict[str, int] = {}
        self.sample: list[tuple[TrialConfig, list[Violation]]] = []
        self.merged = 0
        needs = _Needs(space)
        self.rewrites = [(rewrite, needs.of(needs.read[rewrite.__name__])) for rewrite in NORMALISERS]
        self.rules = [(rule, needs.of(needs.read[rule.__name__])) for rule in RULES]
        self._advance()

    def add(self, dimension: Dimension) -> None:
        """Multiply the rows by a dimension's combinations and ask what can now be asked."""
        count = len(dimension.rows)
        if self.length * count > MOST_ROWS:
            largest = max(self.space.dimensions, key=lambda searched: len(searched.rows))
            raise SpaceTooLargeError(self.length * count, largest)
        self.left //= count
        for name, column in self.columns.columns.items():
            if len(column.codes) == self.length:
                self.columns.columns[name] = column._replace(codes=np.repeat(column.codes, count))
        for position, knob in enumerate(dimension.knobs):
            values = tuple(dict.fromkeys(row[position] for row in dimension.rows))
            codes = np.array([values.index(row[position]) for row in dimension.rows], dtype=np.int16)
            self.columns.columns[knob] = Column(values, np.tile(codes, self.length))
        self.length *= count
        self.joined.update(dimension.knobs)
        self._advance()

    def _advance(self) -> None:
        """Rewrite and refuse as far as the joined knobs allow."""
        ready = [rewrite for rewrite, needed in self.rewrites if needed <= self.joined]
        self.rewrites = [(rewrite, needed) for rewrite, needed in self.rewrites if not needed <= self.joined]
        for rewrite in ready:
            rewrite(self.columns)
        if ready:
            self._merge()
        keep = np.ones(self.length, dtype=np.bool_)
        for rule, needed in self.rules:
            if needed <= self.joined:
                keep &= ~self._ask(rule)
        self.rules = [(rule, needed) for rule, needed in self.rules if not needed <= self.joined]
        self._keep(keep)

    def _ask(self, rule: Rule) -> Bools:
        """Where a rule is broken; counts it and remembers some rows."""
        broken = np.broadcast_to(rule(self.columns).broken, (self.length,))
        count = int(broken.sum())
        if count:
            self.refused[rule.__name__] = self.refused.get(rule.__name__, 0) + count * self.left
            for row in np.flatnonzero(broken)[:: max(1, count // SAMPLE_PER_RULE)][:SAMPLE_PER_RULE]:
                config = self._example(int(row))
                self.sample.append((config, check(self.space.workload, config)))
        return np.asarray(broken)

    def _example(self, row: int) -> TrialConfig:
        """One refused row, completed with the first choice of what is not joined yet."""
        rest: dict[str, Any] = {}
        for dimension in self.space.dimensions:
            if not set(dimension.knobs) & self.joined:
                rest.update(zip(dimension.knobs, dimension.rows[0], strict=True))
        columns = self.columns.columns.items()
        values = {name: column.values[column.codes[row if len(column.codes) > 1 else 0]] for name, column in columns}
        return normalise(self.space.workload, self.space.base.model_copy(update={**rest, **values}))

    def _merge(self) -> None:
        """Drop rows that a rewrite made equal to an earlier one."""
        keys = pack([column for column in self.columns.columns.values() if len(column.codes) == self.length], self.length)
        _, first = np.unique(keys, return_index=True)
        if len(first) < self.length:
            keep = np.zeros(self.length, dtype=np.bool_)
            keep[first] = True
            self.merged += (self.length - len(first)) * self.left
            self._keep(keep)

    def _keep(self, keep: Bools) -> None:
        """Drop rows."""
        if keep.all():
            return
        for name, column in self.columns.columns.items():
            if len(column.codes) == self.length:
                self.columns.columns[name] = column._replace(codes=column.codes[keep])
        self.length = int(keep.sum())

    def finish(self) -> CandidateTable:
        """The finished table."""
        spread: dict[str, Column] = {}
        for name, column in self.columns.columns.items():
            codes = column.codes if len(column.codes) == self.length else np.broadcast_to(column.codes, (self.length,))
            spread[name] = Column(column.values, np.ascontiguousarray(codes))
        return CandidateTable(self.space.workload, self.space.base, self.space.knobs, spread, self)


class _Needs:
    """Which searched knobs a rule or rewrite has to wait for."""

    def __init__(self, space: SearchSpace) -> None:
        self.searched = set(space.knobs)
        self.read: dict[str, set[str]] = {}
        self.inputs: dict[str, set[str]] = {}
        for rewrite in NORMALISERS:
            columns = Columns(space.workload, {}, space.base)
            rewrite(columns)
            self.read[rewrite.__name__] = columns.asked
            for written in columns.columns:
                self.inputs.setdefault(written, set()).update(columns.asked)
        for rule in RULES:
            columns = Columns(space.workload, {}, space.base)
            rule(columns)
            self.read[rule.__name__] = columns.asked

    def of(self, knobs: set[str]) -> set[str]:
        """The searched knobs among these and among everything that may rewrite them."""
        needed, new = set[str](), set(knobs)
        while new:
            needed |= new
            new = set().union(*(self.inputs.get(knob, set()) for knob in new)) - needed
        return needed & self.searched
