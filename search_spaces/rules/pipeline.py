"""Layers against stages: even, uneven and interleaved splits, and micro-batches against the interleaved schedule."""

from __future__ import annotations

import math

import numpy as np

from search_spaces.columns import Columns, Ints
from search_spaces.layout import parse_layout
from search_spaces.rules.base import Finding, Rule, finding, near_divisors, near_multiples

VIRTUAL = "num_virtual_stages_per_pipeline_rank"
PER_VIRTUAL = "num_layers_per_virtual_pipeline_stage"
LAYOUT = "pipeline_model_parallel_layout"
FIRST = "decoder_first_pipeline_num_layers"
LAST = "decoder_last_pipeline_num_layers"
EMBEDDING = "account_for_embedding_in_pipeline_split"
LOSS = "account_for_loss_in_pipeline_split"
GROUP = "microbatch_group_size_per_virtual_pipeline_stage"


def one_virtual_spelling(c: Columns) -> Finding:
    """Virtual stages are spelled in one way only (arguments.py validate_args)."""
    spellings = c.given(PER_VIRTUAL).astype(int) + c.given(VIRTUAL) + c.given(LAYOUT)
    return finding(spellings > 1, f"more than one of {PER_VIRTUAL}, {VIRTUAL} and {LAYOUT} is given; keep one")


