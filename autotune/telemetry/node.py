"""NodeGpus: the GPUs of an agent's node, opened once, recorded beside each trial. What cannot be opened is said, never raised."""

from __future__ import annotations

import logging
import math
import os
import threading
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace

import numpy as np

from autotune.probes import read_driver
from autotune.telemetry import Gpu, TelemetryError, open_gpus
from autotune.telemetry.base import HOST
from autotune.telemetry.sampler import Sampler
from autotune.telemetry.sensors import sensor_of
from autotune.telemetry.series import Array, NodeTelemetry, Sensor, reported_series
from autotune.telemetry.visible import physical, select
from autotune.telemetry.wall import WallMeter
from autotune.throttle_metrics import slope_c_per_min
from launchers.base import StepRecord
from launchers.gpu_sample import SAMPLES_EVENT, GpuSample, sample_from_dict
from launchers.outcome import Outcome, Verdict
from launchers.process import Event, LaunchRequest, Limits, Supervised, TrialEnd, run_trial
from search_spaces.gpus import gpu
from search_spaces.hardware import PoolSpec

log = logging.getLogger(__name__)
_OPEN_S = 30.0


def vendors_of(pool: PoolSpec) -> tuple[str, ...]:
    """Whose libraries a pool's agents load: what the pool says, else its kind of GPU's vendor, else the loaded drivers'."""
    if pool.telemetry.vendors is not None:
        return pool.telemetry.vendors
    if pool.device == "cpu":
        return ()
    with suppress(KeyError):
        return (gpu(pool.gpu).vendor,)
    driver = read_driver()
    loaded = {"nvidia": driver.nvidia is not None, "amd": driver.amdgpu}
    return tuple(vendor for vendor, there in loaded.items() if there)


@dataclass(frozen=True, slots=True)
class BoardsGuard:
    """What the boards of one node may draw while a trial runs.

    Attributes:
        device_w: Each of them.
        node_w: All of them together.
        window_s: Seconds over which these watts are means.
    """

    device_w: float = math.inf
    node_w: float = math.inf
    window_s: float = 1.0


class Recording:
    """One trial's measurement in progress."""

    def __init__(
        self,
        sampler: Sampler,
        charged: frozenset[str],
        sensors: dict[str, Sensor],
        problems: dict[str, str],
        meter: WallMeter | None = None,
    ) -> None:
        self._sampler = sampler
        self._meter = meter
        self._charged = charged
        self._sensors = sensors
        self._problems = problems
        self._reported: list[GpuSample] = []
        self._told: dict[str, list[tuple[float, float]]] = {}

    @property
    def lost(self) -> str:
        """Which of the trial's GPUs stopped answering, and why; empty while all do."""
        lost = {uuid: why for uuid, why in self._sampler.lost().items() if uuid in self._charged}
        return ", ".join(f"{uuid} ({why})" for uuid, why in lost.items())

    def over(self, allowed: BoardsGuard) -> str:
        """How this node's boards pass what they are allowed; empty while they do not, or cannot be measured."""
        watts = self._sampler.power_w(self._charged, allowed.window_s)
        if watts and max(watts) > allowed.device_w:
            return f"a GPU drew {max(watts):,.0f} W over {allowed.window_s:g} s; {allowed.device_w:,.0f} W are allowed"
        if sum(watts) > allowed.node_w:
            return f"the node's GPUs drew {sum(watts):,.0f} W over {allowed.window_s:g} s; {allowed.node_w:,.0f} W are allowed"
        return ""

    def report(self, samples: Iterable[GpuSample]) -> None:
        """Take readings that the trial's own program reports, in the order of their times."""
        for sample in samples:
            self._reported.append(sample)
            if sample.temperature_c is not None:
                self._told.setdefault(sample.gpu, []).append((sample.time_s, sample.temperature_c))

    def slopes_c_per_min(self, start_s: float, end_s: float) -> list[float | None]:
        """How fast each of the trial's GPUs that tells its temperature warmed up in that time; None where it told too little.

        May be called from another thread than the one that records.
        """
        told = [_between(readings, start_s, end_s) for readings in list(self._told.values())]
        found = [*self._sampler.temperatures(self._charged), *told]
        return [slope_c_per_min(times, celsius, start_s, end_s) for times, celsius in found]

    def end(self, node: int) -> NodeTelemetry:
        """Stop reading; what was read."""
        series, cost = self._sampler.stop(self._charged, node)
        if self._meter is not None:
            self._meter.halt()
            series = (*series, self._meter.series(node))
        log.info("telemetry took %.2f %% of a core (%d readings)", 100 * cost.core_fraction, cost.readings)
        return NodeTelemetry(node, (*series, *reported_series(self._reported, node)), cost, self._sensors, self._problems)


