"""What earlier studies of the same machines tell a new one: which trials count, what they change, and what they must not."""

from __future__ import annotations

from functools import cache
from typing import Any

import optuna
import pytest
from optuna.storages import BaseStorage, InMemoryStorage

from autotune import parent_run
from autotune.earlier import ALIKE, ALIKE_PER_DOUBLING, CHOSEN, MOST_TRIALS, alike_to, earlier_studies
from autotune.earlier import MACHINES as MACHINES_OF
from autotune.machines import machines_of
from autotune.pool_study import PoolStudy
from autotune.records import TrialRecord
from autotune.refit import Refit
from autotune.report import results_json
from launchers.outcome import Outcome
from search_spaces.columns import Columns
from search_spaces.config import TrialConfig
from search_spaces.prediction import Predictions, predict

from .study_cases import NoLauncher, completed, failed, optuna_study, run_to_end, study_spec

TP, PP, MBS = "tensor_model_parallel_size", "pipeline_model_parallel_size", "micro_batch_size"
POOL = {"name": "h100", "gpu": "h100-sxm", "gpus_per_node": 8}
MODEL = {"num_layers": 32, "hidden_size": 4096, "ffn_hidden_size": 11008, "num_attention_heads": 32, "vocab_size": 32000}
STUDY: dict[str, Any] = {
    "model": MODEL,
    "pools": [POOL],
    "seq_length": 4096,
    "global_batch_size": 64,
    "search": {TP: [1, 2, 4, 8], PP: [1, 2, 4, 8], MBS: [1, 2, 4], "recompute": ["none", "full"]},
    "baseline": {TP: 8, "use_distributed_optimizer": True, "sequence_parallel": True},
    "recipes": False,
    "sampler": "residual",
    "budget": {"trials": 16, "confidence": None},
}
MACHINES = machines_of(study_spec(**STUDY).pools[0])


def predicted(columns: Columns) -> Predictions:
    return predict(columns, MACHINES)


def opened(storage: BaseStorage, **fields: Any) -> PoolStudy:
    """A study whose sampler starts from shipped predictions; nothing is refitted."""
    spec = study_spec(**{**STUDY, **fields})
    study = PoolStudy(spec, spec.pools[0], NoLauncher(), storage, lambda study, record: None, predictor=predicted)
    study.refit = Refit(study.name, study.table, None, ("", ""), None)
    return study


def seconds(study: PoolStudy, config: TrialConfig, slow: int = 0) -> float:
    """As predicted, but for three times as long with pipelines of `slow` stages."""
    found = float(predicted(Columns.of(study.workload, config)).step_time_s[0])
    return found * (3.0 if config.pipeline_model_parallel_size == slow else 1.0)


def run(study: PoolStudy, slow: int = 0, factor: float = 1.0) -> list[TrialConfig]:
    """All of its trials."""
    return [one.config for one in run_to_end(study, lambda p: completed(factor * seconds(study, p.config, slow)))]


def before(storage: BaseStorage, slow: int = 0, factor: float = 1.0, **fields: Any) -> PoolStudy:
    """A study of twice the global batch that has ended."""
    study = opened(storage, **{"name": "before", "global_batch_size": 128, "sampler": "random", **fields})
    run(study, slow, factor)
    return study


def measured(study: PoolStudy) -> list[TrialRecord]:
    """Its trials that were run: points that Megatron refuses are proposed, too."""
    return [record for record in study.records if record.outcome is Outcome.COMPLETED]


@cache
def best_stages() -> int:
    """Pipeline stages of what is predicted best: the first proposal without anything before."""
    return run(opened(InMemoryStorage(), budget={"trials": 2, "confidence": None}))[1].pipeline_model_parallel_size


def test_an_earlier_study_that_contradicts_the_prediction_changes_the_first_proposal() -> None:
    storage, slow = InMemoryStorage(), best_stages()
    before(storage, slow)
    first = run(opened(storage, budget={"trials": 2, "confidence": None}), slow)[1]
    assert first.pipeline_model_parallel_size != slow


def test_one_that_agrees_with_the_prediction_leaves_the_first_proposal() -> None:
    storage, short = InMemoryStorage(), {"trials": 2, "confidence": None}
    before(storage)
    assert run(opened(storage, budget=short)) == run(opened(InMemoryStorage(), budget=short))


