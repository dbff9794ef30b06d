"""Seconds of single kernels on one device: matrix products, attention, element-wise work.

A roofline (Williams, Waterman, Patterson 2009) with three corrections: the last wave of output tiles leaves multiprocessors idle
(NVIDIA, "Matrix multiplication background user's guide": tile and wave quantisation), a short inner dimension never reaches full
speed, and dimensions that are no multiple of 64 elements are slower (same guide: tensor core alignment).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from search_spaces.coefficients import Coefficients
from search_spaces.gpus import GpuSpec, Links

Floats = npt.NDArray[np.float64]
Number = Any  # a float or an array of them

TILE = 128
SHORT_INNER = 96.0
MISALIGNED = 0.08
VECTOR = 8  # 16-bit elements in the 16 bytes that one copy loads
ODD_ROWS = 2.8
"""Slow-down on an A100 where rows begin at odd elements: cuBLAS 11 then takes Turing's tensor core kernels, which copy one by one.

PyTorch ("Accelerating large language models with accelerated transformers", A100 SXM 80 GB): the products of GPT-2's output layer
are "nearly 3x" as fast with 50,304 words as with 50,257, and a step takes 87 ms in place of 113.
"""
EVEN_ROWS = 1.8
"""The same where rows begin at even elements, by two or four: Ampere's kernels with narrow copies.

Moondream's kestrel, pull request 143 (H100, clock fixed): an inner dimension of 588 takes 3.53 times as long as 592, in a kernel of
Ampere, whose instructions reach half of Hopper's rate.
"""
AMPERE_PER_CLOCK = 2048.0
"""Operations per clock and multiprocessor of an A100's 16-bit products, the most that kernels made before Hopper reach."""

UNALIGNED_HEADS = 10.0
"""Slow-down of the batched products of stored scores where heads are no whole vectors, as without tensor cores.

So since before the figures above and kept with `bigscience-bloom` in view; no other public measurement was found.
"""
REFERENCE_W_PER_TFLOPS = 0.7  # board power over dense 16-bit peak of an H100 SXM
OLD_FLASH = 0.5  # flash attention 2 against kernels written for Hopper and later (Shah et al. 2024: 35 % of peak against 75 %)
ATTENTION_ROWS = 256.0  # queries that a multiprocessor works on at a time in the forward pass; half as many keys in the backward
SHORT_KEYS = 320.0
"""Keys that the start and the end of a row of scores cost.

Shah et al. 2024, figure 5 (cuDNN, H100, causal, heads 128 wide): 512 and 2,048 keys reach 0.58 and 0.90 of the rate of 16,384.
"""
ATTENTION_BACKWARD = 1.5
"""Seconds of the backward pass over those of its products and exponentials at the forward's rates.

Same paper, figure 6 (flash attention 3, H100, heads 128 wide, 16,384 keys): 561 TFLOP/s.
"""

SOFTMAX_APART = 32.0, 34.0
"""Bytes per score, forward and backward, that torch's softmax moves more than the fused one.

It casts to 32 bits, scales, masks, takes the softmax and casts back, each a kernel (fused_softmax.py forward_torch_softmax).
"""


@dataclass(frozen=True, slots=True)
class Machine:
    """One device, its links and its coefficients."""

    gpu: GpuSpec
    links: Links
    coefficients: Coefficients

    @property
    def bandwidth(self) -> float:
        """Bytes/s of device memory that element-wise kernels reach."""
        return self.gpu.memory_bandwidth_gb_s * 1e9 * self.coefficients.memory

    @property
    def watts_share(self) -> float:
        """Clock that the board's watts allow in matrix products, over that of `REFERENCE_W_PER_TFLOPS`.

        A large product runs at the power limit; watts grow about as the square of the clock there, so the rate as their root.
        Devices with more watts for an operation (older, or not for products) reach their clock.
        """
        gpu = self.gpu
        watts = gpu.tdp_w / gpu.dies_per_package / (gpu.peak("bf16") / 1e12)
        return float(np.sqrt(min(watts / REFERENCE_W_PER_TFLOPS, 1.0)))

    def gemm_rate(self, low_precision: Number, full_precision: Number) -> Floats:
        """Operations/s of a large aligned matrix product: 8-bit, 32-bit, else 16-bit.

        The watts bind 16-bit products only: the best 8-bit ones of H100, H200, GH200, B200, B300 and GB200 reach 0.71, 0.73, 0.78,
        0.76, 0.75 and 0.72 of their peak, in no order of watts per operation (ml-engineering, "Maximum achievable matmul FLOPS").
        """
        c, gpu = self.coefficients, self.gpu
        gemm = c.gemm * self.watts_share
        low = c.gemm_low if "fp8" in gpu.peak_tflops else gemm
        wide = gpu.peak("tf32" if gpu.vendor != "cpu" else "fp32") * gemm
        return np.where(full_precision, wide, np.where(low_precision, gpu.peak("fp8") * low, gpu.peak("bf16") * gemm))


