"""Slots: the nodes on which one trial runs, held by the study for its whole life.

Per slot one placement group with one labelled whole-node bundle per node, and one `NodeAgent` actor in each bundle. A Tune trial
is a small actor outside the group that leases a slot, so that a failed trial costs the next one neither an agent nor a preload.
Slots that share a node (several pools on one machine) take turns. So do the node counts of one pool: they share a slot with as many
nodes as the largest takes, and a trial on fewer runs on the first of them.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

import ray
from ray.exceptions import ActorDiedError, GetTimeoutError, RayError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from autotune.errors import InfrastructureError
from autotune.node_agent import AgentSetup, NodeAgent
from autotune.ray_session import RaySession, pool_labels
from search_spaces.hardware import PoolSpec

log = logging.getLogger(__name__)
_PLACEMENT_TIMEOUT_S = 120.0
_AGENT_TIMEOUT_S = 120.0
_ANSWER_S = 30.0
_END_S = 30.0
_LOOK_S = 1.0


@dataclass(eq=False)
class Slot:
    """The agents that run one trial at a time.

    Attributes:
        pool: Their pool.
        group: Placement group that holds the nodes.
        agents: One actor handle per node; node rank = position.
        node_ids: Ray node ids in the same order.
        leased: Whether a trial runs on it.
        used: Nodes of the trial that leased it last.
        trial: The trial that was launched last.
        generations: Agents started so far, over all nodes.
    """

    pool: PoolSpec
    group: PlacementGroup
    agents: list[Any] = field(default_factory=list)
    node_ids: list[str] = field(default_factory=list)
    leased: bool = False
    used: int = 0
    trial: str = ""
    generations: int = 0

    @property
    def trial_agents(self) -> list[Any]:
        """The agents that the trial runs on."""
        return self.agents[: self.used]


class Slots:
    """All slots of a study; leaving it ends them."""

    def __init__(self, session: RaySession, study_id: str) -> None:
        self._session = session
        self._study_id = study_id
        self._slots: list[Slot] = []
        self._setups: dict[str, AgentSetup] = {}

    def __enter__(self) -> Self:
        """Nothing is reserved yet."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """End all agents and give the nodes back."""
        self._ask_all("close", [(slot, ()) for slot in self._slots])
        for slot in self._slots:
            remove_placement_group(slot.group)
        self._slots.clear()

    def open(self, setup: AgentSetup) -> Slot:
        """Reserve a pool's nodes and start an agent on each.

        Raises:
            InfrastructureError: where no such nodes exist, they stay taken, or an agent does not start.
        """
        pool, labels = setup.pool, setup.labels
        nodes = matching_nodes(pool, labels)
        bundle = _bundle(pool, nodes, sharers=_sharers(nodes, self._session.pools))
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

    def lease(self, pool: PoolSpec) -> Slot | None:
        """A free slot for a trial on so many nodes of the pool, sharing none with a leased one; None where there is none now."""
        busy = {node for slot in self._slots if slot.leased for node in slot.node_ids}
        for slot in self._slots:
            if slot.pool.name == pool.name and not slot.leased and not busy.intersection(slot.node_ids):
                slot.leased, slot.used = True, pool.nodes
                return slot
        return None

    def release(self, slot: Slot) -> None:
        """Give a slot back."""
        slot.leased = False

    def end_trial(self, slot: Slot) -> None:
        """End what still runs on the slot; an agent that does not end it is killed, and its supervisor then ends it."""
        for agent in self._ask_all("stop", [(slot, (slot.trial,))]):
            ray.kill(agent)

    def end_all(self) -> None:
        """End what runs on every leased slot."""
        self._ask_all("stop", [(slot, (slot.trial,)) for slot in self._slots if slot.leased])

    def repair(self, slot: Slot, *, anew: bool = False) -> None:
        """Start a new agent for each dead one of the last trial's.

        Args:
            slot: The slot.
            anew: Replace also those that answer: on a node that is going away an agent may answer once more and then fail.

        Raises:
            InfrastructureError: where a node does not come back.
        """
        for rank, agent in enumerate(slot.trial_agents):
            if anew or not _answers(agent):
                log.warning("pool %s: agent of node %d failed; starting another", slot.pool.name, rank)
                ray.kill(agent)
                self._start_agent(slot, rank)

    def _ask_all(self, method: str, calls: list[tuple[Slot, tuple[str, ...]]]) -> list[Any]:
        """Call a method of all agents of these slots at once; the agents that gave no answer in time."""
        asked = [(slot, agent, getattr(agent, method).remote(*values)) for slot, values in calls for agent in slot.agents]
        deadline_s = time.monotonic() + _END_S
        silent = []
        for slot, agent, answer in asked:
            try:
                ray.get(answer, timeout=max(0.0, deadline_s - time.monotonic()))
            except ActorDiedError:
                continue  # then the supervisor ends what it had started
            except RayError as error:
                log.warning("pool %s: an agent did not %s: %s", slot.pool.name, method, error)
                silent.append(agent)
        return silent

    def _start_agent(self, slot: Slot, rank: int) -> None:
        bundle = slot.group.bundle_specs[rank]
        agent = (
            ray.remote(NodeAgent)
            .options(
                num_cpus=bundle.get("CPU", 0),
                num_gpus=bundle.get("GPU", 0),
                max_concurrency=4,
                runtime_env={"env_vars": slot.pool.telemetry.env},
                scheduling_strategy=PlacementGroupSchedulingStrategy(slot.group, placement_group_bundle_index=rank),
            )
            .remote(self._setups[slot.pool.name])
        )
        node_id = self._await_agent(slot, rank, agent)
        slot.agents[rank : rank + 1] = [agent]
        slot.node_ids[rank : rank + 1] = [node_id]
        slot.generations += 1

    def _await_agent(self, slot: Slot, rank: int, agent: Any) -> str:
        """The node that the new agent is on. Waits no longer than there are enough nodes: a lost one comes back rarely."""
        answer = agent.describe.remote()
        deadline_s = time.monotonic() + _AGENT_TIMEOUT_S
        while not ray.wait([answer], timeout=_LOOK_S)[0]:
            matching_nodes(slot.pool, self._setups[slot.pool.name].labels)
            if time.monotonic() > deadline_s:
                raise InfrastructureError(f"pool {slot.pool.name!r}: no agent on node {rank} within {_AGENT_TIMEOUT_S:.0f} s")
        try:
            node_id: str = ray.get(answer)["node_id"]
        except RayError as error:
            matching_nodes(slot.pool, self._setups[slot.pool.name].labels)
            raise InfrastructureError(f"pool {slot.pool.name!r}: no agent on node {rank}: {error}") from error
        return node_id


def _answers(agent: Any) -> bool:
    try:
        ray.get(agent.describe.remote(), timeout=_ANSWER_S)
    except RayError:
        return False
    return True


def check_nodes(pools: tuple[PoolSpec, ...]) -> None:
    """Refuse at once what no waiting would help.

    Raises:
        InfrastructureError: where the cluster lacks a pool's nodes or GPUs, with the labels that it has.
    """
    for pool in pools:
        matching_nodes(pool, pool_labels(pool))


def matching_nodes(pool: PoolSpec, labels: dict[str, str]) -> list[dict[str, Any]]:
    """The living nodes that carry these labels and have the pool's GPUs.

    Raises:
        InfrastructureError: where there are too few.
    """
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


def _sharers(nodes: list[dict[str, Any]], pools: tuple[PoolSpec, ...]) -> int:
    """The study's pools that some of these nodes belong to."""
    return sum(any(pool_labels(pool).items() <= node["Labels"].items() for node in nodes) for pool in pools)


def _bundle(pool: PoolSpec, nodes: list[dict[str, Any]], sharers: int) -> dict[str, float]:
    """A whole node: all CPUs that every matching node has (an equal share where pools share one machine), and its GPUs."""
    cpus = min(node["Resources"].get("CPU", 0.0) for node in nodes) // sharers  # Ray takes whole numbers above 1
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