def test_a_constant_factor_between_studies_says_nothing() -> None:
    orders = []
    for factor in (1.0, 3.0):
        storage = InMemoryStorage()
        before(storage, best_stages(), factor)
        orders.append(run(opened(storage, budget={"trials": 5, "confidence": None})))
    assert orders[0] == orders[1]


def test_a_few_trials_outvote_what_was_elsewhere() -> None:
    """Elsewhere the best pipelines took three times as long, here they take what is predicted: found after five own trials."""
    storage, slow = InMemoryStorage(), best_stages()
    before(storage, slow)
    study = opened(storage, budget={"trials": 6, "confidence": None})
    tried = [seconds(study, config) for config in run(study)]
    best = float(predicted(study.table.columns).step_time_s.min())
    assert tried[1] > 1.02 * best
    assert min(tried) <= 1.02 * best


def test_nothing_of_an_earlier_study_is_a_trial_of_the_new_one() -> None:
    """The earlier one was a hundred times as fast, over the same candidates."""
    storage = InMemoryStorage()
    before(storage, factor=0.01, global_batch_size=64)
    study = opened(storage, budget={"trials": 6, "confidence": None})
    run(study)
    assert study.best is not None and study.best in study.records
    assert study.best.metrics["step_time_s"] > 0.5 * min(seconds(study, record.config) for record in study.records)
    assert len(optuna_study(study).trials) == len(study.records) == study.launched == 6
    assert study.results().spent.trials == 6
    assert {record.study for record in study.records} == {study.name}
    assert study._sampler._inner.seen(optuna_study(study)).rows == [study.table.find(one.config) for one in study.records]  # type: ignore[union-attr]


def test_a_resumed_study_starts_with_the_trials_it_began_with() -> None:
    """The earlier one went on meanwhile and contradicts itself, and a third was added."""
    storage, slow = InMemoryStorage(), best_stages()
    before(storage, slow)
    whole = run(opened(storage, name="whole", budget={"trials": 5, "confidence": None}), slow)

    storage = InMemoryStorage()
    before(storage, slow)
    first = run(opened(storage, name="whole", budget={"trials": 3, "confidence": None}), slow)
    before(storage, 0, budget={"trials": 40, "confidence": None})
    before(storage, 0, name="another", global_batch_size=64)
    again = run(opened(storage, name="whole", budget={"trials": 5, "confidence": None}), slow)
    assert first + again == whole


def test_an_earlier_study_that_is_gone_is_done_without() -> None:
    storage = InMemoryStorage()
    earlier = before(storage)
    run(opened(storage, budget={"trials": 3, "confidence": None}))
    storage.delete_study(storage.get_study_id_from_name(earlier.name))
    again = opened(storage, budget={"trials": 4, "confidence": None})
    assert len(run(again)) == 1


@pytest.mark.parametrize("fields", [{"transfer": False}, {"sampler": "tpe"}])
def test_switched_off_or_under_another_sampler_nothing_is_taken(fields: dict[str, Any]) -> None:
    storage, slow = InMemoryStorage(), best_stages()
    before(storage, slow)
    fields = {**fields, "budget": {"trials": 5, "confidence": None}}
    study = opened(storage, **fields)
    assert study.results().earlier == ""
    assert run(study, slow) == run(opened(InMemoryStorage(), **fields), slow)


EXPERTS = {**MODEL, "num_experts": 8, "moe_ffn_hidden_size": 1024}


@pytest.mark.parametrize(
    ("fields", "taken"),
    [
        ({}, True),
        ({"model": {**MODEL, "num_layers": 16}}, True),
        ({"seq_length": 2048, "search": {TP: [1, 2], MBS: [1, 2]}}, True),
        ({"pools": [{**POOL, "nodes": 2}]}, True),
        ({"model": EXPERTS}, False),
        ({"pools": [{**POOL, "name": "other"}]}, False),
        ({"pools": [{**POOL, "gpu": "a100-sxm4-80gb"}]}, False),
        ({"pools": [{**POOL, "environment": {"python": "/other/python"}}]}, False),
        ({"launcher": "simulated"}, False),
    ],
)
def test_what_is_comparable(fields: dict[str, Any], taken: bool) -> None:
    storage = InMemoryStorage()
    earlier = before(storage, budget={"trials": 6, "confidence": None}, **{"global_batch_size": 64, **fields})
    assert [one.name for one in found_by(opened(storage))] == ([earlier.name] if taken else [])


