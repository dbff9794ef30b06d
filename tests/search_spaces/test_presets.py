"""Presets load for the model families that they are for, and leave something to try."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from search_spaces.legality import check
from search_spaces.model import ModelSpec, Workload
from search_spaces.presets import NAMES, load_preset
from search_spaces.space import SearchSpace

MODELS: dict[str, dict[str, Any]] = {
    model["name"]: model for model in yaml.safe_load((Path(__file__).parent / "hf_models.yaml").read_text())
}
DENSE = [
    "meta-llama/Meta-Llama-3-8B",
    "meta-llama/Llama-3.1-405B",
    "mistralai/Mistral-7B-v0.1",
    "Qwen/Qwen2.5-14B",
    "google/gemma-2-9b",
    "microsoft/phi-4",
    "EleutherAI/gpt-neox-20b",
    "openai-community/gpt2-xl",
    "allenai/OLMo-2-1124-7B",
]
MOE = ["mistralai/Mixtral-8x7B-v0.1", "Qwen/Qwen3-30B-A3B", "deepseek-ai/DeepSeek-V3", "openai/gpt-oss-120b"]
PAIRS = [("dense", name) for name in DENSE] + [("moe", name) for name in MOE]
PAIRS += [(preset, name) for preset in ("long_context", "finetune") for name in (DENSE[0], DENSE[3], MOE[0], MOE[1])]


@pytest.mark.parametrize(("preset", "name"), PAIRS)
def test_G020_preset_expands(preset: str, name: str) -> None:
    model = ModelSpec.from_hf(MODELS[name]["config"])
    seq_length = 32768 if preset == "long_context" else model.max_position_embeddings or 4096
    workload = Workload(model=model, world_size=64, global_batch_size=256, seq_length=seq_length, gpus_per_node=8)
    table = SearchSpace(workload, load_preset(preset)).table()
    assert len(table) > 50
    for row in range(0, len(table), max(1, len(table) // 5)):
        assert check(workload, table.config(row)) == []


@pytest.mark.parametrize("name", NAMES)
def test_presets_are_explained(name: str) -> None:
    text = (Path(__file__).parents[2] / "search_spaces" / "presets" / f"{name}.yaml").read_text()
    comments = [line for line in text.splitlines() if line.strip().startswith("#")]
    assert len(comments) >= 3


def test_quickstart_fits_four_cpu_ranks() -> None:
    content = yaml.safe_load((Path(__file__).parents[2] / "search_spaces" / "presets" / "quickstart.yaml").read_text())
    workload = Workload(
        model=ModelSpec(**content["model"]),
        world_size=4,
        global_batch_size=content["global_batch_size"],
        seq_length=content["seq_length"],
        device="cpu",
        megatron="0.16",
    )
    table = SearchSpace(workload, load_preset("quickstart")).table()
    assert 100 < len(table) < 500


def test_unknown_preset() -> None:
    with pytest.raises(ValueError, match="there are: quickstart"):
        load_preset("fast")
