"""What Megatron silently changes, so that two spellings of one run are one candidate."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from search_spaces.columns import Columns
from search_spaces.config import TrialConfig
from search_spaces.model import Workload
from search_spaces.rules.pipeline import FIRST, GROUP, LAST, LAYOUT, PER_VIRTUAL, VIRTUAL, counted_layers

Normaliser = Callable[[Columns], None]


def normalise(workload: Workload, config: TrialConfig) -> TrialConfig:
    """The one spelling of a configuration: unused knobs at their default, defaults that depend on others written out."""
    columns = Columns.of(workload, config)
    for rewrite in NORMALISERS:
        rewrite(columns)
    changes = {name: column.values[column.codes[0]] for name, column in columns.columns.items()}
    return config.model_copy(update=changes) if changes else config


def layers_to_virtual_stages(c: Columns) -> None:
    """Layers per virtual stage are a number of virtual stages (arguments.py validate_args)."""
    layers, pp, per = counted_layers(c), c.pp, np.maximum(c.number(PER_VIRTUAL), 1)
    alone = c.given(PER_VIRTUAL) & ~c.given(VIRTUAL) & ~c.given(LAYOUT) & ~c.given(FIRST) & ~c.given(LAST)
    fits = alone & (layers % pp == 0) & ((layers // pp) % per == 0)
    c.replace(VIRTUAL, fits, layers // pp // per)
    c.replace(PER_VIRTUAL, fits, None)


def one_virtual_stage(c: Columns) -> None:
    """One virtual stage is no interleaving (arguments.py validate_args); beside another spelling it is still refused."""
    c.replace(VIRTUAL, c.equals(VIRTUAL, 1) & ~c.given(PER_VIRTUAL) & ~c.given(LAYOUT), None)


def interleaving_options(c: Columns) -> None:
    """Without interleaving its options do nothing; a group of PP micro-batches is the default (validate_args)."""
    plain = c.vpp == 0
    c.replace(GROUP, plain | (c.number(GROUP) == c.pp), None)
    c.replace("overlap_p2p_comm", plain, True)


def sequence_parallel_off(c: Columns) -> None:
    """Sequence parallelism is switched off at TP=1 (arguments.py validate_args)."""
    c.replace("sequence_parallel", c.tp == 1, False)


def expert_tensor_default(c: Columns) -> None:
    """Expert tensor parallel size defaults to TP (arguments.py validate_args); without experts that is the same as none."""
    if c.model.is_moe:
        c.replace("expert_tensor_parallel_size", ~c.given("expert_tensor_parallel_size"), c.tp + 0 * c.etp)
    else:
        c.replace("expert_tensor_parallel_size", c.number("expert_tensor_parallel_size") == c.tp, None)


def context_exchange(c: Columns) -> None:
    """Point-to-point is the default, and without CP nothing is exchanged (arguments.py _add_distributed_args)."""
    unused = (c.cp == 1) & ~c.holds("cp_comm_type", "a2a+p2p")
    c.replace("cp_comm_type", unused | c.equals("cp_comm_type", ("p2p",)), None)


def recompute_options(c: Columns) -> None:
    """Without recompute its options do nothing, unless the experts' overlap looks at them (TransformerConfig.__post_init__)."""
    unused = (
        ~c.given("recompute_granularity") & ~c.flag("overlap_moe_expert_parallel_comm") & ~c.flag("distribute_saved_activations")
    )
    c.replace("recompute_method", unused, None)
    c.replace("recompute_num_layers", unused, None)
    modules_unused = ~c.equals("recompute_granularity", "selective") & ~c.flag("overlap_moe_expert_parallel_comm")
    c.replace("recompute_modules", modules_unused | c.equals("recompute_modules", ("core_attn",)), None)


def recompute_all_layers(c: Columns) -> None:
    """Recomputing more layers than a chunk has recomputes all of them (core/recompute.py; transformer_block.py)."""
    even = ~c.given(LAYOUT) & ~c.given(FIRST) & ~c.given(LAST)
    most = np.maximum(-(-counted_layers(c) // (c.pp * np.maximum(c.vpp, 1))), 1)
    above = c.equals("recompute_granularity", "full") & even & (c.number("recompute_num_layers") > most)
    c.replace("recompute_num_layers", above, most)


def fsdp_options(c: Columns) -> None:
    """Megatron-FSDP brings the distributed optimiser (validate_args, 0.19); without it sharding strategies do nothing."""
    if c.v19:
        c.replace("use_distributed_optimizer", c.flag("use_megatron_fsdp"), True)
    c.replace("data_parallel_sharding_strategy", ~c.flag("use_megatron_fsdp"), _default("data_parallel_sharding_strategy"))
    c.replace("fp8_param_gather", c.flag("use_torch_fsdp2"), False)


def low_precision_options(c: Columns) -> None:
    """Without FP8 its recipe does nothing, without FP8 or FP4 no layer stays in bf16 (TransformerConfig.__post_init__)."""
    c.replace("fp8_recipe", ~c.given("fp8_format") & ~c.flag("fp8_param_gather"), _default("fp8_recipe"))
    c.replace("first_last_layers_bf16", ~c.low_precision, False)
    for name in ("num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16"):
        c.replace(name, ~c.flag("first_last_layers_bf16"), _default(name))


def offload_options(c: Columns) -> None:
    """Without optimiser offload its fraction does nothing (optimizer/__init__.py)."""
    c.replace("optimizer_offload_fraction", ~c.flag("optimizer_cpu_offload"), _default("optimizer_offload_fraction"))


def expert_options(c: Columns) -> None:
    """A negative capacity means none (TransformerConfig.__post_init__)."""
    negative = c.where("moe_expert_capacity_factor", lambda value: value is not None and value < 0)
    c.replace("moe_expert_capacity_factor", negative, None)


def _default(knob: str) -> object:
    """A knob's default."""
    return TrialConfig.model_fields[knob].default


NORMALISERS: tuple[Normaliser, ...] = (
    layers_to_virtual_stages,
    one_virtual_stage,
    interleaving_options,
    sequence_parallel_off,
    expert_tensor_default,
    context_exchange,
    recompute_options,
    recompute_all_layers,
    fsdp_options,
    low_precision_options,
    offload_options,
    expert_options,
)
