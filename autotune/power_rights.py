"""Before a study: may power limits be set on its nodes? Where not, the knob is dropped by name, with what to ask for."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from autotune.errors import SpecError
from autotune.power_limits import PowerLimits
from autotune.ray_session import RaySession, pool_labels
from autotune.spec import StudySpec
from autotune.telemetry import Gpu, PowerLimitError, TelemetryError, open_gpus
from autotune.telemetry.node import vendors_of
from search_spaces.hardware import PoolSpec

POWER_KNOB = "gpu_power_limit_w"
CLOCK_KNOB = "sm_clock_limit_mhz"
_PROBE_S = 60.0
_NO_CLOCKS = f"{CLOCK_KNOB} was dropped: clock limits are not set by autotune, because no driver says what they were before"
_ASK = (
    "ask the administrator to let this account set them (on NVIDIA root or `sudo nvidia-smi -pl`, on AMD root), "
    "or give the site's own command as `power_limit_command` of the pool, e.g. "
    '"sudo nvidia-smi -i {gpu} -pl {watts}"'
)

Probe = Callable[[PoolSpec], Sequence["Rights"]]


@dataclass(frozen=True, slots=True)
class Rights:
    """What one node says of power limits.

    Attributes:
        low_w: Lowest limit that all its GPUs take; None where one does not say.
        high_w: Highest such limit.
        problem: Why limits cannot be set there; empty where they can.
    """

    low_w: float | None = None
    high_w: float | None = None
    problem: str = ""


def probe_rights(vendor: str, ids: Sequence[str] | None, command: str | None) -> Rights:
    """Find out on this node, by requesting the limit that is requested already.

    Args:
        vendor: "nvidia" or "amd".
        ids: GPUs as `CUDA_VISIBLE_DEVICES` names them; None = all.
        command: The site's own command.
    """
    try:
        gpus = open_gpus(vendor, ids)
    except TelemetryError as error:
        return Rights(problem=str(error))
    if cut := [gpu for gpu in gpus if gpu.info.mig]:
        return Rights(problem=f"GPU {cut[0].info.index} is cut into MIG instances, which share its limit")
    lows = [gpu.info.min_power_limit_w for gpu in gpus]
    highs = [gpu.info.max_power_limit_w for gpu in gpus]
    return Rights(_all(lows, max), _all(highs, min), _try_to_set(gpus, command or ""))


def _all(values: Iterable[float | None], choose: Callable[[list[float]], float]) -> float | None:
    known = list(values)
    numbers = [value for value in known if value is not None]
    return choose(numbers) if numbers and len(numbers) == len(known) else None


def _try_to_set(gpus: Sequence[Gpu], command: str) -> str:
    for device in gpus:
        limits = PowerLimits([device], command)
        try:
            limits.set(device.requested_power_limit_w())
        except PowerLimitError as error:
            return f"GPU {device.info.index}: {error}"
        finally:
            problems = limits.restore()
        if problems:
            return problems[0]
    return ""


def check_rights(spec: StudySpec, probe: Probe) -> dict[str, list[str]]:
    """Which pools cannot set power limits: the notes for their reports, by the pool's name. Asks only where the knob is used.

    Args:
        spec: The study.
        probe: Asks a pool's nodes.

    Raises:
        SpecError: where a wanted limit is outside of what the devices take.
    """
    notes: dict[str, list[str]] = {}
    for pool in spec.pools:
        if pool.device == "cpu":
            continue
        if _choices(spec, CLOCK_KNOB):
            notes.setdefault(pool.name, []).append(_NO_CLOCKS)
        watts = _choices(spec, POWER_KNOB)
        nodes = probe(pool) if watts else ()
        for rights in nodes:
            _check_range(pool, watts, rights)
        if problems := [rights.problem for rights in nodes if rights.problem]:
            notes.setdefault(pool.name, []).append(f"{POWER_KNOB} was dropped: {problems[0]}; {_ASK}")
    return notes


def _check_range(pool: PoolSpec, watts: Sequence[int], rights: Rights) -> None:
    low, high = rights.low_w or 0.0, rights.high_w or float("inf")
    if outside := [limit for limit in watts if not low <= limit <= high]:
        hint = f"the GPUs of pool {pool.name!r} take {low:g} to {high:g} W"
        raise SpecError(f"search.{POWER_KNOB}", outside[0], "is outside of what the devices take", hint)


def _choices(spec: StudySpec, knob: str) -> list[int]:
    """The limits that a study may set, in the search or by its baseline."""
    searched: Any = spec.search.get(knob, ()) if isinstance(spec.search, Mapping) else ()
    if isinstance(searched, Mapping):  # {range: [low, high]}
        searched = [end for ends in searched.values() for end in ends]
    values = [*(searched if isinstance(searched, list | tuple) else [searched]), getattr(spec.baseline, knob)]
    return [int(value) for value in values if isinstance(value, int | float) and not isinstance(value, bool)]


def without(spec: StudySpec, notes: Sequence[str]) -> StudySpec:
    """The study without the knobs that the notes name as dropped."""
    dropped = [knob for knob in (POWER_KNOB, CLOCK_KNOB) if any(note.startswith(f"{knob} ") for note in notes)]
    if not dropped:
        return spec
    search: Any = spec.search
    if isinstance(search, Mapping):
        search = {name: wanted for name, wanted in search.items() if name not in dropped}
    baseline = spec.baseline.model_copy(update=dict.fromkeys(dropped))
    return spec.model_copy(update={"search": search, "baseline": baseline})


def probe_pool(pool: PoolSpec, ids: Sequence[str] | None) -> Rights:
    """Find out on this node for a pool; its telemetry must be able to reach the GPUs."""
    vendors = vendors_of(pool)
    return probe_rights(vendors[0], ids, pool.power_limit_command) if vendors else Rights(problem="no GPU driver is loaded here")


def ask_here(gpus: Sequence[str]) -> Probe:
    """Ask this machine, whose GPUs a private Ray would use, in a process with the environment of the pool's telemetry."""

    def probe(pool: PoolSpec) -> list[Rights]:
        ids = list(pool.telemetry.gpus or gpus[: pool.gpus_per_node])
        program = "import sys; sys.path.insert(0, sys.argv.pop(1)); from autotune.power_rights import main; main()"
        argv = [sys.executable, "-c", program, str(Path(__file__).resolve().parents[1])]
        question = json.dumps({"pool": pool.model_dump(mode="json", exclude_defaults=True), "ids": ids})
        environment = {**os.environ, **pool.telemetry.env}
        try:
            done = subprocess.run(
                argv, input=question, env=environment, capture_output=True, text=True, timeout=_PROBE_S, check=False
            )
        except subprocess.TimeoutExpired:
            return [Rights(problem=f"the driver did not answer within {_PROBE_S:g} s")]
        if done.returncode:
            return [Rights(problem=f"asking the driver failed: {(done.stderr.strip().splitlines() or ['no answer'])[-1]}")]
        return [Rights(**json.loads(done.stdout.splitlines()[-1]))]

    return probe


def ask_cluster(spec: StudySpec, address: str) -> Probe:
    """Ask every node of a pool, in a Ray session of its own."""

    def probe(pool: PoolSpec) -> list[Rights]:
        with RaySession(spec.pools, address):
            import ray
            from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

            from autotune.nodes import matching_nodes

            ids = list(pool.telemetry.gpus) or None
            task = ray.remote(probe_pool).options(num_cpus=0, runtime_env={"env_vars": pool.telemetry.env})
            places = [
                NodeAffinitySchedulingStrategy(node["NodeID"], soft=False) for node in matching_nodes(pool, pool_labels(pool))
            ]
            asked = [task.options(scheduling_strategy=place).remote(pool, ids) for place in places]
            try:
                found: list[Rights] = ray.get(asked, timeout=_PROBE_S)
            except ray.exceptions.RayError as error:
                return [Rights(problem=f"a node did not answer: {str(error).strip().splitlines()[0]}")]
            return found

    return probe


def main() -> None:
    """Answer one question on standard input, in a process that the driver's library may crash."""
    question = json.load(sys.stdin)
    rights = probe_pool(PoolSpec.model_validate(question["pool"]), question["ids"])
    sys.stdout.write(json.dumps(asdict(rights)) + "\n")
