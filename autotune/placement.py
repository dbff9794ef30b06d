"""Slots: the nodes on which one trial runs, held by the study for its whole life.

Per slot one placement group with one labelled whole-node bundle per node, and one `NodeAgent` actor in each bundle. A Tune trial
is a small actor outside the group that leases a slot, so that a failed trial costs the next one neither an agent nor a preload.
Slots that share a node (several pools on one machine) take turns.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from autotune.errors import InfrastructureError
from autotune.node_agent import AgentSetup, NodeAgent
from autotune.ray_session import RaySession
from search_spaces.hardware import PoolSpec

log = logging.getLogger(__name__)
_PLACEMENT_TIMEOUT_S = 120.0
_AGENT_TIMEOUT_S = 120.0


@dataclass(eq=False)
class Slot:
    """The agents that run one trial at a time.

    Attributes:
        pool: Their pool.
        group: Placement group that holds the nodes.
        agents: One actor handle per node; node rank = position.
        node_ids: Ray node ids in the same order.
        leased: Whether a trial runs on it.
        generations: Agents started so far, over all nodes.
    """

    pool: PoolSpec
    group: PlacementGroup
    agents: list[Any] = field(default_factory=list)
    node_ids: list[str] = field(default_factory=list)
    leased: bool = False
    generations: int = 0


class Slots:
    """All slots of a study."""

    def __init__(self, session: RaySession, study_id: str) -> None:
        self._session = session
        self._study_id = study_id
        self._slots: list[Slot] = []
        self._setups: dict[str, AgentSetup] = {}

    def open(self, setup: AgentSetup) -> Slot:
        """Reserve a pool's nodes and start an agent on each.

        Raises:
            InfrastructureError: where no such nodes exist, they stay taken, or an agent does not start.
        """
        pool, labels = setup.pool, setup.labels
        nodes = _matching_nodes(pool, labels)
        bundle = _bundle(pool, nodes, sharers=len(self._session.pools) if self._session.private else 1)
        group = placement_group(
            [bundle] * pool.nodes,
            strategy="STRICT_SPREAD",
            name=f"autotune:{self._study_id}:{pool.name}",
            bundle_label_selector=[labels] * pool.nodes,
        )
        slot = Slot(pool, group)
        self._slots.append(slot)
        self._setups[pool.name] = setup
        try:
            ray.get(group.ready(), timeout=_PLACEMENT_TIMEOUT_S)
        except GetTimeoutError:
            raise InfrastructureError(
                f"pool {pool.name!r}: its nodes did not become free within {_PLACEMENT_TIMEOUT_S:.0f} s ({_holders(nodes)})",
                "end what holds them, or tune on other nodes",
            ) from None
        for rank in range(pool.nodes):
            self._start_agent(slot, rank)
        return slot

    def lease(self, pool_name: str) -> Slot | None:
        """A free slot of the pool whose nodes no leased slot shares; None where there is none now."""
        busy = {node for slot in self._slots if slot.leased for node in slot.node_ids}
        for slot in self._slots:
            if slot.pool.name == pool_name and not slot.leased and not busy.intersection(slot.node_ids):
                slot.leased = True
                return slot
        return None

    def release(self, slot: Slot) -> None:
        """Give a slot back."""
        slot.leased = False

    def end_trial(self, slot: Slot) -> None:
        """End whatever still runs on the slot's living agents."""
        for agent in slot.agents:
            try:
                ray.get(agent.stop.remote(), timeout=10.0)
            except (RayError, GetTimeoutError) as error:
                log.warning("pool %s: an agent did not end its trial: %s", slot.pool.name, error)

    def end_all(self) -> None:
        """End what runs on every leased slot."""
        for slot in self._slots:
            if slot.leased:
                self.end_trial(slot)

    def repair(self, slot: Slot) -> None:
        """Start a new agent for each dead one.

        Raises:
            InfrastructureError: where a node does not come back.
        """
        for rank, agent in enumerate(slot.agents):
            try:
                ray.get(agent.describe.remote(), timeout=_AGENT_TIMEOUT_S)
            except (RayError, GetTimeoutError):
                log.warning("pool %s: agent of node %d is gone; starting another", slot.pool.name, rank)
                ray.kill(agent)
                self._start_agent(slot, rank)

    def close(self) -> None:
        """End all agents and give the nodes back."""
        for slot in self._slots:
            for agent in slot.agents:
                try:
                    ray.get(agent.close.remote(), timeout=10.0)
                except (RayError, GetTimeoutError) as error:
                    log.warning("pool %s: an agent did not close: %s", slot.pool.name, error)
            remove_placement_group(slot.group)
        self._slots.clear()

    def _start_agent(self, slot: Slot, rank: int) -> None:
        bundle = slot.group.bundle_specs[rank]
        agent = (
            ray.remote(NodeAgent)
            .options(
                num_cpus=bundle.get("CPU", 0),
                num_gpus=bundle.get("GPU", 0),
                max_concurrency=4,
                scheduling_strategy=PlacementGroupSchedulingStrategy(slot.group, placement_group_bundle_index=rank),
            )
            .remote(self._setups[slot.pool.name])
        )
        try:
            node_id = ray.get(agent.describe.remote(), timeout=_AGENT_TIMEOUT_S)["node_id"]
        except (RayError, GetTimeoutError) as error:
            raise InfrastructureError(f"pool {slot.pool.name!r}: no agent on node {rank}: {error}") from error
        slot.agents[rank : rank + 1] = [agent]
        slot.node_ids[rank : rank + 1] = [node_id]
        slot.generations += 1


