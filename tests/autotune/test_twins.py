"""The twins: worlds that a seed fixes, in virtual time, wrong where predictions are right, and never taken for a measurement."""

import io
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from optuna.storages import InMemoryStorage
from rich.console import Console
from scipy.stats import spearmanr

from autotune.candidates import candidate_table
from autotune.guards import guards_of
from autotune.machines import machines_of
from autotune.measured import measure
from autotune.outlook import predicted_log
from autotune.pool_study import PoolStudy
from autotune.proposal import Proposal
from autotune.records import Phase
from autotune.refit import Refit
from autotune.report import final_report, results_json
from autotune.results import keep_notes
from autotune.run_spread import RunSpread
from autotune.simulation import is_simulated, note, simulated, twin_launcher
from autotune.telemetry.series import reported_series
from benchmarks import search_twins
from benchmarks.twin_worlds import CLOSE, LEVELS, METRIC, World, played
from launchers.outcome import Outcome
from launchers.simulated import OutOfMemoryError, play
from launchers.soak import Demand, Gpus, soak
from launchers.twins import SimulatedLauncher, demand
from search_spaces.columns import Columns
from search_spaces.config import TrialConfig
from search_spaces.hardware import PoolSpec
from search_spaces.model import ModelSpec, Workload
from search_spaces.prediction import predict

from .study_cases import study_spec

GPU = {"name": "h200", "idle_w": 80.0, "tdp_w": 700.0, "lowest_clock": 0.2}
LOAD = Demand(step_s=4.0, clocked=0.6, mean_w=650.0, peak_w=700.0, memory_gib=80.0)
SEEDS = (0, 1, 2)


def run(steps=30, load=LOAD, seed=3, **limits):
    return soak(load, Gpus.of(GPU, 2, 8, seed), steps, "noise", **limits)


def fitting(world):
    return next(world.table.config(row) for row in range(len(world.table)) if np.isfinite(world.truth.watts[row]))


@pytest.fixture(scope="module")
def worlds():
    return {(kind, seed): World(kind, seed, 12) for kind in ("physics", "table") for seed in SEEDS}


@pytest.mark.parametrize("kind", ["physics", "table"])
def test_a_seed_fixes_everything_and_another_changes_it(kind, worlds):
    config = fitting(worlds[kind, 0])

    def steps(seed):
        world = World(kind, seed, 12)
        job = world.launcher().job(world.table.workload, config, steps=6, seed=1)
        job["load"]["memory_gib"] = 10.0
        shown = play(job, 100.0, most_samples=0)
        return [step.step_s for step in shown.steps], [sample.power_w for sample in shown.samples]

    assert steps(0) == steps(0)
    assert steps(0)[0] != steps(1)[0]
    assert steps(0)[1] != steps(1)[1]


def confirmed_watts(world, config, runs):
    """Mean watts that confirming runs of a configuration measure."""
    spec, launcher, found = world.study_spec("middle", "random"), world.launcher(), []
    for number in range(runs):
        proposal = Proposal(SimpleNamespace(number=number), config, Phase.CONFIRM, 0.0)
        shown = measure(world.table.workload, played(launcher, spec, proposal), spec.measurement, RunSpread())
        if shown.outcome is Outcome.COMPLETED and not shown.contaminated:
            found.append(shown.metrics[METRIC])
    return np.array(found)


@pytest.mark.acceptance
def test_no_cap_lies_so_close_to_a_candidate_that_runs_could_not_tell_on_which_side(worlds):
    """Two standard deviations of a confirming run, and no more: the cap stays near its quantile."""
    scatter = [np.log(confirmed_watts(world, fitting(world), 20)).std(ddof=1) for world in worlds.values()]
    assert 2.0 * np.median(scatter) < CLOSE
    for world in worlds.values():
        watts = world.truth.watts[np.isfinite(world.truth.watts)]
        for quantile in LEVELS.values():
            cap_w = world.truth.cap_w(quantile)
            assert np.abs(cap_w / watts - 1.0).min() >= CLOSE
            assert abs(np.mean(watts <= cap_w) - quantile) < 0.25


def test_runs_of_one_configuration_scatter_a_little(worlds):
    world = worlds["physics", 0]
    launcher = world.launcher()
    jobs = [launcher.job(world.table.workload, fitting(world), steps=20, seed=1) for _ in range(2)]
    first, second = (np.median([step.step_s for step in play(job, 0.0).steps]) for job in jobs)
    assert 0 < abs(first / second - 1) < 0.02


