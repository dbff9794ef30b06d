"""The table of candidates: the same answer as checking every combination by itself."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from search_spaces import space
from search_spaces.config import TrialConfig
from search_spaces.legality import check
from search_spaces.model import ModelSpec, Workload
from search_spaces.normalise import normalise
from search_spaces.space import SearchSpace

SMALL = ModelSpec(num_layers=8, hidden_size=128, num_attention_heads=8, vocab_size=1024)
DENSE = Workload(model=SMALL, world_size=4, global_batch_size=16, seq_length=128, device="cpu")
MOE = Workload(model=SMALL.model_copy(update={"num_experts": 4}), world_size=8, global_batch_size=32, seq_length=128)
SPACES: dict[str, tuple[Workload, dict[str, Any]]] = {
    "dense": (
        DENSE,
        {
            "tensor_model_parallel_size": [1, 2],
            "pipeline_model_parallel_size": [2, 1],
            "num_virtual_stages_per_pipeline_rank": ["none", 1, 2],
            "micro_batch_size": {"range": [1, 2]},
            "sequence_parallel": [False, True],
            "recompute_granularity": ["none", "selective", "full"],
            "use_distributed_optimizer": "auto",
        },
    ),
    "moe": (
        MOE,
        {
            "tensor_model_parallel_size": "powers_of_two",
            "pipeline_model_parallel_size": [2],
            "context_parallel_size": [1, 2],
            "expert_model_parallel_size": [1, 3, 4],
            "expert_tensor_parallel_size": ["none", 1, 2],
            "decoder_first_pipeline_num_layers": ["none", 3],
            "sequence_parallel": [False, True],
            "fp8_format": ["none", "hybrid"],
        },
    ),
}


def every_combination(space: SearchSpace) -> set[TrialConfig]:
    """The legal candidates, one check per combination."""
    legal = set()
    for rows in itertools.product(*(dimension.rows for dimension in space.dimensions)):
        chosen: dict[str, Any] = {}
        for dimension, row in zip(space.dimensions, rows, strict=True):
            chosen.update(zip(dimension.knobs, row, strict=True))
        config = TrialConfig(**chosen)
        if not check(space.workload, config):
            legal.add(normalise(space.workload, config))
    return legal


@pytest.mark.parametrize("name", SPACES)
def test_table_equals_single_checks(name: str) -> None:
    space = SearchSpace(*SPACES[name])
    table = space.table()
    assert {table.config(row) for row in range(len(table))} == every_combination(space)


@pytest.mark.parametrize("name", SPACES)
def test_rows_are_found_again_and_indexed(name: str) -> None:
    table = SearchSpace(*SPACES[name]).table()
    matrix = table.index_matrix
    assert matrix.shape == (len(table), len(table.knobs))
    for row in range(0, len(table), 7):
        config = table.config(row)
        assert table.find(config) == row
        assert all(
            table.choices[knob][index] == getattr(config, knob) for knob, index in zip(table.knobs, matrix[row], strict=True)
        )


@pytest.mark.parametrize("name", SPACES)
def test_refused_samples_are_refused(name: str) -> None:
    table = SearchSpace(*SPACES[name]).table()
    assert table.refused and all(violations for _, violations in table.sample)


def test_another_spelling_finds_its_candidate() -> None:
    table = SearchSpace(*SPACES["dense"]).table()
    plain = table.find(TrialConfig())
    assert plain is not None
    assert table.find(TrialConfig(sequence_parallel=True, num_virtual_stages_per_pipeline_rank=1)) == plain
    assert table.find(TrialConfig(tensor_model_parallel_size=3)) is None
    assert table.find(TrialConfig(precision="fp16")) is None


def test_choices_are_ordered() -> None:
    table = SearchSpace(*SPACES["dense"]).table()
    assert table.choices["pipeline_model_parallel_size"] == (1, 2)
    assert table.choices["num_virtual_stages_per_pipeline_rank"] == (None, 2)


def test_unknown_knob_names_the_nearest() -> None:
    with pytest.raises(ValueError, match="nearest: tensor_model_parallel_size"):
        SearchSpace(DENSE, {"tensor_parallel_size": [1]})


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ({"micro_batch_size": [0]}, "micro_batch_size cannot be 0"),
        ({"recompute": ["half"]}, "unknown recompute mode"),
        ({"recompute": ["none"], "recompute_granularity": ["full"], "recompute_method": ["block"]}, "more than once"),
        ({"micro_batch_size": []}, "no choices"),
        ({"micro_batch_size": {"range": [1, 10**8]}}, "a range of 100,000,000 choices is too long"),
        ({"cuda_graph_impl": "auto"}, "has no auto"),
        ("all", "or auto"),
    ],
)
def test_bad_choices(choices: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SearchSpace(DENSE, choices)


def test_a_space_that_cannot_be_held_is_refused_before_it_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(space, "MOST_ROWS", 40)
    choices = {"micro_batch_size": [1, 2], "sequence_parallel": [False, True], "gpu_power_limit_w": {"range": [200, 209]}}
    assert len(SearchSpace(DENSE, choices).table()) <= 40
    choices["gpu_power_limit_w"] = {"range": [200, 700]}
    with pytest.raises(space.SpaceTooLargeError, match="gpu_power_limit_w alone has 501 choices"):
        SearchSpace(DENSE, choices).table()


def test_no_choices_is_the_base() -> None:
    table = SearchSpace(DENSE, {}, TrialConfig(micro_batch_size=2)).table()
    assert len(table) == 1
    assert table.config(0) == TrialConfig(micro_batch_size=2)


def test_nothing_legal_is_an_empty_table() -> None:
    table = SearchSpace(DENSE, {"tensor_model_parallel_size": [3, 5], "micro_batch_size": [1, 2]}).table()
    assert len(table) == 0
    assert table.refused["world_over_attention_mesh"] == 4
    assert table.index_matrix.shape == (0, 2)


def test_exotic_groups_are_opt_in_by_name() -> None:
    gpus = MOE.model_copy(update={"model": SMALL.model_copy(update={"num_experts": 4, "num_layers": 8}), "gpus_per_node": 8})
    choices = {"tensor_model_parallel_size": [1, 2], "sequence_parallel": [True], "expert_model_parallel_size": [1, 2]}
    plain = len(SearchSpace(gpus, choices).table())
    for group in ("fsdp", "cuda_graphs", "optimizer_offload", "activation_offload", "expert_overlap"):
        base = TrialConfig(use_distributed_optimizer=True)
        assert len(SearchSpace(gpus, {**choices, group: "auto"}, base).table()) > plain, group


def test_knobs_that_change_learning_are_named() -> None:
    assert SearchSpace(DENSE, {"precision": ["bf16", "fp16"], "micro_batch_size": [1]}).changes_learning == ("precision",)


def test_auto_on_cpu_needs_no_gpu() -> None:
    table = SearchSpace(MOE.model_copy(update={"device": "cpu"}), "auto").table()
    assert len(table) > 100
    assert table.choices["context_parallel_size"] == (1,)
    assert table.choices["expert_tensor_parallel_size"] == (1,)
