"""Software: what a run's software decides and no knob says.

Not here: what a GPU has (`search_spaces.hardware`), and anything that depends on a model or a split.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Self

from search_spaces.model import Workload

FLASH_ATTENTION_ARCH = 8
"""Oldest CUDA architecture with a fused attention kernel (Transformer Engine, dot_product_attention/utils.py)."""

STEP_GRADIENT_BYTES_IN_CODE = 4.0
"""The fp32 copy of a bf16 gradient (optimizer/distrib_optimizer.py _copy_model_grads_to_main_grads)."""

STEP_GRADIENT_BYTES = 8.0
"""The same as measured: published peaks of Megatron-Bridge that recomputation does not lower, on three splits, are that step's."""


@dataclass(frozen=True, slots=True)
class Software:
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
        """The software that a run of this workload gets where nothing else is said."""
        cuda = workload.device == "cuda"
        return cls(
            transformer_engine=cuda,
            flash_attention=cuda and workload.settings.gpu_arch_major >= FLASH_ATTENTION_ARCH,
            gradient_accumulation_fusion=cuda,  # Megatron-LM's default
        )
