"""The residual sampler: where it starts, what it learns, several at once, failures, limits, and a predictor that is wrong."""

import itertools
import math
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from optuna.storages import InMemoryStorage

from autotune import acquisition
from autotune.acquisition import SHORTLIST, choose, shortlist
from autotune.candidates import candidate_table
from autotune.machines import machines_of
from autotune.outlook import Limit, knob_features, outlook_of
from autotune.pool_study import PoolStudy
from autotune.residual_sampler import WHY
from autotune.seen import Seen
from launchers.outcome import Outcome
from search_spaces.prediction import predict

from .study_cases import NoLauncher, completed, failed, open_pool, optuna_study, run_to_end, study_spec

GPUS = {"name": "h100", "gpu": "h100-sxm", "gpus_per_node": 8}
MODEL = {"num_layers": 32, "hidden_size": 4096, "ffn_hidden_size": 11008, "num_attention_heads": 32, "vocab_size": 32000}
SEARCH = {
    "tensor_model_parallel_size": [1, 2, 4, 8],
    "pipeline_model_parallel_size": [1, 2, 4, 8],
    "micro_batch_size": [1, 2, 4, 8],
    "recompute": ["none", "full"],
}
BASELINE = {"tensor_model_parallel_size": 8, "use_distributed_optimizer": True, "sequence_parallel": True}


def gpu_spec(**fields):
    data = {"model": MODEL, "pools": [GPUS], "seq_length": 4096, "global_batch_size": 64, "search": SEARCH, "baseline": BASELINE}
    data["recipes"] = False  # the sampler alone
    return study_spec(**{**data, "sampler": "residual", **fields})


def gpu_study(predictor=None, **fields):
    spec = gpu_spec(**fields)
    return PoolStudy(spec, spec.pools[0], NoLauncher(), InMemoryStorage(), lambda study, record: None, predictor=predictor)


@cache
def truth():
    """The predictions of the shipped coefficients, taken for what is measured."""
    return predict(gpu_study().table.columns, machines_of(gpu_spec().pools[0]))


def seconds(study, config):
    return float(truth().step_time_s[study.table.find(config)])


def fits(study, config):
    return truth().fits[study.table.find(config)] != "does_not_fit"


def answer(study):
    """Measured = predicted; what is predicted not to fit runs out of memory."""
    return lambda proposal: completed(seconds(study, proposal.config)) if fits(study, proposal.config) else failed(Outcome.OOM)


def trials_to_best(study, within=1.02):
    """Trials until one is within 2 % of the best that fits."""
    configs = [study.table.config(row) for row in range(len(study.table))]
    best = min(seconds(study, config) for config in configs if fits(study, config))
    for taken in itertools.count(1):
        proposal = study.propose()
        assert proposal is not None, "the study ended before"
        study.finish(proposal, answer(study)(proposal))
        if fits(study, proposal.config) and seconds(study, proposal.config) <= within * best:
            return taken
    return None


def random_median(study, within=1.02):
    """Median trials of a random order, over 200 of them."""
    taken = []
    for seed in range(200):
        order = np.random.default_rng(seed).permutation(len(study.table))
        times = truth().step_time_s[order]
        runs = truth().fits[order] != "does_not_fit"
        taken.append(int(np.argmax(runs & (times <= within * times[runs].min()))) + 1)
    return float(np.median(taken))


def test_after_the_baseline_the_fastest_predicted_that_fits_is_tried():
    study = gpu_study()
    baseline = study.propose()
    study.finish(baseline, completed(seconds(study, baseline.config)))
    throughput = np.where(truth().fits == "fits", truth().tokens_per_s_per_gpu, 0.0)
    assert seconds(study, study.propose().config) <= 1.05 * truth().step_time_s[throughput.argmax()]


def test_a_right_prediction_is_followed():
    study = gpu_study()
    # within 5 %: the two fastest that fit lie next to some that do not, and the third is 4 % slower
    assert trials_to_best(study, within=1.05) <= 3


def wrong(factor):
    """The predictions with communication `factor` times as long, and recomputation that saves time in place of costing it."""
    found = truth()
    parts = dict(found.times.parts)
    for name in ("tp_comm", "pp_comm", "dp_comm"):
        parts[name] = parts[name] * factor
    step = sum(parts.values()) - 2.0 * parts["recompute"]
    scaled = np.maximum(step, 0.05 * found.step_time_s)
    return retimed(found, replace(found.times, parts=parts, step_time_s=scaled))


def retimed(found, times):
    """Predictions with other step times, without limits on power."""
    return replace(found, times=times, power=replace(found.power, step_time_s=times.step_time_s))


