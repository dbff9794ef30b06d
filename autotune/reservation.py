"""A pool's nodes as one placement group: one labelled bundle per node, had within a limit, named by study, pool and Ray job."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Mapping

import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util.placement_group import (
    PlacementGroup,
    PlacementGroupID,
    placement_group,
    placement_group_table,
    remove_placement_group,
)

from autotune.errors import InfrastructureError
from autotune.nodes import free_part, holders_of, matching_nodes, sharers_of, whole_node
from autotune.ray_session import pool_labels
from search_spaces.hardware import PoolSpec

log = logging.getLogger(__name__)
_FIRST_TRY_S = 120.0
_SECOND_TRY_S = 30.0
_PREFIX = "autotune:"
_NODE_ID = "ray.io/node-id"
_numbers = itertools.count()


def reserve(study_id: str, pool: PoolSpec, pools: tuple[PoolSpec, ...], aside: Mapping[str, str]) -> PlacementGroup:
    """Reserve nodes of a pool, none of those set aside.

    What is free is sometimes not given all the same, and somebody's actors may hold CPUs of nodes whose GPUs are idle. So a group
    that does not come is asked for once more, after groups of ended drivers are removed, with the CPUs that are left.

    Args:
        study_id: The study.
        pool: The pool.
        pools: All pools of the study; they share what nodes they share.
        aside: Node ids that run no more trials, each with the reason.

    Raises:
        InfrastructureError: where there are no such nodes, or they stay taken; it says by whom.
    """
    labels = pool_labels(pool)
    nodes = matching_nodes(pool, labels, aside)
    whole = whole_node(pool, nodes, sharers_of(nodes, pools))
    selector = {**labels, **({_NODE_ID: f"!in({','.join(sorted(aside))})"} if aside else {})}
    if (group := _try(study_id, pool, whole, selector, _FIRST_TRY_S)) is not None:
        return group
    remove_left_behind()
    nodes = matching_nodes(pool, labels, aside)
    part = free_part(pool, nodes, whole)
    if (group := _try(study_id, pool, part, selector, _SECOND_TRY_S)) is None:
        limit_s = _FIRST_TRY_S + _SECOND_TRY_S
        raise InfrastructureError(
            f"pool {pool.name!r}: its nodes did not become free within {limit_s:.0f} s ({holders_of(nodes)})",
            "end what holds them, or tune on other nodes",
        )
    if part != whole:
        log.warning("pool %s: others hold CPUs of its nodes; trials get %g per node", pool.name, part.get("CPU", 0.0))
    return group


def _try(
    study_id: str, pool: PoolSpec, bundle: Mapping[str, float], selector: Mapping[str, str], limit_s: float
) -> PlacementGroup | None:
    """The group, ready; None where it did not come in time. Ray refuses a second group of one name, so every name is new."""
    name = f"{_PREFIX}{study_id}:{pool.name}:{ray.get_runtime_context().get_job_id()}-{next(_numbers)}"
    try:
        group = placement_group(
            [dict(bundle)] * pool.nodes,
            strategy="STRICT_SPREAD",
            name=name,
            bundle_label_selector=[dict(selector)] * pool.nodes,
        )
        ray.get(group.ready(), timeout=limit_s)
    except GetTimeoutError:
        remove_placement_group(group)
        return None
    except RayError as error:
        raise InfrastructureError(f"pool {pool.name!r}: Ray makes no placement group: {str(error).strip()}") from error
    return group


def remove_left_behind() -> None:
    """Remove the groups of studies whose driver has ended: Ray does so itself, but not always at once."""
    ended = {job["JobID"] for job in ray._private.state.jobs() if job["IsDead"]}
    for number, group in placement_group_table().items():
        job = group["name"].rpartition(":")[2].partition("-")[0]
        if group["name"].startswith(_PREFIX) and job in ended and group["state"] != "REMOVED":
            log.warning("placement group %s is left of a study that has ended; removing it", group["name"])
            remove_placement_group(PlacementGroup(PlacementGroupID(bytes.fromhex(number))))
