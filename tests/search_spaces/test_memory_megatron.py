"""The memory model against megatron-core itself, built and run on CPU under a fake process group."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from search_spaces import memory
from search_spaces.memory import Software
from search_spaces.memory.stages import INDEX, pipelines, stage_counts
from search_spaces.memory.tables import GIB
from search_spaces.parameters import rank_parameters
from tests.search_spaces.memory_cases import Case, activation_cases, ask, columns, parameter_cases

Answered = tuple[Case, Any]
LOCAL = Software(transformer_engine=False, flash_attention=False)


@pytest.fixture(scope="module")
def answered() -> dict[str, list[Answered]]:
    """A few cases of both kinds, in one process: importing megatron-core takes seconds."""
    return ask(parameters=parameter_cases(12, seed=11), activations=activation_cases(16, seed=5))


def test_parameters_per_stage_are_megatrons(answered: dict[str, list[Answered]]) -> None:
    assert_parameters(answered["parameters"])


@pytest.mark.acceptance
@pytest.mark.timeout(900)
def test_parameters_per_stage_are_megatrons_in_every_case():
    assert_parameters(ask(parameters=parameter_cases(110, seed=3))["parameters"])


def test_activation_bytes_are_those_that_autograd_saves(answered: dict[str, list[Answered]]) -> None:
    assert_activations(answered["activations"])


@pytest.mark.acceptance
@pytest.mark.timeout(900)
def test_activation_bytes_are_those_that_autograd_saves_in_every_case():
    assert_activations(ask(activations=activation_cases(60, seed=1))["activations"])


def assert_parameters(answered: list[Answered]) -> None:
    for case, built in answered:
        assert stage_parameters(case) == built, case


def assert_activations(answered: list[Answered]) -> None:
    errors = [activation_bytes(case) / answer["bytes"] - 1 for case, answer in answered]
    assert max(map(abs, errors)) <= 0.002, sorted(errors)


def stage_parameters(case: Case) -> list[list[int]]:
    """Parameters outside and inside the experts of every stage."""
    table = columns(case)
    (pipeline,), _ = pipelines(table)
    held = dict(zip(INDEX, stage_counts(table.model, pipeline), strict=True))
    count = rank_parameters(table, transformer_engine=False)
    plain = held["dense_layers"] * count.dense_layer + held["moe_layers"] * count.moe_layer
    plain = plain + held["embeddings"] * count.embedding + held["outputs"] * count.output
    plain = plain + held["final_norms"] * count.final_norm + held["mtp_layers"] * count.mtp_layer
    experts = held["moe_layers"] * count.experts + held["mtp_layers"] * count.mtp_experts
    stages: list[list[int]] = np.stack([plain, experts], axis=1).astype(int).tolist()
    return stages


def activation_bytes(case: Case) -> float:
    return memory.estimate(columns(case), LOCAL).by_component(0)["activations"] * GIB
