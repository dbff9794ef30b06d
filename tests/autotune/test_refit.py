"""The refit of a running study: predictions that follow measurements, cheap and never in the way."""

from dataclasses import replace

import numpy as np
import pytest
from optuna.storages import InMemoryStorage

from autotune import refit as module
from autotune.pool_study import PoolStudy
from autotune.records import TrialResult
from autotune.refit import CALIBRATION_FILE, MOST_ROWS, Refit, Row, calibration_key, chosen
from launchers.outcome import Outcome
from search_spaces.calibration import Measured, Predictor, Sample
from search_spaces.calibration_store import Calibration, Store
from search_spaces.coefficients import Coefficients, shipped
from search_spaces.gpus import gpu, links_of
from search_spaces.prediction import CALIBRATING_TRIALS

from .study_cases import NoLauncher, completed, failed, open_pool, run_to_end, steps_of, study_spec

# What this machine "really" reaches: far from the shipped figures of a CPU.
TRUTH = shipped("cpu").model_copy(update={"gemm": 0.2, "attention": 0.9, "inside": 0.3, "step_ms": 25.0})
DEVICE = gpu("cpu")
LINKS = links_of(DEVICE, 4)


def measured_by(study):
    """Trials that take what the truth says."""

    def answer(proposal):
        sample = Sample(Measured(study.workload, proposal.config, 1.0), DEVICE, LINKS)
        return completed(float(Predictor([sample])(TRUTH)[0]))

    return answer


def opened(folder=None, name="case", trials=8, storage=None):
    spec = study_spec(name=name, budget={"trials": trials})
    return PoolStudy(spec, spec.pools[0], NoLauncher(), storage or InMemoryStorage(), lambda study, record: None, folder)


def errors(records):
    return [abs(r.metrics["predicted_step_time_s"] / r.metrics["step_time_s"] - 1) for r in records if "step_time_s" in r.metrics]


def test_predictions_at_launch_get_better_while_the_study_runs():
    study = opened(trials=14)
    run_to_end(study, measured_by(study))
    found = errors(study.records)
    assert np.mean(found[:2]) > 0.25
    assert np.mean(found[-6:]) < 0.1
    behind = [r.metrics["predicted_from_trials"] for r in study.records if r.metrics]
    assert behind == [0, 1, 2, 3, 4, 4, 6, 6, 8, 8, 8, 11, 11, 11], "every trial counts at once while there are few"


def test_a_disturbed_trial_hardly_moves_the_predictions():
    """One trial four times as slow as the others: disturbed, it moves the predictions far less."""
    study = opened()
    run_to_end(study, measured_by(study))
    last = study.records[-1]
    slow = replace(last, metrics={**last.metrics, "step_time_s": 4 * last.metrics["step_time_s"]})

    def moved(record):
        again = opened()
        for other in study.records:
            again.refit.learn(other)
        before = again.refit.predictions().step_time_s
        for _ in range(3):  # one more trial beside eight is no reason to refit
            again.refit.learn(record)
        return float(np.abs(np.log(again.refit.predictions().step_time_s / before)).max())

    assert moved(replace(slow, contaminated="a hog")) < 0.2 * moved(slow)


def test_the_table_follows_the_refit_and_keeps_its_memory():
    study = opened()
    before = study.refit.predictions()
    run_to_end(study, measured_by(study))
    after = study.refit.predictions()
    assert len(after) == len(before) == len(study.table)
    assert after.memory is before.memory
    assert not np.allclose(after.step_time_s, before.step_time_s)
    assert after.machines.trials == 8
    assert study.refit.predictions() is after


def test_a_launched_trial_carries_what_was_predicted_also_where_it_failed():
    study = open_pool(study_spec(), refits=True)
    record = study.finish(study.propose(), failed(Outcome.OOM))
    assert record.metrics["predicted_peak_memory_gib"] > 0
    assert record.metrics["predicted_fits"] == 1.0
    assert record.outcome is Outcome.OOM


def test_a_noisy_trial_counts_less():
    """One trial with a wide interval says the opposite of the others; it must not win over their number."""

    def told(noise):
        study = opened(trials=5)
        answer = measured_by(study)
        for _ in range(5):
            proposal = study.propose()
            result = answer(proposal)
            if proposal.trial.number == 2:
                slow = [replace(step, step_s=step.step_s * (4 + noise * (step.iteration % 2))) for step in result.steps]
                result = replace(result, steps=tuple(slow))
            study.finish(proposal, result)
        return study.refit.predictions().step_time_s

    clean = opened(trials=5)
    run_to_end(clean, measured_by(clean))
    truth = clean.refit.predictions().step_time_s
    assert np.abs(told(noise=6) / truth - 1).mean() < 0.5 * np.abs(told(noise=0) / truth - 1).mean()


def test_the_error_that_is_stated_is_that_of_the_pools_own_predictions(tmp_path):
    study = opened(tmp_path, trials=12)
    run_to_end(study, measured_by(study))
    study.close()
    late = [record for record in study.records if record.metrics.get("predicted_from_trials", 0) >= CALIBRATING_TRIALS]
    assert len(late) == 6
    kept = Store(tmp_path / CALIBRATION_FILE).get(*calibration_key(study.pool))
    assert kept.trials == 12
    assert kept.error == pytest.approx(np.mean(errors(late)))
    assert study.refit.predictions().machines.step_time_error == kept.error


