"""A rehearsal counts virtual seconds, everywhere and once: budgets, money and wall time end it as they would end the real study."""

import threading
from itertools import pairwise
from types import SimpleNamespace

import pytest
from optuna.storages import InMemoryStorage
from pydantic import ValidationError
from ray.tune.search import Searcher

from autotune.errors import SpecError
from autotune.pool_study import PoolStudy
from autotune.records import Phase, TrialResult
from autotune.rehearsed import VirtualTrial
from autotune.searcher import StudySearcher
from autotune.simulation import twin_launcher
from autotune.study import check_baseline_time, open_studies
from autotune.time_limits import limits_of
from autotune.tracking.upload import trial_upload
from autotune.trial import RESULT_KEY, Merged
from launchers.limits import Limits
from launchers.outcome import Outcome, Verdict
from launchers.simulated import STARTUP_S, NodeLostError, OutOfMemoryError, play
from tests.autotune.study_cases import steps_of, study_spec
from tests.autotune.test_searcher import FakeSlots

POOL = {"name": "h200", "gpu": "h200", "nodes": 4, "gpus_per_node": 8, "usd_per_gpu_hour": 3.0}
LARGE = {
    "launcher": "simulated",
    "model": {"num_layers": 48, "hidden_size": 6144, "num_attention_heads": 48, "num_query_groups": 8, "vocab_size": 64000},
    "pools": [POOL],
    "global_batch_size": 1024,
    "seq_length": 4096,
    "baseline": {"tensor_model_parallel_size": 8, "pipeline_model_parallel_size": 2, "use_distributed_optimizer": True},
    "search": {"tensor_model_parallel_size": [2, 4, 8], "pipeline_model_parallel_size": [1, 2, 4], "micro_batch_size": [1, 2, 4]},
}


def answer(request):
    """What the trial's driver makes of a trial on the twin, without Ray."""
    merged = Merged(virtual=VirtualTrial(request.virtual_limits))
    try:
        shown = play(request.job, request.job["start_s"] + STARTUP_S, most_samples=0)
    except (OutOfMemoryError, NodeLostError) as error:
        outcome = Outcome.OOM if isinstance(error, OutOfMemoryError) else Outcome.LOST
        return TrialResult(outcome, str(error), virtual_s=merged.virtual.took_s)
    for step in shown.steps:
        merged.take(step)
        merged.look(request)
    merged.verdicts.append(Verdict(Outcome.COMPLETED, ""))
    verdict = merged.verdict()
    return TrialResult(verdict.outcome, verdict.detail, tuple(merged.steps), virtual_s=merged.virtual.took_s)


def rehearse(tmp_path, storage=None, most=1000, **fields):
    """The pools' studies of a rehearsal, driven by the searcher."""
    spec, storage = study_spec(**{**LARGE, **fields}), storage or InMemoryStorage()
    studies = [PoolStudy(spec, pool, twin_launcher(spec, pool), storage, lambda study, record: None) for pool in spec.pools]
    searcher = StudySearcher(spec, studies, FakeSlots(), tmp_path, lambda study, proposal: None, threading.Event())
    for number in range(most):
        if not isinstance(launched := searcher.suggest(f"t{number}"), dict):
            assert launched == Searcher.FINISHED
            break
        searcher.on_trial_complete(f"t{number}", {RESULT_KEY: answer(launched["request"])})
    return studies


def test_hours_and_money_are_those_of_the_virtual_steps_and_the_start_up(tmp_path):
    (study,) = rehearse(tmp_path, budget={"trials": 5, "confidence": None})
    spent, records = study.results().spent, study.records
    assert [record.took_s for record in records] == pytest.approx(
        [STARTUP_S + sum(step.step_s for step in record.steps) for record in records], abs=1e-3
    )
    assert spent.gpu_hours == pytest.approx(sum(record.took_s for record in records) / 3600 * 32)
    assert spent.usd == pytest.approx(3.0 * spent.gpu_hours)
    assert spent.gpu_hours > 1.0
    for record in records:
        upload = trial_upload(record)
        assert (upload.end_ms - upload.start_ms) / 1000 == pytest.approx(record.took_s, abs=0.01)
        assert all(record.started_s < step.time_s <= record.ended_s + 1e-3 for step in record.steps)


@pytest.mark.parametrize(
    ("budget", "unit"), [({"gpu_hours": 4.0}, "GPU-hours"), ({"usd": 12.0}, "USD"), ({"wall_time_s": 450}, "wall")]
)
def test_every_budget_of_time_ends_a_rehearsal_by_virtual_seconds(tmp_path, budget, unit):
    (study,) = rehearse(tmp_path, budget={"trials": 25, "confidence": None, **budget})
    assert unit in study.end_reason
    *before, _ = study.records
    assert sum(record.took_s for record in before) < 450.0 <= sum(record.took_s for record in study.records)


