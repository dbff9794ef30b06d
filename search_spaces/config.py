"""TrialConfig: the knobs of one trial, under Megatron's own argument names.

A field is a knob is a Megatron argument: a new knob is one field here, plus a rule in `legality` only if it changes what is legal.
What is trained (model, batch, world size) is not a knob: see `search_spaces.model.Workload`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, NonNegativeInt, PositiveInt


@dataclass(frozen=True, slots=True)
class Knob:
    """How one field of `TrialConfig` reaches Megatron, and what else a person should know of it.

    Attributes:
        description: One line for help texts and study files.
        flag: Megatron-LM's command line flag; None derives it from the field's name.
        changes_learning: Whether the knob changes what is learned, not only how fast.
        devices: Device types on which a launcher can run a non-default value.
        why_not: Why the devices left out of `devices` cannot.
    """

    description: str
    flag: str | None = None
    changes_learning: bool = False
    devices: tuple[str, ...] = ("cuda", "cpu")
    why_not: str = ""


_NEEDS_TE = "needs Transformer Engine, which has no CPU build"


class TrialConfig(BaseModel):
    """One point of the search space. Frozen and hashable; equal configurations are the same candidate."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    tensor_model_parallel_size: Annotated[PositiveInt, Knob("ranks that share each layer's matrices (TP)")] = 1
    pipeline_model_parallel_size: Annotated[PositiveInt, Knob("stages that the layers are cut into (PP)")] = 1
    num_virtual_stages_per_pipeline_rank: Annotated[
        PositiveInt | None, Knob("model chunks per pipeline rank, interleaved schedule (VPP)")
    ] = None
    context_parallel_size: Annotated[
        PositiveInt, Knob("ranks that share each sequence (CP)", devices=("cuda",), why_not=f"context parallelism {_NEEDS_TE}")
    ] = 1
    expert_model_parallel_size: Annotated[PositiveInt, Knob("ranks that share the experts (EP)")] = 1
    expert_tensor_parallel_size: Annotated[
        PositiveInt | None, Knob("tensor parallel size inside each expert (ETP); none = Megatron's default, TP")
    ] = None
    micro_batch_size: Annotated[PositiveInt, Knob("sequences per rank and forward pass")] = 1
    sequence_parallel: Annotated[bool, Knob("shard layer norms and dropout over the tensor parallel ranks (SP)")] = False
    recompute_granularity: Annotated[
        Literal["full", "selective"] | None, Knob("what activations are computed again in the backward pass")
    ] = None
    recompute_method: Annotated[Literal["uniform", "block"] | None, Knob("which layers full recompute covers")] = None
    recompute_num_layers: Annotated[NonNegativeInt | None, Knob("layers per recomputed unit (uniform) or per stage (block)")] = None
    recompute_modules: Annotated[tuple[str, ...] | None, Knob("modules of selective recompute; none = core_attn")] = None
    use_distributed_optimizer: Annotated[bool, Knob("shard optimiser state over the data parallel ranks")] = False
    overlap_grad_reduce: Annotated[bool, Knob("reduce gradients while the backward pass runs")] = False
    overlap_param_gather: Annotated[bool, Knob("gather parameters while the forward pass runs")] = False
    precision: Annotated[
        Literal["fp32", "bf16", "fp16"], Knob("numeric type of parameters and activations", flag="", changes_learning=True)
    ] = "bf16"

    def data_parallel_size(self, world_size: int) -> int:
        """Data parallel size of the attention mesh: world / (TP x PP x CP). 0 where that does not divide."""
        ranks = self.tensor_model_parallel_size * self.pipeline_model_parallel_size * self.context_parallel_size
        return world_size // ranks if world_size % ranks == 0 else 0

    def changed(self) -> dict[str, Any]:
        """The knobs that differ from their defaults, as plain values."""
        return self.model_dump(exclude_defaults=True)


def knobs() -> dict[str, Knob]:
    """Every knob's description by field name, in the order of the fields."""
    return {
        name: next(item for item in field.metadata if isinstance(item, Knob)) for name, field in TrialConfig.model_fields.items()
    }