def found_by(study: PoolStudy) -> tuple[Any, ...]:
    return study._sampler._inner._earlier.studies  # type: ignore[union-attr, no-any-return]


def test_rehearsals_of_another_seed_are_other_machines() -> None:
    storage, fields = InMemoryStorage(), {"launcher": "simulated", "budget": {"trials": 6, "confidence": None}}
    before(storage, **fields)
    assert found_by(opened(storage, name="same", **fields))
    assert not found_by(opened(storage, name="other", seed=1, **fields))


def test_failed_and_disturbed_trials_do_not_count() -> None:
    storage = InMemoryStorage()
    study = opened(storage, name="before", sampler="grid", budget={"trials": 6, "confidence": None})
    ends = iter([completed(), failed(Outcome.OOM), completed(), failed(Outcome.CRASHED), completed(), completed()])
    run_to_end(study, lambda proposal: next(ends))
    (found,) = found_by(opened(storage))
    assert [record.number for record in found.records] == [0, 2, 4, 5]


def test_a_single_configuration_tells_nothing_apart() -> None:
    storage = InMemoryStorage()
    before(storage, budget={"trials": 1, "confidence": None})
    assert found_by(opened(storage)) == ()


def test_of_many_trials_some_are_taken_from_the_slowest_to_the_fastest() -> None:
    storage = InMemoryStorage()
    earlier = before(storage, budget={"trials": 40, "confidence": None})
    (found,) = found_by(opened(storage))
    speeds = [record.metrics["tokens_per_s_per_gpu"] for record in found.records]
    every = [record.metrics["tokens_per_s_per_gpu"] for record in measured(earlier)]
    assert len(found.records) == MOST_TRIALS < len(every)
    assert (min(speeds), max(speeds)) == (min(every), max(every))


def test_the_most_alike_come_first_and_four_are_enough() -> None:
    storage = InMemoryStorage()
    for batch in (1024, 64, 512, 32, 128):
        before(storage, name=f"b{batch}", global_batch_size=batch, budget={"trials": 3, "confidence": None})
    names = [study.name.split("/")[0] for study in found_by(opened(storage))]
    assert names == ["b64", "b128", "b32", "b512"]


def test_how_alike_workloads_are_by_hand() -> None:
    one = study_spec(**STUDY)
    other = study_spec(**{**STUDY, "global_batch_size": 16, "pools": [{**POOL, "nodes": 2}]})
    assert alike_to(one.workload(one.pools[0]), one.workload(one.pools[0])) == ALIKE
    found = alike_to(one.workload(one.pools[0]), other.workload(other.pools[0]))
    assert found == pytest.approx(ALIKE * ALIKE_PER_DOUBLING**3)


def test_reports_say_in_one_line_what_the_search_started_with() -> None:
    storage = InMemoryStorage()
    earlier = before(storage)
    study = opened(storage)
    line = "The search started with what 16 trials of earlier studies showed: before/h100/1x8."
    assert study.results().earlier == line == results_json([study.results()])[0]["earlier"]
    assert parent_run.ParentOf(None, study_spec(**STUDY), study)._parent.tags["earlier"] == line  # type: ignore[arg-type]
    assert optuna_study(study).user_attrs[CHOSEN] == {earlier.name: [record.number for record in measured(earlier)]}
    assert opened(InMemoryStorage()).results().earlier == ""


def test_an_unread_study_of_another_program_is_left_alone() -> None:
    storage = InMemoryStorage()
    earlier = before(storage, budget={"trials": 4, "confidence": None})
    kept = optuna_study(earlier).user_attrs["fingerprint"]
    optuna_study(earlier).set_user_attr("fingerprint", {**kept, "workload": {"model": "of another version"}})
    spec = study_spec(**STUDY)
    assert earlier_studies(spec, spec.pools[0], storage, "new") == ()


def test_a_study_whose_driver_died_while_it_was_created_is_left_alone() -> None:
    """It has the machines it is of, and nothing yet that says what it trains."""
    storage = InMemoryStorage()
    first = before(storage, slow=best_stages())
    half = optuna.create_study(study_name="half/h100/1x8", storage=storage)
    half.set_user_attr(MACHINES_OF, first._optuna.user_attrs[MACHINES_OF])
    spec = study_spec(**STUDY)
    assert [one.name for one in earlier_studies(spec, spec.pools[0], storage, "another")] == [first.name]
