"""Slots on a cluster that others use too: taken nodes, groups left behind, broken nodes, and what Ray says of GPUs.

The nodes' GPUs are Ray's word only. Each test joins the cluster as a driver of its own.
"""

from __future__ import annotations

import json
import re
import time
from contextlib import contextmanager

import pytest
import ray
from ray._raylet import AuthenticationTokenLoader, Config
from ray.util.placement_group import placement_group, placement_group_table

from autotune import reservation
from autotune.errors import InfrastructureError
from autotune.node_agent import AgentSetup
from autotune.placement import Slots
from autotune.ray_session import RaySession, pool_labels
from search_spaces.hardware import PoolSpec
from tests.integration.running_cluster import running_cluster
from tests.telemetry.devices import H100 as H100_80GB
from tests.telemetry.devices import Scenario, environment

pytestmark = [pytest.mark.acceptance, pytest.mark.timeout(300)]
KIND = {"gpu-kind": "H100"}
OTHER = {"gpu-kind": "B200"}
GPU_NODE = {"num_cpus": 2, "num_gpus": 4, "labels": KIND}
WITHOUT_CPUS = {"gpu-kind": "L40S"}
NODES = (
    {"num_cpus": 1},
    GPU_NODE,
    GPU_NODE,
    {"num_cpus": 2, "num_gpus": 4, "labels": OTHER},
    {"num_cpus": 0, "num_gpus": 1, "labels": WITHOUT_CPUS},
)


@pytest.fixture(scope="module")
def cluster():
    with running_cluster(NODES) as running:
        yield running


@pytest.fixture
def session(cluster, monkeypatch):
    """Join the cluster with some pools."""
    for name, value in cluster.environment.items():
        if name.startswith("RAY_"):
            monkeypatch.setenv(name, value)
    Config.initialize("")  # read again: another test of this process may have imported Ray before
    AuthenticationTokenLoader.instance().reset_cache()

    @contextmanager
    def join(*pools):
        with RaySession(pools, cluster.address) as joined, Slots(joined, "shared") as slots:
            yield slots

    return join


def pool(name="four", **changes):
    return PoolSpec.model_validate({"name": name, "gpu": "H100", "gpus_per_node": 4, "labels": KIND, **changes})


def open_slot(slots, of, setup=None):
    return slots.open(setup or AgentSetup(of, (), pool_labels(of)))


def described(slot):
    return ray.get([agent.describe.remote() for agent in slot.agents], timeout=30)


class Holder:
    """Somebody else's actor."""

    def node(self):
        return ray.get_runtime_context().get_node_id()


def test_C019_C021_a_pool_of_two_nodes_takes_one_whole_node_each_and_none_of_another_kind(session):
    with session(two := pool(nodes=2), other := pool("other", labels=OTHER)) as slots:
        found = [*described(open_slot(slots, two)), *described(open_slot(slots, other))]
    assert len({node["node_id"] for node in found}) == 3
    assert [node["labels"]["gpu-kind"] for node in found] == ["H100", "H100", "B200"]
    assert all(sorted(node["gpus"]) == ["0", "1", "2", "3"] for node in found)


def test_C019_eight_gpus_on_one_node_are_not_two_nodes_of_four(session):
    with session(eight := pool(gpus_per_node=8)) as slots, pytest.raises(InfrastructureError, match=r"Ray sees \[4\.0\]"):
        open_slot(slots, eight)


def test_C023_idle_gpus_are_used_although_actors_of_others_hold_the_cpus(session, monkeypatch):
    monkeypatch.setattr(reservation, "_FIRST_TRY_S", 3.0)
    with session(one := pool()) as slots:
        holders = [ray.remote(Holder).options(num_cpus=2, label_selector=KIND).remote() for _ in range(2)]
        ray.get([holder.node.remote() for holder in holders], timeout=30)
        slot = open_slot(slots, one)
        assert slot.group.bundle_specs == [{"GPU": 4.0}]
        assert len(described(slot)[0]["gpus"]) == 4


def test_C018_nodes_that_stay_taken_are_refused_within_a_limit_with_their_holders(session, monkeypatch):
    monkeypatch.setattr(reservation, "_FIRST_TRY_S", 3.0)
    monkeypatch.setattr(reservation, "_SECOND_TRY_S", 3.0)
    with session(one := pool()) as slots:
        taken = placement_group([{"GPU": 4}] * 2, strategy="STRICT_SPREAD", name="of-others", bundle_label_selector=[KIND] * 2)
        ray.get(taken.ready(), timeout=30)
        actor = ray.remote(Holder).options(num_cpus=0, label_selector=KIND).remote()
        ray.get(actor.node.remote(), timeout=30)
        with pytest.raises(InfrastructureError) as refused:
            open_slot(slots, one)
        waiting = [group for group in placement_group_table().values() if group["state"] == "PENDING"]
    message = str(refused.value)
    assert "did not become free within 6 s" in message
    assert message.count("0 of 4 GPUs free") == 2
    assert message.count("placement group of-others") == 2
    assert re.search(r"actor Holder of job \w+", message)
    assert not waiting


