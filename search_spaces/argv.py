"""Megatron-LM's command line: written from the knobs of a `TrialConfig`, and read back into them."""

from __future__ import annotations

import itertools
import types
import typing
from collections.abc import Iterator, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from search_spaces.config import TrialConfig
    from search_spaces.model import ModelSpec

PRECISIONS = {"--bf16": "bf16", "--fp16": "fp16"}
ALIASES = {
    "--fp8-hybrid": "--fp8-format",
    "--cuda-graph-modules": "--cuda-graph-scope",
    "--fp8-param": "--fp8-param-gather",
    "--moe-router-padding-for-quantization": "--moe-router-padding-for-fp8",
}


def config_argv(config: TrialConfig) -> list[str]:
    """The arguments of every knob whose value is not Megatron's default."""
    argv = [] if config.precision == "fp32" else [f"--{config.precision}"]
    defaults = type(config)()
    for flag, name in _flags().items():
        value = getattr(config, name)
        if value != getattr(defaults, name) or name == "micro_batch_size" or _always(config, name):
            argv += _spell(flag, value)
    return argv


def model_argv(model: ModelSpec) -> list[str]:
    """The arguments of a model's shapes."""
    argv: list[str] = []
    for name in _MODEL_VALUES:
        value = getattr(model, name)
        unused = not model.is_moe and value == type(model).model_fields[name].default
        if value is not None and not (unused and name.startswith("moe_")):
            argv += [_flag(name), _layer_list(value) if isinstance(value, tuple) else str(value)]
    for name in _MODEL_SWITCHES:
        if getattr(model, name):
            argv.append(_flag(name))
    if not model.add_bias_linear:
        argv.append("--disable-bias-linear")
    if model.num_query_groups is not None and not model.multi_latent_attention:
        argv += ["--group-query-attention", "--num-query-groups", str(model.num_query_groups)]
    if model.multi_latent_attention:
        argv += [item for name in _LATENT if (value := getattr(model, name)) for item in (_flag(name), str(value))]
    return argv


_MODEL_VALUES = (
    "num_layers",
    "hidden_size",
    "num_attention_heads",
    "ffn_hidden_size",
    "kv_channels",
    "vocab_size",
    "make_vocab_size_divisible_by",
    "normalization",
    "position_embedding_type",
    "max_position_embeddings",
    "num_experts",
    "moe_router_topk",
    "moe_ffn_hidden_size",
    "moe_layer_freq",
    "moe_shared_expert_intermediate_size",
    "moe_router_score_function",
    "moe_router_num_groups",
    "moe_router_group_topk",
    "mtp_num_layers",
)
_MODEL_SWITCHES = (
    "swiglu",
    "untie_embeddings_and_output_weights",
    "add_qkv_bias",
    "qk_layernorm",
    "moe_router_pre_softmax",
    "multi_latent_attention",
)
_LATENT = ("q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim")


def _flag(name: str) -> str:
    """Megatron's spelling of a field."""
    return "--" + name.replace("_", "-")


def _layer_list(layers: tuple[int, ...]) -> str:
    """A list of layers in Megatron's spelling, e.g. ([0]*3+[1]*58)."""
    return "+".join(f"[{value}]*{len(list(run))}" for value, run in itertools.groupby(layers))


def knobs_from_argv(argv: Sequence[str]) -> dict[str, Any]:
    """Knob values by field name, from the arguments that are knobs. Values are text: the caller validates them.

    Raises:
        ValueError: an argument lacks its value, or two precisions are asked for.
    """
    found: dict[str, Any] = {"precision": _precision(argv)}
    kinds = _kinds()
    for flag, values in arguments(argv):
        name = _flags().get(ALIASES.get(flag, flag))
        if name is not None:
            found[name] = _read(flag, kinds[name], values)
    if "--recompute-activations" in argv:
        found["recompute_granularity"] = "selective"
    return found


@cache
def _flags() -> dict[str, str]:
    """Field name by flag, for the knobs that have a flag."""
    from search_spaces.config import knobs  # noqa: PLC0415  config.TrialConfig.argv calls this module

    flags = {}
    for name, knob in knobs().items():
        if knob.scope == "megatron" and knob.flag != "":
            flags[knob.flag or "--" + name.replace("_", "-")] = name
    return flags


@cache
def _kinds() -> dict[str, str]:
    """How each field is spelled: "switch", "list" or "value"."""
    from search_spaces.config import TrialConfig  # noqa: PLC0415  config.TrialConfig.argv calls this module

    return {name: _kind(field.annotation) for name, field in TrialConfig.model_fields.items()}


def _kind(annotation: Any) -> str:
    """Spelling of a value of this type on the command line."""
    origin = typing.get_origin(annotation)
    if origin in (typing.Union, types.UnionType):
        kinds = {_kind(arg) for arg in typing.get_args(annotation) if arg is not type(None)}
        return kinds.pop()
    if annotation is bool:
        return "switch"
    return "list" if origin is tuple else "value"


def _always(config: TrialConfig, name: str) -> bool:
    """Knobs to spell out although at our default, because Megatron's own default differs between versions."""
    return name == "data_parallel_sharding_strategy" and config.use_megatron_fsdp


def _spell(flag: str, value: Any) -> list[str]:
    """One argument. A switch stands for the value that is not its default."""
    if isinstance(value, bool):
        return [flag]
    if isinstance(value, tuple):
        return [flag, *map(str, value)]
    return [flag, str(value)]


def _read(flag: str, kind: str, values: list[str]) -> Any:
    """The value that an argument gives its knob."""
    if kind == "switch":
        return not flag.startswith("--no-")
    if not values:
        raise ValueError(f"{flag} has no value")
    return tuple(values) if kind == "list" else values[0]


def arguments(argv: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """Each flag with the values that follow it; `--flag=value` counts as one value."""
    flag: str | None = None
    values: list[str] = []
    for item in argv:
        if item.startswith("--"):
            if flag is not None:
                yield flag, values
            flag, equals, first = item.partition("=")
            values = [first] if equals else []
        else:
            values.append(item)
    if flag is not None:
        yield flag, values


def _precision(argv: Sequence[str]) -> str:
    """The one precision that is asked for; Megatron's default is fp32."""
    asked = [name for flag, name in PRECISIONS.items() if flag in argv]
    if len(asked) > 1:
        raise ValueError(f"more than one precision: {' and '.join('--' + name for name in asked)}")
    return asked[0] if asked else "fp32"
