"""An explanation in words, one line per finding, kept with the study and shown below its winner."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial

import numpy as np

from autotune.explain import Explanation, Neighbour, explain
from autotune.objective import Objective
from autotune.prospects import Prospects
from autotune.records import TrialRecord, spelled
from autotune.wall_metrics import judged_on
from search_spaces.columns import Columns
from search_spaces.prediction import Predictions, predict

_MOST = 4
_NAMED_SHARE = 0.02
_SHOWN = 0.05
_WHOSE = {1: "of the winner", 2: "winner / baseline"}
_MEASURED = {"gpu_mean_power_w": "mean W per GPU", "gpu_peak_power_w_1s": "peak W over 1 s", "joules_per_token": "joules per token"}


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
    compared = [winner] if baseline is None or baseline.config == winner.config else [winner, baseline]
    if predictions is not None:
        lines.append(_time_split(compared, predictions))
    lines.append(_watts(compared))
    return [line for line in lines if line]


def _importance(found: Explanation) -> str:
    named = [f"{knob} {share:.0%}" for knob, share in found.importance.items() if share >= _NAMED_SHARE][:_MOST]
    return f"What mattered, as shares of the variance of the measured throughputs: {', '.join(named)}." if named else ""


def _around(found: Explanation) -> str:
    steps = ", ".join([_neighbour(one) for one in found.neighbours if not one.why_not][:_MOST])
    return f"One step from the winner (a {found.shape} optimum): {steps}." if steps else ""


def _ruled_out(found: Explanation) -> str:
    """The steps that should not be taken, those that promise most first."""
    steps = "; ".join([f"{_neighbour(one)}, but {one.why_not}" for one in found.neighbours if one.why_not][:_MOST])
    return f"One step from the winner, ruled out: {steps}." if steps else ""


def _next(found: Explanation) -> str:
    if found.next_to_try is not None and found.next_to_try.ratio > 1.0:
        return f"Next to try: {_neighbour(found.next_to_try)}."
    if found.next_to_try is not None:
        return (
            f"Next to try: nothing that is one step away is predicted to be faster; the nearest is {_neighbour(found.next_to_try)}."
        )
    ruled_out = any(one.why_not and one.origin == "predicted" for one in found.neighbours)
    return "Next to try: nothing that is one step away; what is left there is ruled out." if ruled_out else ""


def _neighbour(one: Neighbour) -> str:
    origin = f"{one.origin}, but its score is lower" if one.ratio > 1.0 and one.scores_less else one.origin
    return f"{one.knob} {spelled(one.value)}: {one.ratio:.2f} x ({origin})"


def _slack(winner: TrialRecord, objective: Objective) -> str:
    """What the winner measured of each limit, and the share of the limit that is left."""
    bounds = {judged_on(name, winner.metrics): bound for name, bound in objective.limits.items()}
    measured = {name: f" {winner.metrics[name]:,.4g} ({bound})" for name, bound in bounds.items() if name in winner.metrics}
    slack = [f"{name}{measured.get(name, '')}: {share + 0.0:.1%}" for name, share in objective.slack(winner.metrics).items()]
    return f"Room left to each limit, as a share of it: {', '.join(slack)}." if slack else ""


def _time_split(compared: Sequence[TrialRecord], predictions: Predictions) -> str:
    """Where a step's seconds go, as predicted: the winner's, and the baseline's, which need not be a candidate."""
    found = [predict(Columns.of(predictions.workload, record.config), predictions.machines).row(0) for record in compared]
    large = [part for part in found[0].time_by_part_s if any(one.time_by_part_s[part] >= _SHOWN * one.step_time_s for one in found)]
    parts = sorted(large, key=lambda part: -max(one.time_by_part_s[part] for one in found))
    named = ", ".join(f"{part} {_each(one.time_by_part_s[part] for one in found)}" for part in parts)
    total = _each(one.step_time_s for one in found)
    return f"Where a step's seconds go, predicted, {_WHOSE[len(found)]}: {named}, of {total}."


def _watts(compared: Sequence[TrialRecord]) -> str:
    """The boards' watts and the energy of a token, as measured; what one of the trials could not tell is left out."""
    words = [
        f"{title} {_each(record.metrics[name] for record in compared)}"
        for name, title in _MEASURED.items()
        if all(name in record.metrics for record in compared)
    ]
    return f"Power, measured, {_WHOSE[len(compared)]}: {', '.join(words)}." if words else ""


def _each(values: Iterable[float]) -> str:
    return " / ".join(f"{value:,.3g}" for value in values)
