"""What an optimiser step moves, by the types of its state."""

from __future__ import annotations

from typing import Any

import pytest

from search_spaces.coefficients import Coefficients
from search_spaces.columns import Columns
from search_spaces.config import TrialConfig
from search_spaces.gpus import gpu, links_of
from search_spaces.model import ModelSpec, RunSettings, Workload
from search_spaces.step_ends import update_bytes
from search_spaces.step_time import estimate

DEVICE = gpu("h100")
MODEL = ModelSpec(num_layers=2, hidden_size=1024, num_attention_heads=16, vocab_size=50304)
AWARE = {"use_precision_aware_optimizer": True, "use_distributed_optimizer": True}


def columns(*, separate: bool = True, **knobs: Any) -> Columns:
    settings = RunSettings(separate_main_params=separate)
    workload = Workload(model=MODEL, world_size=1, global_batch_size=8, seq_length=1024, settings=settings)
    return Columns.of(workload, TrialConfig.model_validate(knobs))


@pytest.mark.parametrize(
    ("knobs", "adam", "passes"),
    [
        ({}, 30, 12),
        ({"precision": "fp32"}, 28, 12),
        (AWARE, 30, 12),
        ({**AWARE, "main_grads_dtype": "bf16"}, 28, 6),
        ({**AWARE, "exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "fp8"}, 30 + 12 + 10, 12),
        ({"main_grads_dtype": "bf16", "exp_avg_dtype": "bf16"}, 30, 12),
        ({"separate": False}, 22, 6),
        ({"separate": False, "precision": "fp32"}, 28, 12),
    ],
)
def test_bytes_of_an_update_follow_the_types_of_its_state(knobs, adam, passes):
    found = update_bytes(columns(**knobs))
    assert [float(number.item()) for number in found] == [adam, passes]


def test_bf16_gradients_shorten_the_step_and_bf16_moments_which_are_unpacked_lengthen_it():
    links = links_of(DEVICE, 1)
    plain, gradients, moments = (
        estimate(columns(**knobs), DEVICE, links, Coefficients()).parts["optimizer"].item()
        for knobs in (AWARE, {**AWARE, "main_grads_dtype": "bf16"}, {**AWARE, "exp_avg_dtype": "bf16"})
    )
    assert gradients < plain < moments