@pytest.mark.parametrize("factor", [3.0, 1 / 3])
def test_a_predictor_wrong_on_purpose_costs_no_more_trials_than_random(factor):
    misled = wrong(factor)
    study = gpu_study(lambda columns: misled)
    assert trials_to_best(study) <= random_median(study)


def test_the_order_upside_down_is_noticed():
    """The slowest is predicted fastest: the best is still found within two thirds of the walk that the prediction would take."""
    found = truth()
    turned = 1.0 / np.asarray(found.step_time_s)
    upside = retimed(found, replace(found.times, step_time_s=turned))
    study = gpu_study(lambda columns: upside)
    assert trials_to_best(study) < 2 / 3 * len(study.table)


def test_several_at_once_differ():
    study = gpu_study()
    assert len({study.propose().config for _ in range(9)}) == 9


def test_running_trials_spread_the_next_ones_over_the_knobs():
    study = gpu_study()
    view, knobs = outlook_of(study.table, truth()), knob_features(study.table)

    def batch(told):
        rows = []
        for number in range(8):
            rest = np.setdiff1d(np.arange(len(study.table)), rows)
            rows.append(choose(view, Seen(running=list(rows) if told else []), rest, (0, number)).row)
        return knobs[rows]

    assert _spread(batch(told=True)) > 1.05 * _spread(batch(told=False))


def test_no_limit_on_power_lies_above_the_highest_one():
    """300, 400 and 500 W are 0.42 and 0.32 apart on a scale of doublings; none lies as far above 500 W as that does above 400 W."""
    search = {**SEARCH, "gpu_power_limit_w": ["none", 300, 400, 500], "num_virtual_stages_per_pipeline_rank": ["none", 2]}
    table = gpu_study(search=search).table
    scale = {}
    for name in ("gpu_power_limit_w", "num_virtual_stages_per_pipeline_rank"):
        places = table.index_matrix[:, table.knobs.index(name)]
        column = next(one for one in knob_features(table).T if len(np.unique(np.stack([places, one]), axis=1).T) == len(set(one)))
        scale[name] = {table.choices[name][place]: value for place, value in zip(places, column, strict=True)}
    watts, stages = scale["gpu_power_limit_w"], scale["num_virtual_stages_per_pipeline_rank"]
    assert watts[None] - watts[500] == pytest.approx(np.log2(500 / 400))
    assert watts[400] - watts[300] == pytest.approx(np.log2(400 / 300))
    assert stages.get(None, 0.0) == 0.0


def _spread(points):
    return float(np.mean([np.linalg.norm(a - b) for i, a in enumerate(points) for b in points[:i]]))


def test_an_oom_ranks_down_what_is_larger_under_the_same_recompute_and_says_so():
    study = gpu_study()
    first = study.propose()
    study.finish(first, completed(seconds(study, first.config)))
    for _ in range(2):
        study.finish(study.propose(), failed(Outcome.OOM))
    proposal = study.propose()
    why = optuna_study(study).trials[proposal.trial.number].system_attrs[WHY]
    assert why["larger_than_oom"] > 0
    assert 0 < why["fits"] <= 1


def test_after_an_oom_something_smaller_or_otherwise_recomputed_is_tried():
    study = gpu_study()
    baseline = study.propose()
    study.finish(baseline, completed(seconds(study, baseline.config)))
    memory, load = outlook_of(study.table, truth()).memory, truth().memory.device_gib
    first = study.table.find((proposal := study.propose()).config)
    study.finish(proposal, failed(Outcome.OOM))
    second = study.table.find(study.propose().config)
    assert load[second] < load[first] or memory.recompute[second] != memory.recompute[first]


def test_where_nine_of_ten_fail_the_best_that_runs_is_found_early():
    """Only TP 4 with small micro-batches runs: failures teach it, so it takes less than half of a random walk's trials."""
    study = gpu_study()
    runs = [row for row in range(len(study.table)) if _survives(study.table.config(row))]
    assert len(runs) <= 0.1 * len(study.table)
    proposals = run_to_end(study, lambda p: completed(seconds(study, p.config)) if _survives(p.config) else failed(Outcome.CRASHED))
    best = min(seconds(study, study.table.config(row)) for row in runs)
    place = [_survives(p.config) and seconds(study, p.config) <= best for p in proposals].index(True)
    assert place < 0.5 * (len(study.table) + 1) / 2
    assert study.best.config == proposals[place].config


def _survives(config):
    return config.tensor_model_parallel_size == 4 and config.micro_batch_size <= 2 and config.recompute_granularity is None


