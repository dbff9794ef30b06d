"""What should not be tried is told with its reason, is never the next to try, and says nothing of how sharp the optimum is."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from autotune.explain_text import explanation_lines
from autotune.machines import machines_of
from autotune.objective import Objective
from autotune.plan import DOES_NOT_FIT
from autotune.pool_study import PoolStudy
from autotune.prospects import Prospects
from autotune.records import Phase, TrialRecord
from autotune.spec_parts import Bound
from launchers.outcome import Outcome
from search_spaces.config import TrialConfig
from search_spaces.legality import Violation
from search_spaces.prediction import predict
from tests.autotune.study_cases import open_pool, study_spec

LLAMA_8B = {
    "num_layers": 32,
    "hidden_size": 4096,
    "ffn_hidden_size": 14336,
    "num_attention_heads": 32,
    "num_query_groups": 8,
    "vocab_size": 128256,
}
KNOB = "gpu_power_limit_w"
BASELINE = {"use_distributed_optimizer": True, KNOB: 450}
SPEC = study_spec(
    model=LLAMA_8B,
    pools=[{"name": "h200", "gpu": "h200", "nodes": 8, "gpus_per_node": 8}],
    global_batch_size=512,
    seq_length=4096,
    baseline=BASELINE,
    search={"micro_batch_size": [1, 2, 4, 8], KNOB: [450, 600]},
)
STUDY: PoolStudy = open_pool(SPEC)
TABLE = STUDY.table
PREDICTIONS = predict(TABLE.columns, machines_of(SPEC.pools[0], SPEC.hardware))
PEAK = "gpu_peak_power_w_1s"


def config(micro_batch_size: int, watts: int = 450) -> TrialConfig:
    return TrialConfig.model_validate({**BASELINE, "micro_batch_size": micro_batch_size, KNOB: watts})


def row(*knobs: int) -> int:
    found = TABLE.find(config(*knobs))
    assert found is not None
    return found


def trial(own: TrialConfig, outcome: Outcome = Outcome.COMPLETED) -> TrialRecord:
    """As predicted, but with a tenth less watts: those of a measurement are not the predicted ones."""
    said = PREDICTIONS.row(row(own.micro_batch_size, own.gpu_power_limit_w or 0))
    boards_w = 0.9 * said.mean_power_w
    metrics = {
        "tokens_per_s_per_gpu": said.tokens_per_s_per_gpu,
        "step_time_s": said.step_time_s,
        "peak_memory_gib": said.memory_gib,
        "gpu_mean_power_w": boards_w,
        "pool_gpu_mean_power_w": 64 * boards_w,
        PEAK: 0.9 * said.peak_power_w,
        "throttle_fraction": 0.0,
    }
    return TrialRecord("s", 0, Phase.EXPLORE, own, (), outcome, metrics=metrics if outcome is Outcome.COMPLETED else {})


def prospects(winner: TrialRecord, *others: TrialRecord, **limits: Bound) -> Prospects:
    objective = Objective(SPEC.objective, limits, winner.metrics)
    return Prospects(TABLE, (winner, *others), PREDICTIONS, objective, SPEC.pools[0], STUDY.violations)


def test_what_is_predicted_not_to_fit_is_ruled_out_with_the_gib() -> None:
    assert [PREDICTIONS.fits[row(size)] == DOES_NOT_FIT for size in (2, 4, 8)] == [False, False, True]
    winner = trial(config(4))
    why = prospects(winner).why_not(row(8), winner)
    assert why.startswith("does not fit: ") and why.endswith(" GiB predicted of 141.0 GiB")
    assert prospects(winner).why_not(row(2), winner) == ""


def test_what_is_predicted_over_a_limit_of_the_answer_is_ruled_out_and_the_winner_s_own_watts_count() -> None:
    winner = trial(config(2))
    least_w = PREDICTIONS.row(row(1)).mean_power_w
    between = Bound(max=0.97 * least_w)
    assert winner.metrics["gpu_mean_power_w"] < between.max < PREDICTIONS.row(row(2)).mean_power_w
    known = prospects(winner, gpu_mean_power_w=between)
    assert known.why_not(row(1), winner) == "", "predicted over it, but the winner drew less than predicted"
    assert known.why_not(row(2, 600), winner).startswith("predicted: gpu_mean_power_w ")


@pytest.mark.parametrize("name", [PEAK, "pool_gpu_mean_power_w", "pool_wall_mean_power_w"])
def test_every_limit_on_watts_is_looked_at_those_at_the_wall_too(name: str) -> None:
    winner = trial(config(2))
    boards_w = winner.metrics["pool_gpu_mean_power_w"]
    winner = replace(winner, metrics={**winner.metrics, "pool_wall_mean_power_w": 1.3 * boards_w})
    known = prospects(winner, **{name: Bound(max=1.01 * winner.metrics[name])})
    assert name in known.why_not(row(2, 600), winner)
    assert known.why_not(row(1), winner) == ""


def test_a_lower_bound_is_looked_at_as_well() -> None:
    winner = trial(config(2))
    less = Bound(min=0.999 * winner.metrics["tokens_per_s_per_gpu"])
    assert "tokens_per_s_per_gpu" in prospects(winner, tokens_per_s_per_gpu=less).why_not(row(1), winner)


def test_what_may_not_be_launched_and_what_failed_are_ruled_out() -> None:
    winner = trial(config(2))
    known = prospects(winner, trial(config(4), Outcome.OOM))
    assert known.why_not(row(4), winner) == "ended as OOM"
    barred = replace(known, refusals=lambda own: [Violation("guard_rack", 0.1, "too many watts")] if own == config(1) else [])
    assert barred.why_not(row(1), winner) == "cannot be launched: too many watts"
    assert known.why_not(row(1), winner) == ""


def test_what_is_larger_than_a_trial_that_ran_out_of_memory_is_ruled_out() -> None:
    winner = trial(config(1))
    assert prospects(winner).why_not(row(4), winner) == ""
    out_of_memory = trial(config(2), Outcome.OOM)
    assert "ran out of memory" in prospects(winner, out_of_memory).why_not(row(4), winner)


def test_the_next_to_try_is_nothing_that_is_ruled_out_and_the_reasons_are_told() -> None:
    winner = trial(config(2))
    free = explanation_lines(winner, None, prospects(winner))
    assert f"Next to try: {KNOB} 600: " in "\n".join(free) and "ruled out" not in "\n".join(free)
    bound = explanation_lines(winner, None, prospects(winner, gpu_peak_power_w_1s=Bound(max=1.02 * winner.metrics[PEAK])))
    assert "Next to try: micro_batch_size " in "\n".join(bound)
    (ruled_out,) = [line for line in bound if line.startswith("One step from the winner, ruled out: ")]
    assert f"{KNOB} 600: " in ruled_out and PEAK in ruled_out
    (around,) = [line for line in bound if line.startswith("One step from the winner (")]
    assert KNOB not in around


def test_where_everything_near_is_ruled_out_nothing_is_next_and_the_shape_is_not_told() -> None:
    winner = trial(config(2))
    barred = replace(prospects(winner), refusals=lambda own: [Violation("rule", 1.0, "not here")])
    text = "\n".join(explanation_lines(winner, None, barred))
    assert "Next to try: nothing that is one step away" in text
    assert "optimum" not in text


def lines_of(winner: TrialRecord, baseline: TrialRecord | None, **limits: Bound) -> dict[str, str]:
    """What explains a winner, by the first word of each line."""
    return {line.split(" ")[0].rstrip(","): line for line in explanation_lines(winner, baseline, prospects(winner, **limits))}


def test_only_a_neighbour_that_is_predicted_to_be_faster_is_next() -> None:
    fastest = TABLE.config(int(PREDICTIONS.tokens_per_s_per_gpu.argmax()))
    said = lines_of(trial(fastest), None)["Next"]
    assert re.fullmatch(r"Next to try: nothing .* to be faster; the nearest is \w+ \w+: 0\.\d\d x \(predicted\)\.", said)
    said = lines_of(trial(config(1)), None)["Next"]
    assert re.fullmatch(r"Next to try: \w+ \w+: 1\.\d\d x \(predicted\)\.", said)


def test_each_limit_is_told_with_what_was_measured_its_bound_and_what_is_left() -> None:
    winner = trial(config(2))
    peak, least = winner.metrics[PEAK], 0.5 * winner.metrics["tokens_per_s_per_gpu"]
    room = lines_of(winner, None, **{PEAK: Bound(max=1.25 * peak), "tokens_per_s_per_gpu": Bound(min=least)})["Room"]
    assert f"{PEAK} {peak:,.4g} (at most {1.25 * peak:,g}): 20.0%" in room
    assert f"tokens_per_s_per_gpu {2 * least:,.4g} (at least {least:,g}): 100.0%" in room


def test_seconds_and_watts_are_told_of_winner_and_baseline_and_of_a_winner_alone() -> None:
    """The baseline need not be a candidate."""
    winner, recomputing = (
        trial(config(2)),
        {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
    )
    baseline = trial(winner.config.model_copy(update=recomputing))
    assert TABLE.find(baseline.config) is None
    both, alone = lines_of(winner, baseline), lines_of(winner, None)
    assert both["Where"].startswith("Where a step's seconds go, predicted, winner / baseline: gemm ")
    assert ", recompute 0 / " in both["Where"]
    assert alone["Where"].endswith(f", of {PREDICTIONS.row(row(2)).step_time_s:,.3g}.")
    watts = [f"{one.metrics['gpu_mean_power_w']:,.3g}" for one in (winner, baseline)]
    assert both["Power"].startswith(f"Power, measured, winner / baseline: mean W per GPU {' / '.join(watts)}, peak W over 1 s ")
    assert alone["Power"].startswith(f"Power, measured, of the winner: mean W per GPU {watts[0]}, ")
    blind = {name: value for name, value in winner.metrics.items() if "power" not in name}
    assert "Power" not in lines_of(replace(winner, metrics=blind), None)
