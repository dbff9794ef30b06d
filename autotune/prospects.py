"""Prospects: which candidates of a study should not be tried next, and why, by its trials and what is predicted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from autotune.ledger import Refusals
from autotune.metrics import derived
from autotune.objective import Objective
from autotune.outlook import memory_of, predicted_log
from autotune.plan import DOES_NOT_FIT
from autotune.records import TrialRecord
from autotune.wall_metrics import DOMAIN, NODE, POOL
from launchers.outcome import Outcome
from search_spaces.candidates import CandidateTable
from search_spaces.hardware import PoolSpec
from search_spaces.prediction import Predictions
from search_spaces.wall_power import NodePower

_LIKELY = 0.5


@dataclass(frozen=True)
class Prospects:
    """What a study knows of its candidates when it ends.

    Attributes:
        table: The candidates.
        records: All ended trials.
        predictions: Of the table's rows; None where nothing is predicted.
        objective: With the limits.
        pool: Where it ran.
        refusals: What forbids to launch a configuration: rules of Megatron and of the launcher, and the study's guards.
    """

    table: CandidateTable
    records: Sequence[TrialRecord]
    predictions: Predictions | None
    objective: Objective
    pool: PoolSpec
    refusals: Refusals

    def why_not(self, row: int, winner: TrialRecord) -> str:
        """Why a candidate should not be tried; empty where nothing is known against it.

        Trials of it tell most, then what forbids its launch, then what is predicted: its memory, and the limits of the answer.
        """
        config = self.table.config(row)
        ended = [record for record in self.records if record.config == config and record.outcome is not Outcome.LOST]
        if ended:
            return self._as_it_ended(ended)
        if refused := self.refusals(config):
            return f"cannot be launched: {refused[0].message}"
        return self._too_large(row) or self._over_a_limit(row, winner)

    def _as_it_ended(self, ended: Sequence[TrialRecord]) -> str:
        completed = [record for record in ended if record.outcome is Outcome.COMPLETED]
        if not completed:
            return f"ended as {ended[-1].outcome.value}"
        crossed = [self.objective.violations(record.metrics) for record in completed]
        return crossed[-1][0].message if all(crossed) else ""

    def _too_large(self, row: int) -> str:
        if self.predictions is None:
            return ""
        if self.predictions.fits[row] == DOES_NOT_FIT:
            taken, most = self.predictions.memory.device_gib[row], self.predictions.machines.gpu.memory_gib
            return f"does not fit: {taken:,.1f} GiB predicted of {most:,.1f} GiB"
        return "probably does not fit, by the trials that ran out of memory" if self._at_risk[row] else ""

    @cached_property
    def _at_risk(self) -> npt.NDArray[np.bool_]:
        """Which rows probably do not fit by the trials, bool (rows,).

        Their probability to fit is below a half, or they are predicted larger than all that fitted and than one under the same
        recomputation that ran out of memory.
        """
        if self.predictions is None:
            return np.zeros(len(self.table), dtype=np.bool_)
        found = [(row, record) for record in self.records if (row := self.table.find(record.config)) is not None]
        fitted = [(row, record) for row, record in found if record.outcome is Outcome.COMPLETED]
        peaks = np.array([record.metrics.get("peak_memory_gib", np.nan) for _, record in fitted])
        out_of_memory = np.array([row for row, record in found if record.outcome is Outcome.OOM], dtype=np.intp)
        rows = np.array([row for row, _ in fitted], dtype=np.intp)
        memory = memory_of(self.table, self.predictions)
        largest = memory.load > memory.load[rows].max(initial=-np.inf)
        unlikely = memory.fits(out_of_memory, rows, np.log(peaks)) < _LIKELY
        return np.asarray(unlikely | (largest & memory.larger_than(out_of_memory)))

    def _over_a_limit(self, row: int, winner: TrialRecord) -> str:
        expected = self._expected(row, winner)
        crossed = self.objective.violations(expected) if expected else []
        return f"predicted: {crossed[0].message}" if crossed else ""

    def _expected(self, row: int, winner: TrialRecord) -> dict[str, float]:
        """The winner's metrics, each times what is predicted of the row over what is predicted of the winner.

        What nothing predicts stays as it was measured; empty where the winner is no candidate or nothing is predicted.
        """
        here, predictions = self.table.find(winner.config), self.predictions
        if here is None or predictions is None:
            return {}
        expected = dict(winner.metrics)
        wall = self._wall_ratio(row, here, predictions)
        for name, value in winner.metrics.items():
            logs = predicted_log(name, predictions)
            if logs is not None:
                expected[name] = value * float(np.exp(logs[row] - logs[here]))
            elif name.startswith((NODE, POOL, DOMAIN)):
                expected[name] = value * wall
        return expected | derived(_boards(expected), predictions.workload, self.pool, predictions.machines.gpu)

    def _wall_ratio(self, row: int, here: int, predictions: Predictions) -> float:
        """Predicted watts at the wall over the winner's, from the boards' mean watts."""
        node = NodePower.of(self.pool, predictions.machines.gpu)
        boards_w = np.broadcast_to(predictions.power.mean_w, (len(predictions),)) * predictions.workload.world_size
        return float(node.wall_w(boards_w[row], self.pool.nodes) / node.wall_w(boards_w[here], self.pool.nodes))


def _boards(metrics: dict[str, float]) -> dict[str, float]:
    """The metrics but those at the wall that were estimated, for these follow from the others."""
    return {name: value for name, value in metrics.items() if not name.endswith("_estimated")}
