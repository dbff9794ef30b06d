"""Which nodes draw from which domain, and what they take at the wall."""

import pytest

from autotune.power_domains import DomainLimit, domain_limits, nodes_fed
from autotune.spec_parts import PowerDomain
from search_spaces.gpus import gpu
from search_spaces.hardware import PoolSpec
from search_spaces.wall_power import NodePower

DOMAINS = tuple(
    PowerDomain(name=name, nodes=nodes, limit_w=1.0)
    for name, nodes in {
        "room": ("row", "slow"),
        "row": ("rack-a", "rack-b"),
        "rack-a": 4,
        "rack-b": 3,
        "slow-rack": ("slow",),
    }.items()
)


@pytest.mark.parametrize(
    ("domain", "pool", "nodes", "fed"),
    [
        ("rack-a", "fast", 2, 2),
        ("rack-a", "fast", 6, 4),
        ("row", "fast", 6, 6),
        ("row", "fast", 9, 7),
        ("room", "slow", 9, 9),
        ("slow-rack", "slow", 5, 5),
        ("slow-rack", "fast", 5, 0),
    ],
)
def test_nodes_that_draw_from_a_domain(domain, pool, nodes, fed):
    place = next(found for found in DOMAINS if found.name == domain)
    assert nodes_fed(place, PoolSpec(name=pool, gpu="h200", nodes=nodes, gpus_per_node=8), DOMAINS) == fed


def test_64_gpus_held_to_40_kw_take_62_kw_at_the_wall():
    node = NodePower.of(PoolSpec(name="a", gpu="h200", nodes=8, gpus_per_node=8), gpu("h200"))
    assert node.wall_w(40_000, 8) == pytest.approx(62_000, rel=0.02)


def test_a_pools_own_figures_win():
    pool = PoolSpec(name="a", gpu="h100", gpus_per_node=8, node_overhead_w=0, psu_efficiency=0.8)
    assert NodePower.of(pool, gpu("h100")).wall_w(800, 3) == pytest.approx(1000)


def test_two_devices_of_one_package_count_once():
    two, one = (PoolSpec(name="a", gpu=kind, gpus_per_node=8) for kind in ("mi250x", "mi300x"))
    dies, whole = gpu("mi250x"), gpu("mi300x")
    assert dies.dies_per_package == 2
    assert NodePower.of(two, dies).overhead_w / dies.tdp_w == pytest.approx(NodePower.of(one, whole).overhead_w / whole.tdp_w / 2)


def test_limits_of_a_pools_trials_are_those_of_the_domains_that_feed_them():
    pool = PoolSpec(name="fast", gpu="h200", nodes=8, gpus_per_node=8)
    found = {limit.name: limit.share for limit in domain_limits(DOMAINS, pool)}
    assert found == {"room": 7 / 8, "row": 7 / 8, "rack-a": 4 / 8, "rack-b": 3 / 8}


@pytest.mark.parametrize(
    ("metrics", "told"),
    [
        ({"pool_wall_peak_power_w_1s": 800.0, "pool_wall_peak_power_w_10s": 600.0}, ("pool_wall_peak_power_w_10s", 300.0)),
        ({"pool_wall_peak_power_w_60s": 500.0}, ("pool_wall_peak_power_w_60s", 250.0)),
        ({"pool_wall_peak_power_w_60s": 500.0, "domain_r_peak_power_w_60s": 900.0}, ("domain_r_peak_power_w_60s", 900.0)),
        ({"pool_wall_peak_power_w_1s": 800.0}, None),
        ({"pool_wall_peak_power_w_10s_estimated": 800.0}, None),
        ({"domain_r2_peak_power_w_10s": 800.0}, None),
    ],
)
def test_which_measurement_tells_a_domains_watts_over_5_s(metrics, told):
    assert DomainLimit("r", 1000.0, 5.0, 0.5).measured(metrics) == told
