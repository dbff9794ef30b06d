"""Predictions: memory, step time and watts of every row of a table together, on one kind of device, before a GPU is used.

Nothing is modelled here: `memory`, `step_time` and `power` are asked about the same rows and joined. The numbers are predicted,
never measured, and say how far they may be off: memory by its own upper bound, step time by the error on published measurements.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Literal

import numpy as np
import yaml

from search_spaces import memory, power, step_time
from search_spaces.clock_power import shipped_power
from search_spaces.coefficients import Coefficients, shipped
from search_spaces.columns import Columns
from search_spaces.gpus import GpuSpec, Links, LinkSpec, links_of
from search_spaces.kernels import Floats
from search_spaces.memory import MemoryTable, Verdict
from search_spaces.model import Workload
from search_spaces.power import PowerTable
from search_spaces.step_time import TimeTable

Routing = Literal["balanced", "real"]

_ERRORS = Path(__file__).with_name("step_time_error.yaml")

CALIBRATING_TRIALS = 5
"""Measured trials from which on the coefficients count as calibrated."""

POWER_LIMIT_PART = "power_limit"
"""Seconds that a power or clock limit adds to the sum of the parts of `step_time.PARTS`."""


@cache
def step_time_error(mode: Literal["shipped", "calibrated"]) -> float:
    """Mean absolute error of predicted step times on published rows, as a share; recorded by `benchmarks/accuracy.py --write`.

    Args:
        mode: Without any measured row of the pool, each source held out of the fit, or after at most five.
    """
    return float(yaml.safe_load(_ERRORS.read_text(encoding="utf-8"))[mode]["error"])


@dataclass(frozen=True, slots=True)
class Machines:
    """The machines that a prediction is for.

    Attributes:
        gpu: Kind of device.
        links: How the devices are joined.
        coefficients: What real kernels reach on them.
        trials: Measured trials of these machines behind the coefficients; 0 = as shipped.
        own_error: Mean absolute error of their seconds as predicted before each ran, as a share; None = not known.
    """

    gpu: GpuSpec
    links: Links
    coefficients: Coefficients
    trials: int = 0
    own_error: float | None = None

    @classmethod
    def shipped(
        cls,
        gpu: GpuSpec,
        gpus_per_node: int,
        network: str | None = None,
        inside: str | None = None,
        own_links: Mapping[str, LinkSpec] | None = None,
    ) -> Machines:
        """Machines with shipped coefficients.

        Args:
            gpu: Kind of device.
            gpus_per_node: Devices of a node.
            network: Link between nodes; none = the one usual for the device's generation.
            inside: Link inside a node; none = the device's own.
            own_links: The user's own links by name.

        Raises:
            KeyError: no such link.
        """
        return cls(gpu, links_of(gpu, gpus_per_node, network, inside, own_links), shipped(gpu.name))

    @property
    def step_time_error(self) -> float:
        """Mean absolute error to expect of a step's seconds, as a share: these machines' own, else that on published rows."""
        if self.own_error is not None:
            return self.own_error
        return step_time_error("calibrated" if self.trials >= CALIBRATING_TRIALS else "shipped")


@dataclass(frozen=True, slots=True)
class Prediction:
    """What physics says of one configuration. Predicted, not measured.

    Attributes:
        fits: "fits", "at_risk" (the upper bound is above the GPU's memory) or "does_not_fit" (the expectation is).
        memory_gib: Peak of what torch allocates on the fullest pipeline stage.
        memory_gib_by_stage: The same for every stage.
        memory_by_component: GiB by component on the fullest stage; they add up to `device_gib`.
        device_gib: What the GPU is expected to hold there: allocated, unused segments, CUDA context, NCCL.
        upper_gib: Upper bound of that.
        capacity_gib: The GPU's memory.
        step_time_s: Seconds of an optimiser step, limits of power and clock obeyed.
        time_by_part_s: Seconds by part; they add up to `step_time_s`.
        tokens_per_s_per_gpu: Global batch x sequence length / step time / GPUs.
        mean_power_w: Mean watts of a board; of all GPUs that share it (`GpuSpec.dies_per_package`), as power limits are.
        peak_power_w: Highest mean over the board's averaging window, likewise.
        gpus_per_board: GPUs that share a board and its watts.
        step_time_error: Mean absolute error to expect of `step_time_s`, as a share.
        origin: Always "predicted".
    """

    fits: Verdict
    memory_gib: float
    memory_gib_by_stage: tuple[float, ...]
    memory_by_component: dict[str, float]
    device_gib: float
    upper_gib: float
    capacity_gib: float
    step_time_s: float
    time_by_part_s: dict[str, float]
    tokens_per_s_per_gpu: float
    mean_power_w: float
    peak_power_w: float
    gpus_per_board: int
    step_time_error: float
    origin: Literal["predicted"] = "predicted"

    @property
    def headroom_gib(self) -> float:
        """GPU memory left at the expected peak."""
        return self.capacity_gib - self.device_gib

    @property
    def slowest_part(self) -> str:
        """The part of the step that takes most."""
        return max(self.time_by_part_s, key=lambda name: self.time_by_part_s[name])

    @property
    def largest_component(self) -> str:
        """The component of memory that takes most on the fullest stage."""
        return max(self.memory_by_component, key=lambda name: self.memory_by_component[name])


@dataclass(frozen=True)
class Predictions:
    """What physics says of every row of a table.

    Attributes:
        workload: What is trained.
        machines: The machines that were assumed.
        memory: GiB.
        times: Seconds without limits of power or clock.
        power: Watts, and seconds under the limits.
    """

    workload: Workload
    machines: Machines
    memory: MemoryTable
    times: TimeTable
    power: PowerTable

    def __len__(self) -> int:
        return len(self.memory)

    @cached_property
    def fits(self) -> np.ndarray:
        """The verdict of every row against the GPU's memory, (rows,)."""
        return self.memory.verdict(self.machines.gpu.memory_gib)

    @cached_property
    def step_time_s(self) -> Floats:
        """Seconds of an optimiser step, limits obeyed, (rows,)."""
        return np.broadcast_to(self.power.step_time_s, (len(self),))

    @property
    def tokens_per_s_per_gpu(self) -> Floats:
        """Global batch x sequence length / step time / GPUs, (rows,)."""
        return np.asarray(self.workload.tokens_per_step / self.step_time_s / self.workload.world_size)

    @property
    def peak_power_w(self) -> Floats:
        """Peak watts per device, (rows,); a board of two draws twice that."""
        return np.broadcast_to(self.power.peak_w, (len(self),))

    def row(self, row: int) -> Prediction:
        """One row with all its parts."""
        seconds, parts = float(self.step_time_s[row]), self.times.row(row)
        added = max(seconds - sum(parts.values()), 0.0)
        mean_w, dies = np.broadcast_to(self.power.mean_w, (len(self),)), self.machines.gpu.dies_per_package
        return Prediction(
            fits=self.fits[row].item(),
            memory_gib=float(self.memory.memory_gib[row]),
            memory_gib_by_stage=tuple(self.memory.by_stage(row).tolist()),
            memory_by_component=self.memory.by_component(row),
            device_gib=float(self.memory.device_gib[row]),
            upper_gib=float(self.memory.upper_gib[row]),
            capacity_gib=self.machines.gpu.memory_gib,
            step_time_s=seconds,
            time_by_part_s={**parts, POWER_LIMIT_PART: added if added > 1e-9 * seconds else 0.0},
            tokens_per_s_per_gpu=self.workload.tokens_per_step / seconds / self.workload.world_size,
            mean_power_w=float(mean_w[row]) * dies,
            peak_power_w=float(self.peak_power_w[row]) * dies,
            gpus_per_board=dies,
            step_time_error=self.machines.step_time_error,
        )


def recalibrated(predictions: Predictions, columns: Columns, machines: Machines, routing: Routing = "real") -> Predictions:
    """The same rows after a refit of the machines' coefficients: memory does not depend on them and is kept.

    Args:
        predictions: Of the same columns, on the same kind of device.
        columns: The candidates.
        machines: The machines with the new coefficients.
        routing: As for `predict`.
    """
    times = step_time.estimate(columns, machines.gpu, machines.links, machines.coefficients, routing)
    watts = power.estimate(times, columns, shipped_power(machines.gpu))
    return Predictions(predictions.workload, machines, predictions.memory, times, watts)


def predict(columns: Columns, machines: Machines, routing: Routing = "real") -> Predictions:
    """Memory, step time and watts of every row.

    Args:
        columns: Legal candidates of one workload (`Columns.of(workload, config)` for one).
        machines: The machines.
        routing: Whether experts get equal shares (forced balance, as in benchmarks) or the router's own.
    """
    software = memory.Software.of(columns.workload)
    fused = software.flash_attention and "bf16" in machines.gpu.peak_tflops  # both came with the same generation
    software = replace(software, balanced_experts=routing == "balanced", flash_attention=fused)
    times = step_time.estimate(columns, machines.gpu, machines.links, machines.coefficients, routing)
    return Predictions(
        workload=columns.workload,
        machines=machines,
        memory=memory.estimate(columns, software),
        times=times,
        power=power.estimate(times, columns, shipped_power(machines.gpu)),
    )
