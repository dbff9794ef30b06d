"""A number format that a pool's GPU lacks is told by every verb before the first trial, and a first study does not ask for it."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from optuna.storages import InMemoryStorage
from rich.console import Console
from typer.testing import CliRunner

from autotune import cli
from autotune.candidates import candidate_table
from autotune.first_study import write_study
from autotune.lacking import lacking_words
from autotune.progress import Progress
from autotune.simulation import simulated
from autotune.state_folder import StateFolder
from autotune.study import open_studies
from search_spaces.gpus import gpu
from search_spaces.hardware import PoolSpec
from tests.autotune.study_cases import study_data, study_spec

OLD, NEW = ({"name": name, "gpu": name, "gpus_per_node": 4} for name in ("v100", "a100"))
SIZES = {"tensor_model_parallel_size": [1, 2], "micro_batch_size": [1, 2]}
BOTH = {**SIZES, "precision": ["bf16", "fp16"]}
HALF = {**SIZES, "precision": ["fp16"]}
EMULATED = "v100-sxm2-32gb has no bf16: torch emulates it in fp32"


@pytest.mark.parametrize(
    ("name", "fields", "who"),
    [
        ("v100", {"search": SIZES}, "The baseline and all 4 candidates"),
        ("v100", {"search": BOTH}, "The baseline and 4 of 8 candidates"),
        ("v100", {"search": HALF}, "The baseline"),
        ("v100", {"search": BOTH, "baseline": {"precision": "fp16"}}, "4 of 8 candidates"),
        ("v100", {"search": SIZES, "baseline": {"precision": "fp16"}}, None),
        ("a100", {"search": SIZES}, None),
    ],
)
def test_who_uses_it_is_counted_and_what_to_set_is_named(name: str, fields: dict[str, Any], who: str | None) -> None:
    spec = study_spec(pools=[{"name": "p", "gpu": name, "gpus_per_node": 4}], **fields)
    found = lacking_words(gpu(name), candidate_table(spec, spec.pools[0]), spec.baseline)
    assert [line.split(":")[0] for line in found] == ([who] if who else [])
    assert all(EMULATED in line and "give precision=fp16, under `baseline` or in `search`" in line for line in found)


def test_check_and_plan_say_it_of_the_pool_that_lacks_it(tmp_path: Path) -> None:
    path = tmp_path / "study.yaml"
    path.write_text(yaml.safe_dump(study_data(pools=[OLD, NEW], search=SIZES)))
    for verb, key in (("check", "cautions"), ("plan", "lacking")):
        told = json.loads(CliRunner().invoke(cli.app, [verb, str(path), "--json"]).stdout)
        assert [EMULATED in "".join(pool[key]) for pool in told] == [True, False]
        shown = CliRunner().invoke(cli.app, [verb, str(path)], env={"COLUMNS": "300"}).output
        assert shown.count(EMULATED) == 1
    assert "Nothing is predicted." in shown


def test_tune_says_it_before_the_first_trial_and_in_its_report(tmp_path: Path) -> None:
    spec, output = simulated(study_spec(pools=[OLD, NEW], search=SIZES)), io.StringIO()
    studies = open_studies(spec, StateFolder(tmp_path), InMemoryStorage(), lambda study, record: None)
    assert [EMULATED in "".join(study.results().notes) for study in studies] == [True, False]
    Progress(Console(file=output, width=500), spec).opened(studies)
    told = [line for line in output.getvalue().splitlines() if EMULATED in line]
    assert [line.startswith("case-simulated/v100/1x4: The baseline and all 4 candidates: ") for line in told] == [True]
    assert output.getvalue().count("SIMULATED") == 1


@pytest.mark.parametrize(
    ("names", "precision"), [(["V100-SXM2-32GB"], "fp16"), (["A100", "V100-SXM2-32GB"], "fp16"), (["A100"], "bf16")]
)
def test_a_first_study_asks_for_what_all_its_devices_have(tmp_path: Path, names: list[str], precision: str) -> None:
    pools = [PoolSpec(name=name.lower(), gpu=name, gpus_per_node=4) for name in names]
    assert yaml.safe_load(write_study(tmp_path / "s.yaml", pools).read_text())["baseline"]["precision"] == precision


def test_a_model_without_a_study_is_planned_in_fp16_whatever_its_defaults_would_break(tmp_path: Path) -> None:
    shapes = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 16, "vocab_size": 128256}
    sizes = {"hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 32, "num_key_value_heads": 8}
    (tmp_path / "config.json").write_text(json.dumps(shapes | sizes))
    options = ["--gpus", "8", "--gpus-per-node", "8", "--global-batch-size", "4", "--seq-length", "2048", "--json"]
    command = ["plan", "--model", str(tmp_path / "config.json"), "--gpu", "v100", *options]
    (found,) = json.loads(CliRunner().invoke(cli.app, command).stdout)
    assert found["best"][0]["config"]["precision"] == "fp16"
    assert found["cautions"] == []
