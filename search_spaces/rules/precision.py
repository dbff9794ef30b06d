"""FP8: its recipes, the layers kept in bf16, and the alignment of the matrices that Transformer Engine multiplies."""

from __future__ import annotations

import numpy as np

from search_spaces.columns import Bools, Columns, Ints
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


def fp8_tokens(c: Columns) -> Finding:
    """Tokens of a rank's products align to 8, for MXFP8 to 32 (transformer_engine/pytorch/utils.py assert_dim_for_fp8_exec)."""
    tokens = c.workload.seq_length // c.cp * c.mbs
    tokens = np.where(c.sp, tokens // c.tp, tokens)
    block = np.where(_block_scaled(c), 32, 8)
    return finding(
        np.where(fp8(c), tokens % block, 0),
        "FP8: {tokens} tokens per rank are not divisible by {block}, nearest: {legal};"
        " change micro_batch_size, context or sequence parallelism",
        tokens=tokens,
        block=block,
        legal=near_multiples(tokens, block),
    )


def fp8_width(c: Columns) -> Finding:
    """Widths of a rank's products align to 16, for MXFP8 to 32 (transformer_engine/pytorch/utils.py; csrc/quantizer.cpp)."""
    block = np.where(_block_scaled(c), 32, 16)
    per_rank = c.model.ffn_size // c.tp
    misfit = (c.model.hidden_size % block != 0) | (per_rank % block != 0) | (c.model.hidden_size % 8 != 0)
    return finding(
        fp8(c) & misfit,
        "FP8: hidden_size={hidden} and ffn_hidden_size / tensor parallel = {per_rank} must be divisible by {block};"
        " nearest to the latter: {legal}",
        hidden=c.model.hidden_size,
        per_rank=per_rank,
        block=block,
        legal=near_multiples(per_rank, block),
    )


def fp8(c: Columns) -> Bools:
    """Where matrix products run in FP8."""
    return c.given("fp8_format")


def _block_scaled(c: Columns) -> Ints:
    """Where scales belong to blocks of 32."""
    return np.asarray(c.equals("fp8_recipe", "mxfp8"))


RULES: tuple[Rule, ...] = (
    fp8_parameters_need_fp8,
    fp8_parameters_optimizer,
    bf16_layers_recipe,
    bf16_layers_over_stage,
    fp8_tokens,
    fp8_width,
)
