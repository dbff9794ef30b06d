"""The script for one GPU, as far as it can be shown without one; `pytest -m gpu tests/gpu` runs it where there is one."""

import json
import os
import subprocess
import sys
import time

import pytest
from rich.console import Console
from typer.testing import CliRunner

from autotune import cli
from autotune.candidates import candidate_table
from autotune.spec import StudySpec
from autotune.state_folder import StateFolder
from autotune.storage import open_storage
from launchers.outcome import Outcome
from tests.autotune.study_cases import completed, failed, open_pool, study_spec
from tests.gpu import one_gpu
from tests.telemetry.devices import H100, ROOT, Scenario, environment

MEASURED = {"tokens_per_s_per_gpu": 1234.0, "peak_memory_gib": 10.0, "step_time_s": 0.5}
POWER = {"gpu_mean_power_w": 612.0, "gpu_peak_power_w_1s": 655.0, "pool_gpu_energy_j": 4321.0, "throttle_fraction": 0.25}
PREDICTED = {"predicted_peak_memory_gib": 11.0, "predicted_step_time_s": 0.4}


def trial(number=0, phase="explore", outcome="COMPLETED", **metrics):
    config = {"micro_batch_size": 4, "recompute_granularity": "selective"}
    return {"trial": number, "phase": phase, "outcome": outcome, "detail": "why", "config": config, "metrics": metrics}


