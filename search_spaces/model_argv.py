"""A model's shapes as arguments of Megatron-LM's pretrain script."""

from __future__ import annotations

from typing import Any

from search_spaces.model import ModelSpec


def model_argv(model: ModelSpec) -> list[str]:
    """The arguments that build `model`: what differs from `ModelSpec`'s defaults, and what differs from Megatron's own."""
    argv: list[str] = []
    for name in ModelSpec.model_fields:
        value = getattr(model, name)
        if name == "add_bias_linear":
            argv += [] if value else ["--disable-bias-linear"]
        elif name == "num_query_groups":
            argv += ["--group-query-attention", "--num-query-groups", str(value)] if value else []
        elif value is True:
            argv.append(_flag(name))
        elif value not in (None, False) and (value != _default(name) or name in _NOT_MEGATRONS_DEFAULT):
            argv += [_flag(name), str(list(value)) if isinstance(value, tuple) else str(value)]
    return argv


# Here our default is not Megatron's, so the argument is always given.
_NOT_MEGATRONS_DEFAULT = ("normalization", "position_embedding_type")


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _default(name: str) -> Any:
    return ModelSpec.model_fields[name].default
