"""Slots: the nodes on which one trial runs, held by the study for its whole life.

Per slot one placement group with one labelled whole-node bundle per node, and one `NodeAgent` actor in each bundle. A Tune trial
is a small actor outside the group that leases a slot, so that a failed trial costs the next one neither an agent nor a preload.
Slots that share a node (several pools on one machine) take turns. So do the node counts of one pool: they share a slot with as many
nodes as the largest takes, and a trial on fewer runs on the first of them.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

import ray
from ray.exceptions import ActorDiedError, OutOfMemoryError, RayError
from ray.util.placement_group import PlacementGroup, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from autotune.errors import InfrastructureError
from autotune.node_agent import AgentSetup, NodeAgent
from autotune.nodes import is_alive, matching_nodes
from autotune.ray_session import RaySession
from autotune.reservation import reserve
from search_spaces.hardware import PoolSpec

log = logging.getLogger(__name__)
_AGENT_TIMEOUT_S = 120.0
_ANSWER_S = 30.0
_END_S = 30.0
_LOOK_S = 1.0
_ENDED = (ActorDiedError, OutOfMemoryError)  # the latter where Ray's memory monitor killed the agent


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
        self._aside: dict[str, str] = {}

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
        slot = Slot(setup.pool, reserve(self._study_id, setup.pool, self._session.pools, self._aside))
        self._slots.append(slot)
        self._setups[setup.pool.name] = setup
        self._start_agents(slot)
        return slot

    def _start_agents(self, slot: Slot) -> None:
        for rank in range(slot.pool.nodes):
            self._start_agent(slot, rank)

    def leave(self, slot: Slot, faults: Mapping[int, str]) -> None:
        """Set nodes of a slot aside for good, and take others in its pool in their place.

        Args:
            slot: The slot.
            faults: Why, by node rank.

        Raises:
            InfrastructureError: where the pool has too few others.
        """
        self._aside |= {slot.node_ids[rank]: why for rank, why in faults.items()}
        for rank, why in faults.items():
            log.warning("pool %s: node %s is set aside: %s", slot.pool.name, slot.node_ids[rank], why)
        self._renew(slot)

    def _renew(self, slot: Slot) -> None:
        """Give a slot's nodes back, and hold some that are there."""
        for agent in slot.agents:
            ray.kill(agent)
        remove_placement_group(slot.group)
        slot.agents.clear()
        slot.node_ids.clear()
        slot.group = reserve(self._study_id, slot.pool, self._session.pools, self._aside)
        self._start_agents(slot)

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

    def end_trial(self, slot: Slot) -> RayError | None:
        """End what still runs on the slot; an agent that does not end it is killed, and its supervisor then ends it.

        Returns:
            How an agent of the trial had ended before; None where all live.
        """
        unheard = self._ask_all("stop", [(slot, (slot.trial,))])
        for agent, _ in unheard:
            ray.kill(agent)
        return next((error for _, error in unheard if isinstance(error, _ENDED)), None)

    def end_all(self) -> None:
        """End what runs on every leased slot."""
        self._ask_all("stop", [(slot, (slot.trial,)) for slot in self._slots if slot.leased])

    def repair(self, slot: Slot, *, anew: bool = False) -> None:
        """Start a new agent for each dead one of the last trial's, on other nodes where theirs has gone.

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
                try:
                    self._start_agent(slot, rank)
                except InfrastructureError:
                    if is_alive(slot.node_ids[rank]):
                        raise
                    self._renew(slot)  # Ray had not known yet that the node was gone
                    return

    def _ask_all(self, method: str, calls: list[tuple[Slot, tuple[str, ...]]]) -> list[tuple[Any, RayError]]:
        """Call a method of all agents of these slots at once; the agents that gave no answer in time, and why."""
        asked = [(slot, agent, getattr(agent, method).remote(*values)) for slot, values in calls for agent in slot.agents]
        deadline_s = time.monotonic() + _END_S
        unheard = []
        for slot, agent, answer in asked:
            try:
                ray.get(answer, timeout=max(0.0, deadline_s - time.monotonic()))
            except _ENDED as error:  # then the supervisor ends what it had started
                unheard.append((agent, error))
            except RayError as error:
                log.warning("pool %s: an agent did not %s: %s", slot.pool.name, method, error)
                unheard.append((agent, error))
        return unheard

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
            matching_nodes(slot.pool, self._setups[slot.pool.name].labels, self._aside)
            if time.monotonic() > deadline_s:
                raise InfrastructureError(f"pool {slot.pool.name!r}: no agent on node {rank} within {_AGENT_TIMEOUT_S:.0f} s")
        try:
            node_id: str = ray.get(answer)["node_id"]
        except RayError as error:
            matching_nodes(slot.pool, self._setups[slot.pool.name].labels, self._aside)
            raise InfrastructureError(f"pool {slot.pool.name!r}: no agent on node {rank}: {error}") from error
        return node_id


def _answers(agent: Any) -> bool:
    try:
        ray.get(agent.describe.remote(), timeout=_ANSWER_S)
    except RayError:
        return False
    return True
