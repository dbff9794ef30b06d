"""Transfer: trials of earlier studies as rows of a new study's residual models, on the scales of its own candidates.

What counts of a trial is how far it was from what is predicted of it today, against the other trials of its study.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from autotune.earlier import EarlierStudy
from autotune.residual_kernels import Floats
from autotune.residual_model import Elsewhere, warmer_c
from search_spaces.calibration import columns_of
from search_spaces.columns import Columns
from search_spaces.prediction import Predictions, predict

Metrics = Mapping[str, float]
Predictor = Callable[[Columns], Predictions | None]


@dataclass(frozen=True, slots=True)
class Earlier:
    """What a sampler starts with.

    Attributes:
        studies: The earlier studies.
        predictor: What predicts their trials; None = `predict` on the machines of the newest predictions.
    """

    studies: tuple[EarlierStudy, ...] = ()
    predictor: Predictor | None = None

    def tables(self, newest: Predictions | None) -> list[Table]:
        """Their trials with what is predicted of them today: nothing where nothing is predicted of the candidates."""
        columns = [columns_of(study.workload, [record.config for record in study.records]) for study in self.studies]
        if newest is None:
            return [Table(study, rows, None) for study, rows in zip(self.studies, columns, strict=True)]
        predictor = self.predictor or (lambda rows: predict(rows, newest.machines))
        return [Table(study, rows, predictor(rows)) for study, rows in zip(self.studies, columns, strict=True)]


NOTHING = Earlier()


@dataclass(frozen=True, slots=True)
class Table:
    """The trials of one earlier study.

    Attributes:
        study: The study.
        columns: Their configurations.
        predictions: Of these; None where nothing is predicted.
    """

    study: EarlierStudy
    columns: Columns
    predictions: Predictions | None


@dataclass(frozen=True, slots=True)
class Past:
    """The trials of all earlier studies beside the candidates.

    Attributes:
        tables: The trials.
        matrix: What the model sees of them, study after study, (trials, features).
        parts: Number of parts: the column of the prediction follows them.
    """

    tables: tuple[Table, ...]
    matrix: Floats
    parts: int

    def about(
        self,
        measured: Callable[[Metrics], float],
        predicted: Callable[[Predictions], Floats | None],
        noise: Callable[[Metrics], float],
    ) -> Elsewhere:
        """What they say of one score.

        Args:
            measured: The score of a trial's metrics, a logarithm; NaN where they do not tell.
            predicted: Its prediction; None where there is none.
            noise: Standard deviation of the measured score, by a trial's metrics.
        """
        every = [[record.metrics for record in table.study.records] for table in self.tables]
        values = [[measured(metrics) for metrics in trials] for trials in every]
        found = [_columns(table, shown, predicted) for table, shown in zip(self.tables, values, strict=True)]
        residuals, stretched = (np.concatenate(part) for part in zip(*found, strict=True))
        matrix, known = self.matrix.copy(), np.isfinite(residuals)
        matrix[:, self.parts] = stretched
        return Elsewhere(
            matrix[known],
            residuals[known],
            np.array([noise(metrics) for trials in every for metrics in trials])[known],
            np.concatenate([warmer_c(trials) for trials in every])[known],
            np.repeat(np.arange(1, len(every) + 1), [len(trials) for trials in every])[known],
            (1.0, *(table.study.alike for table in self.tables)),
        )


def _columns(table: Table, measured: Sequence[float], predicted: Callable[[Predictions], Floats | None]) -> tuple[Floats, Floats]:
    """Residuals and predictions of one study's trials, each less its median over those that were measured."""
    expected = predicted(table.predictions) if table.predictions is not None else None
    expected = np.zeros(len(measured)) if expected is None else expected
    residuals = np.asarray(measured) - expected
    known = np.isfinite(residuals)
    if not known.any():
        return residuals, expected
    return residuals - np.median(residuals[known]), expected - np.median(expected[known])
