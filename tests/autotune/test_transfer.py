"""Trials of earlier studies as rows of a new study's models: on its scales, for its limits, and where nothing is predicted."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from optuna.storages import BaseStorage, InMemoryStorage

from autotune.outlook import Expects, outlook_of
from autotune.pool_study import PoolStudy
from autotune.spec_parts import Bound
from autotune.transfer import Earlier
from search_spaces.config import TrialConfig

from .study_cases import NoLauncher, completed, run_to_end, study_spec
from .test_earlier import POOL, STUDY, before, found_by, opened, predicted


def beside(storage: BaseStorage, limits: dict[str, Bound], metrics: dict[str, float]) -> Any:
    """The outlook of a new study beside an earlier one whose trials measured these metrics, too."""
    study = opened(storage)
    studies = tuple(
        replace(one, records=tuple(replace(record, metrics={**record.metrics, **metrics}) for record in one.records))
        for one in found_by(study)
    )
    expects = Expects({"tokens_per_s_per_gpu": 1.0}, limits)
    return study, outlook_of(study.table, predicted(study.table.columns), expects, Earlier(studies, predicted))


def test_limits_learn_of_earlier_trials_that_measured_them() -> None:
    storage, limits = InMemoryStorage(), {"gpu_mean_power_w": Bound(max=500.0)}
    before(storage)
    _, with_watts = beside(storage, limits, {"gpu_mean_power_w": 450.0})
    _, without = beside(storage, limits, {})
    assert len(with_watts.limits[0].elsewhere.residuals) == 16
    assert len(without.limits[0].elsewhere.residuals) == 0
    assert len(without.elsewhere.residuals) == 16


def test_earlier_trials_are_seen_on_the_scales_of_the_candidates() -> None:
    """An earlier trial of a candidate's own configuration and workload has its features, but for the level of the prediction."""
    storage = InMemoryStorage()
    before(storage, global_batch_size=64)
    study, view = beside(storage, {}, {})
    (earlier,) = found_by(study)
    rows = [study.table.find(record.config) for record in earlier.records]
    difference = view.elsewhere.matrix - view.features.matrix[rows]
    apart = np.delete(difference, view.features.parts, axis=1)
    assert apart == pytest.approx(np.zeros_like(apart))
    assert np.ptp(difference[:, view.features.parts]) == pytest.approx(0.0, abs=1e-9)
    assert view.elsewhere.residuals == pytest.approx(np.zeros(16), abs=0.02)


def test_a_knob_that_is_fixed_here_is_a_feature_where_earlier_trials_had_it_otherwise() -> None:
    storage = InMemoryStorage()
    before(storage, search={**STUDY["search"], "use_distributed_optimizer": [False, True]}, global_batch_size=64)
    study, view = beside(storage, {}, {})
    alone = outlook_of(study.table, predicted(study.table.columns))
    assert view.features.knobs.shape[1] == alone.features.knobs.shape[1] + 1
    assert (np.ptp(view.features.knobs, axis=0) == 0.0).sum() == 1


def test_where_nothing_is_predicted_earlier_trials_still_tell() -> None:
    """A kind of GPU that nobody knows: the search goes where the earlier study was fast."""
    storage, pool = InMemoryStorage(), {**POOL, "gpu": "gpu-of-2040"}

    def unknown(name: str, trials: int, sampler: str) -> list[TrialConfig]:
        spec = study_spec(**{**STUDY, "name": name, "pools": [pool], "sampler": sampler, "budget": {"trials": trials}})
        study = PoolStudy(spec, spec.pools[0], NoLauncher(), storage, lambda study, record: None)
        return [one.config for one in run_to_end(study, lambda p: completed(0.1 * p.config.tensor_model_parallel_size))]

    unknown("before", 20, "random")
    assert unknown("after", 2, "residual")[1].tensor_model_parallel_size == 1
