"""Measures a slot's nodes before a pool's first trial, where nothing is known of them yet. Never stops a study."""

from __future__ import annotations

import logging
from pathlib import Path

import ray
from ray.exceptions import RayError

from autotune.node_agent import SlotRequest
from autotune.placement import Slot
from launchers.base import Launcher
from launchers.process import Limits
from search_spaces.node_figures import NodeFigures

log = logging.getLogger(__name__)

_MEASURE_S = 20.0
_ANSWER_S = 15.0


def measure_nodes(slot: Slot, launcher: Launcher, startup_s: float, log_folder: Path) -> NodeFigures | None:
    """What the slot's ranks reach in a few seconds; None where the launcher cannot measure or it failed.

    Args:
        slot: A free slot.
        launcher: Its `figures_program` measures.
        startup_s: How long the ranks' Python may take to import what it needs.
        log_folder: Folder of the ranks' logs.
    """
    program = getattr(launcher, "figures_program", "")
    if not program:
        return None
    limit_s = startup_s + _MEASURE_S
    request = SlotRequest(
        trial=f"figures/{slot.pool.name}",
        program=program,
        job={"device": slot.pool.device},
        limits=Limits(startup_s=limit_s, step_s=limit_s, trial_s=limit_s),
        log_folder=log_folder,
    )
    try:
        address = ray.get(slot.agents[0].describe.remote(), timeout=_ANSWER_S)["address"]
        port = ray.get(slot.agents[0].free_port.remote(), timeout=_ANSWER_S)
        nodes = len(slot.agents)
        asked = [agent.measure.remote(request, rank, nodes, address, port) for rank, agent in enumerate(slot.agents)]
        events = [event for node in ray.get(asked, timeout=limit_s + _ANSWER_S) for event in node]
    except RayError as error:
        log.warning("pool %s: its nodes were not measured: %s", slot.pool.name, str(error).splitlines()[0])
        return None
    if len(events) < slot.pool.world_size:
        log.warning("pool %s: %d of %d ranks were measured", slot.pool.name, len(events), slot.pool.world_size)
        return None
    return NodeFigures.of_ranks(events)