def test_a_resumed_rehearsal_goes_on_where_its_virtual_time_was(tmp_path):
    storage, budget = InMemoryStorage(), {"trials": 25, "confidence": None, "gpu_hours": 16.0}
    (first,) = rehearse(tmp_path, storage, most=3, budget=budget)
    (resumed,) = rehearse(tmp_path, storage, budget=budget)
    assert len(first.records) == 3 < len(resumed.records)
    assert all(later.started_s >= earlier.ended_s for earlier, later in pairwise(resumed.records))
    assert sum(record.took_s for record in resumed.records[:-1]) * 32 / 3600 < 16.0 <= resumed.results().spent.gpu_hours


def test_pools_of_one_rack_confirm_alone_in_virtual_time_too(tmp_path):
    pools = [POOL, {**POOL, "name": "small", "nodes": 2}]
    rack = [{"name": "rack", "nodes": ["h200", "small"], "limit_w": 90000}]
    studies = rehearse(tmp_path, pools=pools, power_domains=rack, budget={"trials": 3}, confirm={"top": 1, "repeats": 2})
    for study, other in (studies, studies[::-1]):
        confirming = [record for record in study.records if record.phase is Phase.CONFIRM]
        assert confirming
        for one in confirming:
            assert not [two for two in other.records if two.started_s < one.ended_s and one.started_s < two.ended_s]


@pytest.mark.parametrize(
    ("limits", "outcome", "detail", "steps", "took_s"),
    [
        (Limits(300.0, 0.9, 600.0), Outcome.HUNG, "no step within 0.9 s after step 1", 1, STARTUP_S + 10.0 + 0.9),
        (Limits(35.0, 120.0, 600.0), Outcome.TIMEOUT, "no first step within 35 s", 0, 35.0),
        (Limits(300.0, 120.0, 42.5), Outcome.TIMEOUT, "the trial took over 42.5 s", 3, 42.5),
        (Limits(300.0, 120.0, 600.0), Outcome.COMPLETED, "", 8, None),
    ],
)
def test_limits_end_a_rehearsed_trial_as_they_end_a_real_one(limits, outcome, detail, steps, took_s):
    """A first step of 10 s, then 1.00 to 1.02 s each."""
    merged, shown = Merged(virtual=VirtualTrial(limits), verdicts=[Verdict(Outcome.COMPLETED, "")]), steps_of(1.0)
    for step in shown:
        merged.take(step)
        merged.look(SimpleNamespace(measurement=study_spec().measurement, beaten_s=None, spread=None))
    verdict = merged.verdict()
    assert verdict.outcome is outcome
    assert verdict.detail.startswith(detail)
    assert len(merged.steps) == steps
    assert merged.virtual.took_s == pytest.approx(took_s or STARTUP_S + sum(step.step_s for step in shown))
    assert merged.failed() == (outcome is not Outcome.COMPLETED)


def of(predicted_s=0.0, steps=30, first=False, **given):
    measurement = study_spec(measurement={"steps": 30, **given}).measurement
    found = limits_of(measurement, predicted_s, steps=steps, exploring_steps=30, first=first)
    return found.startup_s, found.step_s, found.trial_s


def test_limits_follow_what_is_predicted_and_obey_the_study():
    assert of() == of(0.5) == (300.0, 120.0, 1800.0)
    assert of(125.0) == (1250.0, 625.0, 1250.0 + 3 * 30 * 125.0)
    assert of(125.0, steps=60)[2] == 1250.0 + 3 * 60 * 125.0
    assert of(125.0, first=True)[0] == 2500.0
    assert of(125.0, steps=60, startup_timeout_s=60, step_timeout_s=130, trial_timeout_s=900) == (60.0, 130.0, 1800.0)


def test_a_study_whose_own_limit_its_baseline_cannot_keep_is_refused_before_launch(tmp_path):
    (fine,) = rehearse(tmp_path, most=0)
    for name in ("startup_timeout_s", "step_timeout_s", "trial_timeout_s"):
        spec = study_spec(**LARGE, measurement={"steps": 30, name: 5})
        with pytest.raises(SpecError, match=f"measurement.{name}.*is less than the .* s predicted for .* of the baseline"):
            check_baseline_time(spec, fine)
    check_baseline_time(study_spec(**LARGE, measurement={"steps": 30, "step_timeout_s": 500}), fine)
    (known,) = rehearse(tmp_path, most=1)
    check_baseline_time(spec, known)


def test_what_no_real_pool_can_set_is_dropped_by_a_rehearsal_too_and_a_limit_out_of_range_refused():
    clocks = {**LARGE["search"], "sm_clock_limit_mhz": [1000, 1500], "gpu_power_limit_w": [400, 500]}
    storage, folder = InMemoryStorage(), SimpleNamespace(path=None)
    (study,) = open_studies(study_spec(**{**LARGE, "search": clocks}), folder, storage, lambda study, record: None)
    assert any(note.startswith("sm_clock_limit_mhz was dropped") for note in study.results().notes)
    assert "sm_clock_limit_mhz" not in study.table.choices
    assert "gpu_power_limit_w" in study.table.choices
    with pytest.raises(ValidationError, match="gpu_power_limit_w"):
        study_spec(**{**LARGE, "search": {**clocks, "gpu_power_limit_w": [50, 500]}})
