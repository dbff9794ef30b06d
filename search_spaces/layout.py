"""Pipeline layouts: the pattern that gives every stage its layers (core/transformer/pipeline_parallel_layer_layout.py)."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache

from search_spaces.whole import MOST_LAYERS

_REPEATS = (r"\(([^)]+)\)\*(\d+)", r"(.)\*(\d+)")
_LAYERS = "ELtm"


@dataclass(frozen=True, slots=True)
class Layout:
    """A layout's stages in pipeline order, each a string of E (embedding), t (transformer), m (MTP) and L (loss).

    Attributes:
        stages: The layers of each stage; PP x VPP of them.
        problem: Why the layout is not a layout at all; empty where it is one.
    """

    stages: tuple[str, ...]
    problem: str

    @property
    def decoders(self) -> int:
        """Transformer layers."""
        return "".join(self.stages).count("t")

    @property
    def mtp(self) -> int:
        """Multi-token prediction layers."""
        return "".join(self.stages).count("m")

    @property
    def mtp_stages(self) -> tuple[int, ...]:
        """Positions of the stages that hold MTP layers."""
        return tuple(position for position, stage in enumerate(self.stages) if "m" in stage)


@lru_cache(maxsize=4096)
def parse_layout(text: str) -> Layout:
    """Unroll a pattern as Megatron's parse_str_to_list does, and check its form as validate_layer_layout does."""
    unrolled = text.replace(",", "")
    for pattern in _REPEATS:
        if _length(pattern, unrolled) > MOST_LAYERS:
            return Layout((), f"it stands for more than {MOST_LAYERS:,} layers")
        unrolled = re.sub(pattern, lambda found: found.group(1) * int(found.group(2)), unrolled)
    stages = tuple(unrolled.split("|"))
    return Layout(stages, _problem("".join(stages)))


def _length(pattern: str, text: str) -> int:
    """How long the repeated parts of a text would be."""
    repeats = re.findall(pattern, text)
    if any(len(times) > len(str(MOST_LAYERS)) for _, times in repeats):
        return MOST_LAYERS + 1
    return sum(len(part) * int(times) for part, times in repeats)


def _problem(layers: str) -> str:
    """What is wrong with the sequence of layers, whatever the model."""
    unknown = set(layers) - set(_LAYERS)
    if unknown:
        return f"unknown layer letters {sorted(unknown)}; legal: E, t, m, L, |, (...)*n"
    if not layers.startswith("E") or layers.count("E") != 1:
        return "the embedding E must be the first layer, exactly once"
    if not layers.endswith("L") or layers.count("L") != 1:
        return "the loss L must be the last layer, exactly once"
    if "m" in layers and "t" in layers[layers.index("m") :]:
        return "transformer layers t must come before MTP layers m"
    return ""
