"""Job: everything that one trial needs, as plain values. Standard library only: the launcher writes it, the ranks read it.

`model` and `knobs` keep Megatron's own names, so that a new shape or knob passes through here without being named again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Job:
    """One trial: what is trained, how, on how many ranks.

    Attributes:
        model: Shapes by the names of `ModelSpec`, with Megatron's defaults filled in (ffn_hidden_size, num_query_groups).
        knobs: Knobs by the names of `TrialConfig`.
        padded_vocab_size: Rows of the embedding over all tensor parallel ranks.
        world_size: Ranks.
        global_batch_size: Sequences of one optimiser step over all ranks.
        seq_length: Tokens of a sequence.
        device: "cuda" or "cpu".
        steps: Optimiser steps to run.
        seed: Of the weights and of the token batches.
        learning_rate: Constant over the trial.
    """

    model: Mapping[str, Any]
    knobs: Mapping[str, Any]
    padded_vocab_size: int
    world_size: int
    global_batch_size: int
    seq_length: int
    device: str
    steps: int
    seed: int
    learning_rate: float

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Job:
        """The job that `to_dict` wrote."""
        return cls(**values)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)

    @property
    def micro_batch_size(self) -> int:
        """Sequences per rank and forward pass."""
        return int(self.knobs["micro_batch_size"])

    @property
    def model_chunks(self) -> int:
        """Model chunks per pipeline rank: 1 without the interleaved schedule."""
        return self.knobs["num_virtual_stages_per_pipeline_rank"] or 1
