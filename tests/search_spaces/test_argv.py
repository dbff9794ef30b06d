"""Megatron-LM's command line, there and back."""

from __future__ import annotations

import typing
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from search_spaces.config import TrialConfig, knobs
from search_spaces.model import ModelSpec

SIZES = st.integers(1, 64)
OPTIONAL = st.one_of(st.none(), SIZES)
WORDS = st.one_of(
    st.none(), st.lists(st.sampled_from(["core_attn", "mlp", "moe", "p2p", "a2a"]), min_size=1, max_size=3).map(tuple)
)
VALUES: dict[str, st.SearchStrategy[Any]] = {
    "pipeline_model_parallel_layout": st.sampled_from([None, "Et*3|(tt|)*5L", "Et|tL"]),
    "hierarchical_context_parallel_sizes": st.one_of(st.none(), st.tuples(SIZES, SIZES)),
    "moe_expert_capacity_factor": st.sampled_from([None, 1.0, 1.25]),
    "optimizer_offload_fraction": st.sampled_from([0.25, 1.0]),
}


def strategy(name: str) -> st.SearchStrategy[Any]:
    """Values of one knob, by the kind of its default and annotation."""
    field = TrialConfig.model_fields[name]
    if name in VALUES:
        return VALUES[name]
    if isinstance(field.default, bool):
        return st.booleans()
    parts = typing.get_args(field.annotation) if type(None) in typing.get_args(field.annotation) else (field.annotation,)
    words = [word for part in parts if typing.get_origin(part) is typing.Literal for word in typing.get_args(part)]
    if words:
        return st.sampled_from([*words, None] if len(parts) > 1 else words)
    if any(typing.get_origin(part) is tuple for part in parts):
        return WORDS
    return OPTIONAL if field.default is None else SIZES


MEGATRON = [name for name, knob in knobs().items() if knob.scope == "megatron"]


@settings(max_examples=60, deadline=None)
@given(st.fixed_dictionaries({name: strategy(name) for name in MEGATRON}))
def test_round_trip(values: dict[str, Any]) -> None:
    config = TrialConfig(**values)
    assert TrialConfig.from_argv(config.argv()) == config


def test_reads_a_launch_script_and_passes_over_what_is_no_knob() -> None:
    line = "--num-layers 32 --bf16 --tensor-model-parallel-size=4 --sequence-parallel --lr 1e-4 --recompute-activations --mock-data"
    expected = TrialConfig(tensor_model_parallel_size=4, sequence_parallel=True, recompute_granularity="selective")
    assert TrialConfig.from_argv(line.split()) == expected


def test_no_precision_is_fp32() -> None:
    assert TrialConfig.from_argv([]).precision == "fp32"
    assert "--bf16" not in TrialConfig(precision="fp32").argv()


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--bf16", "--fp16"], "more than one precision"),
        (["--tensor-model-parallel-size"], "has no value"),
        (["--tensor-model-parallel-size", "two"], "valid integer"),
    ],
)
def test_bad_command_lines(argv: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TrialConfig.from_argv(argv)


def test_every_knob_has_a_description_and_a_flag_of_its_own() -> None:
    flags = [knob.flag or name for name, knob in knobs().items() if knob.flag != ""]
    assert len(flags) == len(set(flags))
    assert all(knob.description for knob in knobs().values())
    assert all(knob.why_not for knob in knobs().values() if "cpu" not in knob.devices)


def test_model_argv() -> None:
    model = ModelSpec(
        num_layers=4,
        hidden_size=64,
        num_attention_heads=4,
        num_query_groups=2,
        vocab_size=512,
        num_experts=8,
        moe_layer_freq=(0, 1, 1, 1),
    )
    argv = model.argv()
    assert argv[argv.index("--moe-layer-freq") + 1] == "[0]*1+[1]*3"
    assert argv[argv.index("--group-query-attention") + 2] == "2"
    assert "--disable-bias-linear" in argv and "--swiglu" in argv
