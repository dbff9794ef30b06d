"""MemoryTable: the memory of every candidate, its fullest stage, and what makes it up."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import numpy.typing as npt

from search_spaces.columns import Floats, Places
from search_spaces.memory.outside import FRAGMENTATION
from search_spaces.memory.stages import Pipeline, stage_counts
from search_spaces.memory.tables import COMPONENTS, GIB, MOMENTS
from search_spaces.model import ModelSpec

Verdict = Literal["fits", "at_risk", "does_not_fit"]
VERDICTS: tuple[Verdict, ...] = ("fits", "at_risk", "does_not_fit")


@dataclass(frozen=True)
class Parts:
    """Bytes per feature of the distinct combinations of some knobs, and which of them each row has.

    Attributes:
        bytes: (components, combinations, features).
        codes: (rows,).
    """

    bytes: Floats
    codes: Places


@dataclass(frozen=True)
class MemoryTable:
    """Memory per GPU of each row of a table, in GiB.

    Attributes:
        memory_gib: Peak of what torch allocates on the fullest stage, (rows,). Compare it with max_memory_allocated.
        device_gib: What the GPU is expected to hold: that, what the allocator holds unused, the CUDA context and NCCL, (rows,).
        upper_gib: Upper bound of what the GPU holds, (rows,): full experts, fragmentation, this model's own error.
        stage: The fullest stage, (rows,).
        host_gib: What a rank keeps in the host's memory: offloaded optimiser state, (rows,).
        context_gib: CUDA context and NCCL, (rows,).
    """

    memory_gib: Floats
    device_gib: Floats
    upper_gib: Floats
    stage: Places
    host_gib: Floats
    context_gib: Floats
    _model: ModelSpec
    _pipelines: list[Pipeline]
    _pipeline_codes: Places
    _held: Parts
    _flowing: Parts

    def __len__(self) -> int:
        return len(self.memory_gib)

    def take(self, rows: Places) -> MemoryTable:
        """A table with these rows of this one."""
        numbers = ("memory_gib", "device_gib", "upper_gib", "stage", "host_gib", "context_gib", "_pipeline_codes")
        parts = {name: replace(getattr(self, name), codes=getattr(self, name).codes[rows]) for name in ("_held", "_flowing")}
        return replace(self, **{name: getattr(self, name)[rows] for name in numbers}, **parts)

    def verdict(self, capacity_gib: float) -> npt.NDArray[np.str_]:
        """Per row "fits", "at_risk" (its upper bound is above the capacity) or "does_not_fit" (its expectation is)."""
        risk = (self.upper_gib > capacity_gib).astype(int) + (self.device_gib > capacity_gib)
        return np.asarray(np.array(VERDICTS)[risk])

    def by_stage(self, row: int) -> Floats:
        """Allocated GiB of every pipeline stage of a row, (stages,)."""
        return np.asarray(self._components(row).sum(axis=0))

    def by_component(self, row: int, stage: int | None = None) -> dict[str, float]:
        """GiB by component on a stage, the fullest if none is named; the components add up to `device_gib` there."""
        parts = self._components(row)[:, self.stage[row] if stage is None else stage]
        named = {name: gib for name, gib in zip(COMPONENTS, parts.tolist(), strict=True) if name != "host"}
        return {**named, "fragmentation": float(parts.sum() * FRAGMENTATION), "context": float(self.context_gib[row])}

    def decides(self, row: int) -> tuple[str, int]:
        """The largest component of a row and the stage where it is."""
        parts = self.by_component(row)
        return max(parts, key=lambda name: parts[name]), int(self.stage[row])

    def deciding(self, rows: Places) -> dict[str, int]:
        """How many of these rows each component is the largest of, as `decides` says, most first."""
        names = [*COMPONENTS, "fragmentation", "context"]
        counts = np.zeros(len(names), dtype=np.intp)
        places = self._pipeline_codes[rows] * (int(self.stage.max(initial=0)) + 1) + self.stage[rows]
        order = np.argsort(places, kind="stable")
        for own in np.split(rows[order], np.flatnonzero(np.diff(places[order])) + 1):
            if len(own):
                counts += np.bincount(self._largest(own), minlength=len(names))
        found = ((names[place], int(counts[place])) for place in np.argsort(-counts, kind="stable"))
        return {name: count for name, count in found if count}

    def _largest(self, rows: Places) -> Places:
        """The largest component of rows that have the same pipeline and fullest stage."""
        features = stage_counts(self._model, self._pipelines[self._pipeline_codes[rows[0]]])[:, self.stage[rows[0]]]
        held, own = np.unique(self._held.codes[rows], return_inverse=True)
        parts = (self._held.bytes[:, held] @ features)[:, own]
        flowing, own = np.unique(self._flowing.codes[rows], return_inverse=True)
        parts = (parts + (self._flowing.bytes[:, flowing] @ features)[:, own]).T / GIB
        fullest = (parts @ MOMENTS.T).argmax(axis=1)
        parts *= MOMENTS[fullest]
        unused = parts.sum(axis=1) * FRAGMENTATION
        return np.asarray(np.column_stack([parts, unused, self.context_gib[rows]]).argmax(axis=1))

    def _components(self, row: int) -> Floats:
        """GiB at each stage's fullest moment, (components, stages)."""
        counts = stage_counts(self._model, self._pipelines[self._pipeline_codes[row]])
        bytes_ = self._held.bytes[:, self._held.codes[row]] + self._flowing.bytes[:, self._flowing.codes[row]]
        parts = MOMENTS[:, :, None] * (bytes_ @ counts / GIB)
        fullest = parts.sum(axis=1).argmax(axis=0)
        return np.asarray(parts[fullest, :, np.arange(len(fullest))].T)
