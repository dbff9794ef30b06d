"""Nodes of a pool: what is said where the cluster lacks them."""

import pytest

from autotune.errors import InfrastructureError
from autotune.nodes import check_nodes
from search_spaces.hardware import PoolSpec


def test_a_pool_that_the_cluster_lacks_is_told_with_the_labels_and_the_address(monkeypatch):
    node = {"Alive": True, "NodeID": "a", "Labels": {"autotune-pool-h": "yes", "ray.io/node-id": "a"}, "Resources": {"GPU": 8.0}}
    monkeypatch.setattr("autotune.nodes.ray.nodes", lambda: [node])
    pool = PoolSpec(name="h", gpu="h100", nodes=2, gpus_per_node=8)
    with pytest.raises(InfrastructureError, match=r"needs 2 node\(s\) with autotune-pool-h=yes; the cluster has 1") as told:
        check_nodes((pool,))
    assert told.value.hint is not None
    assert "ray start --labels=autotune-pool-h=yes" in told.value.hint and "--address" in told.value.hint
