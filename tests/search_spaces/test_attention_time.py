"""Seconds of attention: products, exponentials, few heads and short rows against published kernels; softmax of stored scores."""

from __future__ import annotations

import pytest

from search_spaces.coefficients import Coefficients
from search_spaces.columns import Columns
from search_spaces.config import TrialConfig
from search_spaces.gpus import gpu, links_of
from search_spaces.kernels import Machine, fused_attention, softmax_apart
from search_spaces.model import ModelSpec, Workload
from search_spaces.step_time import estimate


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


def test_four_matrices_of_scores_at_a_time_go_through_the_fused_softmax():
    # fused_softmax.py is_kernel_available: batch x heads a multiple of four, up to 4,096 keys
    assert [float(softmax_apart(scores, 2048)) for scores in (1, 2, 3, 4, 6, 8)] == [1, 1, 1, 0, 1, 0]
    assert [float(softmax_apart(4, keys)) for keys in (16, 20, 4094, 4096, 8192)] == [1, 0, 1, 0, 1]


def test_a_softmax_of_its_own_passes_over_the_scores_more_often():
    model = ModelSpec(num_layers=2, hidden_size=2048, num_attention_heads=16, vocab_size=51200)
    workload = Workload(model=model, world_size=8, global_batch_size=8, seq_length=1024)
    device = gpu("a100")

    def attention_s(ranks: int, micro_batch: int) -> float:
        config = TrialConfig(tensor_model_parallel_size=ranks, micro_batch_size=micro_batch, attention_backend="unfused")
        return float(estimate(Columns.of(workload, config), device, links_of(device, 8), Coefficients()).parts["attention"][0])

    assert attention_s(8, 1) > 1.5 * attention_s(8, 2)
    assert attention_s(2, 1) == pytest.approx(attention_s(2, 2))