def test_an_hour_is_computed_and_settles():
    shown = run(steps=900)
    assert len(shown.step_s) == 900
    assert shown.end_s[-1] > 3600
    first, tenth, last = shown.temperature_c[0], shown.temperature_c[9], shown.temperature_c[-1]
    assert np.all(last > tenth)
    assert np.all(tenth > first)
    assert np.abs(last - shown.temperature_c[-200]).max() < 3.0


def test_a_power_limit_lowers_watts_and_clocks_and_slows_steps():
    free, held = run(), run(limit_w=350.0)
    assert max(watts.max() for watts in held.mean_w) <= 350.0
    assert np.mean(held.mean_w) < np.mean(free.mean_w)
    assert np.mean(held.clock) < np.mean(free.clock)
    assert np.median(held.step_s) > 1.05 * np.median(free.step_s)
    assert held.cap_s[-1].min() > 0.0


def test_rear_gpus_are_hotter():
    hottest = run(steps=200).temperature_c[-1].reshape(2, 8)
    assert hottest[:, 4:].mean() > hottest[:, :4].mean() + 5.0


def test_a_faulty_node_holds_all_back_and_says_why():
    gpus = Gpus.of(GPU, 2, 8, 3)
    braked = replace(gpus, faulty=np.arange(16) < 8)
    fine, held = (soak(LOAD, which, 10, "noise") for which in (gpus, braked))
    assert np.median(held.step_s) == pytest.approx(4.0 * np.median(fine.step_s), rel=0.2)
    assert held.brake_s[-1][:8].min() > 0.0 == held.brake_s[-1][8:].max()


def test_physics_runs_out_of_memory_where_nothing_predicts_it(worlds):
    missed = found = 0
    for seed in SEEDS:
        world = worlds["physics", seed]
        predicted = predict(world.table.columns, machines_of(world.spec.pools[0]))
        oom = np.isnan(world.truth.watts)
        found += int(oom.sum())
        missed += int((oom & (np.asarray(predicted.fits) == "fits")).sum())
    assert found > 0
    assert missed >= 0.1 * found


def test_the_table_does_not_follow_the_prediction_and_physics_does(worlds):
    def agreement(kind, seed):
        world = worlds[kind, seed]
        runs = np.flatnonzero(world.truth.tokens_per_s)
        predicted = predict(world.table.columns, machines_of(world.spec.pools[0])).tokens_per_s_per_gpu
        return spearmanr(predicted[runs], world.truth.tokens_per_s[runs]).statistic

    assert abs(np.mean([agreement("table", seed) for seed in SEEDS])) < 0.5
    assert np.mean([agreement("physics", seed) for seed in SEEDS]) > 0.7


def test_a_limit_is_no_part_of_the_demand(worlds):
    world = worlds["physics", 0]
    machines = machines_of(world.spec.pools[0])
    free, held = TrialConfig(), TrialConfig(gpu_power_limit_w=300)
    assert demand("physics", world.table.workload, free, machines, 0) == demand("physics", world.table.workload, held, machines, 0)


def test_what_a_study_measures_is_what_the_twin_does(worlds):
    """The watts that a trial's telemetry tells are the truth's, within the steps' scatter."""
    world = worlds["physics", 1]
    spec = world.study_spec("loose", "random")
    launcher = world.launcher()
    study = PoolStudy(spec, spec.pools[0], launcher, InMemoryStorage(), lambda study, record: None)
    record = study.finish(proposal := study.propose(), played(launcher, spec, proposal))
    row = world.rows[record.config]
    assert record.metrics[METRIC] == pytest.approx(world.truth.watts[row], rel=0.01)
    assert record.metrics["tokens_per_s_per_gpu"] * 32 == pytest.approx(world.truth.tokens_per_s[row], rel=0.02)


def test_memory_that_is_not_there_ends_a_trial_as_torch_does(worlds):
    world = worlds["physics", 0]
    job = world.launcher().job(world.table.workload, fitting(world), steps=3, seed=0)
    job["load"]["memory_gib"] = 1000.0
    with pytest.raises(OutOfMemoryError, match="CUDA out of memory"):
        play(job, 0.0)


