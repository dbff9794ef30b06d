"""Power limits that a trial did not reach: under any other that it would not have reached either, it is the same run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from autotune.residual_kernels import Floats
from search_spaces.candidates import CandidateTable, pack
from search_spaces.columns import Bools, Ints

POWER_LIMIT = "gpu_power_limit_w"
NEAR = 0.97
"""A limit is reached where a board's highest mean comes to this share of it: readings are means, and off by a few percent."""
_PEAK = "gpu_peak_power_w_"
_CAPPED = "power_cap_fraction"


@dataclass(frozen=True, slots=True)
class PowerLimits:
    """The power limits of the candidates.

    Attributes:
        program: A number per candidate, equal where only the power limit differs, (rows,).
        limit_w: Its power limit, infinite where none is set, (rows,).
    """

    program: Ints
    limit_w: Floats

    @classmethod
    def of(cls, table: CandidateTable) -> PowerLimits:
        """Those of a table."""
        limit_w = np.broadcast_to(table.columns.number(POWER_LIMIT), (len(table),)).astype(np.float64)
        others = [table.columns.column(name) for name in table.knobs if name != POWER_LIMIT]
        return cls(pack(others, len(table)), np.where(limit_w > 0, limit_w, np.inf))

    def same_run(self, trials: Sequence[tuple[int, Mapping[str, float]]]) -> Bools:
        """Which candidates would only repeat one of some trials, (rows,).

        Args:
            trials: Candidates that were measured, with their metrics. Those whose metrics do not say whether the limit was reached
                tell nothing of others.
        """
        found = np.zeros(len(self.limit_w), dtype=np.bool_)
        for row, told in trials:
            if told.get(_CAPPED) == 0.0:
                peak_w = max((watts for name, watts in told.items() if name.startswith(_PEAK)), default=np.inf)
                unreached = (self.limit_w >= self.limit_w[row]) | (peak_w < NEAR * self.limit_w)
                found |= unreached & (self.program == self.program[row])
        return found
