"""From a Job to Megatron's own objects: process groups, GPTModel chunks wrapped for data parallelism, optimiser.

Knobs and shapes reach Megatron's configuration classes by their names. What is written out here are only the names that differ
and what a training script chooses for itself.
"""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig

from launchers.megatron_core import weights
from launchers.megatron_core.job import Job

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_RENAMED = {
    "num_experts": "num_moe_experts",
    "num_virtual_stages_per_pipeline_rank": "virtual_pipeline_model_parallel_size",
    "microbatch_group_size_per_virtual_pipeline_stage": "microbatch_group_size_per_vp_stage",
    "decoder_first_pipeline_num_layers": "num_layers_in_first_pipeline_stage",
    "decoder_last_pipeline_num_layers": "num_layers_in_last_pipeline_stage",
    "fp8_format": "fp8",
    "fp4_format": "fp4",
}
CLIP_GRAD = 1.0


@dataclass(frozen=True, slots=True)
class Training:
    """What the training loop works on."""

    config: TransformerConfig
    chunks: list[DistributedDataParallel]
    optimizer: Any


class Norm(torch.nn.Module):
    """LayerNorm or RMSNorm on torch alone, for sequence parallelism too (Megatron's own torch norm refuses that)."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__()
        self.eps = eps
        make = {"dtype": config.params_dtype, "device": torch.cuda.current_device()}
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, **make))
        self.bias = torch.nn.Parameter(torch.zeros(hidden_size, **make)) if config.normalization == "LayerNorm" else None
        for parameter in self.parameters():
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """The normalised hidden states."""
        if self.bias is None:
            return torch.nn.functional.rms_norm(hidden, self.weight.shape, self.weight, self.eps)
        return torch.nn.functional.layer_norm(hidden, self.weight.shape, self.weight, self.bias, self.eps)


def initialise_groups(job: Job) -> None:
    """Creates Megatron's process groups and seeds its random number generators."""
    parallel_state.initialize_model_parallel(
        job.knobs["tensor_model_parallel_size"],
        job.knobs["pipeline_model_parallel_size"],
        virtual_pipeline_model_parallel_size=job.knobs["num_virtual_stages_per_pipeline_rank"],
        context_parallel_size=job.knobs["context_parallel_size"],
        expert_model_parallel_size=job.knobs["expert_model_parallel_size"],
        expert_tensor_parallel_size=job.knobs["expert_tensor_parallel_size"],
        hierarchical_context_parallel_sizes=job.knobs.get("hierarchical_context_parallel_sizes"),
        num_distributed_optimizer_instances=job.knobs.get("num_distributed_optimizer_instances", 1),
        order="tp-cp-ep-pp-dp" if job.knobs.get("use_tp_pp_dp_mapping") else "tp-cp-ep-dp-pp",
        create_gloo_process_groups=False,
    )
    tensor_parallel.model_parallel_cuda_manual_seed(job.seed)


def build(job: Job) -> Training:
    """Builds model chunks, data parallel wrappers and optimiser, and ties them together as Megatron's training script does."""
    config = transformer_config(job)
    models = [_model_chunk(job, config, stage) for stage in range(job.model_chunks)]
    chunks = _wrap(job, config, models)
    optimizer = get_megatron_optimizer(_optimizer_config(job), chunks, use_gloo_process_groups=False)
    _connect(config, chunks, optimizer)
    return Training(config, chunks, optimizer)


def transformer_config(job: Job) -> TransformerConfig:
    """Megatron's configuration of the layers: the job's values by name, and the kernels that are installed here."""
    dtype = _DTYPES[job.knobs["precision"]]
    settings = {
        **_by_name(TransformerConfig, {**job.model, **job.knobs}),
        **_precision(job),
        "gated_linear_unit": job.model["swiglu"],
        "activation_func": torch.nn.functional.silu if job.model["swiglu"] else torch.nn.functional.gelu,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "init_method": _leave,
        "output_layer_init_method": _leave,
        **_communication(job),
        **_kernels(job),
        **_experts(job),
    }
    return TransformerConfig(**settings)


def _leave(weight: torch.Tensor) -> torch.Tensor:
    """Megatron marks how a matrix is sharded while it initialises it; the values come from `weights`."""
    return weight


def _by_name(cls: type, values: Mapping[str, Any]) -> dict[str, Any]:
    """The values that are set and that `cls` has a field for."""
    fields = {field.name for field in dataclasses.fields(cls)}
    named = {_RENAMED.get(name, name): value for name, value in values.items() if value is not None}
    return {name: value for name, value in named.items() if name in fields}


def _precision(job: Job) -> dict[str, bool]:
    return {"bf16": job.knobs["precision"] == "bf16", "fp16": job.knobs["precision"] == "fp16"}


def _communication(job: Job) -> dict[str, bool]:
    """As in Megatron-LM: sends overlap with the interleaved schedule, and go in batches where they do not overlap."""
    overlap = job.model_chunks > 1 and job.knobs.get("overlap_p2p_comm", True)
    return {"overlap_p2p_comm": overlap, "batch_p2p_comm": not overlap and job.device == "cuda"}


