"""What every pipeline stage holds."""

from __future__ import annotations

import numpy as np
import pytest

from search_spaces.columns import Column, Columns
from search_spaces.config import TrialConfig
from search_spaces.model import ModelSpec, Workload
from search_spaces.pipeline_stages import Split, StageKind, chunks, splits, stage_table, stages

MODEL = ModelSpec(num_layers=8, hidden_size=64, num_attention_heads=4, vocab_size=100)
MOE = ModelSpec(
    num_layers=8, hidden_size=64, num_attention_heads=4, vocab_size=100, num_experts=4, moe_layer_freq=(0, 0, 1, 1, 1, 1, 1, 1)
)


def split(pp, vpp=1, first=0, last=0, layout=None, embedding=False, loss=False):
    return Split(pp, vpp, first, last, layout, embedding, loss)


def test_even_split():
    assert stages(MODEL, split(2)) == (StageKind(4, 0, 1, 0, 0), StageKind(4, 0, 0, 1, 0))


def test_uneven_ends():
    assert [stage.dense for stage in stages(MODEL, split(3, first=1, last=3))] == [1, 4, 3]


def test_embedding_and_loss_count_as_layers():
    model = MODEL.model_copy(update={"num_layers": 6})
    assert [stage.dense for stage in stages(model, split(4, embedding=True, loss=True))] == [1, 2, 2, 1]


def test_interleaving_deals_chunks_round():
    assert stages(MOE, split(2, vpp=2)) == (StageKind(2, 2, 1, 0, 0), StageKind(0, 4, 0, 1, 0))


def test_layout_with_mtp():
    model = MOE.model_copy(update={"mtp_num_layers": 1})
    assert stages(model, split(2, layout="Ettt|tttttmL")) == (StageKind(2, 1, 1, 0, 0), StageKind(0, 5, 0, 1, 1))


@pytest.mark.parametrize(
    ("cut", "sizes"),
    [
        (split(4, first=1, last=3), [1, 3, 3, 3]),
        (split(4, embedding=True, loss=True), [2, 3, 3, 2]),
        (split(2, vpp=2, first=4), [2, 3, 2, 3]),
        (split(4, layout="Et|tttt|tttt|tL"), [1, 4, 4, 1]),
        (split(4, vpp=2, layout="Et|t|t|t|t|t|tt|ttL"), [1, 1, 1, 1, 1, 1, 2, 2]),
    ],
)
def test_layers_of_chunks_in_the_order_of_the_model(cut, sizes):
    held = chunks(MODEL.model_copy(update={"num_layers": 10}), cut)
    assert [len(chunk.layers) for chunk in held] == sizes
    assert [chunk.embedding for chunk in held] == [True] + [False] * (len(sizes) - 1)
    assert [chunk.loss for chunk in held] == [chunk.norm for chunk in held] == [False] * (len(sizes) - 1) + [True]


def test_the_final_norm_follows_the_last_decoder_layer_where_prediction_layers_come_after():
    model = MOE.model_copy(update={"mtp_num_layers": 1})
    held = chunks(model, split(4, layout="Ettt|tttt|t|mL"))
    assert [chunk.norm for chunk in held] == [False, False, True, False]
    assert [chunk.mtp for chunk in held] == [0, 0, 0, 1]


def test_layers_per_chunk_are_chunks():
    workload = Workload(model=MODEL, world_size=8, global_batch_size=8, seq_length=16)
    config = TrialConfig(pipeline_model_parallel_size=2, num_layers_per_virtual_pipeline_stage=1)
    (cut,) = splits(Columns.of(workload, config))
    assert cut == split(2, vpp=4)


def test_layers_that_do_not_divide_are_all_there():
    assert sum(stage.dense for stage in stages(MODEL, split(3))) == 8


def test_table_keeps_one_entry_per_kind():
    workload = Workload(model=MODEL, world_size=8, global_batch_size=8, seq_length=16)
    codes = np.array([0, 1, 1])
    table = stage_table(Columns(workload, {"pipeline_model_parallel_size": Column((1, 8), codes)}, TrialConfig()))
    assert table.numbers.shape == (3, 6, 2)
    assert table.numbers[:, 5, 1].tolist() == [1, 6, 1]
