"""Rehearsing a study on pools that are not there: a twin answers for every pool, and its trials run on this machine's CPU."""

from __future__ import annotations

from typing import Any

from autotune.errors import SpecError
from autotune.machines import machines_of
from autotune.spec import StudySpec, override
from launchers.limits import Limits
from launchers.simulated import STARTUP_S
from launchers.twins import KINDS, SimulatedLauncher
from search_spaces.hardware import PoolSpec

LAUNCHER = "simulated"
WALL_LIMITS = Limits(startup_s=600.0, step_s=120.0, trial_s=1800.0)
"""For the process that plays a trial: it takes seconds, whatever the trial takes in virtual time."""
_SUFFIX = "-simulated"


def simulated(spec: StudySpec) -> StudySpec:
    """The study on a twin of its pools, under a name of its own, so that nothing simulated lies among measurements."""
    name = spec.name if spec.name.endswith(_SUFFIX) else spec.name[: 63 - len(_SUFFIX)] + _SUFFIX
    return override(spec, {"name": name, "launcher": LAUNCHER})


def is_simulated(spec: StudySpec) -> bool:
    """Whether the study's trials are simulated."""
    return spec.launcher.partition(":")[0] == LAUNCHER


def twin_launcher(spec: StudySpec, pool: PoolSpec) -> SimulatedLauncher:
    """The twin of one pool: `simulated` or `simulated:physics`, or `simulated:table`.

    Raises:
        SpecError: there is no such twin.
    """
    asked = spec.launcher.partition(":")[2] or KINDS[0]
    for kind in KINDS:
        if kind == asked:
            return SimulatedLauncher(machines_of(pool, spec.hardware), pool.nodes, kind, spec.seed)
    raise SpecError("launcher", spec.launcher, "is not a twin", f"known: {', '.join(f'{LAUNCHER}:{kind}' for kind in KINDS)}")


def host_pool(spec: StudySpec, pool: PoolSpec) -> PoolSpec:
    """The machines that a pool's trials really use: its own, or one process on this machine's CPU where they are simulated."""
    return PoolSpec(name=pool.name, gpus_per_node=1) if is_simulated(spec) else pool


def starting_at(job: dict[str, Any], start_s: float) -> dict[str, Any]:
    """A twin's job, launched at that virtual Unix time."""
    return {**job, "start_s": start_s}


def note(spec: StudySpec) -> list[str]:
    """What every report of a simulated study says first; nothing for a real one."""
    if not is_simulated(spec):
        return []
    counted = f"Hours, money and wall time are virtual: what the steps take, and {STARTUP_S:g} s of start-up for every trial."
    return [f"SIMULATED by {spec.launcher}, seed {spec.seed}: nothing here was measured", counted]
