"""Pareto studies: one value per term, a front among what keeps the limits, and nothing that takes one value for granted."""

from __future__ import annotations

import io
import itertools
import math
import warnings
from dataclasses import replace
from typing import Any

import pytest
from optuna.storages import InMemoryStorage
from optuna.study import StudyDirection
from optuna.trial import TrialState
from pydantic import ValidationError
from rich.console import Console

from autotune import parent_run
from autotune import study as study_module
from autotune.objective import Objective
from autotune.pareto import NOTE, Point, front_of, hypervolume
from autotune.pool_study import PoolStudy
from autotune.proposal import Proposal
from autotune.records import Phase, TrialRecord, TrialResult
from autotune.report import final_report, results_json
from autotune.spec_parts import Bound, Confirmation
from autotune.state_folder import StateFolder
from launchers.outcome import Outcome
from search_spaces.config import TrialConfig

from .study_cases import completed, failed, open_pool, optuna_study, run_to_end, step_seconds, study_spec

TOKENS, MEMORY = "tokens_per_s_per_gpu", "peak_memory_gib"
TERMS = {TOKENS: 1.0, MEMORY: -0.5}
CONFIRM = {"top": 2, "repeats": 2}
REFERENCE = {TOKENS: 100.0, MEMORY: 10.0}


def pareto_spec(**fields: Any) -> Any:
    return study_spec(**{"pareto": True, "objective": TERMS, "budget": {"trials": 12}, **fields})


def gib(config: TrialConfig) -> float:
    """Made-up memory: larger micro-batches are faster and take more."""
    return 2.0 + config.micro_batch_size / config.tensor_model_parallel_size


def shown(seconds: float, memory_gib: float | None) -> TrialResult:
    result = completed(seconds)
    return replace(result, steps=tuple(replace(step, peak_memory_gib=memory_gib) for step in result.steps))


def measured(proposal: Proposal) -> TrialResult:
    return shown(step_seconds(proposal.config), gib(proposal.config))


def text(study: PoolStudy) -> str:
    console = Console(width=400, file=io.StringIO())
    console.print(final_report([study.results()], 2))
    return console.file.getvalue()  # type: ignore[attr-defined,no-any-return]


def trial(number: int, tokens: float, memory: float, phase: Phase = Phase.EXPLORE, size: int | None = None) -> TrialRecord:
    config = TrialConfig(micro_batch_size=size or number + 1)
    metrics = {TOKENS: tokens, MEMORY: memory}
    return TrialRecord("case", number, phase, config, (), Outcome.COMPLETED, metrics=metrics)


def objective(**limits: Bound) -> Objective:
    return Objective(TERMS, limits, REFERENCE, every_term=True)


def beats(one: TrialRecord, other: TrialRecord) -> bool:
    """Whether one is no worse in both terms and better in one of them."""
    faster, smaller = one.metrics[TOKENS] >= other.metrics[TOKENS], one.metrics[MEMORY] <= other.metrics[MEMORY]
    return faster and smaller and one.values != other.values


def numbers(points: tuple[Point, ...]) -> list[int]:
    return [point.record.number for point in points]


NOT_CONFIRMED = Confirmation(top=0)


def test_the_front_is_what_no_other_beats_in_every_term_and_the_knee_has_the_largest_sum() -> None:
    records = [trial(0, 100, 10), trial(1, 120, 12), trial(2, 120, 11), trial(3, 90, 5), trial(4, 90, 5.5), trial(5, 200, 40)]
    points = front_of(records, objective(), NOT_CONFIRMED)
    assert sorted(numbers(points)) == [0, 2, 3, 5]
    sums = {
        number: math.log(records[number].metrics[TOKENS]) - 0.5 * math.log(records[number].metrics[MEMORY])
        for number in (0, 2, 3, 5)
    }
    assert numbers(points)[0] == max(sums, key=lambda number: sums[number]) == 3
    assert [point.knee for point in points] == [True, False, False, False]


def test_two_that_are_equal_are_both_on_the_front() -> None:
    assert numbers(front_of([trial(0, 100, 10), trial(1, 100, 10)], objective(), NOT_CONFIRMED)) == [0, 1]


def test_what_crosses_a_limit_is_not_on_the_front() -> None:
    records = [trial(0, 100, 10), trial(1, 200, 30)]
    assert numbers(front_of(records, objective(peak_memory_gib=Bound(max=20)), NOT_CONFIRMED)) == [0]


def test_only_the_confirmed_are_on_the_front_once_there_are_any_at_their_means() -> None:
    records = [trial(0, 100, 10), trial(1, 150, 10)]
    records += [trial(number, tokens, 10, Phase.CONFIRM, size=1) for number, tokens in ((2, 80), (3, 125))]
    (point,) = front_of(records, objective(), Confirmation(repeats=2))
    assert point.record.phase is Phase.CONFIRM
    assert point.changes[TOKENS] == pytest.approx(math.log(80 * 125) / 2 - math.log(100)) == pytest.approx(0.0)


