"""Recipes: what is shipped, whose family a model is of, and which candidates they point at."""

from __future__ import annotations

import csv
from dataclasses import replace

import numpy as np
import pytest

from benchmarks import write_recipes
from benchmarks.timed_rows import read
from search_spaces import recipes as module
from search_spaces.config import TrialConfig
from search_spaces.gpus import gpu
from search_spaces.model import ModelSpec, Workload
from search_spaces.prediction import Machines, predict
from search_spaces.recipes import Recipe, nearest, recipes, starts
from search_spaces.space import SearchSpace

LLAMA = ModelSpec(num_layers=32, hidden_size=4096, ffn_hidden_size=11008, num_attention_heads=32, vocab_size=32000)
EXPERTS = LLAMA.model_copy(update={"num_experts": 8, "num_layers": 8})
TP, PP, MBS = "tensor_model_parallel_size", "pipeline_model_parallel_size", "micro_batch_size"
H100 = gpu("h100-sxm")


def workload(model=LLAMA, seq_length=4096, world_size=8):
    return Workload(model=model, world_size=world_size, global_batch_size=64, seq_length=seq_length)


def recipe(name="made-up", model=LLAMA, gpu="h100-sxm", gpus=8, seq_length=4096, per_gpu=8, **knobs):
    config, batch = TrialConfig(**knobs), per_gpu * gpus
    return Recipe(
        name=name, model=model, gpu=gpu, gpus=gpus, global_batch_size=batch, seq_length=seq_length, config=config, source="table 1"
    )


@pytest.fixture
def shipped(monkeypatch):
    """Replaces the shipped recipes."""
    return lambda *found: monkeypatch.setattr(module, "recipes", lambda: found)


@pytest.fixture(scope="module")
def table():
    search = {TP: [1, 2, 4, 8], PP: [1, 2], MBS: [1, 2, 4], "recompute": ["none", "full"]}
    return SearchSpace(workload(), search, base=TrialConfig(use_distributed_optimizer=True)).table()


def found(table, taken=(), allowed=None):
    predictions = predict(table.columns, Machines.shipped(H100, 8))
    return starts(table, H100, np.ones(len(table), dtype=np.bool_) if allowed is None else allowed, predictions, taken)


