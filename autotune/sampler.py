"""CandidateSampler: lets an Optuna sampler propose points of the candidate table, and never the same one twice.

Parameters are indices into each knob's ordered choices, so that powers of two keep their order. A proposal that is one spelling of
a legal candidate is told to Optuna as that candidate, never repaired silently.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, cast

import optuna
from optuna.distributions import BaseDistribution, IntDistribution
from optuna.samplers import BaseSampler, GPSampler, NSGAIISampler, RandomSampler, TPESampler
from optuna.study import Study
from optuna.trial import FrozenTrial, TrialState

from autotune.acquisition import Choice
from autotune.candidates import Candidates
from autotune.outlook import Expects
from autotune.spec import SamplerName, StudySpec
from autotune.transfer import NOTHING, Earlier
from search_spaces.prediction import Predictions

PredictionSource = Callable[[], Predictions | None]

# How often a sampler is asked for something new before the nearest open candidate is taken. One draw of a Gaussian process is a
# whole fit, and what it likes it proposes again.
_REDRAWS: dict[SamplerName, int] = {"residual": 1, "tpe": 10, "gp": 2, "nsga2": 50, "random": 50, "grid": 0}


def inner_sampler(
    spec: StudySpec, candidates: Candidates, predictions: PredictionSource, earlier: Earlier = NOTHING
) -> BaseSampler | None:
    """The study's sampler, ours or Optuna's; None for `grid`, which walks the table in its own order."""
    seed = spec.seed
    match spec.sampler:
        case "residual":
            from autotune.pareto_sampler import ParetoSampler
            from autotune.residual_sampler import ResidualSampler

            ours = ParetoSampler if spec.pareto else ResidualSampler
            return ours(candidates, predictions, seed, Expects(spec.objective, spec.limits), earlier)
        case "tpe":
            return TPESampler(seed=seed)
        case "gp":
            import torch

            # Its matrices are small: on a busy machine more threads only wait for each other.
            torch.set_num_threads(1)
            return GPSampler(seed=seed)
        case "nsga2":
            return NSGAIISampler(seed=seed)
        case "random":
            return RandomSampler(seed=seed)
        case "grid":
            return None


def candidate_sampler(
    spec: StudySpec, candidates: Candidates, predictions: PredictionSource = lambda: None, earlier: Earlier = NOTHING
) -> CandidateSampler:
    """The sampler of a study; `predictions` are of the table's rows, and `earlier` what it starts with, for those that use them."""
    return CandidateSampler(inner_sampler(spec, candidates, predictions, earlier), candidates, _REDRAWS[spec.sampler])


class CandidateSampler(BaseSampler):
    """Delegates to an Optuna sampler until it proposes something new; after some repeats the nearest open candidate is taken.

    Attributes:
        legal_only: While set, illegal points are drawn again as well.
    """

    def __init__(self, inner: BaseSampler | None, candidates: Candidates, redraws: int) -> None:
        self.legal_only = False
        self._redraws = redraws
        self._inner = inner
        self._candidates = candidates

    @property
    def outlook(self) -> Choice | None:
        """The last proposal and what it promises; None where there is no model, or nothing to compare with."""
        chosen: Choice | None = getattr(self._inner, "chosen", None)
        return chosen if chosen is not None and math.isfinite(chosen.improvement) else None

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
        for _ in range(self._redraws):
            params = self._draw(self._inner, cast(Study, _TableTrials(study, search_space)), trial, search_space)
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


class _TableTrials:
    """A study as samplers see it: without trials outside the table (a baseline that is no candidate), which have no parameters.

    GPSampler raises on them.
    """

    def __init__(self, study: Study, search_space: dict[str, BaseDistribution]) -> None:
        self._study = study
        self._names = search_space.keys()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._study, name)

    def get_trials(self, *args: Any, **kwargs: Any) -> list[FrozenTrial]:
        return [trial for trial in self._study.get_trials(*args, **kwargs) if self._names <= trial.params.keys()]

    def _get_trials(self, *args: Any, **kwargs: Any) -> list[FrozenTrial]:
        return [trial for trial in self._study._get_trials(*args, **kwargs) if self._names <= trial.params.keys()]


optuna.logging.set_verbosity(optuna.logging.WARNING)