def test_studies_of_the_benchmark_keep_the_cap_and_the_guard(worlds):
    """Three physics twins, short studies: what is returned keeps the cap, was confirmed, and no launch crossed the guard."""
    for seed in SEEDS:
        found = search_twins.study(worlds["physics", seed], "guarded", "residual")
        assert found["feasible"]
        assert found["keeps"]
        assert found["shown"]
        assert found["guard_crossings"] == 0


def test_a_missed_promise_is_named():
    good = {"keeps": 1.0, "shown": 1.0, "within": 1.0, "over": 0.1, "guard_crossings": 0}
    assert search_twins.missed(good) == []
    for wrong in ({"keeps": 0.98}, {"shown": 0.98}, {"within": 0.98}, {"over": 0.11}, {"guard_crossings": 1}):
        assert len(search_twins.missed({**good, **wrong})) == 1


def test_everything_simulated_says_so(worlds):
    real = worlds["physics", 0].spec.model_copy(update={"launcher": "megatron_core"})
    spec = simulated(real)
    assert not is_simulated(real)
    assert is_simulated(spec)
    assert spec.name.endswith("-simulated")
    assert simulated(spec).name == spec.name
    assert note(real) == []
    assert "SIMULATED" in note(spec)[0]


def test_report_and_json_of_a_simulated_study_begin_with_it(worlds):
    spec = simulated(worlds["physics", 0].spec)
    storage = InMemoryStorage()
    study = PoolStudy(spec, spec.pools[0], twin_launcher(spec, spec.pools[0]), storage, lambda study, record: None)
    keep_notes(storage, study.name, note(spec))
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(final_report([study.results()], 2))
    assert "SIMULATED" in console.export_text()
    assert any("SIMULATED" in text for text in results_json([study.results()])[0]["notes"])


def test_a_power_limit_of_a_package_is_shared_by_its_dies():
    """Load and limit of the twin are per device, as its readings are: half of the package's watts on MI250X."""
    pool = PoolSpec(name="amd", gpu="mi250x", nodes=1, gpus_per_node=8)
    world = Workload(
        model=ModelSpec(num_layers=4, hidden_size=512, num_attention_heads=8, vocab_size=1000),
        world_size=8,
        global_batch_size=8,
        seq_length=512,
        gpus_per_node=8,
    )
    launcher = SimulatedLauncher(machines_of(pool), 1, "physics", 0)

    def job(limit):
        return launcher.job(world, TrialConfig(gpu_power_limit_w=limit), steps=3, seed=0)

    assert job(300)["limit_w"] == 150.0
    assert job(None)["limit_w"] is None
    assert job(500)["limit_w"] == job(None)["gpu"]["tdp_w"] == 250.0


def test_a_board_of_two_dies_is_measured_predicted_and_guarded_as_one():
    """MI250X: a package under 300 W draws at most that, shows it once for both dies, and a guard of 299 W refuses it."""
    pool = {"name": "amd", "gpu": "mi250x", "nodes": 1, "gpus_per_node": 4}
    spec = study_spec(pools=[pool], baseline={"gpu_power_limit_w": 300}, launcher="simulated", gpu_power_guard_w=299.0)
    (pool,) = spec.pools
    workload, table = spec.workload(pool), candidate_table(spec, pool)
    machines = machines_of(pool)
    config = TrialConfig(gpu_power_limit_w=300)
    job = SimulatedLauncher(machines, 1, "physics", 0).job(workload, config, steps=3, seed=0)
    job["load"]["memory_gib"] = 1.0
    series = reported_series(list(play(job, 0.0).samples), 0)
    assert [one.info.package for one in series] == ["SIMULATED-0-0"] * 2 + ["SIMULATED-0-1"] * 2
    (first, twin, *_) = [one.column("power_w")[1] for one in series]
    assert (first == twin).all() and machines.gpu.idle_w / 2 < first.max() < 1.25 * 300
    predictions = predict(Columns.of(workload, config), machines)
    mean_w = float(np.exp(predicted_log("gpu_mean_power_w", predictions))[0])
    assert mean_w == pytest.approx(predictions.row(0).mean_power_w)
    assert Refit.of("amd", spec, pool, table, None).metrics(config)["predicted_mean_power_w"] == pytest.approx(mean_w)
    (guard,) = guards_of(spec, pool, Columns.of(workload, config), predictions)
    assert guard.upper_w[0] >= 300.0