def text_of(trials, best=None):
    console = Console(width=200, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    console.print(one_gpu.table_of(trials, best, "title"))
    return console.export_text()


def test_the_table_is_made_of_what_status_tells(tmp_path):
    spec = study_spec(baseline={"precision": "fp32"}, sampler="grid")
    folder = StateFolder(tmp_path / "case")
    folder.write_spec(spec)
    study = open_pool(spec, open_storage(None, folder.path))
    for result in (completed(0.2), failed(Outcome.OOM), completed(0.1)):
        study.finish(study.propose(), result)
    study.close()
    told = CliRunner().invoke(cli.app, ["status", "case", "--state", str(tmp_path), "--json"])
    (pool,) = json.loads(told.stdout)["pools"]
    assert [(one["phase"], one["outcome"]) for one in pool["trials"]] == [
        ("baseline", "COMPLETED"),
        ("explore", "OOM"),
        ("explore", "COMPLETED"),
    ]
    rows = [line for line in text_of(pool["trials"], pool["best"]).splitlines() if line.startswith("│")]
    assert "0 baseline" in rows[0] and "precision=fp32" in rows[0] and " / 0.202 " in rows[0]
    assert "OOM" in rows[1] and "best" in next(row for row in rows if " / 0.101 " in row)


def test_a_row_shows_power_throttling_and_both_predictions():
    (row,) = [line for line in text_of([trial(3, **MEASURED, **POWER, **PREDICTED)]).splitlines() if line.startswith("│")]
    for shown in ("3 explore", "MBS4", "1,234", "612", "655", "4,321", "25%", "11 / 10 (+10%)", "0.4 / 0.5 (-20%)"):
        assert shown in row


def test_the_errors_are_means_over_trials_that_have_both():
    trials = [trial(**MEASURED, **PREDICTED), trial(**MEASURED), trial(**{**MEASURED, "peak_memory_gib": 22.0}, **PREDICTED)]
    assert one_gpu.mean_error(trials, "peak_memory_gib") == pytest.approx((0.1 + 0.5) / 2)
    assert one_gpu.mean_error(trials, "energy_j") is None


ALL = [trial(number, **MEASURED, **POWER) for number in range(one_gpu.TRIALS)]


@pytest.mark.parametrize(
    ("trials", "missing"),
    [
        (ALL, []),
        ([*ALL[1:], trial(99, outcome="OOM")], []),
        (ALL[1:], ["11 of 12 trials"]),
        ([*ALL[1:], trial(99, phase="confirm", **MEASURED, **POWER)], ["11 of 12 trials"]),
        ([*ALL[1:], trial(99, outcome="LOST")], ["11 of 12 trials"]),
        ([*ALL[1:], trial(99, outcome="CRASHED")], ["trial 99 ended as CRASHED: why"]),
        ([*ALL[1:], trial(7, **MEASURED)], ["no gpu_mean_power_w in trials 7", "no pool_gpu_energy_j in trials 7"]),
    ],
)
def test_what_is_missing_is_said(trials, missing, capsys):
    found = one_gpu.not_shown(trials, ALL[1], telemetry=True)
    assert len(found) == len(missing)
    assert all(line.startswith(wanted) for line, wanted in zip(found, missing, strict=True))
    assert one_gpu.show(trials, ALL[1], "title", telemetry=True) == int(bool(missing))
    assert capsys.readouterr().out.count("NOT SHOWN") == len(missing)
    assert "no winner" in one_gpu.not_shown(trials, None, telemetry=True)


def test_a_gpu_that_is_not_there_is_refused():
    command = [sys.executable, "tests/gpu/one_gpu.py", "--gpu", "99"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2
    assert "NOT SHOWN: no NVIDIA GPU 99: " in done.stderr and "--cpu" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.fixture
def report(tmp_path, monkeypatch):
    for name, value in environment(Scenario(H100, 2), folder=tmp_path).items():
        monkeypatch.setenv(name, value)
    return one_gpu.read_json(["doctor", "--telemetry"], time.monotonic() + 60, 60)


@pytest.mark.parametrize("wanted", ["1", "GPU-00000001-0000"])
def test_the_study_runs_on_the_chosen_gpu_alone(report, wanted):
    study = one_gpu.study_on(one_gpu.chosen_gpu(report, wanted))
    spec = StudySpec.model_validate(study)
    assert spec.gpus == ("GPU-00000001-0000",)
    assert (spec.pools[0].world_size, spec.pools[0].device) == (1, "cuda")
    assert len(candidate_table(spec, spec.pools[0])) >= one_gpu.TRIALS
    assert spec.baseline.precision == "bf16"
    with pytest.raises(one_gpu.NotShownError, match="known: 0, 1") as refused:
        one_gpu.chosen_gpu(report, "7")
    assert refused.value.code == 2


def test_a_command_is_interrupted_at_its_limit_and_killed_where_it_goes_on(monkeypatch):
    sleep = "import time; print('on', flush=True); time.sleep(600)"
    listening = f"import signal; signal.signal(signal.SIGINT, signal.SIG_DFL); {sleep}"  # also under nohup, which has it ignored
    assert one_gpu.bounded([sys.executable, "-c", listening], 2.0) == (-2, "on\n")
    monkeypatch.setattr(one_gpu, "_END_S", 0.5)
    deaf = f"import signal; signal.signal(signal.SIGINT, signal.SIG_IGN); {sleep}"
    assert one_gpu.bounded([sys.executable, "-c", deaf], 2.0) == (-9, "on\n")
    with pytest.raises(one_gpu.NotShownError, match="no time was left"):
        one_gpu.autotune(["doctor"], time.monotonic(), 60)


@pytest.mark.acceptance
@pytest.mark.timeout(600)
def test_rehearsal_beside_a_scripted_gpu(tmp_path):
    values = environment(Scenario(H100), folder=tmp_path)
    study = one_gpu.study_on(None)
    study["pools"][0]["telemetry"] = {"vendors": ["nvidia"], "gpus": ["0"], "env": values}
    trials, best = one_gpu.run_study(study, tmp_path, time.monotonic() + one_gpu.LIMIT_S)
    assert one_gpu.not_shown(trials, best, telemetry=True) == []
    shown = text_of(trials, best)
    assert " 300 " in shown and " 0% " in shown and "best" in shown


@pytest.mark.gpu
@pytest.mark.timeout(600)
def test_one_gpu():
    command = [sys.executable, "tests/gpu/one_gpu.py"]
    done = subprocess.run(command, cwd=ROOT, timeout=one_gpu.LIMIT_S + 60, check=False)
    assert done.returncode == 0
