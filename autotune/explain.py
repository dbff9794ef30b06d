"""Why the winner won, and what is left: importance of knobs, one-step sensitivity around it, and the next thing to try."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import optuna
from optuna.distributions import IntDistribution
from optuna.importance import FanovaImportanceEvaluator, get_param_importances

from autotune.objective import THROUGHPUT
from autotune.records import TrialRecord
from launchers.outcome import Outcome
from search_spaces.candidates import CandidateTable

Floats = npt.NDArray[np.float64]

_FEWEST_FOR_IMPORTANCE = 8
_BROAD = 0.03


@dataclass(frozen=True, slots=True)
class Neighbour:
    """A candidate that differs from the winner in one knob, by one choice.

    Attributes:
        knob: That knob.
        value: Its value there.
        ratio: Its tokens/s over the winner's.
        origin: Whether that was measured, or is what physics predicts; predictions of both are compared then.
        row: Its row in the table.
        why_not: Why it should not be tried; empty where nothing is known against it.
        scores_less: Whether its measured score is lower than the winner's: throughput need not be all that counts.
    """

    knob: str
    value: Any
    ratio: float
    origin: Literal["measured", "predicted"]
    row: int
    why_not: str = ""
    scores_less: bool = False


@dataclass(frozen=True, slots=True)
class Explanation:
    """What a study tells beside its winner.

    Attributes:
        importance: Share of the variance of ln(tokens/s) over the measured trials that each knob explains, largest first
            (functional ANOVA, Hutter et al. 2014, as in Optuna); empty with fewer than eight measured trials.
        neighbours: One step from the winner: those that nothing speaks against, best first, then the others.
        next_to_try: The untried neighbour of which most is predicted, of those that nothing speaks against; None without any.
    """

    importance: dict[str, float]
    neighbours: tuple[Neighbour, ...]
    next_to_try: Neighbour | None

    @property
    def shape(self) -> Literal["broad", "sharp", "unknown"]:
        """Whether the median step away from the winner costs less than 3 %; steps to what should not be tried do not count."""
        ratios = [neighbour.ratio for neighbour in self.neighbours if not neighbour.why_not]
        if not ratios:
            return "unknown"
        return "broad" if np.median(ratios) > 1 - _BROAD else "sharp"


def _nothing(_: int) -> str:
    return ""


def explain(
    winner: TrialRecord,
    records: Sequence[TrialRecord],
    table: CandidateTable,
    predicted: Floats | None = None,
    why_not: Callable[[int], str] = _nothing,
) -> Explanation:
    """Explain a winner.

    Args:
        winner: A completed trial.
        records: All ended trials of its study.
        table: The candidates.
        predicted: Tokens/s per GPU that physics predicts for every row, float (rows,); none = nothing is predicted.
        why_not: Why the candidate in a row should not be tried; empty where nothing speaks against it.
    """
    measured = _by_row(records, table, lambda record: record.metrics[THROUGHPUT])
    scores = _by_row(records, table, lambda record: record.value)
    here = table.find(winner.config)
    own = -math.inf if here is None else scores.get(here, -math.inf)
    found = [
        replace(one, why_not=why_not(one.row), scores_less=scores.get(one.row, own) < own)
        for one in _neighbours(winner, measured, table, predicted)
    ]
    neighbours = sorted(found, key=lambda neighbour: (bool(neighbour.why_not), -neighbour.ratio))
    untried = [one for one in neighbours if one.origin == "predicted" and not one.why_not and not _tried(records, table, one)]
    return Explanation(_importance(measured, table), tuple(neighbours), untried[0] if untried else None)


def _by_row(
    records: Sequence[TrialRecord], table: CandidateTable, number: Callable[[TrialRecord], float | None]
) -> dict[int, float]:
    """Median of a number of the completed trials by row, over the runs of each; those without it are left out."""
    values: dict[int, list[float]] = {}
    for record in records:
        row = table.find(record.config) if record.outcome is Outcome.COMPLETED else None
        value = None if row is None else number(record)
        if row is not None and value is not None:
            values.setdefault(row, []).append(value)
    return {row: float(np.median(runs)) for row, runs in values.items()}


def _tried(records: Sequence[TrialRecord], table: CandidateTable, neighbour: Neighbour) -> bool:
    config = table.config(neighbour.row)
    return any(record.config == config and record.outcome is not Outcome.LOST for record in records)


def _neighbours(
    winner: TrialRecord, measured: dict[int, float], table: CandidateTable, predicted: Floats | None
) -> list[Neighbour]:
    here = table.find(winner.config)
    if here is None:
        return []
    found = []
    for row, column in _one_step(table.index_matrix, here):
        knob = table.knobs[column]
        value = table.choices[knob][table.index_matrix[row, column]]
        if row in measured:
            found.append(Neighbour(knob, value, measured[row] / winner.metrics[THROUGHPUT], "measured", row))
        elif predicted is not None:
            found.append(Neighbour(knob, value, float(predicted[row] / predicted[here]), "predicted", row))
    return found


def _one_step(matrix: npt.NDArray[np.int16], here: int) -> list[tuple[int, int]]:
    """(row, column) of candidates that differ in one column, to the nearest choice on either side that exists."""
    shift = matrix - matrix[here]
    single = np.flatnonzero((shift != 0).sum(axis=1) == 1)
    nearest: dict[tuple[int, bool], tuple[int, int]] = {}
    for row in single.tolist():
        column = int(np.flatnonzero(shift[row])[0])
        side, step = (column, bool(shift[row, column] > 0)), abs(int(shift[row, column]))
        if side not in nearest or step < nearest[side][0]:
            nearest[side] = (step, row)
    return [(row, column) for (column, _), (_, row) in nearest.items()]


def _importance(measured: dict[int, float], table: CandidateTable) -> dict[str, float]:
    """By knob, among those that vary over the measured rows."""
    rows = list(measured)
    varying = [column for column in range(len(table.knobs)) if len(set(table.index_matrix[rows, column].tolist())) > 1]
    if len(rows) < _FEWEST_FOR_IMPORTANCE or len(varying) < 2 or len(set(measured.values())) == 1:
        return {}
    space: dict[str, optuna.distributions.BaseDistribution] = {
        table.knobs[column]: IntDistribution(0, len(table.choices[table.knobs[column]]) - 1) for column in varying
    }
    study = optuna.create_study(direction="maximize")
    for row in rows:
        params = {table.knobs[column]: int(table.index_matrix[row, column]) for column in varying}
        study.add_trial(optuna.create_trial(value=float(np.log(measured[row])), params=params, distributions=space))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        try:
            shares = get_param_importances(study, evaluator=FanovaImportanceEvaluator(seed=0))
        except RuntimeError:  # its trees found no difference
            return {}
    return dict(shares)
