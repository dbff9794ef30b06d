"""A baseline that cannot run is refused by every verb that reads a study, before anything is made."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner, Result

from autotune import cli
from autotune.baseline import check_baseline
from autotune.errors import SpecError
from autotune.plan import DOES_NOT_FIT, plan_one
from tests.autotune.study_cases import study_data, study_spec

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


def test_the_pool_or_node_count_at_which_it_is_not_legal_is_named() -> None:
    pools = [{**H200, "nodes": [2, 3]}, {**H200, "name": "lone", "nodes": 1}]
    with pytest.raises(SpecError, match=r"baseline: is not legal on pool h200, 3 nodes: world_over_attention_mesh") as caught:
        check_baseline(study_spec(baseline={TP: 8, "pipeline_model_parallel_size": 2}, pools=pools, global_batch_size=48))
    assert "also not on lone" in str(caught.value)
    check_baseline(study_spec(baseline={TP: 8}, pools=pools, global_batch_size=48))


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
