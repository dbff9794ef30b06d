"""The verbs that read a study, on a small journal that was written without Ray."""

import json
import os
import socket
import subprocess
import sys

import pytest
import yaml
from typer.testing import CliRunner

from autotune import cli
from autotune.errors import AutotuneError
from autotune.state_folder import StateFolder
from autotune.storage import open_storage
from autotune.study import driving
from launchers.outcome import Outcome
from search_spaces.config import TrialConfig
from tests.conftest import ROOT

from .study_cases import POOL, completed, failed, open_pool, study_data, study_spec

POOLS = [POOL, {**POOL, "name": "pair", "gpus_per_node": 2}]
SPEC = study_spec(pools=POOLS, baseline={"precision": "fp32", "tensor_model_parallel_size": 2}, sampler="grid")


@pytest.fixture
def root(tmp_path):
    folder = StateFolder(tmp_path / "case")
    folder.write_spec(SPEC)
    for pool, seconds in enumerate((0.1, 0.3)):
        study = open_pool(SPEC, open_storage(None, folder.path), pool=pool)
        for result in (completed(2 * seconds), failed(Outcome.OOM), completed(seconds), completed(3 * seconds)):
            study.finish(study.propose(), result)
        study.close()
    return tmp_path


def run(*arguments):
    return CliRunner().invoke(cli.app, [str(argument) for argument in arguments], env={"COLUMNS": "200"})


