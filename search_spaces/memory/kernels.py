"""Kernels: what a run's software decides about memory and no knob says; and the few coefficients that no formula gives.

Not here: what a GPU has (`search_spaces.hardware`), and anything that depends on a model or a split.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Self

from search_spaces.model import Workload

GIB = 2**30

LOSS_BYTES = {"unfused": 4, "native": 8, "te": 0, "torch": 12}
"""Bytes per logit that the loss holds beside the logits: one fp32 copy that becomes softmax and gradient in turn
(tensor_parallel/cross_entropy.py), two where compiled functions do not write into their input (fusions/fused_cross_entropy.py),
none in place (Transformer Engine, cross_entropy.py), or log-softmax and two gradients in fp32 (torch's cross_entropy)."""

PARALLEL_LOSS_BYTES = 4
"""The exponential that torch's loss makes besides where the vocabulary is sharded (torch.distributed.tensor.parallel.loss)."""

FLASH_ATTENTION_ARCH = 8
"""Oldest CUDA architecture with a fused attention kernel (Transformer Engine, dot_product_attention/utils.py)."""

STEP_GRADIENT_BYTES_IN_CODE = 4.0
"""The fp32 copy of a bf16 gradient (optimizer/distrib_optimizer.py _copy_model_grads_to_main_grads)."""

STEP_GRADIENT_BYTES = 8.0
"""The same as measured: published peaks of Megatron-Bridge that recomputation does not lower, on three splits, are that step's."""

CUBLAS_WORKSPACE_GIB = 0.07
"""What torch allocates besides tensors of the model: cuBLAS and Transformer Engine workspaces of 32 MiB each (Transformer Engine,
module/base.py get_cublas_workspace_size_bytes on architecture 9), masks and scalars."""

CONTEXT_GIB = 0.6
"""CUDA context with loaded kernels, outside torch's allocator: 0.4 to 0.7 GiB (PyTorch documentation, CUDA semantics, memory)."""

NCCL_GIB_PER_GROUP = 0.2
"""Buffers of one NCCL communicator: 4 MiB for each of up to 24 channels and 2 directions (NCCL user guide, NCCL_BUFFSIZE)."""

FRAGMENTATION = 0.02
"""Reserved but unused share of what is allocated, expected."""

FRAGMENTATION_UPPER = 0.03
"""The same, at most, where activations are freed in the order in which they came."""

FRAGMENTATION_UPPER_INTERLEAVED = 0.35
"""The same with the interleaved schedule and fixed segments, where micro-batches of several chunks are freed between others: runs
with 59 GiB allocated fail on 80 GB boards and run with expandable segments (Megatron-Bridge). At most what comes and goes."""

FRAGMENTATION_UPPER_EXPANDABLE = 0.03
"""The same with PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True (PyTorch documentation, CUDA semantics, memory)."""

MODEL_ERROR_UPPER = 0.03
"""This model's own error on allocated bytes, from published peaks (docs/memory.md)."""

IMBALANCE_UPPER = 1.5
"""Tokens of the fullest expert rank over the mean where nothing balances them: measured peaks grow by 19 to 26 % over a run."""


@dataclass(frozen=True, slots=True)
class Kernels:
    """The software of a run, as far as it changes what is kept in memory.

    Attributes:
        transformer_engine: Transformer Engine's layers (CUDA), else megatron-core's local ones (CPU).
        cross_entropy: How the loss is computed: "unfused" makes fp32 logits, "native" twice, "te" works in place on the logits,
            "torch" is torch's own loss on fp32 logits, "chunked" never has all logits at once.
        flash_attention: Whether a fused attention kernel exists; without, the score matrix is stored.
        hidden_dropout: Whether dropout masks of the hidden states are kept.
        attention_dropout: Whether an unfused attention keeps dropout masks.
        grad_reduce_in_fp32: Whether gradients are kept in fp32, Megatron-LM's default for bf16.
        gradient_accumulation_fusion: Whether matrix products add into the gradient buffer; they then return empty dummies.
        fp8_transpose_cache: Whether FP8 weights are kept transposed, too.
        balanced_experts: Whether every expert gets the same number of tokens.
        step_gradient_bytes: What the optimiser step holds for a moment per parameter of its shard where gradients are not fp32.
        separate_main_parameters: Whether the optimiser has fp32 parameters beside the weights; torch's FSDP shards those alone.
        trained: Whether the weights are trained; else they have neither gradients nor optimiser state.
    """

    transformer_engine: bool = True
    cross_entropy: Literal["unfused", "native", "te", "torch", "chunked"] = "unfused"
    flash_attention: bool = True
    hidden_dropout: bool = False
    attention_dropout: bool = False
    grad_reduce_in_fp32: bool = True
    gradient_accumulation_fusion: bool = False
    fp8_transpose_cache: bool = True
    balanced_experts: bool = False
    step_gradient_bytes: float = STEP_GRADIENT_BYTES
    separate_main_parameters: bool = True
    trained: bool = True

    @classmethod
    def of(cls, workload: Workload) -> Self:
        """The kernels that a run of this workload gets where nothing else is said."""
        cuda = workload.device == "cuda"
        return cls(
            transformer_engine=cuda,
            flash_attention=cuda and workload.settings.gpu_arch_major >= FLASH_ATTENTION_ARCH,
            gradient_accumulation_fusion=cuda,  # Megatron-LM's default
        )
