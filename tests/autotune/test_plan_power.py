"""Node counts and per-GPU power limits: the answer against brute force over the table, and what a person and a script read."""

import json

import numpy as np
import pytest
import yaml

from autotune.plan import plan_one, plan_pool
from autotune.plan_power import MOST_LIMITS, power_limits
from autotune.refit import CALIBRATION_FILE, calibration_key
from search_spaces.calibration_store import Calibration, Store
from search_spaces.coefficients import shipped
from search_spaces.gpus import gpu, gpu_names
from search_spaces.prediction import step_time_error
from search_spaces.wall_power import NodePower

from .test_plan import DENSE, run, spec_of
from .test_spec import OWN_GPU, OWN_LINK

NODES = {"name": "nodes", "gpu": "h100", "nodes": [2, 4], "gpus_per_node": 8}
BATCH = 256


def powered(*domains, **fields):
    given = [{"name": name, "nodes": nodes, "limit_w": limit, "window_s": window} for name, nodes, limit, window in domains]
    return spec_of(DENSE, **{"pools": [NODES], "global_batch_size": BATCH, "power_domains": given, **fields})


def plans_of(spec):
    return [plan_pool(spec, pool) for pool in spec.pools[0].at_each_node_count()]


def written(tmp_path, spec):
    path = tmp_path / "study.yaml"
    path.write_text(yaml.safe_dump(spec.model_dump(mode="json", exclude_defaults=True)))
    return path


@pytest.mark.parametrize("name", gpu_names())
def test_limits_are_within_what_the_device_takes(name):
    device, limits = gpu(name), power_limits(gpu(name))
    assert limits[0] == int(device.power_limit_w[1])
    assert limits[-1] >= device.power_limit_w[0]
    assert 5 <= len(limits) <= MOST_LIMITS
    assert len({low - high for high, low in zip(limits, limits[1:], strict=False)}) == 1


@pytest.mark.parametrize("window_s", [0.1, 600.0])
def test_the_choice_is_the_fastest_of_all_that_keep_the_limit(window_s):
    """Every candidate that fits, predicted one by one with the limit as its knob."""
    limit_w = 22_000
    spec = powered(("rack", ["nodes"], limit_w, window_s), search={"micro_batch_size": [1, 2, 4], "recompute": ["none", "full"]})
    spec = spec.model_copy(update={"baseline": spec.baseline.model_copy(update={"tensor_model_parallel_size": 8})})
    for pool in spec.pools[0].at_each_node_count():
        plan = plan_pool(spec, pool)
        node = NodePower.of(pool, gpu("h100"))
        fastest = {}
        for row in plan.ranking:
            for limit in power_limits(gpu("h100")):
                config = plan.table.config(int(row)).model_copy(update={"gpu_power_limit_w": limit})
                found = plan_one(spec, pool, config).prediction
                board_w = found.mean_power_w if found.step_time_s <= window_s else found.peak_power_w
                if node.wall_w(board_w * pool.world_size, pool.nodes) <= limit_w:
                    fastest[limit] = min(fastest.get(limit, np.inf), found.step_time_s)
        assert {choice.limit_w: choice.step_time_s for choice in plan.choices} == pytest.approx(fastest)
        assert plan.choices
        assert [choice.tokens_per_s for choice in plan.choices] == sorted((c.tokens_per_s for c in plan.choices), reverse=True)


def test_more_nodes_at_a_lower_limit_where_the_limit_binds_and_margins_add_up():
    two, four = plans_of(powered(("rack", ["nodes"], 26_000, 600.0)))
    assert two.choices[0].limit_w > four.choices[0].limit_w
    assert four.choices[0].tokens_per_s > two.choices[0].tokens_per_s
    for choice in (*two.choices, *four.choices):
        assert choice.margin_w == pytest.approx(26_000 - choice.wall_w)
        assert choice.margin_w >= 0
        assert choice.margin_by == "mean"
        assert choice.config.gpu_power_limit_w == choice.limit_w


def test_a_feed_of_some_nodes_binds_by_its_share():
    spec = powered(("room", ["nodes"], 1e6, 600.0), ("feed", 2, 12_000, 600.0))
    for plan in plans_of(spec):
        choice = plan.choices[0]
        assert choice.domain == "feed"
        assert choice.margin_w >= 0
        assert choice.margin_w == pytest.approx(12_000 - choice.wall_w * 2 / plan.nodes)


def test_a_limit_that_nothing_keeps_is_no_success(tmp_path):
    found = run(written(tmp_path, powered(("rack", ["nodes"], 100, 1.0))), "--state", tmp_path)
    assert found.exit_code == 1
    assert "No node count and per-GPU power limit keeps every power domain under its limit" in found.output


def test_what_is_to_spare_says_which_watts_it_is_worked_out_from(tmp_path):
    short_window = powered(("feed", ["nodes"], 40_000, 0.01))
    for plan in plans_of(short_window):
        choice = plan.choices[0]
        assert choice.margin_by == "peak"
        assert choice.margin_w < 40_000 - choice.wall_w
    shown = run(written(tmp_path, short_window), "--state", tmp_path).output
    assert "W by peaks" in shown
    assert "at most" not in shown.split("Node counts and power limits")[1].split("All numbers")[0]


