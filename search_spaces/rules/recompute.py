"""Activation recomputation and offload: what may be combined with what."""

from __future__ import annotations

import numpy as np

from search_spaces.columns import Bools, Columns
from search_spaces.rules.base import Finding, Rule, always, finding
from search_spaces.rules.pipeline import common_chunk_layers

MODULES = ("core_attn", "moe_act", "layernorm", "mla_up_proj", "mlp", "moe", "shared_experts")
MODULES_19 = (*MODULES, "gdn_norm_out")


def full_recompute_method(c: Columns) -> Finding:
    """Full recompute needs a method (transformer_config.py TransformerConfig.__post_init__)."""
    return finding(full(c) & ~c.given("recompute_method"), "recompute_granularity=full needs recompute_method uniform or block")


def full_recompute_layers(c: Columns) -> Finding:
    """Full recompute needs a number of layers (transformer_config.py TransformerConfig.__post_init__)."""
    return finding(
        full(c) & ~c.given("recompute_num_layers"),
        "recompute_granularity=full needs recompute_num_layers, 1 to {most}",
        most=c.model.num_layers // c.pp,
    )


def uniform_recompute_layers(c: Columns) -> Finding:
    """Uniform recompute advances by its layers: at 0 it never ends (transformer_block.py _checkpointed_forward)."""
    none = c.equals("recompute_num_layers", 0) & c.equals("recompute_method", "uniform")
    return finding(full(c) & none, "recompute_method=uniform needs recompute_num_layers of at least 1, but it is 0")


def uniform_recompute_over_chunks(c: Columns) -> Finding:
    """In 0.16 a unit reaches past the last layer of a chunk that it does not divide: the first forward pass raises IndexError.

    Source: transformer_block.py _checkpointed_forward, `custom(layer_idx, layer_idx + recompute_num_layers)`; clamped in 0.19.
    """
    if c.v19:
        return always(False, "")
    unit, layers = np.maximum(c.number("recompute_num_layers"), 1), common_chunk_layers(c)
    return finding(
        full(c) & c.equals("recompute_method", "uniform") & (layers % unit != 0),
        "recompute_num_layers={unit} of method uniform does not divide every chunk's layers; legal: divisors of {layers}",
        unit=unit,
        layers=layers,
    )


def selective_recompute_method(c: Columns) -> Finding:
    """Selective recompute has no method (arguments.py validate_args)."""
    return finding(
        selective(c) & c.given("recompute_method"),
        "recompute_granularity=selective excludes recompute_method; drop it, or use granularity full",
    )


def selective_recompute_layers(c: Columns) -> Finding:
    """Selective recompute has no number of layers (transformer_config.py TransformerConfig.__post_init__)."""
    return finding(
        selective(c) & c.given("recompute_num_layers"),
        "recompute_granularity=selective excludes recompute_num_layers; drop it, or use granularity full",
    )


def recompute_module_names(c: Columns) -> Finding:
    """Selective recompute knows a fixed list of modules (transformer_config.py TransformerConfig.__post_init__)."""
    known = MODULES_19 if c.v19 else MODULES
    unknown = c.where("recompute_modules", lambda modules: bool(set(modules or ()) - set(known)))
    return finding(selective(c) & unknown, "recompute_modules has an unknown name; legal: {known}", known=", ".join(known))


def recompute_gated_norm(c: Columns) -> Finding:
    """gdn_norm_out belongs to gated delta nets, which no model here has (transformer_config.py __post_init__, 0.19)."""
    return finding(
        selective(c) & c.holds("recompute_modules", "gdn_norm_out") & c.v19,
        "recompute_modules gdn_norm_out needs a gated delta net; drop it",
    )


def recompute_expert_activation(c: Columns) -> Finding:
    """moe_act is recomputed only with grouped GEMM (transformer_config.py TransformerConfig.__post_init__)."""
    return finding(
        selective(c) & c.holds("recompute_modules", "moe_act") & ~c.flag("moe_grouped_gemm"),
        "recompute_modules moe_act needs moe_grouped_gemm",
    )


def recompute_latent_projection(c: Columns) -> Finding:
    """mla_up_proj exists only with multi-latent attention (transformer_config.py TransformerConfig.__post_init__)."""
    return finding(
        selective(c) & c.holds("recompute_modules", "mla_up_proj") & (not c.model.multi_latent_attention),
        "recompute_modules mla_up_proj needs a model with multi-latent attention",
    )


