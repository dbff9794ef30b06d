"""The residual sampler for a front: its scalarisation, and that it covers more of the front than chance does."""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import numpy as np
import pytest
from optuna.storages import InMemoryStorage

from autotune.pareto_sampler import Chebyshev
from autotune.pool_study import PoolStudy
from autotune.records import TrialResult
from launchers.outcome import Outcome

from .study_cases import NoLauncher, failed, optuna_study, run_to_end, study_spec
from .test_pareto import MEMORY, TOKENS, numbers, shown
from .test_residual_sampler import GPUS, MODEL, SEARCH, gpu_study, truth


def pareto_study(sampler: str, seed: int, trials: int, terms: dict[str, float] | None = None, predicted: bool = True) -> PoolStudy:
    fields: dict[str, Any] = {
        "model": MODEL,
        "pools": [GPUS],
        "seq_length": 4096,
        "global_batch_size": 64,
        "search": SEARCH,
        "baseline": {"tensor_model_parallel_size": 8, "use_distributed_optimizer": True, "sequence_parallel": True},
        "recipes": False,
        "pareto": True,
        "objective": terms or {TOKENS: 1.0, MEMORY: -1.0},
    }
    spec = study_spec(**fields, sampler=sampler, seed=seed, budget={"trials": trials})
    predictor = None if predicted else lambda columns: None
    return PoolStudy(spec, spec.pools[0], NoLauncher(), InMemoryStorage(), lambda study, record: None, predictor=predictor)


def as_predicted(study: PoolStudy) -> Any:
    """Measured = predicted by the shipped coefficients; what is predicted not to fit runs out of memory."""

    def answer(proposal: Any) -> TrialResult:
        row = study.table.find(proposal.config)
        if truth().fits[row] == "does_not_fit":
            return failed(Outcome.OOM)
        return shown(float(truth().step_time_s[row]), float(truth().memory.memory_gib[row]))

    return answer


def ended(study: PoolStudy) -> PoolStudy:
    run_to_end(study, as_predicted(study))
    return study


@cache
def ended_study(sampler: str, seed: int) -> PoolStudy:
    return ended(pareto_study(sampler, seed, 14))


def covered(study: PoolStudy) -> float:
    return study.results().hypervolume or 0.0


def test_the_score_is_minus_the_augmented_distance_to_the_ideal() -> None:
    joined = Chebyshev(np.array([1.0, 2.0]), np.array([0.5, 2.0]))
    terms = np.array([[1.0, 2.0], [0.0, 2.0], [0.5, 1.0]])
    assert joined.score(terms) == pytest.approx([0.0, -0.5 * 1.05, -2.0 - 0.05 * 2.25])


def test_weights_are_one_on_average_and_relative_to_each_terms_range_on_the_front() -> None:
    known = np.array([[0.0, 1.0], [10.0, 0.0], [5.0, 0.5], [-50.0, -3.0]])
    drawn = np.array([Chebyshev.drawn(known, np.random.default_rng(seed)).weights for seed in range(2000)])
    assert drawn.mean() == pytest.approx(1.0, rel=0.05)
    assert drawn[:, 1].mean() / drawn[:, 0].mean() == pytest.approx(10.0, rel=0.1)


def test_a_term_that_is_the_same_everywhere_weighs_nothing() -> None:
    joined = Chebyshev.drawn(np.array([[0.0, 3.0], [1.0, 3.0]]), np.random.default_rng(0))
    assert joined.weights[1] == 0.0 and joined.weights[0] > 0.0
    assert not Chebyshev.drawn(np.array([[1.0, 3.0]]), np.random.default_rng(0)).weights.any()


def test_it_covers_more_of_the_front_than_random_in_as_many_trials() -> None:
    ours, random = ([covered(ended_study(sampler, seed)) for seed in range(4)] for sampler in ("residual", "random"))
    assert np.mean(ours) > np.mean(random)
    assert min(ours) > np.median(random)


def test_it_covers_both_ends_of_what_counts() -> None:
    study = ended_study("residual", 0)
    front = study.results().front
    baseline = truth().memory.memory_gib[study.table.find(study.results().baseline.config)]  # type: ignore[union-attr]
    counts = (truth().fits != "does_not_fit") & (truth().memory.memory_gib < math.e * baseline)
    fastest, smallest = truth().tokens_per_s_per_gpu[counts].max(), truth().memory.memory_gib[counts].min()
    assert max(point.record.metrics[TOKENS] for point in front) > 0.9 * fastest
    assert min(point.record.metrics[MEMORY] for point in front) < 1.1 * smallest


def test_a_term_that_nothing_predicts_and_a_pool_of_which_nothing_is_known_are_searched() -> None:
    terms = {TOKENS: 1.0, MEMORY: -1.0, "step_time_cv": -1.0}
    assert covered(ended(pareto_study("residual", 0, 8, terms=terms))) > 0.0
    assert covered(ended(pareto_study("residual", 0, 8, predicted=False))) > 0.0


def test_several_at_once_differ_and_the_same_seed_proposes_the_same() -> None:
    first, second = (pareto_study("residual", 3, 20) for _ in range(2))
    configs = [[study.propose().config for _ in range(5)] for study in (first, second)]  # type: ignore[union-attr]
    assert len(set(configs[0])) == 5
    assert configs[0] == configs[1]


def test_what_is_left_to_gain_is_not_told() -> None:
    study = pareto_study("residual", 0, 10)
    run_to_end(study, as_predicted(study))
    assert study._sampler.outlook is None
    assert len(optuna_study(study).best_trials) >= len(numbers(study.results().front)) > 1


def test_a_study_for_one_score_is_not_touched() -> None:
    assert gpu_study().results().hypervolume is None
