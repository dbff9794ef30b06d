"""Hugging Face `config.json` -> shapes under Megatron's names: reads the file and its class' defaults.

What each architecture's fields mean is in `hf_families`. One that is not there, or a field that it needs and the file lacks, is an
error that says so: a guessed shape would make every later number wrong.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from search_spaces.hf_families import FAMILIES, NOT_DESCRIBED, Shapes
from search_spaces.hf_fields import Fields, UnknownModelError


def read_hf(config: Mapping[str, Any] | str | Path) -> Shapes:
    """Fields of a `ModelSpec` from a config.json.

    Raises:
        UnknownModelError: the architecture is unknown, or fields that it needs are missing.
    """
    raw = dict(config) if isinstance(config, Mapping) else _load(Path(config))
    kind = str(raw.get("model_type", ""))
    if kind in NOT_DESCRIBED:
        raise UnknownModelError(f"model_type {kind!r} cannot be described: {NOT_DESCRIBED[kind]}")
    if kind not in FAMILIES:
        raise UnknownModelError(f"unknown model_type {kind!r}; known: {', '.join(sorted(FAMILIES))}. Give the shapes by hand.")
    text = raw.get("text_config")
    return FAMILIES[kind](Fields(kind, _with_defaults({**raw, **text} if isinstance(text, Mapping) else raw)))


def _load(path: Path) -> Shapes:
    """The content of a config.json, given the file or its folder."""
    file = path / "config.json" if path.is_dir() else path
    content = json.loads(file.read_text())
    if not isinstance(content, dict):
        raise UnknownModelError("no JSON object: a config.json holds fields and their values")
    return content


def _with_defaults(raw: Shapes) -> Shapes:
    """The config with the defaults of its class, where transformers is installed."""
    try:
        from transformers import AutoConfig  # noqa: PLC0415  an extra
    except ImportError:
        return raw
    kind = raw["model_type"]
    known = {key: value for key, value in raw.items() if key != "model_type"}
    try:
        return {**AutoConfig.for_model(kind, **known).to_dict(), **raw}
    except (ValueError, TypeError):
        return raw
