"""CandidateSampler: lets an Optuna sampler propose points of the candidate table, and never the same one twice.

Parameters are indices into each knob's ordered choices, so that powers of two keep their order. A proposal that is one spelling of
a legal candidate is told to Optuna as that candidate, never repaired silently.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import optuna
from optuna.distributions import BaseDistribution, IntDistribution
from optuna.samplers import BaseSampler, GPSampler, NSGAIISampler, RandomSampler, TPESampler
from optuna.study import Study
from optuna.trial import FrozenTrial, TrialState

from autotune.spec import SamplerName
from search_spaces.config import TrialConfig
from search_spaces.space import SearchSpace

_REDRAWS = 50


def inner_sampler(name: SamplerName, seed: int) -> BaseSampler | None:
    """Optuna's sampler of that name; None for `grid`, which walks the table in its own order."""
    match name:
        case "tpe":
            return TPESampler(seed=seed)
        case "gp":
            return GPSampler(seed=seed)
        case "nsga2":
            return NSGAIISampler(seed=seed)
        case "random":
            return RandomSampler(seed=seed)
        case "grid":
            return None


class Candidates:
    """The candidate table and what of it has been proposed already, refused points included.

    Attributes:
        space: The table.
        distributions: Optuna's view of it: an index per knob that has more than one choice.
    """

    def __init__(self, space: SearchSpace, allowed: np.ndarray) -> None:
        """Args: space: the table; allowed: bool (rows,), False where the launcher cannot run a row."""
        self.space = space
        self.distributions: dict[str, BaseDistribution] = {
            name: IntDistribution(0, len(choices) - 1) for name, choices in space.choices.items() if len(choices) > 1
        }
        self._columns = [list(space.choices).index(name) for name in self.distributions]
        self._open = allowed.copy()
        self._seen: set[TrialConfig] = set()

    @property
    def left(self) -> int:
        """Candidates not proposed yet."""
        return int(self._open.sum())

    def config(self, params: dict[str, Any]) -> TrialConfig:
        """The normalised configuration at these indices."""
        indices = {name: int(params.get(name, 0)) for name in self.space.choices}
        return self.space.config_at(indices)

    def params(self, config: TrialConfig) -> dict[str, int] | None:
        """The indices of a legal candidate; None where the table does not hold it."""
        row = self.space.row(config)
        return None if row is None else self._params_of_row(row)

    def is_open(self, config: TrialConfig) -> bool:
        """Whether it is a candidate that was not proposed yet."""
        row = self.space.row(config)
        return row is not None and bool(self._open[row])

    def is_seen(self, config: TrialConfig) -> bool:
        """Whether it was proposed before, run or refused."""
        return config in self._seen

    def mark_seen(self, config: TrialConfig) -> None:
        """It will not be proposed again."""
        self._seen.add(config)
        row = self.space.row(config)
        if row is not None:
            self._open[row] = False

    def reopen(self, config: TrialConfig, allowed: bool = True) -> None:
        """The infrastructure failed it: it may be proposed again."""
        self._seen.discard(config)
        row = self.space.row(config)
        if row is not None:
            self._open[row] = allowed

    def nearest_open(self, params: dict[str, Any]) -> dict[str, int] | None:
        """The open candidate with the smallest sum of index distances, each relative to the knob's range."""
        rows = np.flatnonzero(self._open)
        if len(rows) == 0:
            return None
        target = np.array([int(params.get(name, 0)) for name in self.distributions])
        ranges = np.array([max(1, len(self.space.choices[name]) - 1) for name in self.distributions])
        distance = (np.abs(self.space.index_matrix[np.ix_(rows, self._columns)] - target) / ranges).sum(axis=1)
        return self._params_of_row(int(rows[int(distance.argmin())]))

    def first_open(self) -> dict[str, int] | None:
        """The first open candidate in the table's order."""
        rows = np.flatnonzero(self._open)
        return self._params_of_row(int(rows[0])) if len(rows) else None

    def _params_of_row(self, row: int) -> dict[str, int]:
        return {
            name: int(self.space.index_matrix[row, column]) for name, column in zip(self.distributions, self._columns, strict=True)
        }


class CandidateSampler(BaseSampler):
    """Delegates to an Optuna sampler until it proposes something new; after 50 repeats the nearest open candidate is taken.

    Attributes:
        legal_only: While set, illegal points are drawn again as well.
    """

    def __init__(self, inner: BaseSampler | None, candidates: Candidates) -> None:
        self.legal_only = False
        self._inner = inner
        self._candidates = candidates

    def infer_relative_search_space(self, study: Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        """The whole table's, from the first trial on."""
        return self._candidates.distributions

    def sample_relative(self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]) -> dict[str, Any]:
        """One new point as indices; empty where nothing is left or the trial's point is given."""
        if "fixed_params" in trial.system_attrs or not search_space:
            return {}
        if self._inner is None:
            return dict(self._candidates.first_open() or {})
        params: dict[str, Any] = {}
        for _ in range(_REDRAWS):
            params = self._draw(self._inner, study, trial, search_space)
            config = self._candidates.config(params)
            if self._candidates.is_open(config):
                return dict(self._candidates.params(config) or {})
            if not self.legal_only and self._candidates.params(config) is None and not self._candidates.is_seen(config):
                return params
        return dict(self._candidates.nearest_open(params) or {})

    def sample_independent(self, study: Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution) -> Any:
        """Only reached where nothing is left to propose; the caller then ends the study."""
        if isinstance(param_distribution, IntDistribution):
            return param_distribution.low
        raise TypeError(f"{param_name}: candidates are indices, not {param_distribution}")

    def before_trial(self, study: Study, trial: FrozenTrial) -> None:
        """Pass on."""
        if self._inner is not None:
            self._inner.before_trial(study, trial)

    def after_trial(self, study: Study, trial: FrozenTrial, state: TrialState, values: Any) -> None:
        """Pass on."""
        if self._inner is not None:
            self._inner.after_trial(study, trial, state, values)

    def reseed_rng(self) -> None:
        """Pass on."""
        if self._inner is not None:
            self._inner.reseed_rng()

    @staticmethod
    def _draw(inner: BaseSampler, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]) -> dict[str, Any]:
        """A whole point: what the sampler draws jointly, the rest one by one (random start-up phases)."""
        params = inner.sample_relative(study, trial, search_space)
        for name, distribution in search_space.items():
            if name not in params:
                params[name] = inner.sample_independent(study, trial, name, distribution)
        return params


optuna.logging.set_verbosity(optuna.logging.WARNING)
