"""The replay benchmark on a made-up table: every row is tried once, and what is counted is what was measured."""

from dataclasses import replace

import pytest

from benchmarks import replay_recipes, replay_spaces, search_replay
from benchmarks.timed_rows import TimedRow
from search_spaces.calibration import Measured
from search_spaces.config import TrialConfig
from search_spaces.gpus import gpu, links_of
from search_spaces.model import ModelSpec, Workload
from search_spaces.prediction import Machines

MODEL = ModelSpec(num_layers=8, hidden_size=1024, num_attention_heads=16, vocab_size=32000)
WORKLOAD = Workload(model=MODEL, world_size=8, global_batch_size=32, seq_length=1024)
SIZES = [(tp, pp, mbs) for tp in (1, 2, 4) for pp in (1, 2) for mbs in (1, 2)]


def rows(seconds=lambda tp, pp, mbs: 0.1 * tp * pp / mbs):
    device = gpu("a100-sxm4-80gb")
    for tp, pp, mbs in SIZES:
        # 16-bit gradients without a precision-aware optimiser: another framework's run, not legal for Megatron.
        config = TrialConfig(
            tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp, micro_batch_size=mbs, main_grads_dtype="bf16"
        )
        yield TimedRow("made-up", "vtrain", device, links_of(device, 8), Measured(WORKLOAD, config, seconds(tp, pp, mbs)))


@pytest.fixture(scope="module")
def space():
    return replay_spaces.space_of(list(rows()))


@pytest.mark.parametrize("method", ["residual", "random", "grid", "tpe", "prediction", "rule"])
def test_every_method_tries_every_row_once_and_nothing_else(space, method):
    assert sorted(search_replay.walk(space, method, 0, 100)) == pytest.approx(sorted(space.seconds.values()))


def test_all_rows_are_candidates_whatever_the_source_ran_them_with(space):
    assert (len(space.seconds), space.left_out) == (12, 0)
    assert len(space.predictions()) == len(space.table) == 12


def test_a_row_measured_twice_is_one_candidate():
    twice = replay_spaces.space_of([*rows(), *rows(lambda tp, pp, mbs: 0.4 * tp * pp / mbs)])
    assert min(twice.seconds.values()) == pytest.approx((0.05 * 0.2) ** 0.5)


def vtrain(tmp_path, **changes):
    """A folder with a table of vTrain's alone, twice: as it is and changed."""
    names = "n_gpus,global_batch,micro_batch,hidden,heads,layers,seq_len,tp,dp,pp,iteration_time_ms,set"
    lines = [names]
    for tp, pp, mbs in SIZES:
        own = f"8 32 {mbs} 1024 16 8 1024 {tp} {8 // tp // pp} {pp} {100 * tp * pp / mbs} single"
        row = dict(zip(names.split(","), own.split(), strict=True))
        lines += [",".join(row.values()), ",".join({**row, **changes}.values())]
    (tmp_path / "vtrain_a100.csv").write_text("\n".join(lines) + "\n")
    return tmp_path


@pytest.mark.parametrize("change", [{"heads": "8"}, {"seq_len": "2048"}])
def test_spaces_whose_names_say_the_same_are_two(tmp_path, change):
    found = replay_spaces.spaces(vtrain(tmp_path, **change))
    assert [space.name for space in found] == ["vtrain-h1024-L8-g8-b32", "vtrain-h1024-L8-g8-b32-2"]
    assert [space.spec.name for space in found] == [space.name for space in found]


def test_machines_of_any_number_of_gpus_are_whole_nodes():
    load = WORKLOAD.model_copy(update={"world_size": 12, "global_batch_size": 96})
    space = replay_spaces.space_of([replace(row, measured=replace(row.measured, workload=load)) for row in rows()])
    assert (space.spec.pools[0].nodes, space.spec.pools[0].gpus_per_node) == (2, 6)
    assert (len(space.seconds), space.left_out) == (10, 2)  # TP 4 with two stages does not divide 12


def test_the_rule_takes_fewest_ranks_then_the_largest_micro_batch(space):
    first, second, *_ = space.by_rule()
    assert (first.tensor_model_parallel_size * first.pipeline_model_parallel_size, first.micro_batch_size) == (1, 2)
    assert (second.tensor_model_parallel_size * second.pipeline_model_parallel_size, second.micro_batch_size) == (1, 1)


