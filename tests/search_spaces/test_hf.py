"""Shapes from config.json: parameter counts against the published ones."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from search_spaces.columns import Columns
from search_spaces.config import TrialConfig
from search_spaces.hf import _with_defaults
from search_spaces.hf_families import FAMILIES, NOT_DESCRIBED
from search_spaces.hf_fields import UnknownModelError
from search_spaces.model import ModelSpec, Workload
from search_spaces.parameters import count_parameters, rank_parameters

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
    assert set(FAMILIES) - tried <= {"llama4_text", "gemma3", "mistral3", "olmo3"}


LLAMA_7B = MODELS[0]["config"]
ATTENTION, MLP = 32 * 4 * 4096, 32 * (2 * 11008 + 4096)
"""Biases of a Llama 2 7B: queries, keys, values and output; gate, up and down."""


@pytest.mark.parametrize(
    ("fields", "biases", "built"),
    [
        ({}, 0, (False, False)),
        ({"attention_bias": True}, ATTENTION, (False, True)),
        ({"mlp_bias": True}, MLP, (True, False)),
        ({"attention_bias": True, "mlp_bias": True}, ATTENTION + MLP, (True, False)),
    ],
)
def test_biases_that_a_config_asks_for(fields: dict[str, bool], biases: int, built: tuple[bool, bool]) -> None:
    """The count is the model's; what Megatron builds has the biases of all linear layers, or those of queries, keys and values."""
    spec = ModelSpec.from_hf(LLAMA_7B | fields)
    assert spec.parameters == 6738415616 + biases
    assert (spec.add_bias_linear, spec.add_qkv_bias) == built
    shapes = {name: value for name, value in spec.model_dump().items() if name != "biased"}
    assert held(spec) == held(ModelSpec(**shapes))


def held(spec: ModelSpec) -> list[int]:
    """Parameters of the only rank, by kind of layer."""
    columns = Columns.of(Workload(model=spec, world_size=1, global_batch_size=1, seq_length=64), TrialConfig())
    return [int(np.ravel(count)[0]) for count in rank_parameters(columns)]


@pytest.mark.parametrize(("step", "layers"), [(1, range(3, 61)), (2, range(4, 61, 2)), (5, range(5, 61, 5))])
def test_experts_in_every_so_manieth_layer_after_the_dense_ones(step: int, layers: range) -> None:
    """modeling_deepseek.py: layer_idx >= first_k_dense_replace and layer_idx % moe_layer_freq == 0."""
    config = next(model["config"] for model in MODELS if model["name"].endswith("DeepSeek-V3"))
    spec = ModelSpec.from_hf(config | {"moe_layer_freq": step})
    assert [layer for layer, experts in enumerate(spec.moe_layers) if experts] == list(layers)


@pytest.mark.parametrize("kind", sorted(NOT_DESCRIBED))
def test_an_architecture_that_shapes_do_not_describe_is_named_with_the_reason(kind: str) -> None:
    with pytest.raises(UnknownModelError, match=f"model_type '{kind}' cannot be described: its?"):
        ModelSpec.from_hf({**LLAMA_7B, "model_type": kind})


def test_reads_a_file_and_its_folder(tmp_path: Path) -> None:
    config = MODELS[0]["config"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert ModelSpec.from_hf(tmp_path) == ModelSpec.from_hf(tmp_path / "config.json") == ModelSpec.from_hf(config)


def test_unknown_architecture_is_an_error() -> None:
    with pytest.raises(UnknownModelError, match="unknown model_type 'mamba'"):
        ModelSpec.from_hf({"model_type": "mamba", "hidden_size": 1})


@pytest.fixture
def without_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine without the extra [hf]."""
    monkeypatch.setitem(sys.modules, "transformers", None)


@pytest.mark.usefixtures("without_transformers")
def test_missing_fields_are_named() -> None:
    config = {key: value for key, value in MODELS[0]["config"].items() if key != "intermediate_size"}
    with pytest.raises(UnknownModelError, match="lacks intermediate_size"):
        ModelSpec.from_hf(config)


@pytest.mark.usefixtures("without_transformers")
@pytest.mark.parametrize("kind", ["gemma2", "gemma3_text", "qwen3", "qwen3_moe", "gpt_oss"])
def test_a_head_size_that_is_no_quotient_is_not_guessed(kind: str) -> None:
    """Hidden size over heads is 224 for google/gemma-2-9b and 45 for gpt-oss, whose heads have 256 and 64."""
    config = next(dict(model["config"]) for model in MODELS if model["config"]["model_type"] == kind)
    del config["head_dim"]
    with pytest.raises(UnknownModelError, match="lacks head_dim"):
        ModelSpec.from_hf(config)


SHORT_GEMMA_3 = {
    "model_type": "gemma3",
    "text_config": {"model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34},
}
"""google/gemma-3-4b-pt's config.json leaves heads, head size and vocabulary to the defaults of its class."""


@pytest.mark.usefixtures("without_transformers")
def test_defaults_of_a_class_are_not_guessed() -> None:
    with pytest.raises(UnknownModelError, match="lacks num_attention_heads"):
        ModelSpec.from_hf(SHORT_GEMMA_3)


def test_defaults_of_a_class_come_from_transformers() -> None:
    pytest.importorskip("transformers", reason="the extra [hf]")
    spec = ModelSpec.from_hf(SHORT_GEMMA_3)
    assert (spec.num_attention_heads, spec.num_query_groups, spec.head_size, spec.vocab_size) == (8, 4, 256, 262208)
    assert spec.parameters == pytest.approx(3.880e9, rel=1e-3)


def test_transformers_changes_no_published_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers", reason="the extra [hf]")
    assert not [model["name"] for model in MODELS if len(_with_defaults(dict(model["config"]))) <= len(model["config"]) + 5]
    filled = {model["name"]: ModelSpec.from_hf(model["config"]) for model in MODELS}
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert all(_with_defaults(dict(model["config"])) == model["config"] for model in MODELS)
    assert filled == {model["name"]: ModelSpec.from_hf(model["config"]) for model in MODELS}


def test_experts_under_the_name_that_transformers_5_saves() -> None:
    model = next(model for model in MODELS if model["config"]["model_type"] == "qwen3_moe")
    renamed = {("num_local_experts" if name == "num_experts" else name): value for name, value in model["config"].items()}
    assert ModelSpec.from_hf(renamed) == ModelSpec.from_hf(model["config"])


MOE_CONFIG = next(model["config"] for model in MODELS if model["name"].endswith("DeepSeek-V3"))
QWEN_CONFIG = next(model["config"] for model in MODELS if model["name"] == "Qwen/Qwen3-30B-A3B")


@pytest.mark.parametrize(
    ("config", "field", "value"),
    [
        (QWEN_CONFIG, "decoder_sparse_step", 0),
        (QWEN_CONFIG, "head_dim", "128"),
        (MOE_CONFIG, "moe_layer_freq", 0),
        (MOE_CONFIG, "moe_layer_freq", [1]),
        (MOE_CONFIG, "num_hidden_layers", 10**10),
        (MOE_CONFIG, "num_hidden_layers", 2.5),
        (MOE_CONFIG, "n_shared_experts", "1"),
        (MOE_CONFIG, "first_k_dense_replace", -1),
        (MOE_CONFIG, "moe_intermediate_size", True),
    ],
)
def test_a_number_that_cannot_be_reckoned_with_is_named(config: dict[str, Any], field: str, value: Any) -> None:
    with pytest.raises(UnknownModelError, match=f"{field} must be a whole number from") as error:
        ModelSpec.from_hf(config | {field: value})
    assert repr(value) in str(error.value)