def test_text_json_and_figure_give_the_same_answer(tmp_path):
    path, page = written(tmp_path, powered(("rack", ["nodes"], 26_000, 600.0))), tmp_path / "plan.html"
    plans = json.loads(run(path, "--json", "--output", page, "--state", tmp_path).stdout)
    best = max((plan["power_choices"][0] for plan in plans), key=lambda choice: choice["tokens_per_s"])
    assert [plan["nodes"] for plan in plans] == [2, 4]
    answer = f"nodes on {best['nodes']} nodes at {best['limit_w']} W per GPU, {best['tokens_per_s']:,.0f} tokens/s"
    assert answer in run(path, "--top", 1, "--state", tmp_path).output
    assert "in total against the power limit, power domains obeyed" in page.read_text()


def test_without_domains_and_counts_nothing_is_asked():
    (plan,) = plans_of(spec_of(DENSE))
    assert plan.choices == ()


def test_own_hardware_is_what_is_planned(tmp_path):
    hardware = {"gpus": {"mine": OWN_GPU}, "links": {"my-ib": OWN_LINK, "my-slow-ib": {**OWN_LINK, "bandwidth_gb_s": 1}}}
    pools = [{**NODES, "name": name, "gpu": "mine", "nodes": 2, "network": name} for name in ("my-ib", "my-slow-ib")]
    fast, slow = json.loads(run(written(tmp_path, spec_of(DENSE, pools=pools, hardware=hardware)), "--json").stdout)
    assert fast["gpu"] == slow["gpu"] == "mine"
    assert fast["best"][0]["headroom_gib"] + fast["best"][0]["device_gib"] == pytest.approx(96)
    assert slow["best"][0]["step_time_s"] > fast["best"][0]["step_time_s"]


def test_a_plan_uses_what_earlier_studies_measured(tmp_path):
    spec = spec_of(DENSE)
    path = written(tmp_path, spec)
    before = json.loads(run(path, "--json", "--state", tmp_path).stdout)[0]
    slow = shipped("h100-sxm-80gb").model_copy(update={"gemm": 0.3})
    Store(tmp_path / CALIBRATION_FILE).put(*calibration_key(spec.pools[0]), "earlier", Calibration(slow, 7))
    after = json.loads(run(path, "--json", "--state", tmp_path).stdout)[0]
    assert (before["calibrated_with_trials"], after["calibrated_with_trials"]) == (0, 7)
    assert after["best"][0]["step_time_s"] > 1.3 * before["best"][0]["step_time_s"]
    said = f"Step time of nodes: calibrated with 7 trials, {step_time_error('calibrated'):.0%} mean error"
    assert said in " ".join(run(path, "--state", tmp_path).output.split())


def test_watts_and_limits_of_two_gpus_on_a_board_are_both_the_boards(tmp_path):
    """Two MI250X to a board of 500 W: what is shown lies between the board's idle watts and its limit, and says of what it is."""
    device, search = gpu("mi250x"), {"tensor_model_parallel_size": [8], "use_distributed_optimizer": [True]}
    pool = {"name": "amd", "gpu": "mi250x", "nodes": [2, 4], "gpus_per_node": 8}
    spec = powered(("room", ["amd"], 50_000, 600.0), pools=[pool], search=search, baseline={"sequence_parallel": True})
    study = written(tmp_path, spec)
    shown, found = run(study, "--output", tmp_path / "plan.html").stdout, json.loads(run(study, "--json").stdout)
    assert "watts per board of 2 GPUs (peak)" in shown
    assert "W per board of 2 GPUs" in shown
    assert "per GPU power" not in shown and "W per GPU" not in shown
    assert "peak watts per board of 2 GPUs" in (tmp_path / "plan.html").read_text()
    for plan, planned in zip(found, plans_of(spec), strict=True):
        best, node = plan["best"][0], NodePower.of(spec.pools[0], device)
        assert best["gpus_per_board"] == 2
        assert best["mean_power_w"] == pytest.approx(2 * planned.predictions.power.mean_w[planned.ranking[0]])
        assert device.power_limit_w[1] / 2 < best["mean_power_w"] <= best["peak_power_w"]
        for choice in plan["power_choices"]:
            boards_w = choice["limit_w"] * plan["world_size"] / 2
            assert choice["wall_at_limits_w"] == pytest.approx(node.wall_w(boards_w, plan["nodes"]))
    one = run(
        study, *(word for knob in ("tensor_model_parallel_size=8", "use_distributed_optimizer=true") for word in ("--set", knob))
    )
    assert "peak per board of 2 GPUs" in one.stdout


@pytest.mark.parametrize("value", [".inf", ".nan"])
@pytest.mark.parametrize("field", ["limit_w", "window_s", "node_overhead_w", "psu_efficiency"])
def test_a_study_has_finite_numbers(tmp_path, field, value):
    """Infinite watts would be no JSON, and no limit is one that is not there."""
    study = written(tmp_path, powered(("rack", ["nodes"], 21_500, 600.0)))
    data = yaml.safe_load(study.read_text())
    place = data["power_domains"][0] if field in ("limit_w", "window_s") else data["pools"][0]
    place[field] = float(value.removeprefix("."))
    study.write_text(yaml.safe_dump(data))
    found = run(study, "--json")
    assert found.exit_code == 2
    assert f"{field}: must be" in found.output