def test_the_hypervolume_is_what_is_covered_from_one_unit_worse_than_the_reference() -> None:
    def points(*metrics: tuple[float, float]) -> list[Point]:
        changes = [{TOKENS: math.log(tokens / 100), MEMORY: math.log(memory / 10)} for tokens, memory in metrics]
        return [Point(trial(0, 1, 1), one) for one in changes]

    e = math.e
    assert hypervolume(points((100, 10)), objective()) == pytest.approx(1.0)
    assert hypervolume(points((100 * e, 10)), objective()) == pytest.approx(2.0)
    assert hypervolume(points((100, 10 / e)), objective()) == pytest.approx(2.0)
    assert hypervolume(points((100 * e, 10), (100, 10 / e)), objective()) == pytest.approx(3.0)
    assert hypervolume(points((100 / e**2, 1)), objective()) == 0.0
    assert hypervolume([], objective()) == 0.0


def test_optuna_has_a_direction_per_term_by_the_sign_of_its_weight_and_is_told_its_changes() -> None:
    study = open_pool(pareto_spec())
    study.finish(study.propose(), shown(0.1, 4.0))  # type: ignore[arg-type]
    record = study.finish(study.propose(), shown(0.05, 8.0))  # type: ignore[arg-type]
    assert optuna_study(study).directions == [StudyDirection.MAXIMIZE, StudyDirection.MINIMIZE]
    assert optuna_study(study).trials[0].values == [0.0, 0.0]
    assert optuna_study(study).trials[record.number].values == list(record.values) == pytest.approx([math.log(2), math.log(2)])


def test_a_failure_is_told_the_worst_of_every_term_and_a_broken_constraint() -> None:
    study = open_pool(pareto_spec())
    first = study.finish(study.propose(), failed(Outcome.OOM))  # type: ignore[arg-type]
    study.finish(study.propose(), shown(0.1, 4.0))  # type: ignore[arg-type]
    study.finish(study.propose(), shown(0.2, 2.0))  # type: ignore[arg-type]
    last = study.finish(study.propose(), failed(Outcome.HUNG))  # type: ignore[arg-type]
    assert first.values == (0.0, 0.0)
    assert last.values == pytest.approx((-math.log(2), 0.0))
    assert optuna_study(study).trials[last.number].constraints == {"infeasible": 1.0}


def test_a_trial_that_lacks_a_term_fails_with_that_reason_and_without_a_warning() -> None:
    study = open_pool(pareto_spec())
    study.finish(study.propose(), shown(0.1, 4.0))  # type: ignore[arg-type]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        record = study.finish(study.propose(), shown(0.01, None))  # type: ignore[arg-type]
    assert optuna_study(study).trials[record.number].state is TrialState.FAIL
    assert [violation.name for violation in record.violations] == ["peak_memory_gib_not_measured"]
    assert study.best is not None and study.best.number == 0
    reopened = study.results()
    assert numbers(reopened.front) == [0]


def test_a_pool_that_cannot_measure_a_term_ends_the_study_with_that_reason() -> None:
    study = open_pool(pareto_spec())
    proposals = run_to_end(study, lambda proposal: shown(0.1, None))
    assert len(proposals) == 1
    assert study.end_reason.startswith("pareto: peak_memory_gib cannot be measured on pool laptop")
    assert study.best is None and study.results().front == ()
    assert "peak_memory_gib was not measured in this trial" in text(study)


@pytest.mark.parametrize("sampler", ["residual", "tpe", "gp", "nsga2", "random", "grid"])
def test_every_sampler_searches_and_the_best_of_the_front_is_confirmed(sampler: str) -> None:
    study = open_pool(pareto_spec(sampler=sampler, confirm=CONFIRM))
    proposals = run_to_end(study, measured, concurrent=2)
    confirming = {proposal.config for proposal in proposals if proposal.phase is Phase.CONFIRM}
    results = study.results()
    explored = [record for record in study.records if record.phase is not Phase.CONFIRM and record.outcome is Outcome.COMPLETED]
    unbeaten = {one.config for one in explored if not any(beats(other, one) for other in explored)}
    assert study.launched == 12
    assert len(confirming - {study_spec().baseline}) <= 2
    assert confirming <= unbeaten | {study_spec().baseline}
    assert {point.record.config for point in results.front} <= confirming
    assert all(point.record.phase is Phase.CONFIRM for point in results.front)
    assert study.best == results.best == results.front[0].record and results.front[0].knee


def test_a_configuration_that_fails_when_it_is_confirmed_gives_its_place_to_another() -> None:
    study = open_pool(pareto_spec(confirm={"top": 1, "repeats": 2}))
    doomed: list[TrialConfig] = []

    def answer(proposal: Proposal) -> TrialResult:
        if proposal.phase is Phase.CONFIRM and not doomed:
            doomed.append(proposal.config)
        return failed(Outcome.OOM) if proposal.phase is Phase.CONFIRM and proposal.config in doomed else measured(proposal)

    run_to_end(study, answer)
    assert study.best is not None and study.best.phase is Phase.CONFIRM
    assert study.best.config != doomed[0]
    assert doomed[0] not in {point.record.config for point in study.results().front}