def read_json(*arguments):
    result = run(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_G002_best_as_json_answers_per_pool_and_overall(root):
    found = read_json("best", "case", "--state", root)
    assert found["overall"] == "laptop"
    assert [(pool["pool"], pool["baseline"]["trial"]) for pool in found["pools"]] == [("laptop", 0), ("pair", 0)]
    laptop, pair = found["pools"]
    assert laptop["best_tokens_per_s"] == pytest.approx(16 * 32 / 0.101)
    assert pair["best_tokens_per_s"] == pytest.approx(16 * 32 / 0.303)
    assert laptop["outcomes"]["OOM"] == 1
    assert laptop["best"]["metrics"]["step_time_s"] == pytest.approx(0.101)
    assert TrialConfig.from_argv(laptop["best"]["argv"]).changed() == laptop["best"]["config"]


def test_best_as_text_compares_with_the_baseline(root):
    text = run("best", "case", "--state", root).stdout
    assert text.count("The winner is 2.00 times as fast as the baseline [1.") == 2
    assert "Most tokens/s in total: pool laptop, 5,069 tokens/s" in text
    assert "1,267 [1,216, 1,321]" in text


def test_status_says_whether_a_driver_runs(root):
    found = read_json("status", "case", "--state", root)
    assert found["driver_pid"] is None
    assert [pool["running"] for pool in found["pools"]] == [0, 0]
    text = run("status", "case", "--state", root).stdout
    assert "driver: none is running" in text
    assert "told to end as OOM" in text
    with driving(SPEC, StateFolder(root / "case")):
        found = read_json("status", "case", "--state", root)
        assert (found["driver_pid"], found["driver_host"]) == (os.getpid(), os.uname().nodename)


@pytest.mark.parametrize("pool", ["laptop", "pair"])
def test_G025_export_prints_arguments_that_read_back_as_the_winner(root, pool):
    found = read_json("export", "case", "--state", root, "--pool", pool)
    best = next(entry for entry in read_json("best", "case", "--state", root)["pools"] if entry["pool"] == pool)["best"]
    assert found["trial"] == best["trial"]
    assert TrialConfig.from_argv(found["megatron_args"]).changed() == found["config"] == best["config"]
    arguments = " ".join(found["megatron_args"])
    for expected in ("--num-layers 8", "--hidden-size 64", "--global-batch-size 16", "--seq-length 32"):
        assert expected in arguments
    assert found["command"]["argv"][0] == "torchrun"
    assert json.loads((root / "case" / "export" / "winner.json").read_text()) == found


def test_export_without_a_pool_takes_the_one_with_the_most_tokens(root):
    assert read_json("export", "case", "--state", root)["pool"] == "laptop"
    text = run("export", "case", "--state", root).stdout
    assert text.startswith("# trial ")
    assert "# Megatron-LM arguments:\n--" in text
    lines = [line.removesuffix(" \\") for line in text.split("# Megatron-LM arguments:\n")[1].split("\n#")[0].splitlines()]
    words = [word for line in lines for word in line.split()]
    assert TrialConfig.from_argv(words) == TrialConfig.from_argv(read_json("export", "case", "--state", root)["megatron_args"])


def test_an_unknown_pool_is_named(root):
    result = run("export", "case", "--state", root, "--pool", "nope")
    assert result.exit_code == 2
    assert "pool: the study has no results on such a pool (got 'nope')\nhint: pools of case: laptop; pair" in result.stderr


@pytest.mark.parametrize("verb", ["best", "export"])
def test_nothing_completed_is_exit_code_1(tmp_path, verb):
    StateFolder(tmp_path / "case").write_spec(SPEC)
    study = open_pool(SPEC, open_storage(None, tmp_path / "case"))
    study.finish(study.propose(), failed(Outcome.OOM))
    result = run(verb, "case", "--state", tmp_path)
    assert result.exit_code == 1
    assert "No feasible configuration" in result.output


@pytest.mark.parametrize("verb", ["status", "best", "export", "resume"])
def test_an_unknown_study_is_exit_code_2(tmp_path, verb):
    result = run(verb, "nope", "--state", tmp_path)
    assert result.exit_code == 2
    assert result.stderr == f"error: study: no such study (got 'nope')\nhint: there are no studies in {tmp_path} yet\n"


def test_check_as_json_counts_every_pool(tmp_path):
    path = tmp_path / "study.yaml"
    path.write_text(yaml.safe_dump(study_data(pools=POOLS)))
    laptop, pair = read_json("check", path)
    assert (laptop["pool"], laptop["world_size"], laptop["legal"]) == ("laptop", 4, 46)
    # By hand: 3 layouts of two ranks x 4 micro-batch sizes x 2.
    assert (pair["world_size"], pair["legal"]) == (2, 24)
    assert sum(laptop["refused"].values()) > 0


def test_check_of_a_study_without_a_legal_candidate_is_exit_code_1(tmp_path):
    path = tmp_path / "study.yaml"
    path.write_text(yaml.safe_dump(study_data(search={"tensor_model_parallel_size": [3]})))
    result = run("check", path)
    assert result.exit_code == 1
    assert " 0 " in result.stdout


def test_check_as_text_names_the_rules(tmp_path):
    path = tmp_path / "study.yaml"
    path.write_text(yaml.safe_dump(study_data()))
    result = run("check", path)
    assert result.exit_code == 0
    assert "laptop" in result.stdout
    assert "46" in result.stdout


@pytest.mark.parametrize("verb", ["tune", "resume"])
def test_a_budget_of_no_trials_is_refused_and_not_passed_over(root, verb):
    path = root / "study.yaml"
    path.write_text(yaml.safe_dump(study_data()))
    result = run(verb, path if verb == "tune" else "case", "--state", root, "--trials", "0")
    assert result.exit_code == 2
    assert "budget.trials: must be greater than 0 (got 0)" in result.stderr


def test_pages_are_not_served_where_somebody_else_listens(root, monkeypatch):
    monkeypatch.setattr(cli.os, "execvpe", lambda *_: pytest.fail("MLflow was started"))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        refused = run("ui", "case", "--state", root, "--port", taken.getsockname()[1])
    assert refused.exit_code == 2 and "Address already in use" in refused.stderr
    assert run("ui", "case", "--state", root, "--port", 99999).exit_code == 2


def test_print_command_shows_the_baseline_and_starts_nothing(tmp_path):
    path = tmp_path / "study.yaml"
    path.write_text(yaml.safe_dump(study_data()))
    result = run("tune", path, "--state", tmp_path, "--print-command")
    assert result.exit_code == 0
    assert "torchrun" in result.stdout
    assert not (tmp_path / "case" / "optuna-journal.log").exists()


def test_detach_keeps_the_spec_only_after_the_storage_took_it(root, monkeypatch):
    started = []
    monkeypatch.setattr(StateFolder, "detach", lambda *args: started.append(args))
    path = root / "study.yaml"
    path.write_text(yaml.safe_dump(study_data()))
    result = run("tune", path, "--state", root, "--detach")
    assert result.exit_code == 2
    assert "another baseline" in result.stderr
    assert not started
    assert StateFolder(root / "case").read_spec() == SPEC


def test_our_errors_have_no_traceback_and_exit_code_1(root, monkeypatch):
    def broken(*_args):
        raise AutotuneError("it broke", "mend it")

    monkeypatch.setattr("autotune.results.read_results", broken)
    result = run("best", "case", "--state", root)
    assert (result.exit_code, result.stderr) == (1, "error: it broke\nhint: mend it\n")


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("tp=2", "did you mean tensor_model_parallel_size?"),
        ("recompute=full", "a group of `search`; set its knobs: recompute_granularity"),
        ("gbs=3", "global_batch_size is said by the study file"),
        ("seq_length=3", "seq_length is said by the study file"),
        ("xyzzy=3", "Megatron's argument names"),
    ],
)
def test_a_name_that_is_no_knob_is_answered_with_what_was_meant(setting, words):
    result = run("check", "quickstart", "--set", setting)
    assert result.exit_code == 2
    assert words in " ".join(result.stderr.split())


def test_the_package_runs_as_a_module():
    shown = subprocess.run([sys.executable, "-m", "autotune", "--version"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert shown.stdout.startswith("autotune ")