def alignment(gpu: GpuSpec, *dimensions: Number) -> Floats:
    """Slow-down of a product whose inner or output dimension is no multiple of 64 elements; 1 where all are.

    Both are lengths of rows in memory in all three products of a linear layer (of weight and input, of the output or its gradient);
    the number of tokens never is, and does not count.

    Args:
        gpu: The device.
        dimensions: Inner and output dimensions, 16-bit elements.
    """
    smallest = np.full(1, 64)
    for dimension in dimensions:
        smallest = np.minimum(smallest, np.gcd(np.asarray(dimension, dtype=np.int64), 64))
    newer = max(gpu.operations_per_clock / AMPERE_PER_CLOCK, 1.0)
    narrow = newer * np.where(smallest == 1, ODD_ROWS, EVEN_ROWS)
    return np.where(smallest < VECTOR, narrow, 1.0 + MISALIGNED * np.log2(64.0 / smallest))


def gemm_seconds(machine: Machine, rate: Number, m: Number, n: Number, k: Number, count: Number = 1) -> Floats:
    """Seconds of `count` products [m, k] x [k, n] that run as one launch.

    Args:
        machine: The device.
        rate: Operations/s that a large product reaches.
        m: Rows of the output.
        n: Columns of the output.
        k: Inner dimension.
        count: Products of this shape.
    """
    tiles = np.ceil(m / TILE) * np.ceil(n / TILE) * count
    waves = tiles / machine.gpu.multiprocessors
    reached = waves / (waves + machine.coefficients.tail) * (k / (k + SHORT_INNER))
    work = 2.0 * tiles * TILE * TILE * k / (rate * reached)
    moved = 2.0 * count * (m * k + k * n + m * n) / machine.bandwidth
    return np.asarray(np.maximum(work, moved))


def linear(
    machine: Machine, rate: Number, tokens: Number, inner: Number, outer: Number, count: Number = 1
) -> tuple[Floats, Floats, Floats]:
    """Seconds of a linear layer: forward, gradient of its input, gradient of its weight."""
    slow = alignment(machine.gpu, inner, outer)
    forward = gemm_seconds(machine, rate, tokens, outer, inner, count) * slow
    input_gradient = gemm_seconds(machine, rate, tokens, inner, outer, count) * slow
    weight_gradient = gemm_seconds(machine, rate, inner, outer, tokens, count) * slow
    return forward, input_gradient, weight_gradient


def fused_attention(machine: Machine, tokens: Number, keys: Number, heads: Number, qk: int, v: int) -> tuple[Floats, Floats]:
    """Seconds of flash attention, forward and backward.

    A score takes its products, 2 (qk + v) operations, and one exponential, which tensor cores cannot do: as they got faster from
    generation to generation, exponentials did not (Shah et al. 2024, section 2; Zadouri et al. 2026, section 2). The backward pass
    has 2.5 times the products and the exponentials once more (Dao 2023).

    Args:
        machine: The device.
        tokens: Queries of this rank.
        keys: Length of the sequence; causal, so half of the products are done.
        heads: Heads of this rank.
        qk: Head dimension of queries and keys.
        v: Head dimension of values.
    """
    gpu = machine.gpu
    reached = gpu.peak("bf16") * machine.coefficients.attention * keys / (keys + SHORT_KEYS)
    products = 2.0 * tokens * (keys / 2.0) * heads * (qk + v) / reached
    exponentials = products * gpu.exponential_width / ((qk + v) / 2.0)
    waves = heads * tokens / ATTENTION_ROWS / gpu.multiprocessors
    tail = machine.coefficients.tail
    forward = (products + exponentials) * (1.0 + tail / waves)
    return forward, ATTENTION_BACKWARD * (2.5 * products + exponentials) * (1.0 + tail / (2.0 * waves))


def softmax_apart(scores: Number, keys: int) -> Floats:
    """Where the softmax of stored scores runs as torch's kernels: 1, else 0 (fused_softmax.py is_kernel_available).

    Args:
        scores: Matrices of scores of a rank, sequences x heads; the fused kernel takes four at a time.
        keys: Length of the sequence; it takes up to 4,096 and multiples of four.
    """
    fits = 16 < keys <= 4096 and keys % 4 == 0  # noqa: PLR2004
    return np.where(np.bool_(fits) & (np.asarray(scores) % 4 == 0), 0.0, 1.0)


def unfused_attention(
    machine: Machine, rate: Number, tokens: Number, keys: Number, heads: Number, qk: int, v: int, apart: Number = 0.0
) -> tuple[Floats, Floats]:
    """Seconds of attention through stored scores, forward and backward.

    Two batched products over all positions, and the passes over the scores: softmax and dropout read and write 16-bit scores and an
    8-bit mask (Korthikanti et al. 2022, section 4: 5 a s^2 b bytes are kept). `apart`: `softmax_apart`.
    """
    elements = tokens * keys * heads
    slow = UNALIGNED_HEADS if qk % VECTOR or v % VECTOR else alignment(machine.gpu, qk, v)
    reached = rate * np.float64(min(qk, v) / (min(qk, v) + SHORT_INNER))
    products = 2.0 * elements * (qk + v) / reached * slow
    forward, backward = (13.0 + SOFTMAX_APART[0] * apart, 19.0 + SOFTMAX_APART[1] * apart)
    return products + forward * elements / machine.bandwidth, 2.0 * products + backward * elements / machine.bandwidth