def test_only_measured_trials_without_limits_teach():
    study = open_pool(study_spec(), refits=True)
    proposal = study.propose()
    study.finish(proposal, failed(Outcome.NAN))
    limited = study.finish(study.propose(), completed(0.5))
    assert study.refit.predictions().machines.trials == 1
    for limit in ({"gpu_power_limit_w": int(DEVICE.tdp_w) - 1}, {"sm_clock_limit_mhz": 300}):
        study.refit.learn(replace(limited, config=limited.config.model_copy(update=limit)))
    assert study.refit.predictions().machines.trials == 1
    study.refit.learn(replace(limited, config=limited.config.model_copy(update={"gpu_power_limit_w": int(DEVICE.tdp_w)})))
    assert study.refit.predictions().machines.trials == 2


def test_a_resumed_study_knows_its_trials():
    storage = InMemoryStorage()
    first = opened(storage=storage)
    run_to_end(first, measured_by(first))
    again = opened(storage=storage)
    assert again.refit.predictions().machines.trials == 8
    assert again.refit.predictions().step_time_s == pytest.approx(first.refit.predictions().step_time_s, rel=0.02)


def test_the_next_study_starts_where_the_last_one_ended(tmp_path):
    first = opened(tmp_path)
    run_to_end(first, measured_by(first))
    first.refit.predictions()
    second = opened(tmp_path, name="other", trials=3)
    assert second.refit.predictions().machines.trials == 8
    run_to_end(second, measured_by(second))
    assert max(errors(second.records)) < 0.1
    assert second.refit.predictions().machines.trials == 11


def test_a_study_is_not_its_own_prior(tmp_path):
    storage = InMemoryStorage()
    first = opened(tmp_path, storage=storage)
    run_to_end(first, measured_by(first))
    first.refit.predictions()
    assert opened(tmp_path, storage=storage).refit.predictions().machines.trials == 8


@pytest.mark.parametrize("content", ["", "{", "[]", '{"a": {"b": {"c": {"coefficients": {"gemm": -1}, "trials": 1}}}}'])
def test_a_broken_calibration_file_stops_nothing(tmp_path, content):
    (tmp_path / CALIBRATION_FILE).write_text(content)
    study = opened(tmp_path, trials=3)
    run_to_end(study, measured_by(study))
    assert study.refit.predictions().machines.trials == 3
    assert (tmp_path / CALIBRATION_FILE).read_text() == content


def test_a_fit_that_fails_stops_nothing(monkeypatch, caplog):
    def no_fit(*args, **kwargs):
        raise np.linalg.LinAlgError("singular")

    monkeypatch.setattr(module, "fit", no_fit)
    study = opened(trials=3)
    run_to_end(study, measured_by(study))
    assert study.end_reason == "budget: 3 trials"
    assert study.refit.predictions().machines.trials == 0
    assert "not refitted: singular" in caplog.text


def test_G016_an_unknown_gpu_has_no_predictions_and_is_tuned_all_the_same():
    spec = study_spec(pools=[{"name": "new", "gpu": "x9000", "gpus_per_node": 4}], budget={"trials": 2})
    study = open_pool(spec, refits=True)
    run_to_end(study, lambda proposal: TrialResult(Outcome.COMPLETED, "", steps_of(0.1)))
    assert study.refit.predictions() is None
    assert study.launched == 2
    assert not [name for record in study.records for name in record.metrics if name.startswith("predicted_")]


def test_a_refit_looks_at_a_bounded_number_of_rows():
    workload = study_spec().workload(study_spec().pools[0])
    rows = [Row(Sample(Measured(workload, study_spec().baseline, float(s)), DEVICE, LINKS), 1.0) for s in range(1, 301)]
    some = [row.sample.measured.step_time_s for row in chosen(rows)]
    assert len(some) == len(set(some)) == MOST_ROWS
    assert some[-20:] == list(range(281, 301))
    assert (min(some), max(some[:-20])) == (1, 280)
    assert chosen(rows[:5]) == rows[:5]


def test_a_refit_costs_few_predictions(monkeypatch):
    """Evaluations of the model, not seconds: 6 steps of a Jacobian over 13 coefficients and their trials."""
    calls = []
    real = Predictor.__call__

    def counted(self, coefficients):
        calls.append(self.size)
        return real(self, coefficients)

    study = opened(trials=6)
    answer = measured_by(study)
    monkeypatch.setattr(Predictor, "__call__", counted)
    run_to_end(study, answer)
    calls.clear()
    study.refit.predictions()
    assert 0 < len(calls) <= 6 * (13 + 6) + 1
    assert max(calls) <= MOST_ROWS


def test_what_ranks_run_keeps_calibrations_apart():
    pool = study_spec().pools[0]
    own = pool.model_copy(update={"environment": pool.environment.model_copy(update={"python": "/opt/train/bin/python"})})
    assert calibration_key(pool)[1].startswith("megatron-core ")
    assert calibration_key(own)[1] == "/opt/train/bin/python"
    assert calibration_key(pool)[0] == calibration_key(own)[0]


def test_refit_without_a_store_keeps_nothing(tmp_path):
    table = opened().table
    refit = Refit("case", table, None, ("a", "b"), Store(tmp_path / "none.json"))
    assert refit.metrics(study_spec().baseline) == {}
    assert not list(tmp_path.iterdir())


def test_a_store_forgets_the_oldest_studies(tmp_path):
    store = Store(tmp_path / CALIBRATION_FILE)
    for number in range(12):
        store.put("pool", "software", f"study-{number}", Calibration(Coefficients(), number))
    assert store.get("pool", "software").trials == 11
    assert store.get("pool", "software", but_of="study-11").trials == 10
    assert store.path.read_text().count("study-") == 8
