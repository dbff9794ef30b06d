"""What happens once per step: gradients over the data parallel ranks, the optimiser, and traffic to the hosts.

Ring volumes as in Rajbhandari et al. 2020 (ZeRO, section 7): 2 P for an all-reduce, P to scatter and P to gather with shards.
Adam in mixed precision reads and writes its 32-bit parameter and two moments, reads the gradient, and writes the 16-bit parameter.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from search_spaces.columns import Bools, Columns, Ints
from search_spaces.communication import Group
from search_spaces.distinct import distinct
from search_spaces.kernels import Floats, Machine, Number
from search_spaces.memory.states import BYTES
from search_spaces.parameters import COUNT_KNOBS, rank_parameters

STATES = ("main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")
WITHOUT_MAIN_BYTES = 22.0
"""Adam on 16-bit weights without fp32 ones: it reads and writes these and its fp32 moments, and reads the 16-bit gradient."""
HOST_ADAM_BYTES = 30.0
GRADIENT_PASSES = 3.0
"""Times that a step reads or writes the whole gradient apart from Adam: clearing it, its norm, scaling it."""
HOST_ADAM_BYTES_PER_S = 20e9
SAVED_ELEMENTS = 17.0  # Korthikanti et al. 2022: 34 s b h bytes of a layer's activations, as 16-bit elements

END_KNOBS = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "context_parallel_size",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
    "use_tp_pp_dp_mapping",
    "use_distributed_optimizer",
    "num_distributed_optimizer_instances",
    "use_megatron_fsdp",
    "use_torch_fsdp2",
    "data_parallel_sharding_strategy",
    "use_precision_aware_optimizer",
    "main_grads_dtype",
    "main_params_dtype",
    "exp_avg_dtype",
    "exp_avg_sq_dtype",
    "precision",
    "optimizer_cpu_offload",
    "optimizer_offload_fraction",
)


class Parameters(NamedTuple):
    """Parameters of a rank, apart from the experts' and of the experts."""

    plain: Floats
    expert: Floats


class Ends(NamedTuple):
    """Seconds per parameter and seconds apart from their number, for one kind of parameter.

    Attributes:
        reduce: Gradients over the data parallel ranks, per parameter.
        gather: New parameters from their shards, per parameter.
        update: The optimiser, per parameter.
        host: Optimiser state on the host: transfers and the update there, per parameter.
        fixed: Latencies of one reduction.
    """

    reduce: Floats
    gather: Floats
    update: Floats
    host: Floats
    fixed: Floats


class StepEnds(NamedTuple):
    """`Ends` of both kinds of parameter, by combination of `END_KNOBS`, and each row's combination."""

    plain: Ends
    expert: Ends
    sharded_parameters: Bools
    rows: npt.NDArray[np.intp]


def step_ends(machine: Machine, columns: Columns) -> StepEnds:
    """The costs of a step's end for every row."""
    found = distinct(columns, END_KNOBS)
    c = found.columns
    world = c.workload.world_size
    spread = np.where(c.flag("use_tp_pp_dp_mapping"), c.pp, 1)
    strides = c.tp * spread, c.etp * c.ep * spread
    plain = Group.of(machine, (c.dp * c.cp).astype(np.float64), strides[0])
    copies = np.maximum(world // c.expert_ranks, 1)
    expert = Group.of(machine, copies.astype(np.float64), strides[1])
    fsdp = c.flag("use_megatron_fsdp")
    strategy = c.equals("data_parallel_sharding_strategy", "optim_grads_params")
    whole = c.flag("use_torch_fsdp2") | (fsdp & strategy)
    sharded = c.flag("use_distributed_optimizer") | whole | (fsdp & ~c.equals("data_parallel_sharding_strategy", "no_shard"))
    return StepEnds(
        _ends(machine, c, plain, strides[0], sharded), _ends(machine, c, expert, strides[1], sharded), whole, found.rows
    )


def _ends(machine: Machine, c: Columns, group: Group, stride: Number, sharded: Bools) -> Ends:
    """Costs per parameter; a large message's slope, so that latency counts once.

    With several copies of the sharded optimiser, shards are gathered within one and gradients reduced among all.
    """
    copies = c.number("num_distributed_optimizer_instances")
    inner = Group.of(machine, np.maximum(group.size / copies, 1.0), stride)
    slope = group.slope
    gradient = np.where(c.equals("main_grads_dtype", "bf16"), 2.0, 4.0)
    element = np.where(c.equals("precision", "fp32"), 4.0, 2.0)
    shards = np.where(sharded, inner.size, 1.0)
    bandwidth = machine.bandwidth
    fraction = c.column("optimizer_offload_fraction")
    away = np.array([float(value) for value in fraction.values])[fraction.codes] * c.flag("optimizer_cpu_offload")
    transfer = 8.0 / machine.links.host.bytes_per_s + HOST_ADAM_BYTES / HOST_ADAM_BYTES_PER_S
    adam, passes = update_bytes(c)
    return Ends(
        reduce=gradient * np.where(sharded, inner.slope + np.where(copies > 1, 2.0, 1.0) * (slope - inner.slope), 2.0 * slope),
        gather=np.where(sharded, element * inner.slope, 0.0),
        update=(adam * (1.0 - away) / shards + passes) / bandwidth,
        host=away * transfer / shards,
        fixed=3.0 * group.gather(np.float64(0.0)),
    )


def update_bytes(c: Columns) -> tuple[Floats, Floats]:
    """Bytes that the optimiser step moves per parameter of a shard, and that it moves per gradient of a rank besides.

    A state of the precision-aware optimiser that is not fp32 is made one for the step: its own type is read and written, the fp32
    copy written, changed by Adam and read (Transformer Engine, optimizers/fused_adam.py get_unscaled_state). That optimiser takes
    16-bit gradients as they are; the plain one copies them into fp32 first, which costs what their shorter passes save.
    """
    aware = c.flag("use_precision_aware_optimizer")
    mixed = ~c.equals("precision", "fp32")
    gradient = np.where(aware & c.equals("main_grads_dtype", "bf16"), 2.0, 4.0)
    states = sum((np.where(aware, _moved(c, name), 8.0) for name in STATES), np.zeros(1))
    adam = states + gradient + np.where(mixed, 2.0, 0.0)
    if not c.workload.settings.separate_main_params:
        adam, gradient = np.where(mixed, WITHOUT_MAIN_BYTES, adam), np.where(mixed, 2.0, gradient)
    return adam, GRADIENT_PASSES * gradient


def _moved(c: Columns, state: str) -> npt.NDArray[np.int64]:
    """Bytes that a step moves for one state of the precision-aware optimiser."""
    return c.derive(state, lambda name: 8 if name == "fp32" else 2 * BYTES[name] + 16)


def held_parameters(columns: Columns) -> dict[str, Parameters]:
    """Parameters of one rank in each kind of a stage's contents (`pipeline_stages.StageKind`): one per row, or one for all."""
    found = distinct(columns, COUNT_KNOBS)
    count = rank_parameters(found.columns)

    def held(plain: Ints, expert: Ints | float = 0.0) -> Parameters:
        spread = (
            np.broadcast_to(np.asarray(number, dtype=np.float64), (found.size,)).take(found.rows) for number in (plain, expert)
        )
        return Parameters(*spread)

    return {
        "dense": held(count.dense_layer),
        "moe": held(count.moe_layer, count.experts),
        "embedding": held(count.embedding),
        "head": held(count.output + count.final_norm),
        "mtp": held(count.mtp_layer, count.mtp_experts),
    }
