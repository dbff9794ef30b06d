"""Presets: study fragments for common situations, as YAML with comments for a person."""

from __future__ import annotations

from importlib import resources
from typing import Any

import yaml

STUDY = "quickstart"
"""The one that is a whole study; the others are choices for the knobs of one."""
NAMES = (STUDY, "dense", "moe", "long_context", "finetune")


def load_preset(name: str) -> dict[str, Any]:
    """The choices of a preset, to be given to `search_spaces.space.SearchSpace`.

    Raises:
        ValueError: there is no such preset.
    """
    if name not in NAMES:
        raise ValueError(f"no preset {name!r}; there are: {', '.join(NAMES)}")
    content: dict[str, Any] = yaml.safe_load(resources.files(__name__).joinpath(f"{name}.yaml").read_text())
    return dict(content.get("search", content))
