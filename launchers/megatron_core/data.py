"""Synthetic token batches, the same for every layout: each sequence has its own generator, seeded by step and place in the batch.

Tokens are drawn log-uniformly (the k-th token has a probability near 1/k, as words have), so that the loss falls within a few steps
while all of the vocabulary occurs. They model no text: a loss from here says that training works, not how well.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from launchers.megatron_core.job import Job

_STEP_STRIDE = 1 << 24  # more sequences than any global batch has, so that no two steps share a seed


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Inputs and targets of one forward pass, each [micro batch, sequence]."""

    tokens: torch.Tensor
    labels: torch.Tensor
    position_ids: torch.Tensor

    def context_parallel_part(self, rank: int, size: int) -> MicroBatch:
        """What one context parallel rank sees: chunks `rank` and `2 size - 1 - rank` of 2 size, so that causal work is even."""
        if size == 1:
            return self

        def part(whole: torch.Tensor) -> torch.Tensor:
            chunks = whole.chunk(2 * size, dim=1)
            return torch.cat([chunks[rank], chunks[-1 - rank]], dim=1)

        return MicroBatch(part(self.tokens), part(self.labels), part(self.position_ids))


def sequence(job: Job, *, step: int, index: int) -> torch.Tensor:
    """The tokens of sequence `index` of the global batch of `step`: seq_length + 1 of them."""
    generator = torch.Generator().manual_seed((job.seed << 40) + step * _STEP_STRIDE + index)
    vocab_size = int(job.model["vocab_size"])
    exponent = torch.rand(job.seq_length + 1, generator=generator, dtype=torch.float64) ** 2
    return torch.pow(vocab_size, exponent).long().sub_(1).clamp_(0, vocab_size - 1)


def micro_batches(
    job: Job, *, step: int, data_parallel_rank: int, data_parallel_size: int, device: torch.device
) -> Iterator[MicroBatch]:
    """This data parallel rank's part of the global batch of `step`, cut into micro-batches."""
    share = job.global_batch_size // data_parallel_size
    first = data_parallel_rank * share
    position_ids = torch.arange(job.seq_length, device=device).expand(job.micro_batch_size, -1)
    for start in range(first, first + share, job.micro_batch_size):
        rows = [sequence(job, step=step, index=index) for index in range(start, start + job.micro_batch_size)]
        block = torch.stack(rows).to(device)
        yield MicroBatch(block[:, :-1].contiguous(), block[:, 1:].contiguous(), position_ids)
