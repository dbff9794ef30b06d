"""Seconds of fused attention against published kernels: what products, exponentials, few heads and short rows cost."""

from __future__ import annotations

import pytest

from search_spaces.coefficients import Coefficients
from search_spaces.gpus import gpu, links_of
from search_spaces.kernels import Machine, fused_attention


def attention(name: str, heads: int = 16, width: int = 128, keys: int = 8192) -> tuple[float, float]:
    """Operations/s of causal attention over 16,384 tokens, forward and backward."""
    device = gpu(name)
    machine = Machine(device, links_of(device, 8), Coefficients(attention=1.0))
    forward, backward = fused_attention(machine, 16384.0, float(keys), float(heads), width, width)
    products = 2.0 * 16384 * keys / 2 * heads * 2 * width
    return float(products / forward), float(2.5 * products / backward)


def test_exponentials_hold_attention_up_the_more_the_faster_products_are():
    # Shah et al. 2024, figure 5 (flash attention 3, H100): 497, 648 and 756 TFLOP/s with heads 64, 128 and 256 wide
    wide = [attention("h100", 2048 // width, width, 65536)[0] / 1e12 for width in (64, 128, 256)]
    assert wide == pytest.approx([497, 648, 756], rel=0.2)
    # figure 6: 561 TFLOP/s backward, heads 128 wide
    assert attention("h100", keys=16384)[1] / 1e12 == pytest.approx(561, rel=0.1)
    names = ("a100", "h100", "b200", "b300")
    forward, backward = zip(*(attention(name) for name in names), strict=True)
    shares = [rate / gpu(name).peak("bf16") for rate, name in zip(forward, names, strict=True)]
    assert shares[0] > shares[1] > shares[2]
    assert forward[3] > 1.25 * forward[2]
    assert backward[3] > backward[2]


def test_few_heads_leave_multiprocessors_without_attention():
    # SimuMax's profile of a B200, 4,096 tokens: 128 heads reach 3.2 times the rate of 8
    device = gpu("b200")
    machine = Machine(device, links_of(device, 8), Coefficients())
    few, many = (float(fused_attention(machine, 4096.0, 4096.0, float(heads), 128, 128)[0]) / heads for heads in (8, 128))
    assert 1.8 < few / many < 3.5


def test_short_rows_of_scores_are_slower():
    assert 0.5 < attention("h100", keys=512)[0] / attention("h100", keys=16384)[0] < 0.7
