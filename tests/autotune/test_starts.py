"""Where a study starts: the baseline, then what recipes point at, once each and with where it comes from, then the sampler."""

from __future__ import annotations

from typing import Any

import pytest
from optuna.storages import InMemoryStorage

from autotune.pool_study import PoolStudy
from autotune.records import Phase
from autotune.report import results_json
from autotune.tracking.upload import trial_upload
from benchmarks import replay_spaces, twin_worlds
from launchers.outcome import Outcome
from search_spaces import recipes
from search_spaces.config import TrialConfig
from search_spaces.prediction import Machines

from .study_cases import NoLauncher, completed, failed, optuna_study, run_to_end, study_spec
from .test_search_replay import rows

TP, MBS = "tensor_model_parallel_size", "micro_batch_size"
MODEL = {"num_layers": 32, "hidden_size": 4096, "ffn_hidden_size": 11008, "num_attention_heads": 32, "vocab_size": 32000}
STUDY: dict[str, Any] = {
    "model": MODEL,
    "pools": [{"name": "h100", "gpu": "h100-sxm", "gpus_per_node": 8}],
    "seq_length": 4096,
    "global_batch_size": 64,
    "search": {TP: [1, 2, 4, 8], MBS: [1, 2, 4], "sequence_parallel": [False, True]},
    "baseline": {TP: 8, "use_distributed_optimizer": True},
}
SPLITS = ((2, 1), (4, 2))


@pytest.fixture(autouse=True)
def published(monkeypatch: pytest.MonkeyPatch) -> None:
    def one(tp: int, mbs: int) -> recipes.Recipe:
        config = TrialConfig(**{TP: tp, MBS: mbs})
        figures = {"gpu": "h100-sxm", "gpus": 8, "global_batch_size": 64, "seq_length": 4096, "config": config}
        return recipes.Recipe.model_validate({"name": f"tp{tp}", "model": MODEL, "source": f"table {tp}", **figures})

    monkeypatch.setattr(Machines, "step_time_error", 1.0)  # whatever is predicted, errors explain it
    monkeypatch.setattr(recipes, "recipes", lambda: tuple(one(tp, mbs) for tp, mbs in SPLITS))


def study(storage: InMemoryStorage | None = None, launcher: NoLauncher | None = None, **fields: Any) -> PoolStudy:
    spec = study_spec(**{**STUDY, **fields})
    return PoolStudy(spec, spec.pools[0], launcher or NoLauncher(), storage or InMemoryStorage(), lambda study, record: None)


def split(config: TrialConfig) -> tuple[int, int]:
    return config.tensor_model_parallel_size, config.micro_batch_size


@pytest.mark.parametrize("sampler", ["residual", "tpe", "grid"])
def test_recipes_run_right_after_the_baseline_with_where_they_come_from(sampler: str) -> None:
    own = study(sampler=sampler, budget={"trials": 5})
    proposals = run_to_end(own, lambda proposal: completed())
    assert [proposal.phase for proposal in proposals[:3]] == [Phase.BASELINE, Phase.EXPLORE, Phase.EXPLORE]
    assert [split(proposal.config) for proposal in proposals[1:3]] == list(SPLITS)
    assert [bool(proposal.why) for proposal in proposals] == [False, True, True, False, False]
    assert own.records[1].why == "recipe: tp2 on 8 x h100-sxm (table 2)"
    assert trial_upload(own.records[1]).tags["autotune.why"] == own.records[1].why
    assert results_json([own.results()], trials=True)[0]["trials"][1]["why"] == own.records[1].why


def test_several_at_once_are_the_baseline_both_recipes_and_different_proposals() -> None:
    own = study(sampler="residual")
    configs = [own.propose().config for _ in range(6)]  # type: ignore[union-attr]
    assert [split(config) for config in configs[:3]] == [(8, 1), *SPLITS]
    assert len(set(configs)) == 6


def test_a_resumed_study_goes_on_where_it_was() -> None:
    storage = InMemoryStorage()
    first = study(storage)
    for _ in range(2):
        first.finish(first.propose(), completed())  # type: ignore[arg-type]
    again = study(storage)
    proposals = [again.propose(), again.propose()]
    assert [bool(proposal.why) for proposal in proposals if proposal] == [True, False]
    assert split(proposals[0].config) == SPLITS[1]  # type: ignore[union-attr]


def test_a_recipe_that_a_later_driver_would_point_elsewhere_is_not_tried_twice() -> None:
    storage = InMemoryStorage()
    first = study(storage)
    for _ in range(3):
        first.finish(first.propose(), completed())  # type: ignore[arg-type]
    again = study(storage)
    tried = {record.config for record in again.records}
    elsewhere = next(c for row in range(len(again.table)) if (c := again.table.config(row)) not in tried)
    again.starts = type(again.starts)({elsewhere: first.records[1].why})
    assert again.starts.next(again.candidates, again.records) is None


def test_a_recipe_that_was_lost_is_tried_again_and_keeps_its_name() -> None:
    own = study()
    own.finish(own.propose(), completed())  # type: ignore[arg-type]
    lost = own.finish(own.propose(), failed(Outcome.LOST))  # type: ignore[arg-type]
    retried = own.propose()
    assert retried is not None and (retried.config, retried.why) == (lost.config, lost.why)


def test_what_may_not_be_launched_is_left_out_with_the_reason() -> None:
    own = study(launcher=NoLauncher(lambda config: config.tensor_model_parallel_size == 2))
    proposals = run_to_end(own, lambda proposal: completed())
    assert [split(proposal.config) for proposal in proposals if proposal.why] == [SPLITS[1]]
    (line,) = own.starts.left_out
    assert line.startswith("tp2 on 8 x h100-sxm (table 2): ") and "may not be launched here" in line


@pytest.mark.parametrize("fields", [{"recipes": False}, {"pools": [{"name": "laptop", "gpu": "cpu", "gpus_per_node": 8}]}])
def test_none_where_the_study_wants_none_or_nothing_is_known_of_the_machine(fields: dict[str, Any]) -> None:
    own = study(**fields)
    proposals = run_to_end(own, lambda proposal: completed())
    assert not [proposal for proposal in proposals if proposal.why]
    assert own.starts.left_out == ()


def test_a_start_is_an_ordinary_trial_of_the_storage() -> None:
    own = study()
    for _ in range(2):
        own.finish(own.propose(), completed())  # type: ignore[arg-type]
    trial = optuna_study(own).trials[1]
    assert trial.state.is_finished() and own.candidates.config(trial.params) == own.records[1].config


def test_replayed_tables_are_searched_without_recipes() -> None:
    assert replay_spaces.space_of(list(rows())).spec.recipes is False


def test_no_recipe_is_of_the_twins_family(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    world = twin_worlds.World("physics", 0, 10)
    own = PoolStudy(world.spec, world.spec.pools[0], world.launcher(), InMemoryStorage(), lambda study, record: None)
    assert own.starts.next(own.candidates, own.records) is None
