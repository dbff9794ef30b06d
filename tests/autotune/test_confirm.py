"""Confirming: in turns, paired, within the limits; power decides between those that are not told apart."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from autotune.confirm import POWER, Contender, compare, contenders, decide, heat_margins, next_config
from autotune.objective import Objective
from autotune.records import Phase, TrialRecord
from autotune.spec_parts import Bound, Confirmation
from launchers.outcome import Outcome
from search_spaces.config import TrialConfig

PEAK = "gpu_peak_power_w_1s"
TOP_TWO = Confirmation(top=2, repeats=3)


def objective(**limits: Bound) -> Objective:
    return Objective({"tokens_per_s_per_gpu": 1.0}, limits, {"tokens_per_s_per_gpu": 100.0, PEAK: 500.0})


def record(
    micro_batch: int, throughput: float, phase: Phase = Phase.EXPLORE, spread: float = 0.01, **metrics: float
) -> TrialRecord:
    measured = {"low": throughput * (1 - spread), "high": throughput * (1 + spread)}
    return TrialRecord(
        study="s",
        number=0,
        phase=phase,
        config=TrialConfig(micro_batch_size=micro_batch),
        argv=(),
        outcome=Outcome.COMPLETED,
        metrics={
            "tokens_per_s_per_gpu": throughput,
            **{f"tokens_per_s_per_gpu_{end}": value for end, value in measured.items()},
            **metrics,
        },
    )


def confirm_all(records: list[TrialRecord], throughput: dict[int, list[float]], bound: Objective, **metrics: float) -> list[int]:
    """Run what is asked for until nothing is, and say in which order of micro-batches."""
    order: list[int] = []
    while True:
        config = next_config(contenders(records, bound, TOP_TWO), [], TOP_TWO.repeats, bound)
        if config is None:
            return order
        size = config.micro_batch_size
        records.append(record(size, throughput[size][order.count(size)], Phase.CONFIRM, **metrics))
        order.append(size)


def test_runs_are_in_turns_and_no_one_always_goes_first() -> None:
    records = [record(1, 100.0, Phase.BASELINE), record(2, 130.0), record(4, 120.0), record(8, 90.0)]
    order = confirm_all(records, {1: [100] * 3, 2: [130] * 3, 4: [120] * 3}, objective())
    assert [sorted(order[start : start + 3]) for start in (0, 3, 6)] == [[1, 2, 4]] * 3, "every round holds everyone"
    assert len({order[0], order[3], order[6]}) == 3


def test_the_flattered_one_does_not_win() -> None:
    records = [record(1, 100.0, Phase.BASELINE), record(2, 140.0), record(4, 130.0)]
    confirm_all(records, {1: [100, 101, 99], 2: [110, 111, 109], 4: [129, 131, 130]}, objective())
    decision = decide(contenders(records, objective(), TOP_TWO), objective(), 3)
    assert decision is not None and decision.winner.config.micro_batch_size == 4
    assert decision.winner.phase is Phase.CONFIRM
    assert decision.margin is not None and decision.margin.decided
    assert decision.margin.difference == pytest.approx(np.log(130 / 110), abs=0.01)


def test_a_tie_goes_to_the_lower_power() -> None:
    records = [record(2, 140.0), record(4, 139.0)]
    for number in range(3):
        records.append(record(2, 140.0 + number, Phase.CONFIRM, **{POWER: 600.0}))
        records.append(record(4, 141.5 - number, Phase.CONFIRM, **{POWER: 500.0}))
    decision = decide(contenders(records, objective(), TOP_TWO), objective(), 3)
    assert decision is not None and decision.by_power
    assert decision.winner.config.micro_batch_size == 4


def test_what_crosses_a_limit_when_confirmed_never_wins_and_the_next_takes_its_place() -> None:
    capped = objective(gpu_peak_power_w_1s=Bound(max=500.0))
    records = [record(2, 140.0, **{PEAK: 490.0}), record(4, 120.0, **{PEAK: 450.0}), record(8, 110.0, **{PEAK: 440.0})]
    records.append(record(2, 140.0, Phase.CONFIRM, **{PEAK: 520.0}))
    names = [contender.config.micro_batch_size for contender in contenders(records, capped, TOP_TWO)]
    assert names == [2, 4, 8], "two must hold, so a third is taken in"
    confirm_all(records, {4: [120] * 3, 8: [110] * 3}, capped, **{PEAK: 450.0})
    decision = decide(contenders(records, capped, TOP_TWO), capped, 3)
    assert decision is not None and decision.winner.config.micro_batch_size == 4


def test_heat_is_learned_as_a_margin_on_limits() -> None:
    capped = objective(gpu_peak_power_w_1s=Bound(max=500.0))
    warm = Contender(record(2, 140.0, **{PEAK: 400.0}), (record(2, 139.0, Phase.CONFIRM, **{PEAK: 440.0}),))
    assert heat_margins([warm])[PEAK] == pytest.approx(1.1)
    near = record(4, 150.0, **{PEAK: 480.0})
    chosen = contenders([warm.explored, *warm.runs, near], capped, TOP_TWO)
    assert near not in [contender.explored for contender in chosen], "480 W explored is 528 W when warm"


def test_others_within_the_interval_of_the_best_are_confirmed_too() -> None:
    wide = [record(size, 100.0 + size, spread=0.1) for size in (1, 2, 4, 8)]
    assert len(contenders(wide, objective(), TOP_TWO)) == 4
    narrow = [replace(r, metrics={**r.metrics, "tokens_per_s_per_gpu_high": r.metrics["tokens_per_s_per_gpu"]}) for r in wide]
    narrow[-1].metrics["tokens_per_s_per_gpu_low"] = 107.0  # type: ignore[index]
    assert len(contenders(narrow, objective(), TOP_TWO)) == 2


def test_nothing_confirmed_is_no_decision_and_top_zero_switches_it_off() -> None:
    records = [record(2, 140.0)]
    assert decide(contenders(records, objective(), TOP_TWO), objective(), 3) is None
    assert contenders(records, objective(), Confirmation(top=0)) == []


def test_the_paired_interval_is_students() -> None:
    one = Contender(record(1, 1.0), tuple(record(1, value, Phase.CONFIRM) for value in (101.0, 103.0, 105.0)))
    other = Contender(record(2, 1.0), tuple(record(2, 100.0, Phase.CONFIRM) for _ in range(3)))
    shown = compare(one, other, objective())
    pairs = np.log([1.01, 1.03, 1.05])
    assert shown.difference == pytest.approx(pairs.mean())
    assert shown.high - shown.difference == pytest.approx(4.302653 * pairs.std(ddof=1) / np.sqrt(3), rel=1e-5)


def test_a_resumed_study_goes_on_and_lost_runs_do_not_count() -> None:
    records = [record(2, 140.0), record(4, 100.0), record(2, 140.0, Phase.CONFIRM)]
    records.append(replace(record(4, 1.0, Phase.CONFIRM), outcome=Outcome.LOST, metrics={}))
    chosen = contenders(records, objective(), TOP_TWO)
    assert [len(contender.runs) for contender in chosen] == [1, 0]
    following = next_config(chosen, [], 3, objective())
    assert following is not None and following.micro_batch_size == 4


def test_running_confirmations_are_not_launched_twice() -> None:
    chosen = contenders([record(2, 140.0), record(4, 100.0)], objective(), Confirmation(top=2, repeats=2))
    first = next_config(chosen, [], 2, objective())
    second = next_config(chosen, [first] if first else [], 2, objective())
    assert {first, second} == {TrialConfig(micro_batch_size=2), TrialConfig(micro_batch_size=4)}