def _kernels(job: Job) -> dict[str, Any]:
    cuda = job.device == "cuda"
    fused_activation = job.model["swiglu"] or job.model["add_bias_linear"]
    return {
        "bias_activation_fusion": cuda and fused_activation,
        "bias_dropout_fusion": cuda,
        "apply_rope_fusion": _transformer_engine(job) and job.model["position_embedding_type"] == "rope",
        "masked_softmax_fusion": cuda and _installed("scaled_upper_triang_masked_softmax_cuda"),
        "gradient_accumulation_fusion": cuda and _installed("fused_weight_gradient_mlp_cuda"),
        "attention_backend": AttnBackend[job.knobs.get("attention_backend", "auto")],
    }


def _experts(job: Job) -> dict[str, Any]:
    """No balance loss is added: it is computed per micro-batch and rank, and would make the loss depend on the layout."""
    # With one expert per token a softmax over the chosen ones would be constant; Megatron checks that in dense models, too.
    pre_softmax = job.model["moe_router_topk"] == 1 or job.model.get("moe_router_pre_softmax", False)
    if not job.model["num_experts"]:
        return {"moe_router_pre_softmax": pre_softmax}
    return {
        "moe_router_pre_softmax": pre_softmax,
        "moe_token_dispatcher_type": job.knobs.get("moe_token_dispatcher_type", "alltoall"),
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "moe_grouped_gemm": _transformer_engine(job) and job.knobs.get("moe_grouped_gemm", True),
    }


def _installed(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def _transformer_engine(job: Job) -> bool:
    return job.device == "cuda" and bool(gpt_layer_specs.HAVE_TE)


def _layer_spec(job: Job, config: TransformerConfig, stage: int | None) -> TransformerBlockSubmodules:
    engine = _transformer_engine(job)
    block = gpt_layer_specs.get_gpt_decoder_block_spec(config, engine, normalization=config.normalization, vp_stage=stage)
    if engine:
        return block
    _without_transformer_engine()
    for layer in block.layer_specs:
        _use_own_norm(layer.submodules, "input_layernorm", "pre_mlp_layernorm")
        _use_own_norm(layer.submodules.self_attention.submodules, "q_layernorm", "k_layernorm")
    return TransformerBlockSubmodules(layer_specs=block.layer_specs, layer_norm=Norm)


def _use_own_norm(submodules: Any, *names: str) -> None:
    for name in names:
        if getattr(submodules, name) is not IdentityOp:
            setattr(submodules, name, Norm)


def _without_transformer_engine() -> None:
    """Two places where megatron-core reads Transformer Engine's names although they were not imported."""
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None
    # Its default, False, is taken for a recipe of fp8, since only None counts as none.
    tensor_parallel.CheckpointWithoutOutput.__init__.__defaults__ = (None,)


def _model_chunk(job: Job, config: TransformerConfig, index: int) -> Any:
    stage = index if job.model_chunks > 1 else None
    model = GPTModel(
        config,
        _layer_spec(job, config, stage),
        vocab_size=job.padded_vocab_size,
        max_sequence_length=job.seq_length,
        pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=stage),
        post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage),
        share_embeddings_and_output_weights=not job.model["untie_embeddings_and_output_weights"],
        position_embedding_type=job.model["position_embedding_type"],
        vp_stage=stage,
    )
    for parameter in model.parameters():
        tensor_parallel.set_defaults_if_not_set_tensor_model_parallel_attributes(parameter)
    model.to(torch.cuda.current_device())
    _mark_experts(model, job)
    weights.initialise(model, job)
    return model if job.knobs["precision"] == "fp32" else Float16Module(config, model)


def _mark_experts(model: GPTModel, job: Job) -> None:
    """Gradients of experts are reduced over the expert data parallel ranks.

    Megatron reduces them there only with expert parallelism, and else over the data parallel ranks: with TP > ETP and EP = 1 that
    leaves out the tensor parallel ranks, which then train experts of their own.
    """
    etp = job.knobs["expert_tensor_parallel_size"]
    if etp in (None, job.knobs["tensor_model_parallel_size"]):
        return
    for name, parameter in model.named_parameters():
        if ".experts." in name:
            parameter.allreduce = False


def _wrap(job: Job, config: TransformerConfig, models: list[Any]) -> list[DistributedDataParallel]:
    """Only the first chunk's gradients are cut into buckets: the others' reduction is not on the critical path."""
    settings = DistributedDataParallelConfig(**_by_name(DistributedDataParallelConfig, job.knobs), grad_reduce_in_fp32=True)
    return [DistributedDataParallel(config, settings, model, disable_bucketing=index > 0) for index, model in enumerate(models)]


def _optimizer_config(job: Job) -> OptimizerConfig:
    return OptimizerConfig(
        **_by_name(OptimizerConfig, job.knobs),
        **_precision(job),
        optimizer="adam",
        lr=job.learning_rate,
        params_dtype=_DTYPES[job.knobs["precision"]],
        clip_grad=CLIP_GRAD,
        # Megatron's default, 2**32, spends the first steps of fp16 on finding a scale that fits.
        initial_loss_scale=2**12,
    )


def _connect(config: TransformerConfig, chunks: list[DistributedDataParallel], optimizer: Any) -> None:
    """What the pipeline schedule calls while it runs."""
    config.finalize_model_grads_func = finalize_model_grads
    config.grad_scale_func = optimizer.scale_loss
    if chunks[0].ddp_config.overlap_grad_reduce:
        config.no_sync_func = _one_or_all([chunk.no_sync for chunk in chunks])
        config.grad_sync_func = _one_or_all([chunk.start_grad_sync for chunk in chunks])


def _one_or_all(functions: list[Any]) -> Any:
    return functions[0] if len(functions) == 1 else functions
