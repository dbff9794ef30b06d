"""Work: seconds of a piece of a layer by kind of work. Shapes: the sizes that a rank of each candidate sees."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from search_spaces.columns import Bools, Columns
from search_spaces.communication import Group
from search_spaces.kernels import Floats, Machine
from search_spaces.model import ModelSpec

NVFP4 = "nvfp4"
CAST_ELEMENTS = {"tensorwise": 3.0, "delayed": 1.9, "mxfp8": 2.3, "blockwise": 2.3, NVFP4: 3.5}
"""16-bit elements moved to cast an operand of an 8-bit or 4-bit product and write both of its layouts.

A tensor's own scale costs a pass more. Counted for `tensorwise`; the others by their times over its in Transformer Engine's guide
"GEMM profiling" (casts included less casts apart: H200 0.63 for `delayed`, B300 0.78 for `mxfp8` and 1.15 for NVFP4, which has
scales of both kinds and a Hadamard transform).
"""

BLOCK_SCALED = {"mxfp8": 0.95, "blockwise": 0.83, NVFP4: 1.81}
"""Rate of products with a scale per block over 8-bit ones with a scale per tensor, same guide: B300 casts apart; H200, whose tensor
cores know no such scales, casts included and taken off as `mxfp8`'s."""

ACCUMULATION_SEEN = 0.55
"""Share of the main gradients' traffic that products do not hide.

From SimuMax's profile of B200 kernels (configs/system/b200_bf16_ceperm.json), products of a weight's gradient added in 32 bits
against the forward ones of the same sizes: 0.75 of the traffic at the full bandwidth in the median of 144, of which kernels reach
about 0.73.
"""

LAYER_KNOBS = (
    "tensor_model_parallel_size",
    "context_parallel_size",
    "cp_comm_type",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
    "micro_batch_size",
    "sequence_parallel",
    "recompute_granularity",
    "recompute_modules",
    "tp_comm_overlap",
    "moe_token_dispatcher_type",
    "moe_grouped_gemm",
    "moe_shared_expert_overlap",
    "overlap_moe_expert_parallel_comm",
    "moe_expert_capacity_factor",
    "moe_pad_expert_input_to_capacity",
    "precision",
    "main_grads_dtype",
    "fp8_format",
    "fp8_recipe",
    "fp4_format",
    "attention_backend",
    "cuda_graph_impl",
    "environment",
)


class Work(NamedTuple):
    """Seconds by kind of work; the host's run beside the device's and count as far as the device waits for them."""

    gemm: Floats
    attention: Floats
    elementwise: Floats
    routing: Floats
    tp: Floats
    cp: Floats
    ep: Floats
    host: Floats

    def plus(self, other: Work) -> Work:
        """Both, one after the other."""
        return Work(*(mine + theirs for mine, theirs in zip(self, other, strict=True)))

    def times(self, factor: float | Floats | Bools) -> Work:
        """Repeated, or a share of it."""
        return Work(*(mine * factor for mine in self))

    @property
    def device(self) -> Floats:
        """Seconds of the device."""
        return self.gemm + self.attention + self.elementwise + self.routing + self.tp + self.cp + self.ep

    def waits(self, blocking: Bools) -> Floats:
        """Seconds that the device waits for the host.

        The host runs ahead of the device, by a queue of a thousand launches, so that the longer of both sums decides; where they
        are alike each holds the other up at times, since neither a launch nor a kernel always takes the same: hence fourth powers.
        Where launches block (CUDA_LAUNCH_BLOCKING) the host waits for every kernel, and the device for every launch.
        """
        device = self.device
        return np.where(blocking, self.host, np.sqrt(np.hypot(device**2, self.host**2)) - device)


def work(**seconds: Floats | float) -> Work:
    """Work from the kinds that are not zero."""
    return Work(*(np.asarray(seconds.get(kind, 0.0), dtype=np.float64) for kind in Work._fields))


NONE = work()


def _by_recipe(columns: Columns, figures: Mapping[str, float], otherwise: float) -> Floats:
    """A figure of each row's recipe for 8-bit or 4-bit products; `otherwise` for a recipe without one and in 16 bits."""
    recipes = columns.column("fp8_recipe")
    eight_bit = np.array([figures.get(str(recipe), otherwise) for recipe in recipes.values])[recipes.codes]
    found = np.where(columns.given("fp4_format"), figures[NVFP4], eight_bit)
    return np.where(columns.low_precision, found, otherwise)


class Piece(NamedTuple):
    """One block of a layer: forward, backward, and what recomputation runs again."""

    forward: Work
    backward: Work
    again: Work

    def plus(self, other: Piece) -> Piece:
        """Both blocks."""
        return Piece(*(mine.plus(theirs) for mine, theirs in zip(self, other, strict=True)))


