"""The names of all metrics that a trial can carry, for whoever asks for one by name: terms of the objective, and limits.

Names are made where metrics are: `metrics`, `measured`, `telemetry_summary`, `wall_metrics`, `sync` and `refit`. A test lets these
make all that they can, and compares.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from autotune.power_metrics import PEAK_WINDOWS_S
from autotune.wall_metrics import DOMAIN, ESTIMATED, NODE, POOL
from launchers.gpu_sample import Throttle

_STEPS = (
    "tokens_per_s_per_gpu",
    "tokens_per_s_per_gpu_low",
    "tokens_per_s_per_gpu_high",
    "step_time_s",
    "step_interval_fraction",
    "run_spread_fraction",
    "step_time_cv",
    "steady_steps",
    "interval_coverage",
    "first_step_s",
    "loss_first",
    "loss_last",
    "model_tflops_per_gpu",
    "mfu",
    "usd_per_million_tokens",
    "soak_steps",
    "soak_s",
    "raced_out_saved_s",
    "foreign_cpu_fraction",
)
_MEMORY = ("peak_memory_gib", "memory_headroom_fraction", "memory_growth_gib_per_1000_steps", "memory_full_after_steps")
_POWER = (
    "gpu_mean_power_w",
    "gpu_max_mean_power_w",
    "gpu_peak_power_w_<window>s",
    "pool_gpu_mean_power_w",
    "pool_gpu_peak_power_w_<window>s",
    "pool_gpu_energy_j",
    "pool_gpu_power_swing_w",
    "pool_gpu_power_ramp_w_per_s",
    "joules_per_token",
    "tokens_per_s_per_kw",
    "power_coverage_fraction",
    "host_energy_j",
    "host_mean_power_w",
    "host_joules_per_token",
)
_WALL = (
    f"{POOL}mean_power_w",
    f"{POOL}peak_power_w_<window>s",
    f"{POOL}energy_j",
    f"{POOL}joules_per_token",
    f"{POOL}mean_power_w{ESTIMATED}",
    f"{POOL}peak_power_w_<window>s{ESTIMATED}",
    f"{NODE}mean_power_w",
    f"{NODE}peak_power_w_<window>s",
    f"{DOMAIN}<domain>_mean_power_w",
    f"{DOMAIN}<domain>_peak_power_w_<window>s",
    f"{DOMAIN}<domain>_energy_j",
)
_HEAT = (
    "throttle_fraction",
    "throttle_events",
    "throttle_events_per_minute",
    "throttle_s_<reason>",
    "throttle_events_<reason>",
    "throttle_events_per_minute_<reason>",
    "power_cap_fraction",
    "clock_deficit",
    "straggler_ratio",
    "start_temperature_c",
    "peak_temperature_c",
    "peak_memory_temperature_c",
    "temperature_slope_c_per_min",
)
_PREDICTED = (
    "predicted_step_time_s",
    "predicted_tokens_per_s_per_gpu",
    "predicted_peak_memory_gib",
    "predicted_mean_power_w",
    "predicted_peak_power_w",
    "predicted_fits",
    "predicted_from_trials",
)

FAMILIES = (*_STEPS, *_MEMORY, *_POWER, *_WALL, *_HEAT, *_PREDICTED)
"""All names; `<window>` stands for seconds, `<reason>` for one of `Throttle`, `<domain>` for one of the study's power domains."""

_MAY_BE_ZERO = ("_fraction", "_deficit", "_cv", "_slope_c_per_min", "_growth_gib_per_1000_steps")


def metric_names(domains: Iterable[str] = ()) -> tuple[str, ...]:
    """Every name of `FAMILIES` in full.

    Args:
        domains: Names of the study's power domains.
    """
    places = {
        "<window>": [f"{seconds:g}" for seconds in PEAK_WINDOWS_S],
        "<reason>": [reason.value for reason in Throttle],
        "<domain>": list(domains),
    }
    names: Sequence[str] = FAMILIES
    for place, values in places.items():
        names = [full for name in names for full in ([name.replace(place, value) for value in values] if place in name else [name])]
    return tuple(names)


def may_be_zero(name: str) -> bool:
    """Whether a metric may be zero or less, so that it has no logarithm: it enters the score by differences."""
    return name.startswith("throttle_") or name.endswith(_MAY_BE_ZERO)
