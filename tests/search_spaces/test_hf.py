"""Shapes from config.json: parameter counts against the published ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from search_spaces.hf import FAMILIES, UnknownModelError
from search_spaces.model import ModelSpec
from search_spaces.parameters import count_parameters

MODELS: list[dict[str, Any]] = yaml.safe_load((Path(__file__).parent / "hf_models.yaml").read_text())


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model["name"])
def test_parameters_match_the_model_card(model: dict[str, Any]) -> None:
    counted = ModelSpec.from_hf(model["config"]).parameters + model.get("untied", 0)
    assert counted == pytest.approx(model["parameters"], rel=1e-3)


def test_active_parameters_of_experts() -> None:
    deepseek = next(model for model in MODELS if model["name"].endswith("DeepSeek-V3"))
    spec = ModelSpec.from_hf(deepseek["config"])
    assert count_parameters(spec).active == pytest.approx(37.6e9, rel=0.01)
    assert count_parameters(spec).mtp == pytest.approx(11.6e9, rel=0.01)
    assert spec.moe_layers == (False,) * 3 + (True,) * 58


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (
            {
                "model_type": "llama4",
                "text_config": {
                    "hidden_size": 5120,
                    "intermediate_size": 8192,
                    "intermediate_size_mlp": 16384,
                    "num_hidden_layers": 48,
                    "num_attention_heads": 40,
                    "num_key_value_heads": 8,
                    "num_local_experts": 128,
                    "num_experts_per_tok": 1,
                    "interleave_moe_layer_step": 2,
                    "vocab_size": 202048,
                },
            },
            {"num_experts": 128, "moe_shared_expert_intermediate_size": 8192, "moe_layer_freq": (0, 1) * 24},
        ),
        (
            {
                "model_type": "nemotron",
                "hidden_size": 4096,
                "intermediate_size": 16384,
                "num_hidden_layers": 32,
                "num_attention_heads": 48,
                "num_key_value_heads": 8,
                "head_dim": 128,
                "vocab_size": 256000,
            },
            {"swiglu": False, "kv_channels": 128, "add_bias_linear": False, "num_query_groups": 8},
        ),
    ],
    ids=["llama4", "nemotron"],
)
def test_other_families(config: dict[str, Any], expected: dict[str, Any]) -> None:
    spec = ModelSpec.from_hf(config)
    assert {name: getattr(spec, name) for name in expected} == expected


def test_every_family_is_tried() -> None:
    tried = {model["config"]["model_type"] for model in MODELS} | {"llama4", "nemotron"}
    assert set(FAMILIES) - tried <= {"llama4_text", "gemma3"}


def test_reads_a_file_and_its_folder(tmp_path: Path) -> None:
    config = MODELS[0]["config"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert ModelSpec.from_hf(tmp_path) == ModelSpec.from_hf(tmp_path / "config.json") == ModelSpec.from_hf(config)


def test_unknown_architecture_is_an_error() -> None:
    with pytest.raises(UnknownModelError, match="unknown model_type 'mamba'"):
        ModelSpec.from_hf({"model_type": "mamba", "hidden_size": 1})


def test_missing_fields_are_named() -> None:
    config = {key: value for key, value in MODELS[0]["config"].items() if key != "intermediate_size"}
    with pytest.raises(UnknownModelError, match="lacks intermediate_size"):
        ModelSpec.from_hf(config)
