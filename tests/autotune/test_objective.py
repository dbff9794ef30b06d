"""The score is relative to the reference, limits are bounds and not penalties, and what was not measured is never assumed."""

from __future__ import annotations

import math

import pytest
from pydantic import ValidationError

from autotune.objective import DEFAULT_WEIGHTS, Objective
from autotune.power_domains import DomainLimit
from autotune.spec_parts import Bound

BASELINE = {"tokens_per_s_per_gpu": 100.0, "gpu_peak_power_w_1s": 500.0, "throttle_fraction": 0.0, "memory_headroom_fraction": 0.2}


def objective(weights: dict[str, float] | None = None, **limits: Bound) -> Objective:
    return Objective(weights or DEFAULT_WEIGHTS, limits, BASELINE)


def test_the_reference_scores_zero_and_terms_add_up() -> None:
    shown = {"tokens_per_s_per_gpu": 110.0, "gpu_peak_power_w_1s": 550.0, "throttle_fraction": 0.25}
    assert objective().score(BASELINE) == 0
    assert objective().score(shown) == pytest.approx(math.log(1.1) - 0.1 * math.log(1.1) - 0.25)


def test_any_metric_is_a_term() -> None:
    shown = {**BASELINE, "tokens_per_s_per_gpu": 50.0, "memory_headroom_fraction": 0.4}
    assert objective({"memory_headroom_fraction": 2.0}).score(shown) == pytest.approx(0.4)


def test_a_term_that_the_reference_lacks_is_dropped_by_name_for_all_trials() -> None:
    here = Objective(DEFAULT_WEIGHTS, {}, {"tokens_per_s_per_gpu": 100.0})
    assert here.dropped == ("gpu_peak_power_w_1s", "throttle_fraction")
    assert here.score({"tokens_per_s_per_gpu": 100.0, "gpu_peak_power_w_1s": 1.0}) == 0


def test_a_trial_that_lacks_a_term_is_infeasible_not_favoured() -> None:
    lacking = {"tokens_per_s_per_gpu": 120.0, "throttle_fraction": 0.0}
    assert [violation.name for violation in objective().violations(lacking)] == ["gpu_peak_power_w_1s_not_measured"]
    assert objective().infeasibility(lacking) > 0


@pytest.mark.parametrize("lost", [math.nan, math.inf, -1.0])
def test_a_reading_that_no_watt_can_take_counts_as_not_measured(lost: float) -> None:
    assert objective().violations({**BASELINE, "gpu_peak_power_w_1s": lost})


def test_a_limit_is_a_constraint_with_its_excess_and_never_in_the_score() -> None:
    bound = objective(gpu_peak_power_w_1s=Bound(max=400.0))
    (violation,) = bound.violations(BASELINE)
    assert violation.name == "limit_gpu_peak_power_w_1s"
    assert violation.amount == pytest.approx(0.25)
    assert "500" in violation.message and "at most 400" in violation.message and "25.0%" in violation.message
    assert bound.infeasibility(BASELINE) == pytest.approx(0.25)
    assert bound.score(BASELINE) == objective().score(BASELINE)


def test_within_the_limits_the_constraint_says_how_near_the_nearest_is() -> None:
    bound = objective(gpu_peak_power_w_1s=Bound(max=625.0), memory_headroom_fraction=Bound(min=0.1))
    assert bound.infeasibility(BASELINE) == pytest.approx(-0.2)
    assert bound.slack(BASELINE) == pytest.approx({"gpu_peak_power_w_1s": 0.2, "memory_headroom_fraction": 1.0})


def test_a_limit_without_a_measurement_is_not_kept() -> None:
    bound = objective(domain_peak_power_w_60s=Bound(max=40_000.0))
    assert bound.unmeasurable() == ["domain_peak_power_w_60s"]
    assert [violation.name for violation in bound.violations(BASELINE)] == ["limit_domain_peak_power_w_60s"]


@pytest.mark.parametrize(("fields", "word"), [({}, "neither"), ({"max": 1.0, "min": 2.0}, "above"), ({"max": math.nan}, "finite")])
def test_a_bound_that_binds_nothing_is_refused(fields: dict[str, float], word: str) -> None:
    with pytest.raises(ValidationError, match=word):
        Bound(**fields)


@pytest.mark.parametrize("limit", ["pool_wall_mean_power_w", "pool_wall_mean_power_w_estimated"])
def test_a_limit_at_the_wall_is_judged_on_the_meter_where_there_is_one(limit: str) -> None:
    bound = objective(**{limit: Bound(max=1000.0)})
    estimated = {**BASELINE, "pool_wall_mean_power_w_estimated": 1100.0}
    (violation,) = bound.violations(estimated)
    assert violation.message.startswith("pool_wall_mean_power_w_estimated 1,100 is 10.0% beyond")
    measured = {**estimated, "pool_wall_mean_power_w": 900.0}
    assert bound.violations(measured) == []
    assert bound.slack(measured) == {"pool_wall_mean_power_w": pytest.approx(0.1)}
    here = Objective(DEFAULT_WEIGHTS, bound.limits, estimated)
    assert here.unmeasurable() == []


def test_a_power_domain_binds_what_was_measured_at_the_wall_and_nothing_else() -> None:
    domain = DomainLimit("rack-7", 1000.0, 1.0, 0.5)
    bound = Objective(DEFAULT_WEIGHTS, {}, BASELINE, (domain,))
    assert bound.violations({**BASELINE, "pool_wall_peak_power_w_1s_estimated": 9000.0}) == []
    assert bound.infeasibility({**BASELINE, "pool_wall_peak_power_w_1s": 1800.0}) == pytest.approx(-0.1)
    (violation,) = bound.violations({**BASELINE, "pool_wall_peak_power_w_1s": 2200.0})
    assert (violation.name, violation.amount) == ("limit_rack-7", pytest.approx(0.1))
    assert "rack-7 gave 1,100 W" in violation.message
    assert bound.score({**BASELINE, "pool_wall_peak_power_w_1s": 2200.0}) == 0