def test_C018_C051_what_a_dead_study_left_is_removed_and_its_name_does_not_stop_the_next(session, monkeypatch):
    with session(pool()) as slots:
        job = ray.get_runtime_context().get_job_id()
        name = f"autotune:shared:four:{job}-0"
        ghost = placement_group([{"GPU": 4}] * 2, strategy="STRICT_SPREAD", name=name, lifetime="detached")
        ray.get(ghost.ready(), timeout=30)
    monkeypatch.setattr(reservation, "_FIRST_TRY_S", 5.0)
    with session(two := pool(nodes=2)) as slots:
        kept = f"autotune:other:four:{ray.get_runtime_context().get_job_id()}-0"
        alive = placement_group([{"GPU": 1}], name=kept, bundle_label_selector=[OTHER])
        ray.get(alive.ready(), timeout=30)
        assert len(described(open_slot(slots, two))) == 2
        states = {group["name"]: group["state"] for group in placement_group_table().values()}
    assert (states[name], states[kept]) == ("REMOVED", "CREATED")


def test_nodes_that_ray_was_told_have_no_cpus_serve_gpu_pools_only(session):
    gpus, ranks = pool(gpus_per_node=1, labels=WITHOUT_CPUS), pool("ranks", gpu="cpu", labels=WITHOUT_CPUS)
    with session(gpus, ranks) as slots:
        assert described(open_slot(slots, gpus))[0]["gpus"] == ["0"]
        with pytest.raises(InfrastructureError, match="'ranks' runs on CPU, and Ray was told that its nodes have none"):
            open_slot(slots, ranks)


def test_more_pools_than_cpus_on_a_node_share_them(session):
    pools = [pool(f"p{number}", gpu="cpu", gpus_per_node=1, labels=OTHER) for number in range(3)]
    with session(*pools) as slots:
        assert len({open_slot(slots, of).node_ids[0] for of in pools}) == 1


def test_two_studies_of_one_name_do_not_clash_in_ray(session):
    with session(one := pool()) as slots:
        assert open_slot(slots, one).node_ids != open_slot(slots, one).node_ids


def test_C032_a_node_with_a_process_that_cannot_be_ended_is_replaced_and_without_another_named(session):
    with session(one := pool()) as slots:
        slot = open_slot(slots, one)
        first = slot.node_ids[0]
        begin_s = time.monotonic()
        slots.leave(slot, {0: "rank (pid 4711, state D) cannot be ended"})
        print(f"on another node after {time.monotonic() - begin_s:.1f} s")
        assert slot.node_ids != [first]
        assert described(slot)[0]["node_id"] == slot.node_ids[0]
        with pytest.raises(InfrastructureError, match=r"has 0 besides those set aside .*pid 471[12], state D.*pid 471[12]"):
            slots.leave(slot, {0: "rank (pid 4712, state D) cannot be ended"})


def test_C038_a_choice_of_gpus_for_the_whole_job_is_refused(session, monkeypatch):
    variables = {"env_vars": {"CUDA_VISIBLE_DEVICES": "0,1"}}
    monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", json.dumps({"runtime_env": variables}))  # as `ray job submit` does
    with pytest.raises(InfrastructureError, match="sets CUDA_VISIBLE_DEVICES=0,1 on every node"), session(pool()):
        pass


def test_C024_more_gpus_registered_than_the_driver_sees_are_refused(session, tmp_path):
    devices = environment(Scenario(H100_80GB, 2), folder=tmp_path)
    told = pytest.raises(InfrastructureError, match="Ray assigns 4 GPUs on this node, but the driver sees 2")
    with session(one := pool(telemetry={"env": devices})) as slots, told:
        open_slot(slots, one)


def test_C037_a_trial_keeps_the_uuids_of_its_boards(session, tmp_path):
    devices = environment(Scenario(H100_80GB, 4), folder=tmp_path)
    pools = [pool(f"half{number}", gpus_per_node=2, labels=OTHER, telemetry={"env": devices}) for number in range(2)]
    with session(*pools) as slots:
        found = [described(open_slot(slots, of))[0] for of in pools]
    uuids = [set(node["gpu_uuids"]) for node in found]
    assert [len(of) for of in uuids] == [2, 2]
    assert not uuids[0] & uuids[1]


def test_a_node_that_goes_away_is_replaced_by_another_of_its_pool(session, cluster):
    """The last test on this cluster: it loses a node."""
    with session(one := pool()) as slots:
        slot = open_slot(slots, one)
        (lost,) = slot.node_ids
        slot.leased, slot.used = True, 1
        cluster.ask(f"lose {lost}")
        begin_s = time.monotonic()
        slots.repair(slot, anew=True)
        print(f"an agent on another node {time.monotonic() - begin_s:.1f} s after Ray knew of the loss")
        assert slot.node_ids != [lost]
        assert described(slot)[0]["labels"]["gpu-kind"] == "H100"
