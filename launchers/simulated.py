"""The program of a simulated trial: reports steps and GPU samples through the same pipe as a real one, in virtual time.

It runs as the only rank of a trial, on the driver's machine, whatever the size of the pool that it stands for; what the twin
hides was worked out by `launchers.twins` before. Needs numpy and the standard library only.
"""

from __future__ import annotations

import math
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np

from launchers.base import RankContext, StepRecord
from launchers.gpu_sample import SAMPLES_EVENT, GpuSample, Throttle
from launchers.soak import Demand, Floats, Gpus, Soak, generator, soak

STARTUP_S = 30.0
"""Seconds from a trial's launch to its first step, as an assumption: processes, NCCL, weights. No twin knows them better."""

_PERIOD_S = 0.1
_MOST_SAMPLES = 20_000
_FEWEST_PER_STEP = 2
_SAMPLES_PER_EVENT = 8
_FLAKY, _BRAKED = 0.01, 0.01
_LOSS, _LEARNING = 10.0, 0.02
# Reasons that a vendor's devices tell, and that no twin has.
_NEVER = {"nvidia": (Throttle.HW_THERMAL, Throttle.SYNC_BOOST, Throttle.OTHER), "amd": (Throttle.HW_THERMAL,)}


class OutOfMemoryError(RuntimeError):
    """As torch calls it."""


class NodeLostError(RuntimeError):
    """A node went away with all that ran on it."""


@dataclass(frozen=True, slots=True)
class Played:
    """What a trial that ran to its end showed.

    Attributes:
        steps: Every step, in order.
        samples: Readings of all GPUs, in order; can be read once.
    """

    steps: tuple[StepRecord, ...]
    samples: Iterator[GpuSample]


def main(job: dict[str, Any], context: RankContext) -> None:
    """Play one trial, launched at the job's `start_s` in virtual Unix time, and report it."""
    try:
        played = play(job, job["start_s"] + STARTUP_S)
    except NodeLostError:
        os.kill(os.getpid(), signal.SIGKILL)
        raise
    while samples := [sample.to_dict() for sample in islice(played.samples, _SAMPLES_PER_EVENT)]:
        context.emit({"event": SAMPLES_EVENT, "samples": samples})
    for step in played.steps:
        context.emit({"event": "step", **step.to_dict()})


def play(job: dict[str, Any], start_s: float, most_samples: int = _MOST_SAMPLES) -> Played:
    """Play one trial in virtual time.

    Args:
        job: As `SimulatedLauncher.job` gives it.
        start_s: Unix time at which its first step starts.
        most_samples: Readings over all GPUs, at the most; two per GPU and step are always given.

    Raises:
        OutOfMemoryError: the configuration does not fit.
        NodeLostError: a flaky node went away during this run.
    """
    load, luck = Demand(**job["load"]), generator(job["run_seed"], "luck")
    if load.memory_gib > job["gpu"]["memory_gib"]:
        raise OutOfMemoryError(f"CUDA out of memory: {load.memory_gib:.1f} of {job['gpu']['memory_gib']:.1f} GiB (simulated)")
    if luck.random() < _FLAKY:
        raise NodeLostError("a node went away (simulated)")
    braked = int(luck.integers(job["nodes"])) if luck.random() < _BRAKED else None
    gpus = Gpus.of(job["gpu"], job["nodes"], job["gpus_per_node"], job["pool_seed"], braked)
    run = soak(load, gpus, job["steps"], job["run_seed"], job["limit_w"], job["clock"])
    return Played(tuple(_steps(job, run, start_s)), _samples(job, gpus, run, start_s, most_samples))


def _steps(job: dict[str, Any], run: Soak, start_s: float) -> Iterator[StepRecord]:
    for iteration, (end_s, step_s) in enumerate(zip(run.end_s, run.step_s, strict=True), start=1):
        loss = _LOSS * math.exp(-_LEARNING * iteration)
        yield StepRecord(iteration, start_s + end_s, step_s, loss, 1.0, job["tokens"], job["load"]["memory_gib"])


def _samples(job: dict[str, Any], gpus: Gpus, played: Soak, start_s: float, most: int) -> Iterator[GpuSample]:
    """Readings of all GPUs, every tenth of a second or as seldom as their number allows; a step's busy stretches come first."""
    share, dies = job["load"]["clocked"], job["gpu"]["dies_per_package"]
    count, energy_j = len(gpus.silicon), np.zeros(len(gpus.silicon))
    begin_s = 0.0
    for step, end_s in enumerate(played.end_s):
        wanted = max(_FEWEST_PER_STEP, int((end_s - begin_s) / _PERIOD_S))
        instants = np.linspace(0.0, 1.0, max(_FEWEST_PER_STEP, min(wanted, most // (count * len(played.end_s)))) + 1)[1:]
        quiet_w = _quiet(played.mean_w[step], played.burst_w[step], share)
        for place in instants:
            watts = played.burst_w[step] if place <= max(share, instants[0]) else quiet_w
            now_s = begin_s + place * (end_s - begin_s)
            package_w, package_j = (
                _of_packages(each, dies) for each in (watts, energy_j + played.mean_w[step] * (now_s - begin_s))
            )
            for gpu in range(count):
                yield _sample(job, played, step, gpu, start_s + now_s, float(package_w[gpu]), float(package_j[gpu]))
        energy_j, begin_s = energy_j + played.mean_w[step] * (end_s - begin_s), end_s


def _of_packages(each: Floats, dies: int) -> Floats:
    """What every device's package draws: the sum of its dies, which is what a driver tells of a board."""
    return np.repeat(each.reshape(-1, dies).sum(axis=1), dies)


def _quiet(mean_w: Floats, burst_w: Floats, share: float) -> Floats:
    """Watts between the busy stretches, so that the mean holds."""
    return np.maximum((mean_w - share * burst_w) / max(1.0 - share, 0.05), 0.0)


def _sample(job: dict[str, Any], played: Soak, step: int, gpu: int, time_s: float, watts: float, energy_j: float) -> GpuSample:
    """One reading of one GPU; watts and joules are its package's."""
    own, dies = job["gpu"], job["gpu"]["dies_per_package"]
    node, place = divmod(gpu, job["gpus_per_node"])
    seconds = (
        (Throttle.POWER_CAP, played.cap_s),
        (Throttle.SW_THERMAL, played.thermal_s),
        (Throttle.POWER_BRAKE, played.brake_s),
    )
    return GpuSample(
        time_s=time_s,
        gpu=f"SIMULATED-{node}-{place}" if dies == 1 else f"SIMULATED-{node}-{place // dies}.{place % dies}",
        power_w=round(watts, 1),
        energy_j=round(energy_j, 1),
        sm_clock_mhz=round(float(played.clock[step][gpu]) * own["clock_mhz"]),
        temperature_c=round(float(played.temperature_c[step][gpu]), 1),
        utilization=1.0,
        memory_used_gib=round(job["load"]["memory_gib"], 2),
        power_limit_w=(job["limit_w"] or own["tdp_w"]) * dies,
        throttle_s={
            **dict.fromkeys(_NEVER[own["vendor"]], 0.0),
            **{reason: round(float(so_far[step][gpu]), 2) for reason, so_far in seconds},
        },
    )
