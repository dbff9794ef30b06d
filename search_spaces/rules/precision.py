"""FP8 and NVFP4: their recipes, the layers kept in bf16, and the alignment of the matrices that Transformer Engine multiplies."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from search_spaces.columns import Bools, Columns
from search_spaces.rules.base import Finding, Rule, finding, near_multiples


def fp8_parameters_need_fp8(c: Columns) -> Finding:
    """Parameters in FP8 need products in FP8 (transformer_config.py TransformerConfig.__post_init__)."""
    return finding(c.flag("fp8_param_gather") & ~fp8(c), "fp8_param_gather needs fp8_format")


def fp8_parameters_optimizer(c: Columns) -> Finding:
    """Parameters in FP8 need a sharded optimiser or FSDP (arguments.py validate_args)."""
    sharded = c.flag("use_distributed_optimizer") | c.flag("use_torch_fsdp2") | c.flag("use_megatron_fsdp")
    return finding(c.flag("fp8_param_gather") & ~sharded, "fp8_param_gather needs use_distributed_optimizer or FSDP")


def bf16_layers_recipe(c: Columns) -> Finding:
    """Delayed scaling keeps no layers in bf16 (transformer_config.py TransformerConfig.__post_init__)."""
    return finding(
        fp8(c) & c.flag("first_last_layers_bf16") & c.equals("fp8_recipe", "delayed"),
        "first_last_layers_bf16 excludes fp8_recipe=delayed; use another recipe",
    )


def bf16_layers_over_stage(c: Columns) -> Finding:
    """Layers kept in bf16 fit into one pipeline stage (transformer_config.py TransformerConfig.__post_init__)."""
    most = c.model.num_layers // c.pp
    start, end = c.number("num_layers_at_start_in_bf16"), c.number("num_layers_at_end_in_bf16")
    return finding(
        fp8(c) & c.flag("first_last_layers_bf16") & ((start > most) | (end > most)),
        "num_layers_at_start_in_bf16={start} and num_layers_at_end_in_bf16={end} must be at most the {most} layers of a stage",
        start=start,
        end=end,
        most=most,
    )


def fp4_excludes_fp8(c: Columns) -> Finding:
    """Products run in FP8 or in FP4 (transformer_config.py TransformerConfig.__post_init__)."""
    return finding(c.given("fp4_format") & fp8(c), "fp4_format and fp8_format exclude each other; give one of them")


def low_precision_tokens(c: Columns) -> Finding:
    """Tokens of a rank's products align to 8, for NVFP4 to 16, for MXFP8 to 32.

    Sources: transformer_engine/pytorch/utils.py assert_dim_for_fp8_exec; its csrc/quantizer.cpp.
    """
    tokens = c.workload.seq_length // c.cp * c.mbs
    tokens = np.where(c.sp, tokens // c.tp, tokens)
    block = np.where(c.given("fp4_format"), 16, np.where(_block_scaled(c), 32, 8))
    return finding(
        np.where(c.low_precision, tokens % block, 0),
        "{format}: {tokens} tokens per rank are not divisible by {block}, nearest: {legal};"
        " change micro_batch_size, context or sequence parallelism",
        format=_format(c),
        tokens=tokens,
        block=block,
        legal=near_multiples(tokens, block),
    )


def low_precision_width(c: Columns) -> Finding:
    """Widths of a rank's products align to 16, for MXFP8 to 32 (transformer_engine/pytorch/utils.py; csrc/quantizer.cpp)."""
    block = np.where(_block_scaled(c), 32, 16)
    per_rank = c.model.ffn_size // c.tp
    misfit = (c.model.hidden_size % block != 0) | (per_rank % block != 0) | (c.model.hidden_size % 8 != 0)
    return finding(
        c.low_precision & misfit,
        "{format}: hidden_size={hidden} and ffn_hidden_size / tensor parallel = {per_rank} must be divisible by {block};"
        " nearest to the latter: {legal}",
        format=_format(c),
        hidden=c.model.hidden_size,
        per_rank=per_rank,
        block=block,
        legal=near_multiples(per_rank, block),
    )


def fp8(c: Columns) -> Bools:
    """Where matrix products run in FP8."""
    return c.given("fp8_format")


def _block_scaled(c: Columns) -> Bools:
    """Where scales belong to blocks of 32."""
    return fp8(c) & c.equals("fp8_recipe", "mxfp8")


def _format(c: Columns) -> npt.NDArray[np.str_]:
    """The name of the number format that products run in."""
    return np.where(c.given("fp4_format"), "NVFP4", "FP8")


RULES: tuple[Rule, ...] = (
    fp8_parameters_need_fp8,
    fp8_parameters_optimizer,
    bf16_layers_recipe,
    bf16_layers_over_stage,
    fp4_excludes_fp8,
    low_precision_tokens,
    low_precision_width,
)