def test_an_entry_counts_trials_and_regret(space, monkeypatch):
    monkeypatch.setattr(search_replay, "walk", lambda *_: [0.06, 0.0520, 0.0508, 0.05, 0.3])
    found = search_replay.entry(space, "grid", 0, 5)
    assert (found["trials_to_5pct"], found["trials_to_2pct"], found["trials_to_best"]) == (2, 3, 4)
    assert found["regret_after"] == pytest.approx({"1": 0.2, "2": 0.04, "3": 0.016, "5": 0.0, "10": 0.0})
    monkeypatch.setattr(search_replay, "walk", lambda *_: [0.06])
    assert search_replay.entry(space, "grid", 0, 1)["trials_to_2pct"] is None


def test_a_search_after_another_space_starts_with_what_that_showed():
    """In both spaces tensor parallelism is a gain, which is not what is predicted."""

    def faster_with_tp(tp, pp, mbs):
        return pp / tp / mbs**0.1

    larger = WORKLOAD.model_copy(update={"global_batch_size": 64})
    one, other = (
        replay_spaces.space_of([replace(row, measured=replace(row.measured, workload=load)) for row in rows(faster_with_tp)])
        for load in (WORKLOAD, larger)
    )
    alone, after = search_replay.walk(one, "residual", 0, 100), search_replay.walk(one, "transfer", 0, 100, [other])
    assert after[0] < alone[0]
    assert sorted(after) == pytest.approx(sorted(one.seconds.values()))
    assert replay_spaces.neighbours(one, [one, other], same_model=True) == [other]
    assert replay_spaces.neighbours(one, [one, other], same_model=False) == []


def lines(*models):
    """Rows of other models, of which TP 4 with two stages and one sequence at a time is the fastest."""
    for model in models:
        load = WORKLOAD.model_copy(update={"model": model})
        for row in rows(lambda tp, pp, mbs: mbs / tp / pp):
            yield replace(row, measured=replace(row.measured, workload=load)), {"model": str(model), "vpp": "", "source": "table"}


@pytest.fixture
def published(monkeypatch):
    """Replaces what is read from the tables."""
    return lambda *models: monkeypatch.setattr(replay_recipes, "_lines", lambda folder: tuple(lines(*models)))


def test_a_search_from_recipes_begins_with_what_other_models_were_fastest_with(space, published, tmp_path, monkeypatch):
    monkeypatch.setattr(Machines, "step_time_error", 1.0)  # whatever is predicted, errors explain it
    published(MODEL.model_copy(update={"num_layers": 10}))
    starts = replay_recipes.starts_of(space, tmp_path, apart=False)
    tried = search_replay.walk(space, "recipes", 0, 100, starts=starts)
    assert tried[0] == pytest.approx(0.8)
    assert sorted(tried) == pytest.approx(sorted(space.seconds.values()))
    assert search_replay.entry(space, "recipes", 0, 1, starts=starts)["starts"] == 1


def test_no_recipe_is_of_the_space_s_own_model(space, published, tmp_path):
    other = MODEL.model_copy(update={"num_layers": 10})
    published(MODEL, MODEL.model_copy(update={"num_attention_heads": 8}), other)
    assert [recipe.model for recipe in replay_recipes.recipes_of_others(space, tmp_path, apart=False)] == [other]
    assert replay_recipes.recipes_of_others(space, tmp_path, apart=True) == []
    published(MODEL)
    assert not len(replay_recipes.starts_of(space, tmp_path, apart=False))


def test_recipes_of_the_published_tables_leave_the_space_s_rows_out(shared):
    folder = shared / "data" / "published"
    for space in replay_spaces.spaces(folder):
        found = replay_recipes.recipes_of_others(space, folder, apart=False)
        own = space.spec.model
        assert found
        assert not [one for one in found if (one.model.num_layers, one.model.hidden_size) == (own.num_layers, own.hidden_size)]


def test_misled_predictions_are_wrong_and_finite(space):
    right, wrong = space.predictions(), replay_spaces.mislead(space.predictions())
    talking = sum(part for name, part in right.times.parts.items() if name.endswith("_comm"))
    assert wrong.step_time_s == pytest.approx(right.step_time_s + 2.0 * talking)


def test_published_tables_are_read_whole(shared):
    found = replay_spaces.spaces(shared / "data" / "published")
    assert len(found) >= 50
    assert sum(space.left_out for space in found) == 0
    assert len({space.name for space in found}) == len(found)


def test_a_folder_without_tables_is_refused(tmp_path, monkeypatch, capsys):
    (tmp_path / "throughput.csv").write_text("id,status\n")
    monkeypatch.setattr("sys.argv", ["search_replay.py", str(tmp_path)])
    with pytest.raises(SystemExit) as ended:
        search_replay.main()
    assert ended.value.code == 2
    assert "no table with enough" in capsys.readouterr().err
