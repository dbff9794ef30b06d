"""The training loop of a trial: a step, what all ranks know about it afterwards, and the record of it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func

from launchers.base import StepRecord
from launchers.megatron_core import data
from launchers.megatron_core.build import Training
from launchers.megatron_core.data import MicroBatch
from launchers.megatron_core.job import Job

_GIB = 2**30


@dataclass(frozen=True, slots=True)
class Device:
    """What the loop needs to know of the hardware.

    Attributes:
        torch: Where tensors live.
        synchronize: Waits until all work that was started has ended.
        peak_memory_bytes: Largest memory of this rank so far.
    """

    torch: torch.device
    synchronize: Callable[[], None]
    peak_memory_bytes: Callable[[], int]


def train(job: Job, training: Training, device: Device, report: Callable[[StepRecord], None]) -> None:
    """Runs the job's steps and reports each. Ends early, after its record, where the loss is not finite."""
    for iteration in range(1, job.steps + 1):
        record = _step(job, training, device, iteration)
        report(record)
        if not math.isfinite(record.loss):
            return


def _step(job: Job, training: Training, device: Device, iteration: int) -> StepRecord:
    """One optimiser step. Its time ends when the slowest rank has ended it; drawing the tokens is not part of it."""
    batches = _batches(job, device, iteration)
    device.synchronize()
    started_s = time.perf_counter()
    losses = _forward_backward(job, training, batches)
    _, grad_norm, _ = training.optimizer.step()
    device.synchronize()
    loss, peak_bytes = _exchange(losses, device)
    return StepRecord(
        iteration=iteration,
        time_s=time.time(),
        step_s=time.perf_counter() - started_s,
        loss=loss,
        grad_norm=None if grad_norm is None else float(grad_norm),
        tokens=job.global_batch_size * job.seq_length,
        peak_memory_gib=peak_bytes / _GIB,
    )


def _batches(job: Job, device: Device, iteration: int) -> list[MicroBatch]:
    parts = data.micro_batches(
        job,
        step=iteration,
        data_parallel_rank=parallel_state.get_data_parallel_rank(),
        data_parallel_size=parallel_state.get_data_parallel_world_size(),
        device=device.torch,
    )
    cp_rank, cp_size = parallel_state.get_context_parallel_rank(), parallel_state.get_context_parallel_world_size()
    return [part.context_parallel_part(cp_rank, cp_size) for part in parts]


def _forward_backward(job: Job, training: Training, batches: list[MicroBatch]) -> list[torch.Tensor]:
    """Gradients of the global batch; the mean loss of each micro-batch on the ranks of the last stage."""
    for chunk in training.chunks:
        chunk.zero_grad_buffer()
    training.optimizer.zero_grad()
    losses: list[torch.Tensor] = get_forward_backward_func()(
        forward_step_func=_forward_step,
        data_iterator=[iter(batches) for _ in training.chunks],
        model=training.chunks,
        num_microbatches=len(batches),
        seq_length=job.seq_length,
        micro_batch_size=job.micro_batch_size,
        forward_only=False,
    )
    return losses


def _forward_step(batches: Iterator[MicroBatch], model: Any) -> tuple[torch.Tensor, Callable[..., Any]]:
    batch = next(batches)
    return model(batch.tokens, batch.position_ids, None, labels=batch.labels), _mean_loss


def _mean_loss(per_token: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss to differentiate, and the loss to report.

    The schedule divides the first in place by the number of micro-batches and multiplies it by the context parallel size, as a
    context parallel rank sees only its part of each sequence: the second must be a copy.
    """
    mean = per_token.float().mean()
    return mean / parallel_state.get_context_parallel_world_size(), mean.detach().clone()


def _exchange(losses: list[torch.Tensor], device: Device) -> tuple[float, int]:
    """Mean loss per token over the global batch, and the largest peak memory of any rank; the same answer on all ranks."""
    held = bool(losses) and parallel_state.get_tensor_model_parallel_rank() == 0
    mine = [float(torch.stack(losses).double().mean()) if held else 0.0, float(held), float(device.peak_memory_bytes())]
    gathered = torch.empty(dist.get_world_size() * len(mine), dtype=torch.float64, device=device.torch)
    dist.all_gather_into_tensor(gathered, torch.tensor(mine, dtype=torch.float64, device=device.torch))
    loss_sum, holders, _ = gathered.view(-1, len(mine)).sum(0).tolist()
    return loss_sum / holders, int(gathered.view(-1, len(mine))[:, 2].max())