def _matching_nodes(pool: PoolSpec, labels: dict[str, str]) -> list[dict[str, Any]]:
    alive = [node for node in ray.nodes() if node["Alive"]]
    nodes = [node for node in alive if labels.items() <= node["Labels"].items()]
    if len(nodes) < pool.nodes:
        known = sorted({f"{k}={v}" for node in alive for k, v in node["Labels"].items() if not k.startswith("ray.io/node-")})
        wanted = ", ".join(f"{k}={v}" for k, v in labels.items())
        raise InfrastructureError(
            f"pool {pool.name!r} needs {pool.nodes} node(s) with {wanted}; the cluster has {len(nodes)}",
            f"labels in the cluster: {', '.join(known) or 'none'}; start nodes with `ray start --labels={wanted}`",
        )
    if pool.device == "cuda":
        fitting = [node for node in nodes if node["Resources"].get("GPU", 0) >= pool.gpus_per_node]
        if len(fitting) < pool.nodes:
            seen = sorted({node["Resources"].get("GPU", 0) for node in nodes})
            raise InfrastructureError(
                f"pool {pool.name!r} needs {pool.gpus_per_node} GPUs on each node; Ray sees {seen} on its nodes",
                "compare `ray status` with the driver's own list (`nvidia-smi -L`)",
            )
        nodes = fitting
    return nodes


def _bundle(pool: PoolSpec, nodes: list[dict[str, Any]], sharers: int) -> dict[str, float]:
    """A whole node: all CPUs that every matching node has (an equal share where pools share one machine), and its GPUs."""
    cpus = min(node["Resources"].get("CPU", 0.0) for node in nodes) / sharers
    bundle = {"CPU": cpus}
    if pool.device == "cuda":
        bundle["GPU"] = float(pool.gpus_per_node)
    return bundle


def _holders(nodes: list[dict[str, Any]]) -> str:
    available = ray._private.state.available_resources_per_node()
    parts = []
    for node in nodes:
        free = available.get(node["NodeID"], {})
        parts.append(
            f"{node['NodeManagerAddress']}: {free.get('CPU', 0):g} of {node['Resources'].get('CPU', 0):g} CPUs and "
            f"{free.get('GPU', 0):g} of {node['Resources'].get('GPU', 0):g} GPUs free"
        )
    return "; ".join(parts)