def test_nothing_is_raced_explained_or_converged() -> None:
    study = open_pool(pareto_spec(sampler="residual", budget={"trials": 20, "confidence": 0.01}))
    proposals = run_to_end(study, measured)
    study.close()
    assert {proposal.beaten_s for proposal in proposals} == {None}
    assert study._sampler.outlook is None
    assert study.end_reason == "budget: 20 trials"
    results = study.results()
    assert results.explanation == () and results.decision is None


def test_the_report_and_the_json_show_the_front_with_its_knee_and_the_hypervolume() -> None:
    study = open_pool(pareto_spec(confirm=CONFIRM))
    run_to_end(study, measured)
    results = study.results()
    shown_text = text(study)
    assert f"Pareto front: {len(results.front)} configurations (confirmed); hypervolume" in shown_text
    assert f"trial {results.front[0].record.number} (knee): tokens_per_s_per_gpu" in shown_text
    (told,) = results_json([results])
    assert [point["trial"] for point in told["front"]] == numbers(results.front)
    assert [point["knee"] for point in told["front"]] == [True] + [False] * (len(results.front) - 1)
    assert told["best"]["trial"] == told["front"][0]["trial"]
    assert told["hypervolume"] == results.hypervolume > 1.0
    for point in told["front"]:
        shares = {name: point["metrics"][name] / told["baseline"]["metrics"][name] - 1.0 for name in TERMS}
        assert point["changes"] == pytest.approx(shares)
        assert f"tokens_per_s_per_gpu {point['changes'][TOKENS]:+.1%}, " in shown_text


def test_what_is_said_of_a_winner_is_said_of_the_knee() -> None:
    study = open_pool(pareto_spec(confirm=CONFIRM))
    run_to_end(study, measured)
    results = study.results()
    assert results.best is not None
    wall = {**results.best.metrics, "pool_wall_mean_power_w_estimated": 900.0}
    knee = replace(results.best, contaminated="a neighbour computed", metrics=wall)
    console = Console(width=400, file=io.StringIO(), record=True)
    console.print(final_report([replace(results, best=knee, records=(knee,))], 2))
    said = console.export_text()
    assert "the knee among them" in said and "all nodes together: knee 900 W" in said and "winner" not in said


def test_without_pareto_there_is_no_front() -> None:
    study = open_pool(pareto_spec(pareto=False))
    run_to_end(study, measured)
    results = study.results()
    assert (results.front, results.hypervolume) == ((), None)
    assert "Pareto" not in text(study)


def test_the_hypervolume_is_a_metric_of_the_parent_run() -> None:
    class FakeTracker:
        closed: dict[str, Any]

        def open_parent(self, parent: Any) -> str:
            return "run"

        def rebuild(self, records: Any) -> int:
            return 0

        def close_parent(self, run_id: str, status: str, metrics: Any, tags: Any) -> None:
            self.closed = {"status": status, "metrics": metrics, "tags": tags}

    study = open_pool(pareto_spec())
    run_to_end(study, measured)
    tracker = FakeTracker()
    parent = parent_run.ParentOf(tracker, pareto_spec(), study)  # type: ignore[arg-type]
    parent.open()
    parent.close()
    results = study.results()
    assert tracker.closed["metrics"]["hypervolume"] == results.hypervolume
    assert tracker.closed["metrics"]["front_size"] == len(results.front)
    assert tracker.closed["tags"]["front"] == ", ".join(map(str, numbers(results.front)))
    assert "(knee)" in tracker.closed["tags"]["mlflow.note.content"]


def test_the_study_says_what_it_does_not_do(tmp_path: Any) -> None:
    folder = StateFolder(tmp_path / "case")
    studies = study_module.open_studies(pareto_spec(), folder, InMemoryStorage(), lambda study, record: None)
    assert NOTE in studies[0].results().notes


def test_a_reopened_study_shows_the_same_front() -> None:
    storage = InMemoryStorage()
    study = open_pool(pareto_spec(), storage)
    run_to_end(study, measured)
    again = open_pool(pareto_spec(), storage)
    assert again.results().front == study.results().front
    assert again.results().hypervolume == study.results().hypervolume


@pytest.mark.parametrize(
    ("terms", "problem"), [({TOKENS: 1.0}, "a front needs two"), ({TOKENS: 1.0, MEMORY: 0.0}, "has no direction")]
)
def test_terms_without_directions_are_refused(terms: dict[str, float], problem: str) -> None:
    with pytest.raises(ValidationError, match=problem):
        pareto_spec(objective=terms)


def test_greedy_spread_takes_the_ends_before_neighbours() -> None:
    records = [trial(0, 100, 10), trial(1, 101, 10.1), trial(2, 220, 40), trial(3, 50, 2)]
    study = open_pool(pareto_spec(confirm={"top": 2, "repeats": 2}))
    study._ledger.objective = objective()
    study._ledger.records = records
    picked = [contender.explored.number for contender in study._ledger.contenders()]
    points = front_of(records, objective(), NOT_CONFIRMED)
    best_pair = max(itertools.combinations(points, 2), key=lambda pair: hypervolume(pair, objective()))
    assert picked[0] == numbers(points)[0]
    assert set(picked[:2]) == set(numbers(best_pair))  # type: ignore[arg-type]
