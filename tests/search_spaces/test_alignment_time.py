"""Products whose rows do not begin at whole vectors: unpadded vocabularies, odd widths."""

from __future__ import annotations

import numpy as np
import pytest

from search_spaces.coefficients import Coefficients, shipped
from search_spaces.columns import Columns
from search_spaces.config import TrialConfig
from search_spaces.gpus import gpu, links_of
from search_spaces.kernels import Machine, alignment, linear
from search_spaces.model import ModelSpec, Workload
from search_spaces.step_ends import held_parameters
from search_spaces.step_time import estimate

DEVICE = gpu("h100")
LINKS = links_of(DEVICE, 8)


def workload(words: int, multiple: int) -> Workload:
    """A small model with so many words, padded to a multiple."""
    model = ModelSpec(
        num_layers=2, hidden_size=1024, num_attention_heads=16, vocab_size=words, make_vocab_size_divisible_by=multiple
    )
    return Workload(model=model, world_size=8, global_batch_size=8, seq_length=1024)


def test_rows_at_odd_elements_take_turings_kernels_and_newer_devices_lose_more():
    older, newer = gpu("a100"), gpu("h100")
    even, odd = alignment(older, 4096, 50260), alignment(older, 4096, 50257)
    assert 1.5 < even < 2 < odd < 3
    assert alignment(newer, 4096, 50260) / even == pytest.approx(newer.operations_per_clock / 2048, rel=0.01)
    assert alignment(newer, 588, 1152) / alignment(newer, 592, 1152) == pytest.approx(3.53, rel=0.2)


def test_padding_gpt_2s_vocabulary_saves_what_pytorch_measured():
    """113 to 87 ms on an A100, 12 sequences of 1,024 tokens."""
    device = gpu("a100-sxm4-80gb")
    machine = Machine(device, LINKS, shipped(device.name))
    rate = machine.gemm_rate(np.bool_(False), np.bool_(False))
    unpadded, padded = (sum(linear(machine, rate, 12288.0, 768, words)) for words in (50257, 50304))
    assert unpadded - padded == pytest.approx(0.026, rel=0.25)


@pytest.mark.parametrize(("words", "slow"), [(50257, True), (50304, False)])
def test_words_that_nothing_pads_slow_the_head_and_megatrons_padding_does_not(words, slow):
    unpadded, padded = (
        estimate(Columns.of(workload(words, multiple), TrialConfig()), DEVICE, LINKS, Coefficients()).step_time_s[0]
        for multiple in (1, 128)
    )
    assert (unpadded > 1.1 * padded) == slow


def test_each_rank_pads_for_its_tensor_parallel_size():
    """50,257 words on two ranks are 25,129 each, on eight 6,283, odd both."""
    table = workload(50257, 1)
    columns = Columns.of(table, TrialConfig(tensor_model_parallel_size=8))
    assert float(held_parameters(columns)["embedding"].plain[0]) == 6283 * 1024
