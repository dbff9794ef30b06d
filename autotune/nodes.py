"""Which of the cluster's living nodes belong to a pool, what a trial takes of each, and who holds them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import ray
from ray.util.placement_group import placement_group_table

from autotune.errors import InfrastructureError
from autotune.ray_session import pool_labels
from search_spaces.hardware import PoolSpec

_NONE_ASIDE: Mapping[str, str] = {}
_MOST_NAMED = 8


def check_nodes(pools: tuple[PoolSpec, ...]) -> None:
    """Refuse at once what no waiting would help.

    Raises:
        InfrastructureError: where the cluster lacks a pool's nodes or GPUs, with the labels that it has.
    """
    for pool in pools:
        matching_nodes(pool, pool_labels(pool))


def matching_nodes(pool: PoolSpec, labels: Mapping[str, str], aside: Mapping[str, str] = _NONE_ASIDE) -> list[dict[str, Any]]:
    """The living nodes that carry these labels and have the pool's GPUs.

    Args:
        pool: The pool.
        labels: Labels of its nodes.
        aside: Node ids that run no more trials, each with the reason.

    Raises:
        InfrastructureError: where there are too few.
    """
    alive = [node for node in ray.nodes() if node["Alive"]]
    labelled = [node for node in alive if labels.items() <= node["Labels"].items()]
    nodes = [node for node in labelled if node["NodeID"] not in aside]
    if len(nodes) < pool.nodes:
        known = sorted({f"{k}={v}" for node in alive for k, v in node["Labels"].items() if not k.startswith("ray.io/node-")})
        wanted = ", ".join(f"{k}={v}" for k, v in labels.items())
        raise InfrastructureError(
            f"pool {pool.name!r} needs {pool.nodes} node(s) with {wanted}; the cluster has {len(nodes)}{_besides(labelled, aside)}",
            f"labels in the cluster: {', '.join(known) or 'none'}; start nodes with `ray start --labels={wanted}`, "
            "and give their Ray's address with --address: without it this machine is all there is",
        )
    if pool.device == "cpu":
        fitting = [node for node in nodes if node["Resources"].get("CPU", 0) > 0]
        if len(fitting) < pool.nodes:
            raise InfrastructureError(
                f"pool {pool.name!r} runs on CPU, and Ray was told that its nodes have none", "start them without `--num-cpus=0`"
            )
    else:
        fitting = [node for node in nodes if node["Resources"].get("GPU", 0) >= pool.gpus_per_node]
        if len(fitting) < pool.nodes:
            seen = sorted({node["Resources"].get("GPU", 0) for node in nodes})
            raise InfrastructureError(
                f"pool {pool.name!r} needs {pool.gpus_per_node} GPUs on each node; Ray sees {seen} on its nodes",
                "compare `ray status` with the driver's own list (`nvidia-smi -L`)",
            )
    return fitting


def is_alive(node_id: str) -> bool:
    """Whether Ray knows the node as living."""
    return any(node["Alive"] for node in ray.nodes() if node["NodeID"] == node_id)


def sharers_of(nodes: list[dict[str, Any]], pools: tuple[PoolSpec, ...]) -> int:
    """The study's pools that some of these nodes belong to."""
    return sum(any(pool_labels(pool).items() <= node["Labels"].items() for node in nodes) for pool in pools)


def whole_node(pool: PoolSpec, nodes: list[dict[str, Any]], sharers: int) -> dict[str, float]:
    """A whole node: all CPUs that every matching node has (an equal share where pools share one machine), and its GPUs."""
    cpus = min(node["Resources"].get("CPU", 0.0) for node in nodes)
    bundle = {"CPU": cpus // sharers or cpus / sharers}  # Ray takes whole numbers above 1
    if pool.device == "cuda":
        bundle["GPU"] = float(pool.gpus_per_node)
    return {name: amount for name, amount in bundle.items() if amount}  # and no zeros


def free_part(pool: PoolSpec, nodes: list[dict[str, Any]], whole: Mapping[str, float]) -> dict[str, float]:
    """What a trial can take of nodes where somebody holds CPUs but not the GPUs: these, and the CPUs that are left.

    On a CPU pool, or where too few nodes have their GPUs free, it is the whole node, for which a trial has to wait.
    """
    free = free_resources(nodes)
    cpus = sorted((of.get("CPU", 0.0) for of in free if of.get("GPU", 0.0) >= whole.get("GPU", 0.0)), reverse=True)
    if pool.device == "cpu" or len(cpus) < pool.nodes:
        return dict(whole)
    left = float(min(whole.get("CPU", 0.0), cpus[pool.nodes - 1] // 1))
    return {name: amount for name, amount in {**whole, "CPU": left}.items() if amount}


def free_resources(nodes: list[dict[str, Any]]) -> list[dict[str, float]]:
    """What nobody holds of each node."""
    available = ray._private.state.available_resources_per_node()
    return [available.get(node["NodeID"], {}) for node in nodes]


def holders_of(nodes: list[dict[str, Any]]) -> str:
    """What is free of each node, and the placement groups and actors on it, for a person."""
    parts = []
    for node, free in zip(nodes, free_resources(nodes), strict=True):
        found = [f"{count} x {name}" if count > 1 else name for name, count in Counter(_on_node(node["NodeID"])).items()]
        parts.append(
            f"{node['NodeManagerAddress']}: {free.get('CPU', 0):g} of {node['Resources'].get('CPU', 0):g} CPUs and "
            f"{free.get('GPU', 0):g} of {node['Resources'].get('GPU', 0):g} GPUs free"
            + (f"; there are {', '.join(found[:_MOST_NAMED])}" if found else "")
        )
    return "; ".join(parts)


def _on_node(node_id: str) -> list[str]:
    """Created placement groups with bundles on a node, and living actors there, each with its job."""
    found = [
        f"placement group {group['name'] or group['placement_group_id']}"
        for group in placement_group_table().values()
        if group["state"] == "CREATED" and node_id in group["bundles_to_node_id"].values()
    ]
    for actor in ray._private.state.actors(actor_state_name="ALIVE").values():
        if actor["Address"]["NodeID"] == node_id:
            found.append(f"actor {actor['ActorClassName']} of job {actor['JobID']}")
    return found


def _besides(labelled: list[dict[str, Any]], aside: Mapping[str, str]) -> str:
    gone = [f"{node['NodeManagerAddress']}: {aside[node['NodeID']]}" for node in labelled if node["NodeID"] in aside]
    return f" besides those set aside ({'; '.join(gone)})" if gone else ""
