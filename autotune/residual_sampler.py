"""ResidualSampler: starts from what physics predicts, learns where it is wrong, and proposes what promises most within the limits.

Every proposal is the open candidate with the highest expected improvement times the probability that it runs and keeps the limits
(Gardner et al. 2014, "Bayesian optimization with inequality constraints"). The first ones are those with the highest expected
throughput. Trials that still run count as measured at what is expected of them (kriging believer: Ginsbourger, Le Riche and
Carraro 2010), so that several at once differ. A failure lowers the chances of candidates like it and rules none out; nothing is
left out for being slow by assumption.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Any

from optuna.distributions import BaseDistribution
from optuna.samplers import BaseSampler
from optuna.study import Study
from optuna.trial import FrozenTrial, TrialState
from threadpoolctl import threadpool_limits

from autotune.acquisition import Choice, choose
from autotune.candidates import Candidates
from autotune.objective import Objective
from autotune.outlook import METRICS_NOISE, Expects, Outlook, outlook_of, run_noise
from autotune.records import Phase, TrialRecord, record_from_trial
from autotune.residual_model import Rows
from autotune.seen import Seen
from autotune.transfer import NOTHING, Earlier
from launchers.outcome import Outcome
from search_spaces.prediction import Predictions

WHY = "residual:why"
"""Optuna system attribute of a proposed trial: the `Choice` as a mapping; infinity is None."""
_DISTURBED = 0.5  # of a measurement that somebody disturbed: it says little


class ResidualSampler(BaseSampler):
    """Proposes open candidates of the table only.

    Attributes:
        chosen: The last proposal; None before any.
    """

    def __init__(
        self,
        candidates: Candidates,
        predictions: Callable[[], Predictions | None],
        seed: int,
        expects: Expects,
        earlier: Earlier = NOTHING,
    ) -> None:
        """Start without any trial.

        Args:
            candidates: The table, and what of it is open.
            predictions: Gives the predictions of all rows, or None; asked before every proposal.
            seed: Of the candidates drawn at random where the table is large.
            expects: What the study values and allows.
            earlier: Trials of earlier studies that the models start with; none of them is the study's own.
        """
        self.chosen: Choice | None = None
        self._candidates = candidates
        self._predictions = predictions
        self._seed = seed
        self._expects = expects
        self._earlier = earlier
        self._view: tuple[Predictions | None, Outlook] | None = None
        self._records: dict[int, TrialRecord | None] = {}
        self._objective: Objective | None = None

    def infer_relative_search_space(self, study: Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        """The whole table's."""
        return self._candidates.distributions

    def sample_relative(self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]) -> dict[str, Any]:
        """The most promising open candidate; empty where none is left."""
        rows = self._candidates.open_rows()
        if not len(rows):
            return {}
        # The matrices are small: on a busy machine more threads only wait for each other.
        with threadpool_limits(limits=1):
            self.chosen = found = self.choice(study, trial, rows)
        told = asdict(replace(found, gains=None))
        why = {name: value if math.isfinite(value) else None for name, value in told.items() if value is not None}
        study._storage.set_trial_system_attr(trial._trial_id, WHY, why)
        return dict(self._candidates.params_of_row(found.row))

    def sample_independent(self, study: Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution) -> Any:
        """Never reached while a candidate is left."""
        raise RuntimeError(f"{param_name}: candidates are proposed whole")

    def choice(self, study: Study, trial: FrozenTrial, rows: Rows) -> Choice:
        """The most promising of the open candidates `rows`."""
        return choose(self.outlook(), self.seen(study, but=trial.number), rows, (self._seed, trial.number))

    def outlook(self) -> Outlook:
        """The outlook on the newest predictions, worked out once for each."""
        newest = self._predictions()
        if self._view is None or self._view[0] is not newest:
            self._view = newest, outlook_of(self._candidates.table, newest, self._expects, self._earlier)
        return self._view[1]

    def seen(self, study: Study, but: int | None = None) -> Seen:
        """What the study's trials in the table showed so far, without the one of number `but`."""
        seen, trials = Seen(), study.get_trials(deepcopy=False, states=(TrialState.RUNNING, TrialState.COMPLETE))
        if self._objective is None:
            self._objective = self._relative_to_first(trials)
        for trial in trials:
            row = self._candidates.row_of_params(trial.params) if trial.number != but else None
            if row is None:
                continue
            if trial.state is TrialState.RUNNING:
                seen.running.append(row)
            elif (record := self._record(trial)) is not None:
                self._add(seen, row, record)
        return seen

    def _relative_to_first(self, trials: Sequence[FrozenTrial]) -> Objective | None:
        """Scores as the ledger tells them: by the study's weights of now, which may have been edited since a trial ended."""
        records = [record for trial in trials if trial.state is TrialState.COMPLETE and (record := self._record(trial)) is not None]
        measured = [record for record in records if record.outcome is Outcome.COMPLETED]
        reference = min(measured, key=lambda record: record.phase is not Phase.BASELINE, default=None)
        return None if reference is None else Objective(self._expects.weights, {}, reference.metrics)

    def _record(self, trial: FrozenTrial) -> TrialRecord | None:
        """The trial's record, read once."""
        if trial.number not in self._records:
            self._records[trial.number] = record_from_trial(trial)
        return self._records[trial.number]

    def _add(self, seen: Seen, row: int, record: TrialRecord) -> None:
        if record.outcome is Outcome.COMPLETED and self._objective is not None:
            seen.rows.append(row)
            seen.scores.append(self._objective.score(record.metrics))
            seen.noise.append(math.hypot(run_noise(record.metrics), _DISTURBED if record.contaminated else 0.0))
            seen.metrics.append(record.metrics)
            seen.metrics_noise.append(_DISTURBED if record.contaminated else METRICS_NOISE)
        elif record.outcome not in (Outcome.COMPLETED, Outcome.STOPPED, Outcome.REFUSED, Outcome.LOST):
            seen.failed.append(row)
            if record.outcome is Outcome.OOM:
                seen.out_of_memory.append(row)