def layers_per_virtual_stage(c: Columns) -> Finding:
    """Layers per virtual stage divide an even stage's layers (arguments.py validate_args). Where they do, the knob is rewritten."""
    layers, pp, per = counted_layers(c), c.pp, c.number(PER_VIRTUAL)
    uneven = c.given(FIRST) | c.given(LAST)
    misfit = (layers % pp != 0) | ((layers // pp) % np.maximum(per, 1) != 0) | uneven
    return finding(
        (per > 0) & misfit & ~c.given(VIRTUAL) & ~c.given(LAYOUT),
        "num_layers_per_virtual_pipeline_stage={per} does not divide an even stage: {layers} layers on"
        " pipeline_model_parallel_size={pp}; nearest: {legal}, or give num_virtual_stages_per_pipeline_rank for uneven stages",
        per=per,
        layers=layers,
        pp=pp,
        legal=near_divisors(layers // pp, per),
    )


def interleaving_needs_stages(c: Columns) -> Finding:
    """Interleaving needs PP > 1 (parallel_state.py initialize_model_parallel; arguments.py validate_args)."""
    return finding(
        (c.vpp > 1) & (c.pp == 1),
        "{vpp} virtual stages need pipeline_model_parallel_size > 1, but it is {pp}; nearest: 2, or drop the virtual stages",
        vpp=c.vpp,
        pp=c.pp,
    )


def interleaving_without_overlap(c: Columns) -> Finding:
    """Interleaving without overlap of its sends needs PP > 2 (arguments.py validate_args)."""
    return finding(
        (c.vpp > 1) & (c.pp == 2) & ~c.flag("overlap_p2p_comm"),
        "{vpp} virtual stages without overlap_p2p_comm need pipeline_model_parallel_size > 2",
        vpp=c.vpp,
    )


def layers_over_stages(c: Columns) -> Finding:
    """An even split gives every stage as many layers (validate_args; transformer_block.py get_num_layers_to_build)."""
    layers = counted_layers(c)
    return finding(
        np.where(_even(c), layers % c.pp, 0),
        "{layers} layers are not divisible by pipeline_model_parallel_size={pp}; nearest: {legal}, or give uneven stages",
        layers=layers,
        pp=c.pp,
        legal=near_divisors(layers, c.pp),
    )


def layers_over_virtual_stages(c: Columns) -> Finding:
    """Virtual stages divide an even stage's layers (transformer_config.py __post_init__; transformer_block.py)."""
    layers, vpp = counted_layers(c), np.maximum(c.vpp, 1)
    per_stage = layers // c.pp
    return finding(
        np.where(_even(c) & (c.pp > 1) & (layers % c.pp == 0), per_stage % vpp, 0),
        "{per_stage} layers per stage are not divisible by {vpp} virtual stages; nearest: {legal}",
        per_stage=per_stage,
        vpp=vpp,
        legal=near_divisors(per_stage, vpp),
    )


def uneven_stages(c: Columns) -> Finding:
    """Layers outside the uneven stages divide among the middle ones (transformer_config.py __post_init__)."""
    rest, stages = _middle(c)
    mismatch = (rest != 0) != (stages != 0)
    return finding(
        _uneven(c) & (mismatch | (rest % np.where(stages == 0, 1, stages) != 0)),
        "first stage {first}, last stage {last} leave {rest} of {layers} layers to {stages} middle stages: not a whole share;"
        " nearest rest: {legal}",
        first=c.number(FIRST),
        last=c.number(LAST),
        rest=rest,
        layers=c.model.num_layers,
        stages=stages,
        legal=lambda: near_multiples(rest, stages)() if stages.reshape(-1)[0] > 0 else "0",
    )


def every_stage_has_layers(c: Columns) -> Finding:
    """No stage has fewer than no layers; Megatron only checks divisibility (transformer_block.py get_num_layers_to_build)."""
    rest, stages = _middle(c)
    return finding(
        _uneven(c) & (((stages > 0) & (rest < 0)) | (stages < 0)),
        "first stage {first} and last stage {last} leave {rest} layers to {stages} middle stages",
        first=c.number(FIRST),
        last=c.number(LAST),
        rest=rest,
        stages=stages,
    )


def uneven_stages_over_virtual_stages(c: Columns) -> Finding:
    """Virtual stages divide the layers of the first, last and middle stages (transformer_config.py __post_init__)."""
    rest, stages = _middle(c)
    vpp = np.maximum(c.vpp, 1)
    per_middle = np.where(stages > 0, rest // np.maximum(stages, 1), 0)
    first, last = c.number(FIRST), c.number(LAST)
    misfit = (first % vpp != 0) | (last % vpp != 0) | (per_middle % vpp != 0)
    return finding(
        _uneven(c) & misfit,
        "first {first}, middle {middle} and last {last} layers are not all divisible by {vpp} virtual stages; nearest: {legal}",
        first=first,
        middle=per_middle,
        last=last,
        vpp=vpp,
        legal=near_divisors(np.gcd(np.gcd(first, last), per_middle), vpp),
    )


def interleaving_needs_middle_stages(c: Columns) -> Finding:
    """Uneven first and last stages with virtual stages need middle ones (transformer_layer.py get_transformer_layer_offset)."""
    rest, stages = _middle(c)
    return finding(
        _uneven(c) & (c.vpp > 1) & (c.pp > 1) & (stages == 0) & (rest == 0),
        "an uneven first and last stage with {vpp} virtual stages need pipeline_model_parallel_size > 2; give one of them only",
        vpp=c.vpp,
    )


def one_uneven_spelling(c: Columns) -> Finding:
    """Uneven first or last stages exclude counting embedding or loss as layers (transformer_config.py __post_init__)."""
    return finding(
        (c.given(FIRST) | c.given(LAST)) & (c.flag(EMBEDDING) | c.flag(LOSS)),
        "decoder_first/last_pipeline_num_layers exclude account_for_embedding/loss_in_pipeline_split; keep one kind",
    )


def layout_alone(c: Columns) -> Finding:
    """A layout excludes the other split options (transformer_config.py __post_init__)."""
    other = c.given(FIRST) | c.given(LAST) | c.flag(EMBEDDING) | c.flag(LOSS)
    return finding(
        c.given(LAYOUT) & other,
        f"{LAYOUT} excludes decoder_first/last_pipeline_num_layers and account_for_embedding/loss_in_pipeline_split",
    )


def layout_form(c: Columns) -> Finding:
    """A layout starts with the embedding and ends with the loss (pipeline_parallel_layer_layout.py validate_layer_layout)."""
    problem = c.text(LAYOUT, lambda text: parse_layout(text).problem if text is not None else "")
    return finding(np.not_equal(problem, ""), f"{LAYOUT}: {{problem}}", problem=problem)


def layout_over_stages(c: Columns) -> Finding:
    """A layout's stages are a multiple of PP (arguments.py validate_args; PipelineParallelLayerLayout.__init__)."""
    stages = c.layout_number(lambda layout: len(layout.stages))
    return finding(
        stages % c.pp,
        "the layout has {stages} stages, not a multiple of pipeline_model_parallel_size={pp}; nearest: {legal}",
        stages=stages,
        pp=c.pp,
        legal=near_divisors(stages, c.pp),
    )


def layout_layers(c: Columns) -> Finding:
    """A layout has as many transformer and MTP layers as the model (pipeline_parallel_layer_layout.py)."""
    layers, mtp = c.model.num_layers, c.model.mtp_num_layers or 0
    found = c.layout_number(lambda layout: layout.decoders)
    found_mtp = c.layout_number(lambda layout: layout.mtp)
    return finding(
        c.given(LAYOUT) & ((found != layers) | (found_mtp != mtp)),
        "the layout has {found} transformer and {found_mtp} MTP layers, the model {layers} and {mtp}",
        found=found,
        found_mtp=found_mtp,
        layers=layers,
        mtp=mtp,
    )


def layout_mtp_stage(c: Columns) -> Finding:
    """All MTP layers lie in one stage, and that is its rank's last virtual stage (pipeline_parallel_layer_layout.py)."""
    stages = c.layout_number(lambda layout: len(layout.stages))
    holders = c.layout_number(lambda layout: len(layout.mtp_stages))
    first = c.layout_number(lambda layout: min(layout.mtp_stages, default=len(layout.stages)))
    return finding(
        (holders > 1) | ((holders == 1) & (first < stages - c.pp)),
        "MTP layers must lie in one stage among the last pipeline_model_parallel_size={pp} stages of the layout",
        pp=c.pp,
    )


def micro_batch_group(c: Columns) -> Finding:
    """Interleaving runs PP to M micro-batches in a row (schedules.py forward_backward_pipelining_with_interleaving)."""
    group, batches = _group(c), c.micro_batches
    return finding(
        (c.vpp > 1) & (c.pp > 1) & ((group > batches) | (group < c.pp)),
        "interleaving runs {group} micro-batches in a row, which must lie between pipeline_model_parallel_size={pp} and"
        " the {batches} micro-batches of a step; lower micro_batch_size or pipeline_model_parallel_size, or drop virtual stages",
        group=group,
        pp=c.pp,
        batches=batches,
    )


def micro_batch_remainder(c: Columns) -> Finding:
    """The last group of micro-batches is whole or at least PP (schedules.py forward_backward_pipelining_with_interleaving)."""
    group, batches = _group(c), c.micro_batches
    rest = batches % group
    return finding(
        (c.vpp > 1) & (c.pp > 1) & (group <= batches) & (group >= c.pp) & (rest > 0) & (rest < c.pp),
        "{batches} micro-batches in groups of {group} leave {rest}, less than pipeline_model_parallel_size={pp};"
        " make the micro-batches a multiple of {group} or change the group",
        batches=batches,
        group=group,
        rest=rest,
        pp=c.pp,
    )


def counted_layers(c: Columns) -> Ints:
    """Layers that are split evenly: the model's, plus embedding and loss where they count as one."""
    return np.int64(c.model.num_layers) + c.flag(EMBEDDING) + c.flag(LOSS)


def _group(c: Columns) -> Ints:
    """Micro-batches that a virtual stage runs in a row; Megatron's default is PP."""
    given = c.number(GROUP)
    return np.where(c.given(GROUP), np.maximum(given, 1), c.pp)


def _even(c: Columns) -> Ints:
    """Where the layers are split evenly."""
    return np.asarray(~c.given(LAYOUT) & ~c.given(FIRST) & ~c.given(LAST) & ~c.given(PER_VIRTUAL))


def _uneven(c: Columns) -> Ints:
    """Where the first or last stage has its own number of layers."""
    return np.asarray((c.given(FIRST) | c.given(LAST)) & ~c.given(LAYOUT))


def _middle(c: Columns) -> tuple[Ints, Ints]:
    """Layers and stages left between an uneven first and last stage."""
    rest = c.model.num_layers - c.number(FIRST) - c.number(LAST)
    stages = c.pp - c.given(FIRST).astype(int) - c.given(LAST).astype(int)
    return rest, stages


def common_chunk_layers(c: Columns) -> Ints:
    """The largest number of layers that divides every model chunk's (transformer_block.py get_num_layers_to_build)."""
    chunks = c.pp * np.maximum(c.vpp, 1)
    share = counted_layers(c) // chunks
    counted = c.flag(EMBEDDING).astype(np.int64) + c.flag(LOSS)
    plain = np.where(chunks > counted, share, 0)
    even = np.where(chunks == 1, c.model.num_layers, np.gcd(plain, np.where(counted > 0, share - 1, 0)))
    rest, stages = _middle(c)
    ends = np.gcd(c.number(FIRST), c.number(LAST))
    uneven = np.gcd(ends, np.where(stages > 0, rest // np.maximum(stages, 1), 0)) // np.maximum(c.vpp, 1)
    laid_out = c.layout_number(lambda layout: math.gcd(*(stage.count("t") for stage in layout.stages)))
    return np.where(c.given(LAYOUT), laid_out, np.where(_uneven(c), uneven, even))


RULES: tuple[Rule, ...] = (
    one_virtual_spelling,
    layers_per_virtual_stage,
    interleaving_needs_stages,
    interleaving_without_overlap,
    layers_over_stages,
    layers_over_virtual_stages,
    uneven_stages,
    every_stage_has_layers,
    uneven_stages_over_virtual_stages,
    interleaving_needs_middle_stages,
    one_uneven_spelling,
    layout_alone,
    layout_form,
    layout_over_stages,
    layout_layers,
    layout_mtp_stage,
    micro_batch_group,
    micro_batch_remainder,
)
