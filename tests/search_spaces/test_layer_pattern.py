"""Which layers have experts, written as Megatron writes it, and what follows from it for time and memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from search_spaces import memory
from search_spaces.case import read_case
from search_spaces.columns import Columns
from search_spaces.gpus import gpu
from search_spaces.layer_pattern import layer_pattern
from search_spaces.legality import check
from search_spaces.model import ModelSpec
from search_spaces.prediction import Machines, predict

SHAPES = {"num_layers": 12, "hidden_size": 1024, "num_attention_heads": 16, "vocab_size": 32000, "ffn_hidden_size": 4096}
MOE = SHAPES | {"num_experts": 8, "moe_ffn_hidden_size": 2048}
RUN = {"world_size": 8, "gbs": 64, "seq_length": 2048, "use_distributed_optimizer": True}


def predicted(**change: Any) -> Any:
    columns = Columns.of(*read_case({**MOE, **RUN, **change}))
    return predict(columns, Machines.shipped(gpu("h100"), 8))


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("[0]*3+[1]*58", (0,) * 3 + (1,) * 58),
        ("([0]+[1]*3)*2", (0, 1, 1, 1) * 2),
        ("2*[1,0]", (1, 0, 1, 0)),
        ("[1]", (1,)),
        ("4", 4),
    ],
)
def test_expressions(text: str, value: Any) -> None:
    assert layer_pattern(text) == value
    layers = len(value) if isinstance(value, tuple) else 12
    assert ModelSpec(**{**MOE, "num_layers": layers, "moe_layer_freq": text}).moe_layer_freq == value


@pytest.mark.parametrize(
    "text", ["", "[0", "[0]*[1]", "[0]-1", "len('a')", "[0]*10**9", "[0]*1000000000", "[[0]*400]*400", "[0]*90000+[1]*90000"]
)
def test_what_is_no_pattern_or_has_no_end_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="a list of layers"):
        layer_pattern(text)


@pytest.mark.parametrize(("pattern", "legal"), [((0, 1) * 6, True), ((0, 1) * 5, False), ((0, 2) * 6, False), ((0, -1) * 6, False)])
def test_a_list_has_a_0_or_a_1_for_every_layer(pattern: tuple[int, ...], legal: bool) -> None:
    broken = check(*read_case({**MOE, **RUN, "moe_layer_freq": list(pattern)}))
    assert [violation.name for violation in broken] == ([] if legal else ["expert_layer_pattern"])


@pytest.mark.parametrize("first", [0, 3, 6, 12])
def test_every_layer_counts_as_what_it_is(first: int) -> None:
    """Seconds and GiB of a model without pipeline are those of its dense layers and of its layers with experts, in any order."""
    ordered = predicted(moe_layer_freq=[0] * first + [1] * (12 - first))
    mixed = predicted(moe_layer_freq=[1] * (12 - first) + [0] * first)
    assert ordered.step_time_s == pytest.approx(mixed.step_time_s)
    assert ordered.memory.memory_gib == pytest.approx(mixed.memory.memory_gib)
    dense, moe = predicted(moe_layer_freq=[0] * 12), predicted(moe_layer_freq=1)
    share = first / 12
    assert ordered.times.parts["gemm"] == pytest.approx(share * dense.times.parts["gemm"] + (1 - share) * moe.times.parts["gemm"])
    states = [sum(table.memory.by_component(0)[name] for name in ("weights", "gradients")) for table in (ordered, dense, moe)]
    assert states[0] == pytest.approx(share * states[1] + (1 - share) * states[2])


@pytest.mark.parametrize(("pattern", "alike"), [([1, 0] * 6, {"num_experts": None, "moe_ffn_hidden_size": None}), ([0, 1] * 6, {})])
def test_a_prediction_layer_is_of_the_kind_of_the_last_layer(pattern: list[int], alike: dict[str, None]) -> None:
    """multi_token_prediction.py builds it from the last layer's spec: its products take what those of a like model's take."""

    def gemm(mtp: int | None, **change: Any) -> float:
        return float(np.ravel(predicted(mtp_num_layers=mtp, **change).times.parts["gemm"])[0])

    assert gemm(1, moe_layer_freq=pattern) - gemm(None, moe_layer_freq=pattern) == pytest.approx(
        gemm(1, **alike) - gemm(None, **alike)
    )


def test_fsdp_gathers_layers_that_the_model_has() -> None:
    """A model with experts in every layer has no dense ones, however wide they would be."""
    fsdp = {"use_megatron_fsdp": True, "ckpt_format": "fsdp_dtensor", "data_parallel_sharding_strategy": "optim_grads_params"}

    def gib(width: int) -> float:
        columns = Columns.of(*read_case({**MOE, **RUN, **fsdp, "ffn_hidden_size": width, "ep": 8}))
        return float(memory.estimate(columns).by_component(0)["communication"])

    assert gib(65536) == pytest.approx(gib(4096))
