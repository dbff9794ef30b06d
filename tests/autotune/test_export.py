"""What is handed over says where it is from, what to set before, and how it is run on several nodes; and why there is nothing."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner, Result

from autotune import cli
from autotune.export import machine_commands, shell
from autotune.simulation import simulated
from autotune.spec import StudySpec
from autotune.state_folder import StateFolder
from autotune.storage import open_storage
from launchers.base import Command
from launchers.outcome import Outcome
from tests.autotune.study_cases import completed, failed, open_pool, study_data, study_spec

POOL = {"name": "h200", "gpu": "h200", "nodes": 8, "gpus_per_node": 8}
FIELDS: dict[str, Any] = {"pools": [POOL], "global_batch_size": 512, "seq_length": 32, "confirm": {"top": 0}}


def ended(root: Path, spec: StudySpec, *seconds: float) -> None:
    """A study of which a trial for each of these step times completed, and one ran out of memory."""
    folder = StateFolder(root / spec.name)
    folder.write_spec(spec)
    study = open_pool(spec, open_storage(None, folder.path))
    for step_s in seconds:
        study.finish(study.propose(), completed(step_s))
    study.finish(study.propose(), failed(Outcome.OOM))
    study.close()


def export(root: Path, name: str, *options: str) -> Result:
    return CliRunner().invoke(cli.app, ["export", name, "--state", str(root), *options], env={"COLUMNS": "200"})


def test_every_output_of_a_simulated_winner_says_so_and_none_of_a_measured_one(tmp_path: Path) -> None:
    spec = study_spec(**FIELDS)
    ended(tmp_path, spec, 0.2, 0.1)
    ended(tmp_path, simulated(spec), 0.2, 0.1)
    marked = "SIMULATED by simulated, seed 0: nothing here was measured"
    text = export(tmp_path, "case-simulated").stdout
    assert text.startswith(f"# {marked}\n") and "measured\n# on" not in text and "tokens/s per GPU simulated" in text
    found = json.loads(export(tmp_path, "case-simulated", "--json").stdout)
    assert (found["simulated"], found["notes"][0]) == (True, marked)
    assert json.loads((tmp_path / "case-simulated" / "export" / "winner.json").read_text()) == found
    real = json.loads(export(tmp_path, "case", "--json").stdout)
    assert (real["simulated"], real["notes"]) == (False, [])
    assert "SIMULATED" not in (text := export(tmp_path, "case").stdout) and "tokens/s per GPU measured" in text


def test_the_command_of_several_nodes_is_one_per_node_and_says_so(tmp_path: Path) -> None:
    ended(tmp_path, study_spec(**FIELDS), 0.1)
    text = export(tmp_path, "case").stdout
    said, command = text.splitlines()[-2:]
    assert "run it on each of the 8 nodes, with NODE_RANK 0 to 7 and MASTER_ADDR" in said
    words = [
        re.sub(r"\$(\w+)", lambda match: {"NODE_RANK": "3", "MASTER_ADDR": "10.0.0.1"}[match[1]], w) for w in shlex.split(command)
    ]
    for expected in ("--nnodes=8", "--nproc-per-node=8", "--node-rank=3", "--rdzv-endpoint=10.0.0.1:29500"):
        assert expected in words
    assert "--standalone" not in words
    assert "'" not in command, "a shell fills nothing in between single quotes"


def test_one_node_meets_by_itself(tmp_path: Path) -> None:
    ended(tmp_path, study_spec(**{**FIELDS, "pools": [{**POOL, "nodes": 1}]}), 0.1)
    text = export(tmp_path, "case").stdout
    assert "torchrun --standalone --nproc-per-node=8 " in text and "NODE_RANK" not in text


def test_only_what_differs_between_nodes_is_left_to_the_shell() -> None:
    assert shell(Command(("a b", "--x=$NODE_RANK", "$HOME"), {"A": "1 2"})) == "A='1 2' 'a b' \"--x=$NODE_RANK\" '$HOME'"


@pytest.mark.parametrize(
    ("gpu", "knobs", "expected"),
    [
        ("h200", {"gpu_power_limit_w": 450}, ["sudo nvidia-smi -pl 450"]),
        ("h200", {"sm_clock_limit_mhz": 1400}, ["sudo nvidia-smi -lgc 0,1400"]),
        (
            "mi300x",
            {"gpu_power_limit_w": 600, "sm_clock_limit_mhz": 1400},
            ["sudo amd-smi set --gpu all --power-cap 600", "sudo amd-smi set --gpu all --clk-limit sclk max 1400"],
        ),
        ("h200", {}, []),
    ],
)
def test_the_limits_of_a_winner_are_named_with_the_vendor_s_command(gpu: str, knobs: dict[str, int], expected: list[str]) -> None:
    spec = study_spec(**{**FIELDS, "pools": [{**POOL, "gpu": gpu}]}, baseline=knobs)
    assert list(machine_commands(spec, spec.pools[0], spec.baseline)) == expected


def test_a_site_s_own_command_is_named_where_there_is_one() -> None:
    pool = {**POOL, "power_limit_command": "site-cap {gpu} {watts}"}
    spec = study_spec(**{**FIELDS, "pools": [pool]}, baseline={"gpu_power_limit_w": 450})
    assert machine_commands(spec, spec.pools[0], spec.baseline) == ("site-cap {gpu} 450 (for each GPU)",)


def test_the_command_of_trial_1_names_the_limits_too(tmp_path: Path) -> None:
    path = tmp_path / "study.yaml"
    path.write_text(yaml.safe_dump(study_data(**FIELDS, baseline={"gpu_power_limit_w": 450})))
    words = ["tune", str(path), "--state", str(tmp_path), "--print-command"]
    text = CliRunner().invoke(cli.app, words, env={"COLUMNS": "200"}).stdout
    assert "# before, on every node: sudo nvidia-smi -pl 450\n" in text
    assert "--nnodes=8" in text


def test_where_nothing_keeps_the_limits_the_nearest_and_what_it_crosses_are_told(tmp_path: Path) -> None:
    ended(tmp_path, study_spec(**FIELDS, limits={"step_time_s": {"max": 0.05}}), 0.2, 0.101 / 1.01)
    result = export(tmp_path, "case")
    assert result.exit_code == 1
    assert "No configuration keeps the limits. The nearest is trial 1 (" in result.stderr
    assert "step_time_s 0.101 is 102.0% beyond its limit (at most 0.05)" in result.stderr
    assert "completed yet" not in result.stderr


def test_where_nothing_completed_it_says_that(tmp_path: Path) -> None:
    ended(tmp_path, study_spec(**FIELDS))
    assert "there is no winner: No feasible configuration: not one trial completed." in export(tmp_path, "case").stderr
