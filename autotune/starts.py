"""Starts: what a study tries right after its baseline, before the sampler proposes: candidates that published recipes point at."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from autotune.candidates import Candidates
from autotune.records import TrialRecord
from autotune.spec import StudySpec
from launchers.outcome import Outcome
from search_spaces.config import TrialConfig
from search_spaces.hardware import PoolSpec
from search_spaces.prediction import Predictions
from search_spaces.recipes import Recipe, starts

log = logging.getLogger(__name__)


class Starts:
    """The starting points of one pool's study.

    Attributes:
        left_out: Why recipes of the model's family are not among them, a line each.
    """

    def __init__(self, why: Mapping[TrialConfig, str], left_out: Sequence[str] = ()) -> None:
        """Take them as they are.

        Args:
            why: What to try, in this order, and what each comes from.
            left_out: Why others are not among them.
        """
        self.left_out = tuple(left_out)
        self._why = dict(why)

    @classmethod
    def of(
        cls,
        spec: StudySpec,
        pool: PoolSpec,
        candidates: Candidates,
        predict: Callable[[], Predictions | None],
        among: Sequence[Recipe] | None = None,
    ) -> Starts:
        """Those of a study that has not begun; none on a CPU, where nothing is predicted, or where the study wants none.

        Args:
            spec: The study.
            pool: Where it runs.
            candidates: What is open.
            predict: Gives the predictions of all rows; asked only where recipes are wanted.
            among: The recipes to choose from; none = all shipped ones.
        """
        predictions = predict() if spec.recipes and pool.device != "cpu" else None
        if predictions is None:
            return cls({})
        table = candidates.table
        allowed = np.zeros(len(table), dtype=np.bool_)
        allowed[candidates.open_rows()] = True
        baseline = table.find(spec.baseline)
        taken = () if baseline is None else (baseline,)
        found, left_out = starts(table, predictions.machines.gpu, allowed, predictions, taken, among)
        for line in left_out:
            log.info("pool %s: recipe left out: %s", pool.name, line)
        return cls({table.config(start.row): f"recipe: {start.recipe}" for start in found}, left_out)

    def __len__(self) -> int:
        """How many there are."""
        return len(self._why)

    def next(self, candidates: Candidates, records: Sequence[TrialRecord]) -> TrialConfig | None:
        """The next that is still to be tried; None where all were.

        Args:
            candidates: What is open.
            records: Ended trials, those of earlier drivers included: one start is tried for each recipe, even where a later driver
                would point it elsewhere.
        """
        tried = {record.why for record in records if record.outcome is not Outcome.LOST}
        return next((config for config, why in self._why.items() if candidates.is_open(config) and why not in tried), None)

    def why(self, config: TrialConfig) -> str:
        """What a configuration comes from; empty where it is no start."""
        return self._why.get(config, "")
