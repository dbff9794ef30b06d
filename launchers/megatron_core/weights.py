"""Weights that do not depend on the layout: each parameter is drawn whole from a generator seeded by its global name, then sharded.

The global name counts layers and experts over all pipeline stages and expert parallel ranks. Megatron's own initialisation draws
one stream per rank instead: there, another layout is another model.
"""

from __future__ import annotations

import hashlib
import math
import re
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_model import GPTModel

from launchers.megatron_core.job import Job

INIT_STD = 0.02
_LAYER = re.compile(r"^decoder\.layers\.(\d+)\.")
_SEQUENTIAL_EXPERT = re.compile(r"\.experts\.local_experts\.(\d+)\.")
_GROUPED_EXPERT = re.compile(r"\.experts\.(linear_fc\d)\.weight(\d+)$")


@dataclass(frozen=True, slots=True)
class _Shard:
    """Which part of a parameter this rank holds: part `rank` of `size` along `dim`, of each of `stride` equal blocks."""

    size: int
    rank: int
    dim: int
    stride: int

    def cut(self, whole: torch.Tensor) -> torch.Tensor:
        """This rank's part of `whole`."""
        if self.size == 1:
            return whole
        blocks = whole.chunk(self.stride, self.dim)
        return torch.cat([block.chunk(self.size, self.dim)[self.rank] for block in blocks], self.dim)


@torch.no_grad()
def initialise(model: GPTModel, job: Job) -> None:
    """Overwrites every parameter of one model chunk (not wrapped yet)."""
    numbers = [layer.layer_number - 1 for layer in model.decoder.layers]
    for name, parameter in model.named_parameters():
        _fill(parameter, global_name(name, numbers, job), job)


def global_name(name: str, layer_numbers: list[int], job: Job) -> str:
    """The name of a parameter in the whole model, with global layer and expert numbers.

    Args:
        name: Name within this model chunk.
        layer_numbers: Global number, from 0, of each of the chunk's layers.
        job: Tells the number of experts and whether the embeddings are tied.
    """
    name = _LAYER.sub(lambda found: f"decoder.layers.{layer_numbers[int(found[1])]}.", name)
    name = _SEQUENTIAL_EXPERT.sub(lambda found: f".experts.{_expert(int(found[1]), job)}.", name)
    name = _GROUPED_EXPERT.sub(lambda found: f".experts.{_expert(int(found[2]), job)}.{found[1]}.weight", name)
    if name == "output_layer.weight" and not job.model["untie_embeddings_and_output_weights"]:
        return "embedding.word_embeddings.weight"  # the last stage's own copy of tied embeddings
    return name


def _expert(local: int, job: Job) -> int:
    held: int = job.model["num_experts"] // parallel_state.get_expert_model_parallel_world_size()
    rank: int = parallel_state.get_expert_model_parallel_rank()
    return rank * held + local


def _fill(parameter: torch.nn.Parameter, name: str, job: Job) -> None:
    last = name.rpartition(".")[2]
    if "bias" in last:
        parameter.zero_()
    elif "norm" in name:
        parameter.fill_(1.0)
    else:
        shard = _shard(parameter, name, job)
        parameter.copy_(shard.cut(_whole(parameter, name, shard, job)))


def _shard(parameter: Any, name: str, job: Job) -> _Shard:
    if not getattr(parameter, "tensor_model_parallel", False):
        return _Shard(size=1, rank=0, dim=0, stride=1)
    # SwiGLU's fc1 holds gate and up projection in one matrix; each rank has a part of both.
    stride = 2 if job.model["swiglu"] and "linear_fc1" in name else 1
    if ".experts." in name:
        size, rank = parallel_state.get_expert_tensor_parallel_world_size(), parallel_state.get_expert_tensor_parallel_rank()
    else:
        size, rank = parallel_state.get_tensor_model_parallel_world_size(), parallel_state.get_tensor_model_parallel_rank()
    return _Shard(size, rank, parameter.partition_dim, stride)


def _whole(parameter: torch.nn.Parameter, name: str, shard: _Shard, job: Job) -> torch.Tensor:
    """The parameter over all ranks; rows that only pad the vocabulary are zero, however many there are."""
    shape = list(parameter.shape)
    shape[shard.dim] *= shard.size
    rows = shape[0]
    if name in ("embedding.word_embeddings.weight", "output_layer.weight"):
        shape[0] = job.model["vocab_size"]
    digest = hashlib.sha256(f"{job.seed}:{name}".encode()).digest()
    generator = torch.Generator(parameter.device).manual_seed(int.from_bytes(digest[:6], "big"))
    drawn = torch.randn(shape, generator=generator, device=parameter.device).mul_(_std(name, job))
    return torch.nn.functional.pad(drawn, (0, 0, 0, rows - shape[0])) if rows > shape[0] else drawn


def _std(name: str, job: Job) -> float:
    """Megatron's scaled initialisation: matrices that write to the residual stream shrink with the number of layers."""
    if name.endswith(("linear_proj.weight", "linear_fc2.weight")):
        return INIT_STD / math.sqrt(2 * job.model["num_layers"])
    return INIT_STD
