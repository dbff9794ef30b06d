"""An explanation in words, one line per finding, kept with the study and shown below its winner."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from autotune.explain import Explanation, Neighbour, explain
from autotune.objective import Objective
from autotune.records import TrialRecord
from search_spaces.candidates import CandidateTable
from search_spaces.prediction import Predictions

_MOST = 4
_NAMED_SHARE = 0.02


def explanation_lines(
    winner: TrialRecord,
    baseline: TrialRecord | None,
    records: Sequence[TrialRecord],
    table: CandidateTable,
    predictions: Predictions | None,
    objective: Objective,
) -> list[str]:
    """Everything that a study tells beside its winner.

    Args:
        winner: A completed trial.
        baseline: What it is compared with; None where that did not complete.
        records: All ended trials.
        table: The candidates.
        predictions: Of the table's rows; None where nothing is predicted.
        objective: With the limits.
    """
    found = explain(winner, records, table, None if predictions is None else np.asarray(predictions.tokens_per_s_per_gpu))
    lines = [_importance(found), _around(found), _next(found), _slack(winner, objective)]
    if predictions is not None and baseline is not None and baseline.config != winner.config:
        lines.append(_split(winner, baseline, table, predictions))
    return [line for line in lines if line]


def _importance(found: Explanation) -> str:
    named = [f"{knob} {share:.0%}" for knob, share in found.importance.items() if share >= _NAMED_SHARE][:_MOST]
    return f"What mattered, as shares of the variance of the measured throughputs: {', '.join(named)}." if named else ""


def _around(found: Explanation) -> str:
    if not found.neighbours:
        return ""
    steps = ", ".join(_neighbour(one) for one in found.neighbours[:_MOST])
    return f"One step from the winner (a {found.shape} optimum): {steps}."


def _next(found: Explanation) -> str:
    one = found.next_to_try
    return f"Next to try: {_neighbour(one)}." if one is not None else ""


def _neighbour(one: Neighbour) -> str:
    return f"{one.knob} {one.value} {one.ratio:.2f} x {one.origin}"


def _slack(winner: TrialRecord, objective: Objective) -> str:
    slack = [f"{name} {share:.1%}" for name, share in objective.slack(winner.metrics).items()]
    return f"Room left below each limit: {', '.join(slack)}." if slack else ""


def _split(winner: TrialRecord, baseline: TrialRecord, table: CandidateTable, predictions: Predictions) -> str:
    """Where the two steps' time goes, as predicted, and their watts."""
    rows = [table.find(record.config) for record in (winner, baseline)]
    if rows[0] is None or rows[1] is None:
        return ""
    first, second = (predictions.row(row) for row in rows if row is not None)
    shares = {
        part: (seconds / first.step_time_s, second.time_by_part_s[part] / second.step_time_s)
        for part, seconds in first.time_by_part_s.items()
    }
    largest = sorted(shares.items(), key=lambda item: -max(item[1]))[:_MOST]
    parts = ", ".join(f"{part} {own:.0%} / {other:.0%}" for part, (own, other) in largest)
    watts = f"{first.mean_power_w:.0f} / {second.mean_power_w:.0f} W per GPU"
    return f"Where the time goes, predicted, winner / baseline: {parts}; {watts}."