@dataclass(frozen=True, slots=True)
class Shapes:
    """Sizes of one rank for each combination of `LAYER_KNOBS`, and the groups it communicates in."""

    machine: Machine
    model: ModelSpec
    columns: Columns
    seq_length: int
    tokens: Floats
    tp: Floats
    element: Floats
    rate: Floats
    low: Bools
    cast_elements: Floats
    gradient: Floats
    split: Floats
    recompute_full: Bools
    balanced: bool

    @classmethod
    def of(cls, machine: Machine, columns: Columns, balanced: bool) -> Shapes:
        """The shapes of a table's combinations."""
        fp32, low = columns.equals("precision", "fp32"), columns.low_precision
        tp = columns.tp.astype(np.float64)
        return cls(
            machine=machine,
            model=columns.model,
            columns=columns,
            seq_length=columns.workload.seq_length,
            tokens=columns.mbs * columns.workload.seq_length / columns.cp,
            tp=tp,
            element=np.where(fp32, 4.0, 2.0),
            rate=machine.gemm_rate(low, fp32) * _by_recipe(columns, BLOCK_SCALED, 1.0),
            low=low,
            cast_elements=_by_recipe(columns, CAST_ELEMENTS, 0.0),
            gradient=np.where(columns.equals("main_grads_dtype", "bf16"), 2.0, 4.0),
            split=np.where(columns.sp, tp, 1.0),
            recompute_full=columns.equals("recompute_granularity", "full"),
            balanced=balanced,
        )

    def group(self, size: Floats, stride: Floats | float) -> Group:
        """Ranks that communicate."""
        return Group.of(self.machine, size, stride)

    def moved(self, elements: Floats | float) -> Floats:
        """Seconds of element-wise kernels that read and write this many elements in all."""
        return np.asarray(elements * self.element / self.machine.bandwidth)

    def casts(self, elements: Floats | float) -> Floats:
        """Seconds of casting operands of 8-bit and 4-bit products, and the gradients of their results."""
        return self.moved(elements * self.cast_elements)

    def accumulation(self, weights: Floats | float) -> Floats:
        """Seconds that adding a micro-batch's weight gradients to the main gradients takes longer than their products.

        Read and write, 32 or 16 bits, in the product's own kernel, in part while it still multiplies.
        """
        return np.asarray(ACCUMULATION_SEEN * weights * self.gradient * 2.0 / self.machine.bandwidth)

    def host(self, kernels: Floats | float) -> Floats:
        """Seconds of the host for this many launches; none under CUDA graphs."""
        graphs = ~self.columns.equals("cuda_graph_impl", "none")
        return np.where(graphs, 0.0, kernels * self.machine.coefficients.launch_us * 1e-6)

    @property
    def tp_launches(self) -> Floats:
        """Launches that a block's exchange over the TP ranks costs the host (a collective's bookkeeping is worth a few)."""
        return np.where(self.tp > 1, 3.0, 0.0)

    def recomputes(self, module: str) -> Bools:
        """Where selective recomputation covers a module; Megatron's default is core_attn."""
        selective = self.columns.equals("recompute_granularity", "selective")
        named = self.columns.holds("recompute_modules", module)
        return selective & (named | (~self.columns.given("recompute_modules") & np.bool_(module == "core_attn")))

    def tp_exchange(self) -> Floats:
        """Seconds of one all-reduce of the hidden states over the TP ranks, or of its halves under sequence parallelism."""
        size = self.tokens * self.model.hidden_size * self.element
        return np.where(self.tp > 1, self.group(self.tp, 1.0).reduce(size), 0.0)

    def tp_exposed(self) -> Floats:
        """That exchange's seconds in the forward pass that nothing hides."""
        return self._seen(self.tp_exchange(), np.zeros(1))

    def tp_exposed_backward(self, inputs: Floats, weights: Floats, whole: bool = True) -> Floats:
        """Seconds of a block's exchange in the backward pass that nothing hides.

        Megatron reduces the gradients of a block's input beside the products of its weights' gradients. Under sequence parallelism
        it also gathers the input once more, beside the products of that input's gradients (tensor_parallel/layers.py).

        Args:
            inputs: Seconds of the products for the gradients of the block's input.
            weights: Seconds of the products for the gradients of the weights on it.
            whole: Whether the gradients of the block's output have to be gathered, too.
        """
        reduced = self.tp_exchange()
        half, sliced = 0.5 * reduced, self.split > 1
        beside = np.where(sliced, np.minimum(half, inputs) + np.minimum(half, weights), np.minimum(reduced, weights))
        return self._seen(reduced + np.where(sliced & np.bool_(whole), half, 0.0), beside)

    def _seen(self, seconds: Floats, beside: Floats) -> Floats:
        """Less what hides it; with several queues to the device (before Blackwell) a collective waits for products given first."""
        c, connections = self.machine.coefficients, self.columns.variable("CUDA_DEVICE_MAX_CONNECTIONS")
        first = (connections == "auto") | (connections == "1") | np.bool_(self.columns.workload.settings.gpu_arch_major >= 10)
        alone = seconds - np.where(first, c.tp_hidden, 0.0) * beside
        return np.where(self.columns.flag("tp_comm_overlap"), seconds * (1.0 - c.overlap), alone)
