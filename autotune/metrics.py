"""What a trial's steps are worth: one definition each, over the steady steps of one window."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from autotune.memory_growth import GROWTH, full_after_steps, growth_gib_per_1000_steps
from autotune.run_spread import RunSpread, other_runs
from autotune.steady_state import steady, steady_interval
from autotune.wall_metrics import ESTIMATED
from launchers.base import StepRecord
from search_spaces.gpus import GpuSpec
from search_spaces.hardware import PoolSpec
from search_spaces.model import Workload
from search_spaces.model_flops import model_flops_per_token
from search_spaces.wall_power import NodePower

_DEFAULT_SPREAD = RunSpread()
_BOARDS = ("pool_gpu_mean_power_w", "pool_gpu_peak_power_w")


def tokens_per_s_per_gpu(workload: Workload, step_s: float) -> float:
    """Tokens per second and GPU (rank, on CPU): global batch x sequence length / step seconds / ranks."""
    return workload.tokens_per_step / step_s / workload.world_size


def readable(steps: Sequence[StepRecord]) -> tuple[StepRecord, ...]:
    """The steps with numbers only, as a record can be stored: what a program reported as text or not at all becomes NaN or None."""
    return tuple(
        replace(
            step,
            time_s=_number(step.time_s),
            step_s=_number(step.step_s),
            loss=_number(step.loss),
            grad_norm=_number_or_none(step.grad_norm),
            peak_memory_gib=_number_or_none(step.peak_memory_gib),
        )
        for step in steps
    )


def _number(value: object) -> float:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else math.nan


def _number_or_none(value: object) -> float | None:
    return None if math.isnan(number := _number(value)) else number


def summarise(
    workload: Workload, steps: Sequence[StepRecord], warmup_steps: int, spread: RunSpread = _DEFAULT_SPREAD
) -> dict[str, float]:
    """Metrics of a trial's steady steps, by name with the unit in it. Only finite values; empty where no step was measured.

    `tokens_per_s_per_gpu_low` and `_high` are the ends of the interval that holds 95 % of other runs of the same configuration,
    `step_interval_fraction` is the half-width of the 95 % interval of this run's own median step time, over the median.
    `memory_growth_gib_per_1000_steps` is 0 where memory does not grow, and absent on CPU, whose peak is that of whole processes.
    """
    values = steady([step.step_s for step in steps], warmup_steps)
    if not values:
        return {}
    within = steady_interval(values)
    interval = other_runs(within, spread)
    metrics = {
        "tokens_per_s_per_gpu": tokens_per_s_per_gpu(workload, interval.median),
        "tokens_per_s_per_gpu_low": tokens_per_s_per_gpu(workload, interval.high),
        "tokens_per_s_per_gpu_high": tokens_per_s_per_gpu(workload, interval.low),
        "step_time_s": interval.median,
        "step_interval_fraction": within.half_width,
        "run_spread_fraction": spread.relative,
        "step_time_cv": float(np.std(values) / np.mean(values)),
        "steady_steps": float(interval.samples),
        "interval_coverage": interval.coverage,
        "first_step_s": steps[0].step_s,
        "loss_first": steps[0].loss,
        "loss_last": steps[-1].loss,
    }
    peaks = [step.peak_memory_gib for step in steps if step.peak_memory_gib is not None]
    if peaks:
        metrics["peak_memory_gib"] = max(peaks)
    if peaks and workload.device == "cuda":
        metrics[GROWTH] = growth_gib_per_1000_steps(peaks[warmup_steps:])
    return {name: value for name, value in metrics.items() if math.isfinite(value)}


def derived(metrics: Mapping[str, float], workload: Workload, pool: PoolSpec, gpu: GpuSpec | None) -> dict[str, float]:
    """What follows from a trial's metrics and its machines; nothing where it was not measured.

    `model_tflops_per_gpu`: model operations (`model_flops_per_token`: no recomputation, causal attention counted once) per second
    and GPU, in 10^12; `mfu`: over the device's dense bf16 peak; `memory_headroom_fraction`: device memory above the peak that torch
    allocated; `memory_full_after_steps`: where that peak still grew, in how many steps more it is the device's memory;
    `usd_per_million_tokens`: at the pool's price; `pool_wall_..._estimated`: watts at the wall of the pool's nodes, from those of
    their boards (`wall_power`), where no meter told them.
    """
    tokens_per_s = metrics.get("tokens_per_s_per_gpu")
    if tokens_per_s is None:
        return {}
    tflops = model_flops_per_token(workload.model, workload.seq_length) * tokens_per_s / 1e12
    found = {"model_tflops_per_gpu": tflops}
    if gpu is not None and workload.device == "cuda":
        found["mfu"] = tflops * 1e12 / gpu.peak("bf16")
        if "peak_memory_gib" in metrics:
            found["memory_headroom_fraction"] = 1.0 - metrics["peak_memory_gib"] / gpu.memory_gib
        found |= full_after_steps(metrics, gpu.memory_gib)
    if gpu is not None:
        node = NodePower.of(pool, gpu)
        boards = {name.replace("_gpu_", "_wall_"): watts for name, watts in metrics.items() if name.startswith(_BOARDS)}
        estimates = {name: node.wall_w(watts, pool.nodes) for name, watts in boards.items() if name not in metrics}
        found |= {f"{name}{ESTIMATED}": watts for name, watts in estimates.items()}
    if pool.usd_per_gpu_hour is not None:
        found["usd_per_million_tokens"] = pool.usd_per_gpu_hour / 3600.0 / tokens_per_s * 1e6
    return found