def test_every_shipped_recipe_has_a_known_gpu_a_source_and_a_split_that_its_gpus_hold():
    assert 40 <= len(recipes()) <= 80
    for one in recipes():
        own = one.config
        ranks = own.tensor_model_parallel_size * own.pipeline_model_parallel_size * own.context_parallel_size
        assert gpu(one.gpu).memory_gib > 0 and one.source
        assert one.gpus % ranks == 0
        assert one.global_batch_size % (own.micro_batch_size * one.gpus // ranks) == 0


def test_there_is_one_per_model_gpus_and_batch_of_at_least_three_sources():
    keys = [_key(one) for one in recipes()]
    assert len(keys) == len(set(keys))
    assert len({one.source.split(",")[0] for one in recipes()}) >= 3
    assert {one.model.is_moe for one in recipes()} == {False, True}


def test_the_script_takes_the_fastest_of_every_model_gpus_and_batch(shared):
    folder = shared / "data" / "published"
    lines = write_recipes.fastest(write_recipes.usable(folder))
    found = {_key(Recipe.model_validate(write_recipes.entry(row, raw))): row for row, raw in lines}
    assert len(found) >= 20
    with (folder / "throughput.csv").open(newline="") as file:
        names = {line["id"]: line["model"] for line in csv.DictReader(file)}
    for row in read(folder):
        key = names.get(row.id), row.gpu.name, row.measured.workload.world_size, row.measured.workload.global_batch_size
        if row.source in write_recipes.SOURCES and key in found:
            assert write_recipes._speed(row) <= write_recipes._speed(found[key])


def test_of_a_family_the_nearest_is_first(shipped):
    far, near = recipe("far", gpus=512), recipe("near")
    shipped(far, near)
    assert nearest(workload(), H100) == [near, far]


@pytest.mark.parametrize(
    "other",
    [
        recipe(model=EXPERTS),
        recipe(model=LLAMA.model_copy(update={"num_layers": 64})),
        recipe(model=LLAMA.model_copy(update={"hidden_size": 6144})),
        recipe(seq_length=16384),
        recipe(gpu="b300"),
        recipe(per_gpu=16),
        recipe(per_gpu=4),
        recipe(gpus=4, per_gpu=16),
    ],
    ids=[
        "experts",
        "twice the layers",
        "2.2 times the parameters per layer",
        "four times the tokens",
        "3.6 times the memory",
        "twice the batch",
        "half the batch",
        "the same batch on half the GPUs",
    ],
)
def test_another_kind_of_model_or_machine_is_no_family(shipped, other):
    shipped(other)
    assert nearest(workload(), H100) == []


def test_a_recipe_points_at_the_fastest_predicted_candidate_of_its_split(shipped, table):
    shipped(recipe(**{TP: 2, MBS: 2}))
    (start,), left_out = found(table)
    seconds = predict(table.columns, Machines.shipped(H100, 8)).step_time_s
    agreeing = [row for row in range(len(table)) if (c := table.config(row)) and _split(c) == (2, 1, 2)]
    assert len(agreeing) == 2
    assert start.row == min(agreeing, key=lambda row: seconds[row])
    assert left_out == []


def test_at_most_two_and_never_one_that_is_tried_anyway(shipped, table, monkeypatch):
    monkeypatch.setattr(Machines, "step_time_error", 1.0)  # whatever is predicted, errors explain it
    every = [recipe(f"{tp} {mbs}", **{TP: tp, MBS: mbs}) for tp, mbs in ((2, 1), (2, 2), (2, 2), (4, 1), (4, 2))]
    shipped(*every)
    first, _ = found(table)
    others, left_out = found(table, taken=[first[0].row])
    assert len(first) == 2
    assert [_split(table.config(start.row)) for start in others] == [(2, 1, 2), (4, 1, 1)]
    assert [line.split(": ")[1] for line in left_out] == ["points at a candidate that is tried anyway"] * 2


@pytest.mark.parametrize(
    ("knobs", "why"),
    [
        ({PP: 4}, "no legal candidate has its split"),
        ({TP: 4}, "may not be launched here"),
        ({TP: 1, MBS: 4}, "is predicted to fit"),
    ],
)
def test_a_recipe_without_a_candidate_is_left_out_with_the_reason(shipped, table, knobs, why):
    big = workload(model=LLAMA.model_copy(update={"num_layers": 48}), seq_length=8192)
    large = SearchSpace(big, {TP: [1, 2, 4, 8], MBS: [1, 2, 4]}, base=TrialConfig()).table()
    of = large if MBS in knobs else table
    shipped(recipe(model=of.workload.model, seq_length=of.workload.seq_length, **knobs))
    allowed = np.array([of.config(row).tensor_model_parallel_size != 4 for row in range(len(of))])
    starting, (line,) = found(of, allowed=allowed)
    assert starting == []
    assert why in line and line.startswith("made-up on 8 x h100-sxm (table 1): ")


def test_a_recipe_predicted_slower_than_errors_explain_is_left_out_with_the_reason(shipped, table):
    predictions = predict(table.columns, Machines.shipped(H100, 8))
    fastest = predictions.step_time_s[predictions.fits != "does_not_fit"].min()
    shipped(recipe(**{TP: 8, MBS: 1}))
    (row,) = (row for row in range(len(table)) if _split(table.config(row)) == (8, 1, 1) and _recomputes_nothing(table, row))
    slower = predictions.step_time_s[row] / fastest

    def with_error(error):
        known = replace(predictions, machines=replace(predictions.machines, trials=9, own_error=error))
        return starts(table, H100, np.ones(len(table), dtype=np.bool_), known, ())

    enough = (slower - 1.0) / (slower + 1.0)
    (start,), _ = with_error(enough * 1.01)
    none, (line,) = with_error(enough * 0.99)
    assert slower > 1.2 and start.row == row
    assert none == [] and "slower than the fastest" in line


def _recomputes_nothing(table, row):
    return table.config(row).recompute_granularity is None


def _split(config):
    return config.tensor_model_parallel_size, config.pipeline_model_parallel_size, config.micro_batch_size


def _key(one):
    return one.name, one.gpu, one.gpus, one.global_batch_size