def recompute_shared_experts(c: Columns) -> Finding:
    """Overlapped shared experts cannot be recomputed (transformer_config.py TransformerConfig.__post_init__)."""
    shared = c.model.moe_shared_expert_intermediate_size is not None
    return finding(
        selective(c) & c.holds("recompute_modules", "shared_experts") & c.flag("moe_shared_expert_overlap") & shared,
        "recompute_modules shared_experts excludes moe_shared_expert_overlap; drop one",
    )


def recompute_with_fp8(c: Columns) -> Finding:
    """Delayed scaling cannot recompute moe_act or layernorm (transformer_config.py TransformerConfig.__post_init__)."""
    modules = c.holds("recompute_modules", "moe_act") | c.holds("recompute_modules", "layernorm")
    return finding(
        selective(c) & modules & c.given("fp8_format") & c.equals("fp8_recipe", "delayed"),
        "recompute_modules moe_act and layernorm exclude fp8_recipe=delayed; use another recipe or drop the modules",
    )


def distributed_activations_ranks(c: Columns) -> Finding:
    """distribute_saved_activations shards over tensor ranks (arguments.py validate_args)."""
    return finding(
        c.flag("distribute_saved_activations") & (c.tp == 1),
        "distribute_saved_activations needs tensor_model_parallel_size > 1",
    )


def distributed_activations_recompute(c: Columns) -> Finding:
    """distribute_saved_activations needs full recompute and a method (arguments.py validate_args)."""
    return finding(
        c.flag("distribute_saved_activations") & ~(full(c) & c.given("recompute_method")),
        "distribute_saved_activations needs recompute_granularity=full with a recompute_method",
    )


def distributed_activations_sequence(c: Columns) -> Finding:
    """With SP activations are sharded already (transformer_config.py TransformerConfig.__post_init__)."""
    return finding(
        c.flag("distribute_saved_activations") & c.sp & c.given("recompute_granularity"),
        "distribute_saved_activations excludes sequence_parallel; drop one",
    )


def offload_layers(c: Columns) -> Finding:
    """At least one layer stays on the GPU (transformer_config.py TransformerConfig.__post_init__)."""
    layers = c.number("cpu_offloading_num_layers")
    return finding(
        layers >= c.model.num_layers,
        "cpu_offloading_num_layers={layers} must be less than num_layers={most}",
        layers=layers,
        most=c.model.num_layers,
    )


def offload_needs_one_stage(c: Columns) -> Finding:
    """Activation offload has no pipeline (transformer_config.py TransformerConfig.__post_init__)."""
    return finding(
        offloaded(c) & (c.pp > 1),
        "cpu_offloading_num_layers > 0 needs pipeline_model_parallel_size=1, but it is {pp}",
        pp=c.pp,
    )


def offload_excludes_recompute(c: Columns) -> Finding:
    """Activation offload and recompute exclude each other (transformer_config.py TransformerConfig.__post_init__)."""
    return finding(
        offloaded(c) & c.given("recompute_granularity"),
        "cpu_offloading_num_layers > 0 excludes recompute_granularity; drop one",
    )


def full(c: Columns) -> Bools:
    """Where whole layers are recomputed."""
    return c.equals("recompute_granularity", "full")


def selective(c: Columns) -> Bools:
    """Where only some modules are recomputed."""
    return c.equals("recompute_granularity", "selective")


def offloaded(c: Columns) -> Bools:
    """Where activations of some layers go to the host: the launch script derives cpu_offloading from the count (validate_args)."""
    return c.number("cpu_offloading_num_layers") > 0


RULES: tuple[Rule, ...] = (
    full_recompute_method,
    full_recompute_layers,
    uniform_recompute_layers,
    uniform_recompute_over_chunks,
    selective_recompute_method,
    selective_recompute_layers,
    recompute_module_names,
    recompute_gated_norm,
    recompute_expert_activation,
    recompute_latent_projection,
    recompute_shared_experts,
    recompute_with_fp8,
    distributed_activations_ranks,
    distributed_activations_recompute,
    distributed_activations_sequence,
    offload_layers,
    offload_needs_one_stage,
    offload_excludes_recompute,
)
