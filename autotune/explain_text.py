"""An explanation in words, one line per finding, kept with the study and shown below its winner."""

from __future__ import annotations

from functools import partial

import numpy as np

from autotune.explain import Explanation, Neighbour, explain
from autotune.objective import Objective
from autotune.prospects import Prospects
from autotune.records import TrialRecord
from search_spaces.candidates import CandidateTable
from search_spaces.prediction import Predictions

_MOST = 4
_NAMED_SHARE = 0.02


def explanation_lines(winner: TrialRecord, baseline: TrialRecord | None, prospects: Prospects) -> list[str]:
    """Everything that a study tells beside its winner.

    Args:
        winner: A completed trial.
        baseline: What it is compared with; None where that did not complete.
        prospects: What the study knows of its candidates.
    """
    table, predictions = prospects.table, prospects.predictions
    predicted = None if predictions is None else np.asarray(predictions.tokens_per_s_per_gpu)
    found = explain(winner, prospects.records, table, predicted, partial(prospects.why_not, winner=winner))
    lines = [_importance(found), _around(found), _ruled_out(found), _next(found), _slack(winner, prospects.objective)]
    if predictions is not None and baseline is not None and baseline.config != winner.config:
        lines.append(_split(winner, baseline, table, predictions))
    return [line for line in lines if line]


def _importance(found: Explanation) -> str:
    named = [f"{knob} {share:.0%}" for knob, share in found.importance.items() if share >= _NAMED_SHARE][:_MOST]
    return f"What mattered, as shares of the variance of the measured throughputs: {', '.join(named)}." if named else ""


def _around(found: Explanation) -> str:
    steps = ", ".join([_neighbour(one) for one in found.neighbours if not one.why_not][:_MOST])
    return f"One step from the winner (a {found.shape} optimum): {steps}." if steps else ""


def _ruled_out(found: Explanation) -> str:
    """The steps that should not be taken, those that promise most first."""
    steps = "; ".join([f"{_neighbour(one)} ({one.why_not})" for one in found.neighbours if one.why_not][:_MOST])
    return f"One step from the winner, but ruled out: {steps}." if steps else ""


def _next(found: Explanation) -> str:
    if found.next_to_try is not None:
        return f"Next to try: {_neighbour(found.next_to_try)}."
    ruled_out = any(one.why_not and one.origin == "predicted" for one in found.neighbours)
    return "Next to try: nothing that is one step away; what is left there is ruled out." if ruled_out else ""


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