def _between(readings: list[tuple[float, float]], start_s: float, end_s: float) -> tuple[Array, Array]:
    """Times and values of the readings of a time, oldest first."""
    inside = readings[bisect_left(readings, (start_s, -math.inf)) : bisect_right(readings, (end_s, math.inf))]
    columns = np.array(inside, dtype=float).reshape(-1, 2)
    return columns[:, 0], columns[:, 1]


class NodeGpus:
    """Devices of this node.

    Args:
        pool: The agent's pool.
        ids: The trial's GPUs as Ray or the pool names them.
    """

    def __init__(self, pool: PoolSpec, ids: Sequence[str]) -> None:
        self._period_s = pool.telemetry.period_s
        self._wall = (pool.wall_power_command, pool.telemetry.wall_power_period_s)
        self._gpus: list[Gpu] = []
        self._charged: set[str] = set()
        self._problems: dict[str, str] = {}
        self._sensors: dict[str, Sensor] = {}
        self._recording: Recording | None = None
        vendors = vendors_of(pool)
        opening = threading.Thread(target=self._open, args=(vendors, tuple(pool.telemetry.gpus or ids)), daemon=True)
        opening.start()
        opening.join(_OPEN_S)
        if opening.is_alive():
            self._problems["telemetry"] = f"a driver did not answer within {_OPEN_S:g} s"

    @property
    def gpus(self) -> tuple[Gpu, ...]:
        """All that can be seen."""
        return tuple(self._gpus)

    @property
    def charged(self) -> tuple[Gpu, ...]:
        """Those of the trial, and the host's energy zones."""
        return tuple(device for device in self._gpus if device.info.uuid in self._charged)

    def _open(self, vendors: tuple[str, ...], ids: tuple[str, ...]) -> None:
        for vendor in (*vendors, HOST):
            try:
                self._gpus += (found := open_gpus(vendor))
                wanted = found if vendor == HOST else select(found, physical(vendor, ids, os.environ))
            except TelemetryError as error:
                self._problems[vendor] = str(error)
                continue
            self._charged |= {device.info.uuid for device in wanted}
        for device in self._gpus:
            if device.info.is_board and device.info.name not in self._sensors:
                self._sensors[device.info.name] = sensor_of(device)

    @contextmanager
    def recording(self) -> Iterator[Recording]:
        """Read all GPUs, and the node's meter where its pool names one, while the block runs."""
        with ExitStack() as stack:
            sampler = Sampler(self._gpus, self._period_s)
            sampler.start()
            stack.callback(sampler.halt)
            meter = WallMeter(*self._wall) if self._wall[0] else None
            if meter is not None:
                meter.start()
                stack.callback(meter.halt)
            self._recording = Recording(sampler, frozenset(self._charged), dict(self._sensors), dict(self._problems), meter)
            yield self._recording

    def slopes_c_per_min(self, start_s: float, end_s: float) -> list[float | None]:
        """Of the recording that runs, or else of the last one; see `Recording.slopes_c_per_min`."""
        return self._recording.slopes_c_per_min(start_s, end_s) if self._recording is not None else []


def run_measured(
    devices: NodeGpus,
    supervised: Supervised,
    launch: LaunchRequest,
    limits: Limits,
    node_rank: int,
    stop: Callable[[], bool] = lambda: False,
    hang_signal: Callable[[float], str] = lambda _silent_s: "",
    guards: Sequence[BoardsGuard] = (),
) -> Generator[StepRecord | NodeTelemetry | TrialEnd, None, None]:
    """Run one node's share of a trial with the node's GPUs read beside it; `hang_signal` as in `run_trial`.

    Yields its steps as they come, then what was measured, then its end. A trial that loses a GPU is ended; the node is to blame.
    One that crosses a guard is ended, too; its configuration is.
    """
    crossed = ""

    def note(event: Event) -> None:
        if event["event"] == SAMPLES_EVENT:
            recording.report(sample_from_dict(sample) for sample in event["samples"])

    def ends() -> bool:
        nonlocal crossed
        crossed = crossed or next((text for guard in guards if (text := recording.over(guard))), "")
        return bool(crossed) or stop() or bool(recording.lost)

    with devices.recording() as recording:
        for item in run_trial(supervised, launch, limits, stop=ends, on_event=note, hang_signal=hang_signal):
            if not isinstance(item, TrialEnd):
                yield item
                continue
            yield recording.end(node_rank)
            if lost := recording.lost:
                yield replace(item, verdict=Verdict(Outcome.LOST, f"GPU lost: {lost}"), broken=f"GPU lost: {lost}")
            elif crossed:
                yield replace(item, verdict=Verdict(Outcome.OVER_GUARD, crossed, time_s=item.ended_s))
            else:
                yield item
