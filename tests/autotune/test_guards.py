"""Guards bind launches: what might cross one is refused before it starts, and a guard that nothing can keep is refused at once."""

from __future__ import annotations

from typing import Any

import pytest

from autotune.check import check_study
from autotune.errors import SpecError
from autotune.guards import boards_guards
from autotune.plan import plan_pool
from autotune.spec import StudySpec
from search_spaces.gpus import gpu
from search_spaces.wall_power import NodePower
from tests.autotune.study_cases import completed, open_pool, run_to_end

NODE = NodePower(overhead_w=1000.0, psu_efficiency=0.9)


def spec(**fields: Any) -> StudySpec:
    data: dict[str, Any] = {
        "name": "guarded",
        "model": {"num_layers": 8, "hidden_size": 1024, "num_attention_heads": 8, "vocab_size": 1024},
        "pools": [{"name": "h", "gpu": "h200", "nodes": 2, "gpus_per_node": 8, "node_overhead_w": 1000, "psu_efficiency": 0.9}],
        "global_batch_size": 64,
        "seq_length": 512,
        "baseline": {"precision": "bf16", "gpu_power_limit_w": 400},
        "search": {"micro_batch_size": [1, 2], "gpu_power_limit_w": [400, 500, 700]},
        "sampler": "random",
        "confirm": {"top": 0},
    }
    return StudySpec.model_validate({**data, **fields})


def rack(limit_w: float, **fields: Any) -> dict[str, Any]:
    return {"power_domains": [{"name": "rack", "nodes": ["h"], "limit_w": limit_w, **fields}]}


def test_only_limits_that_keep_the_domain_at_the_wall_are_launched() -> None:
    allowed = NODE.wall_w(500.0 * 16, 2)
    study = open_pool(spec(**rack(allowed)))
    proposals = run_to_end(study, lambda proposal: completed())
    assert {proposal.config.gpu_power_limit_w for proposal in proposals} == {400, 500}
    just_less = open_pool(spec(**rack(allowed - 1)))
    assert {proposal.config.gpu_power_limit_w for proposal in run_to_end(just_less, lambda _: completed())} == {400}


def test_a_guard_that_nothing_can_keep_is_refused_with_the_least_bound() -> None:
    told = r"^power_domains.rack: nothing can be launched.*: at the wall, rack may draw 9,111 W or more"
    with pytest.raises(SpecError, match=told) as caught:
        open_pool(spec(**rack(9000.0)))
    assert "gpu_power_limit_w" in caught.value.hint
    assert NODE.wall_w(400.0 * 16, 2) == pytest.approx(9111.1, abs=0.1)


def test_check_and_plan_count_what_guards_refuse_before_any_trial() -> None:
    study = spec(gpu_power_guard_w=600.0, **rack(NODE.wall_w(450.0 * 16, 2), window_s=10.0))
    checked = check_study(study).pools[0]
    assert (checked.legal, checked.refused["guard_gpu_power_guard_w"], checked.refused["guard_rack"]) == (2, 2, 2)
    plan = plan_pool(study, study.pools[0])
    assert {planned.config.gpu_power_limit_w for planned in plan.best(10)} == {400}
    left_out = "4 candidates that may fit are left out: none may be launched (guard_gpu_power_guard_w 2, guard_rack 2)."
    assert plan.lacking == (left_out,)


def test_where_guards_keep_nothing_plan_still_shows_what_is_predicted_and_says_so() -> None:
    study = spec(**rack(9000.0))
    assert check_study(study).pools[0].legal == 0 and not check_study(study).ok
    plan = plan_pool(study, study.pools[0])
    assert len(plan.best(10)) == 6
    assert plan.lacking[0].startswith("None of these may be launched as its power limit is: guard_rack 6.")


def test_a_gpu_guard_that_nothing_can_keep_names_its_field_and_no_domain() -> None:
    with pytest.raises(SpecError, match="^gpu_power_guard_w: nothing can be launched under 100 W") as caught:
        open_pool(spec(gpu_power_guard_w=100.0))
    assert "domain" not in caught.value.hint


def test_a_baseline_over_the_guard_is_refused_and_not_launched() -> None:
    study = open_pool(spec(baseline={"precision": "bf16", "gpu_power_limit_w": 700}, **rack(10_000.0)))
    proposals = run_to_end(study, lambda proposal: completed())
    assert proposals and all((proposal.config.gpu_power_limit_w or 700) <= 400 for proposal in proposals)
    assert study.records[0].violations[0].name == "guard_rack"


def test_without_a_limit_the_device_s_own_binds_and_short_windows_allow_for_overshoot() -> None:
    study = open_pool(spec(search={"micro_batch_size": [1, 2]}, baseline={"precision": "bf16"}, **rack(NODE.wall_w(700.0 * 16, 2))))
    assert study.candidates.left == 2
    with pytest.raises(SpecError, match="rack"):
        open_pool(spec(search={"micro_batch_size": [1, 2]}, **rack(NODE.wall_w(400.0 * 16, 2), window_s=0.1)))


def test_predicted_bounds_are_lower_than_enforced_ones_and_only_by_choice() -> None:
    little = {"search": {"micro_batch_size": [1, 2]}, "baseline": {"precision": "bf16"}}
    watts = NODE.wall_w(650.0 * 16, 2)
    with pytest.raises(SpecError, match="rack"):
        open_pool(spec(**little, **rack(watts)))
    assert open_pool(spec(**little, **rack(watts, bound="predicted"))).candidates.left > 0


def test_a_gpu_s_own_guard() -> None:
    study = open_pool(spec(gpu_power_guard_w=450.0))
    assert {proposal.config.gpu_power_limit_w for proposal in run_to_end(study, lambda _: completed())} == {400}


def test_a_running_trial_is_held_to_a_node_s_share() -> None:
    study = spec(gpu_power_guard_w=600.0, **rack(20_000.0, window_s=10.0))
    per_gpu, per_node = boards_guards(study, study.pools[0], gpu("h200"))
    assert per_gpu.device_w == 600.0
    assert per_node.node_w == pytest.approx((10_000.0 - 1000.0) * 0.9) and per_node.window_s == 10.0


def test_pools_that_a_domain_does_not_feed_are_free() -> None:
    study = spec(power_domains=[{"name": "other", "nodes": ["h2"], "limit_w": 1.0}], pools=[
        {"name": "h", "gpu": "h200", "gpus_per_node": 8}, {"name": "h2", "gpu": "h200", "gpus_per_node": 8}
    ])  # fmt: skip
    assert open_pool(study).candidates.left == 6
    with pytest.raises(SpecError, match="other"):
        open_pool(study, pool=1)
