"""A baseline that cannot run is refused by every verb that reads a study, before anything is made."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from optuna.storages import InMemoryStorage
from rich.console import Console
from typer.testing import CliRunner, Result

from autotune import cli
from autotune.baseline import check_baseline
from autotune.errors import SpecError
from autotune.plan import DOES_NOT_FIT, plan_one
from autotune.pool_study import PoolStudy
from autotune.progress import Progress
from autotune.records import Phase
from launchers.outcome import Outcome
from tests.autotune.study_cases import NoLauncher, completed, run_to_end, study_data, study_spec

TP = "tensor_model_parallel_size"
H200 = {"name": "h200", "gpu": "h200", "nodes": 2, "gpus_per_node": 8}


def run(folder: Path, verb: str, *options: str, **fields: Any) -> Result:
    path = folder / "study.yaml"
    path.write_text(yaml.safe_dump(study_data(**fields)))
    return CliRunner().invoke(cli.app, [verb, str(path), *options], env={"COLUMNS": "200", "AUTOTUNE_STATE": str(folder / "state")})


@pytest.mark.parametrize(
    ("verb", "options"),
    [("check", ()), ("plan", ()), ("tune", ()), ("tune", ("--simulate",)), ("tune", ("--detach",)), ("tune", ("--print-command",))],
)
def test_an_illegal_baseline_ends_with_exit_code_2_and_the_rule_before_anything_is_made(
    tmp_path: Path, verb: str, options: tuple[str, ...]
) -> None:
    result = run(tmp_path, verb, *options, baseline={TP: 3}, pools=[H200])
    assert result.exit_code == 2, result.output
    assert "baseline: is not legal: world_over_attention_mesh: " in result.stderr
    assert f"hint: nearest legal: {TP}=" in result.stderr
    assert not (tmp_path / "state").exists()


def test_one_configuration_of_a_study_can_be_asked_about_whatever_its_baseline_is(tmp_path: Path) -> None:
    assert run(tmp_path, "check", "--set", f"{TP}=2", baseline={TP: 3}, pools=[H200]).exit_code == 0


TWO_STAGES = {TP: 8, "pipeline_model_parallel_size": 2}
COUNTED = {**H200, "nodes": [2, 3]}


def test_the_pool_that_cannot_run_it_at_any_node_count_is_named() -> None:
    pools = [COUNTED, {**H200, "name": "lone", "nodes": 1}, {**H200, "name": "odd", "nodes": [3, 5]}]
    with pytest.raises(SpecError, match=r"baseline: is not legal on pool lone: world_over_attention_mesh") as caught:
        check_baseline(study_spec(baseline=TWO_STAGES, pools=pools, global_batch_size=240))
    assert "; also not on odd, 3 nodes; odd, 5 nodes" in str(caught.value)
    check_baseline(study_spec(baseline={TP: 8}, pools=pools, global_batch_size=240))


def test_a_node_count_that_cannot_run_it_goes_on_without_and_every_verb_says_why(tmp_path: Path) -> None:
    fields = {"baseline": TWO_STAGES, "pools": [COUNTED], "global_batch_size": 48}
    told = "The baseline cannot be launched here: world_over_attention_mesh: world_size=24 is not divisible by "
    lines = [line for line in run(tmp_path, "check", **fields).output.splitlines() if told in line]
    assert [line.startswith("h200, 3 nodes: ") for line in lines] == [True]
    checked, planned = (json.loads(run(tmp_path, verb, "--json", **fields).stdout) for verb in ("check", "plan"))
    for pools in (checked, planned):
        assert [told in "".join(pool["cautions"]) for pool in pools] == [False, True]
    assert told in run(tmp_path, "plan", **fields).output.replace("\n", " ")
    commands = run(tmp_path, "tune", "--print-command", **fields).stdout
    assert f"# pool h200, 3 nodes: {told}" in commands
    assert commands.count("torchrun") == 1


@pytest.mark.parametrize(
    ("search", "goes_on"), [({"pipeline_model_parallel_size": [1, 2]}, True), ({"micro_batch_size": [1, 2]}, False)]
)
def test_what_a_study_without_its_baseline_does(search: dict[str, list[int]], goes_on: bool) -> None:
    """It tries the others, and scores them against its first measured trial; where none is legal it ends with the rule."""
    spec = study_spec(baseline=TWO_STAGES, pools=[COUNTED], global_batch_size=48, search=search)
    alone, output = PoolStudy(spec, spec.studied_pools[1], NoLauncher(), InMemoryStorage(), lambda *_: None), io.StringIO()
    Progress(Console(file=output, width=500), spec).opened([alone])
    says = "The study starts without it: scores are relative to its first measured trial." if goes_on else "Nor can anything else."
    assert "case/h200/3x8: The baseline cannot be launched here: world_over_attention_mesh: " in output.getvalue()
    assert output.getvalue().rstrip().endswith(says)
    if goes_on:
        (proposal,) = run_to_end(alone, lambda _: completed())
        assert (proposal.config.pipeline_model_parallel_size, proposal.phase) == (1, Phase.EXPLORE)
        assert [(record.phase, record.outcome) for record in alone.records] == [
            (Phase.BASELINE, Outcome.REFUSED),
            (Phase.EXPLORE, Outcome.COMPLETED),
        ]
        assert (alone.best.number, alone.best.value) == (1, 0.0)
    else:
        assert alone.end_reason.startswith("no legal candidate: world_over_attention_mesh refused")


def test_what_the_launcher_cannot_run_is_refused_as_well() -> None:
    model = {"num_layers": 8, "hidden_size": 64, "num_attention_heads": 8, "vocab_size": 256, "add_bias_linear": True}
    with pytest.raises(SpecError, match="baseline: is not legal: unsupported_recompute_modules: "):
        check_baseline(study_spec(model=model, baseline={"recompute_granularity": "selective", "recompute_modules": ["mlp"]}))


def test_a_study_that_gives_no_baseline_is_not_refused_for_megatron_s_defaults() -> None:
    check_baseline(study_spec(pools=[{**H200, "nodes": 3}], global_batch_size=16))


def test_a_baseline_that_is_legal_and_predicted_not_to_fit_is_taken() -> None:
    spec = study_spec(
        model={"num_layers": 80, "hidden_size": 8192, "num_attention_heads": 64, "vocab_size": 128256},
        baseline={TP: 2},
        pools=[H200],
    )
    said = plan_one(spec, spec.pools[0], spec.baseline).prediction
    assert said is not None and said.fits == DOES_NOT_FIT
    check_baseline(spec)
