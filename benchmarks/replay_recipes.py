"""Recipes for the replays: worked out anew for every space, without any row of a model of its own shape."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

import numpy as np

from autotune.candidates import Candidates
from autotune.starts import Starts
from benchmarks.replay_spaces import SOURCES, Space
from benchmarks.timed_rows import TimedRow, read
from benchmarks.write_recipes import Line, entry, fastest, usable
from search_spaces.model import ModelSpec
from search_spaces.recipes import Recipe

FROM_OTHERS = {"recipes": False, "recipes-apart": True}
"""By method, whether recipes of the space's own number of GPUs are left out too."""


def recipes_of_others(space: Space, folder: Path, *, apart: bool) -> list[Recipe]:
    """The recipes in which neither a space's own rows nor those of its model's shape had a part.

    Args:
        space: The space.
        folder: Of the published tables.
        apart: Whether those of the same number of GPUs are left out too.
    """
    others = (line for line in _lines(folder) if _shape(line[0].model) != _shape(space.spec.model))
    found = [Recipe.model_validate(entry(*line)) for line in fastest(others)]
    return [recipe for recipe in found if not apart or recipe.gpus != space.table.workload.world_size]


def starts_of(space: Space, folder: Path, *, apart: bool) -> Starts:
    """What a study of a space would try first if these recipes were all there are; arguments as for `recipes_of_others`."""
    measured = np.array([space.table.config(row) in space.seconds for row in range(len(space.table))])
    spec, found = space.spec.model_copy(update={"recipes": True}), recipes_of_others(space, folder, apart=apart)
    return Starts.of(spec, spec.pools[0], Candidates(space.table, spec.baseline, measured), space.predictions, found)


@cache
def _lines(folder: Path) -> tuple[Line, ...]:
    """The rows that the shipped recipes are taken from, and those of the replayed tables."""
    own = usable(folder)
    known = {row.id for row, _ in own}
    return (*own, *((row, line) for row, line in _replayed(folder) if row.id not in known))


def _replayed(folder: Path) -> Iterator[tuple[TimedRow, Mapping[str, str]]]:
    for row in read(folder):
        if row.source in SOURCES:
            name = f"h{row.model.hidden_size}-L{row.model.num_layers}"
            yield row, {"model": name, "vpp": "", "source": row.source}


def _shape(model: ModelSpec) -> tuple[int, int]:
    return model.num_layers, model.hidden_size
