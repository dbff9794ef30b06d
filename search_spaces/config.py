"""TrialConfig: the knobs of one trial, under Megatron's own argument names.

A field is a knob is a Megatron argument: a new knob is one field here, plus a rule in `search_spaces.rules` only if it changes
what is legal. What is trained (model, batch, world size) is not a knob: see `search_spaces.model.Workload`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict

from search_spaces.whole import NonNegativeInt, PositiveInt

GPU = ("cuda",)


@dataclass(frozen=True, slots=True)
class Knob:
    """How one field of `TrialConfig` reaches Megatron, and what else a person should know of it.

    Attributes:
        description: One line for help texts and study files.
        flag: Megatron-LM's command line flag; None derives it from the field's name, "" means that `search_spaces.argv` spells it.
        changes_learning: Whether the knob changes what is learned, not only how fast.
        devices: Device types on which a launcher can run a non-default value.
        why_not: Why the devices left out of `devices` cannot.
        launchers: Launchers that can set the knob.
        scope: "megatron" for an argument of Megatron, "machine" for a setting of the node or its GPUs, which has no flag.
    """

    description: str
    flag: str | None = None
    changes_learning: bool = False
    devices: tuple[str, ...] = ("cuda", "cpu")
    why_not: str = ""
    launchers: tuple[str, ...] = ("megatron_core", "megatron_lm", "simulated")
    scope: Literal["megatron", "machine"] = "megatron"


_NEEDS_TE = "needs Transformer Engine, which has no CPU build"
_NEEDS_CUDA = "needs CUDA streams and kernels"
_SCRIPT = ("megatron_lm", "simulated")


class TrialConfig(BaseModel):
    """One point of the search space. Frozen and hashable; equal configurations are the same candidate."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    tensor_model_parallel_size: Annotated[PositiveInt, Knob("ranks that share each layer's matrices (TP)")] = 1
    pipeline_model_parallel_size: Annotated[PositiveInt, Knob("stages that the layers are cut into (PP)")] = 1
    num_virtual_stages_per_pipeline_rank: Annotated[
        PositiveInt | None, Knob("model chunks per pipeline rank, interleaved schedule (VPP)")
    ] = None
    num_layers_per_virtual_pipeline_stage: Annotated[
        PositiveInt | None, Knob("VPP spelled as layers per chunk; the same run as the matching number of virtual stages")
    ] = None
    microbatch_group_size_per_virtual_pipeline_stage: Annotated[
        PositiveInt | None, Knob("micro-batches that a chunk runs in a row (VPP); none = PP")
    ] = None
    decoder_first_pipeline_num_layers: Annotated[PositiveInt | None, Knob("layers of the first stage; none = even")] = None
    decoder_last_pipeline_num_layers: Annotated[PositiveInt | None, Knob("layers of the last stage; none = even")] = None
    pipeline_model_parallel_layout: Annotated[
        str | None, Knob("layers of every stage as a pattern, e.g. Et*3|(tt|)*5L; excludes the other split options")
    ] = None
    account_for_embedding_in_pipeline_split: Annotated[bool, Knob("the embedding counts as one layer of the first stage")] = False
    account_for_loss_in_pipeline_split: Annotated[bool, Knob("the loss counts as one layer of the last stage")] = False
    overlap_p2p_comm: Annotated[
        bool, Knob("overlap sends between stages with compute (VPP only)", flag="--no-overlap-p2p-communication")
    ] = True
    context_parallel_size: Annotated[
        PositiveInt, Knob("ranks that share each sequence (CP)", devices=GPU, why_not=f"context parallelism {_NEEDS_TE}")
    ] = 1
    cp_comm_type: Annotated[
        tuple[str, ...] | None, Knob("how CP ranks exchange keys and values; one for all layers or one per layer; none = p2p")
    ] = None
    hierarchical_context_parallel_sizes: Annotated[
        tuple[PositiveInt, ...] | None, Knob("sizes of the levels of CP for cp_comm_type a2a+p2p")
    ] = None
    expert_model_parallel_size: Annotated[PositiveInt, Knob("ranks that share the experts (EP)")] = 1
    expert_tensor_parallel_size: Annotated[
        PositiveInt | None, Knob("tensor parallel size inside each expert (ETP); none = Megatron's default, TP")
    ] = None
    use_tp_pp_dp_mapping: Annotated[bool, Knob("rank order on the GPUs: tp-cp-ep-pp-dp in place of tp-cp-ep-dp-pp")] = False
    micro_batch_size: Annotated[PositiveInt, Knob("sequences per rank and forward pass")] = 1
    sequence_parallel: Annotated[bool, Knob("shard layer norms and dropout over the tensor parallel ranks (SP)")] = False
    recompute_granularity: Annotated[
        Literal["full", "selective"] | None, Knob("what activations are computed again in the backward pass")
    ] = None
    recompute_method: Annotated[Literal["uniform", "block"] | None, Knob("which layers full recompute covers")] = None
    recompute_num_layers: Annotated[NonNegativeInt | None, Knob("layers per recomputed unit (uniform) or per stage (block)")] = None
    recompute_modules: Annotated[tuple[str, ...] | None, Knob("modules of selective recompute; none = core_attn")] = None
    distribute_saved_activations: Annotated[bool, Knob("shard the kept activations of full recompute over the TP ranks")] = False
    use_distributed_optimizer: Annotated[bool, Knob("shard optimiser state over the data parallel ranks")] = False
    num_distributed_optimizer_instances: Annotated[
        PositiveInt, Knob("replicas of the sharded optimiser state (partial sharding)")
    ] = 1
    overlap_grad_reduce: Annotated[bool, Knob("reduce gradients while the backward pass runs")] = False
    overlap_param_gather: Annotated[bool, Knob("gather parameters while the forward pass runs")] = False
    overlap_param_gather_with_optimizer_step: Annotated[
        bool, Knob("gather parameters of the first chunk during the optimiser step (VPP)", devices=GPU, why_not=_NEEDS_CUDA)
    ] = False
    use_megatron_fsdp: Annotated[
        bool, Knob("Megatron's fully sharded data parallel", devices=GPU, why_not=_NEEDS_CUDA, launchers=_SCRIPT)
    ] = False
    data_parallel_sharding_strategy: Annotated[
        Literal["no_shard", "optim", "optim_grads", "optim_grads_params"],
        Knob("what Megatron-FSDP shards", devices=GPU, why_not=_NEEDS_CUDA, launchers=_SCRIPT),
    ] = "optim_grads_params"
    use_torch_fsdp2: Annotated[
        bool, Knob("PyTorch's fully sharded data parallel", devices=GPU, why_not=_NEEDS_CUDA, launchers=_SCRIPT)
    ] = False
    ckpt_format: Annotated[
        Literal["torch", "torch_dist", "torch_dcp", "fsdp_dtensor"], Knob("checkpoint format; Megatron-FSDP needs fsdp_dtensor")
    ] = "torch_dist"
    tp_comm_overlap: Annotated[
        bool, Knob("overlap tensor parallel communication with GEMMs", devices=GPU, why_not=f"tensor parallel overlap {_NEEDS_TE}")
    ] = False
    moe_token_dispatcher_type: Annotated[Literal["allgather", "alltoall", "flex"], Knob("how tokens reach their experts")] = (
        "allgather"
    )
    moe_grouped_gemm: Annotated[
        bool, Knob("one grouped GEMM for all local experts", devices=GPU, why_not=f"grouped GEMM {_NEEDS_TE}")
    ] = False
    moe_shared_expert_overlap: Annotated[
        bool, Knob("run shared experts beside the token exchange", devices=GPU, why_not=_NEEDS_CUDA)
    ] = False
    overlap_moe_expert_parallel_comm: Annotated[
        bool, Knob("overlap the experts' all-to-all with compute", devices=GPU, why_not=_NEEDS_CUDA, launchers=_SCRIPT)
    ] = False
    delay_wgrad_compute: Annotated[
        bool, Knob("delay weight gradients for the experts' overlap", devices=GPU, why_not=_NEEDS_CUDA, launchers=_SCRIPT)
    ] = False
    moe_expert_capacity_factor: Annotated[float | None, Knob("drop tokens above this share per expert", changes_learning=True)] = (
        None
    )
    moe_pad_expert_input_to_capacity: Annotated[bool, Knob("pad every expert's input to its capacity", changes_learning=True)] = (
        False
    )
    moe_router_padding_for_fp8: Annotated[
        bool, Knob("pad the routing map to the alignment of FP8 and FP4", devices=GPU, why_not=f"FP8 {_NEEDS_TE}")
    ] = False
    optimizer_cpu_offload: Annotated[
        bool, Knob("keep optimiser state in host memory", devices=GPU, why_not=_NEEDS_CUDA, launchers=_SCRIPT)
    ] = False
    optimizer_offload_fraction: Annotated[
        float, Knob("share of the optimiser state in host memory", devices=GPU, why_not=_NEEDS_CUDA, launchers=_SCRIPT)
    ] = 1.0
    use_precision_aware_optimizer: Annotated[
        bool,
        Knob("optimiser state in chosen types", devices=GPU, why_not=f"it {_NEEDS_TE}", changes_learning=True, launchers=_SCRIPT),
    ] = False
    main_grads_dtype: Annotated[
        Literal["fp32", "bf16"], Knob("type of the main gradients", changes_learning=True, launchers=_SCRIPT)
    ] = "fp32"
    main_params_dtype: Annotated[
        Literal["fp32", "fp16"], Knob("type of the main parameters", changes_learning=True, launchers=_SCRIPT)
    ] = "fp32"
    exp_avg_dtype: Annotated[
        Literal["fp32", "fp16", "bf16", "fp8"], Knob("type of Adam's first moment", changes_learning=True, launchers=_SCRIPT)
    ] = "fp32"
    exp_avg_sq_dtype: Annotated[
        Literal["fp32", "fp16", "bf16", "fp8"], Knob("type of Adam's second moment", changes_learning=True, launchers=_SCRIPT)
    ] = "fp32"
    cpu_offloading_num_layers: Annotated[
        NonNegativeInt, Knob("layers whose activations are offloaded", devices=GPU, why_not=f"it {_NEEDS_TE}")
    ] = 0
    precision: Annotated[
        Literal["fp32", "bf16", "fp16"], Knob("numeric type of parameters and activations", flag="", changes_learning=True)
    ] = "bf16"
    fp8_format: Annotated[
        Literal["e4m3", "hybrid"] | None,
        Knob(
            "FP8 number format of the matrix products; none = off", devices=GPU, why_not=f"FP8 {_NEEDS_TE}", changes_learning=True
        ),
    ] = None
    fp8_recipe: Annotated[
        Literal["tensorwise", "delayed", "mxfp8", "blockwise"],
        Knob("how FP8 scales are found", devices=GPU, why_not=f"FP8 {_NEEDS_TE}", changes_learning=True),
    ] = "delayed"
    fp8_param_gather: Annotated[
        bool, Knob("keep and gather parameters in FP8", devices=GPU, why_not=f"FP8 {_NEEDS_TE}", changes_learning=True)
    ] = False
    fp4_format: Annotated[
        Literal["e2m1"] | None,
        Knob(
            "FP4 number format of the matrix products (NVFP4); none = off",
            devices=GPU,
            why_not=f"FP4 {_NEEDS_TE}",
            changes_learning=True,
        ),
    ] = None
    first_last_layers_bf16: Annotated[
        bool, Knob("first and last layers stay in bf16", devices=GPU, why_not=f"FP8 {_NEEDS_TE}", changes_learning=True)
    ] = False
    num_layers_at_start_in_bf16: Annotated[NonNegativeInt, Knob("layers at the start that stay in bf16", changes_learning=True)] = 1
    num_layers_at_end_in_bf16: Annotated[NonNegativeInt, Knob("layers at the end that stay in bf16", changes_learning=True)] = 1
    attention_backend: Annotated[
        Literal["auto", "flash", "fused", "unfused", "local"],
        Knob("kernel of the core attention", devices=GPU, why_not=f"the choice {_NEEDS_TE}"),
    ] = "auto"
    cuda_graph_impl: Annotated[
        Literal["none", "local", "transformer_engine", "full_iteration"],
        Knob("capture layers or the iteration as CUDA graphs", devices=GPU, why_not=_NEEDS_CUDA, launchers=_SCRIPT),
    ] = "none"
    cuda_graph_modules: Annotated[
        tuple[str, ...] | None,
        Knob(
            "parts of a layer that are captured; none = whole layers", flag="--cuda-graph-scope", devices=GPU, why_not=_NEEDS_CUDA
        ),
    ] = None
    gpu_power_limit_w: Annotated[
        PositiveInt | None, Knob("board power limit of every GPU; none = as found", devices=GPU, why_not="no GPU", scope="machine")
    ] = None
    sm_clock_limit_mhz: Annotated[
        PositiveInt | None, Knob("highest SM clock of every GPU; none = as found", devices=GPU, why_not="no GPU", scope="machine")
    ] = None
    environment: Annotated[
        tuple[tuple[str, str], ...], Knob("environment variables of the ranks (NCCL, allocator)", scope="machine")
    ] = ()

    def data_parallel_size(self, world_size: int) -> int:
        """Data parallel size of the attention mesh: world / (TP x PP x CP). 0 where that does not divide."""
        ranks = self.tensor_model_parallel_size * self.pipeline_model_parallel_size * self.context_parallel_size
        return world_size // ranks if world_size % ranks == 0 else 0

    def changed(self) -> dict[str, Any]:
        """The knobs that differ from their defaults, as plain values."""
        return self.model_dump(exclude_defaults=True)

    def argv(self) -> list[str]:
        """Megatron-LM's command line arguments for the knobs that differ from Megatron's own defaults."""
        from search_spaces.argv import config_argv  # noqa: PLC0415  argv reads the knobs of this module

        return config_argv(self)

    @classmethod
    def from_argv(cls, argv: Sequence[str]) -> Self:
        """The knobs in an existing Megatron-LM command line; arguments that are no knobs are passed over.

        Raises:
            ValueError: a knob's argument lacks its value, has a bad one, or two arguments contradict each other.
        """
        from search_spaces.argv import knobs_from_argv  # noqa: PLC0415  argv reads the knobs of this module

        return cls.model_validate(knobs_from_argv(argv))


def knobs() -> dict[str, Knob]:
    """Every knob's description by field name, in the order of the fields."""
    return {
        name: next(item for item in field.metadata if isinstance(item, Knob)) for name, field in TrialConfig.model_fields.items()
    }