def test_every_told_trial_carries_the_same_constraints():
    study = gpu_study(budget={"trials": 12})
    ends = iter([completed(0.1), failed(Outcome.OOM), completed(0.2), failed(Outcome.NAN)] * 10)
    run_to_end(study, lambda proposal: next(ends))
    assert len({tuple(trial.constraints) for trial in optuna_study(study).trials}) == 1


def test_an_unknown_gpu_is_searched_without_predictions():
    spec = gpu_spec(pools=[{"name": "new", "gpu": "gpu-of-2040", "gpus_per_node": 8}], budget={"trials": 12})
    study = open_pool(spec)
    proposals = run_to_end(study, lambda proposal: completed(0.1 * proposal.config.tensor_model_parallel_size))
    assert len({proposal.config for proposal in proposals}) == 12


def test_a_reopened_study_goes_on_with_what_it_knew():
    storage = InMemoryStorage()
    spec = gpu_spec(budget={"trials": 6})

    def opened(spec):
        return PoolStudy(spec, spec.pools[0], NoLauncher(), storage, lambda study, record: None)

    first = run_to_end(study := opened(spec), lambda p: completed(seconds(study, p.config)))
    again = opened(gpu_spec(budget={"trials": 7}))
    whole = gpu_study(budget={"trials": 7})
    expected = run_to_end(whole, lambda p: completed(seconds(whole, p.config)))
    assert [p.config for p in first] + [again.propose().config] == [p.config for p in expected]


def test_weights_edited_between_runs_count_for_all_trials():
    storage = InMemoryStorage()
    spec = gpu_spec(budget={"trials": 4})
    study = PoolStudy(spec, spec.pools[0], NoLauncher(), storage, lambda study, record: None)
    run_to_end(study, lambda p: completed(seconds(study, p.config)))
    edited = gpu_spec(budget={"trials": 5}, objective={"tokens_per_s_per_gpu": 2.0})
    again = PoolStudy(edited, edited.pools[0], NoLauncher(), storage, lambda study, record: None)
    seen = again._sampler._inner.seen(optuna_study(again))
    values = [record.value for record in again.records if again.table.find(record.config) is not None]
    assert seen.scores == pytest.approx(values)
    assert max(values) == pytest.approx(2 * max(record.value for record in study.records))


@pytest.mark.parametrize("share", [0.1, 0.3, 0.6])
def test_a_limit_turns_the_search_to_what_keeps_it(share):
    """Watts are 10 % above the prediction: after five trials at most one of ten is over, and the best that keeps it is found."""
    spec = gpu_spec(search={**SEARCH, "gpu_power_limit_w": ["none", 450, 500, 550, 600, 650]})
    table = candidate_table(spec, spec.pools[0])
    found = predict(table.columns, truth().machines)
    may = np.flatnonzero(found.fits == "fits")
    watts = np.log(found.peak_power_w)
    measured = watts + 0.1
    most = float(np.quantile(measured[may], share)) + 0.04  # between the watts of two power limits
    view = replace(outlook_of(table, found), limits=(Limit("gpu_peak_power_w_1s", watts, math.exp(most)),))
    seen = Seen()
    for number in range(20):
        row = choose(view, seen, np.setdiff1d(may, seen.rows), (spec.seed, number)).row
        seen.rows.append(row)
        seen.scores.append(float(view.score[row]))
        seen.noise.append(0.02)
        seen.metrics.append({"gpu_peak_power_w_1s": math.exp(measured[row])})
        seen.metrics_noise.append(0.005)
    assert np.mean(measured[seen.rows[5:]] > most) <= 0.1
    assert seen.best(view.limits) >= view.score[may[measured[may] <= most]].max() - 0.03


def test_a_disturbed_measurement_hardly_counts():
    """It carries many times the noise of an undisturbed one, for its score and for its limits."""
    study = gpu_study(budget={"trials": 3})
    first = study.propose()
    shown = study.finish(first, completed(seconds(study, first.config)))
    seen = study._sampler._inner.seen(optuna_study(study))
    for contaminated in ("", "a node's power brake held a GPU back"):
        study._sampler._inner._add(seen, 0, replace(shown, contaminated=contaminated))
    assert seen.noise[-1] > 10 * seen.noise[-2]
    assert seen.metrics_noise[-1] > 10 * seen.metrics_noise[-2]


def test_a_large_table_is_looked_at_through_a_short_list(monkeypatch):
    monkeypatch.setattr(acquisition, "SHORTLIST", 16)
    rows, worth = np.arange(100, 200), np.arange(300.0)
    short = shortlist(rows, worth, (0, 1))
    assert len(set(short)) == 16 < SHORTLIST
    assert set(range(188, 200)) <= set(short) <= set(rows)
    assert short.tolist() == shortlist(rows, worth, (0, 1)).tolist() != shortlist(rows, worth, (0, 2)).tolist()
