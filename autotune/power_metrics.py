"""Metrics of power and energy, one function each, over curves of energy in one window."""

from __future__ import annotations

import numpy as np

from autotune.power_curves import Curve
from autotune.telemetry.series import Array

PEAK_WINDOWS_S = (0.1, 1.0, 10.0, 60.0, 900.0)
_GRID_S = 0.05
_MEAN_S = 0.1
_RAMP_S = 1.0


def mean_power_w(curve: Curve, start_s: float, end_s: float) -> float:
    """Energy of the window over its length."""
    return curve.energy_j(start_s, end_s) / (end_s - start_s)


def peak_power_w(curve: Curve, window_s: float, start_s: float, end_s: float) -> tuple[float, bool]:
    """Highest mean power over any stretch of `window_s` inside [start_s, end_s].

    The curve is piecewise linear, so the highest mean begins or ends at one of its points: max over t of
    (E(t) - E(t - window)) / window with t or t - window among them.

    Returns:
        Watts, and whether the window is longer than the stretch, so that its mean stands for it.
    """
    if window_s > end_s - start_s:
        return mean_power_w(curve, start_s, end_s), True
    ends = np.concatenate([curve.times, curve.times + window_s, [start_s + window_s, end_s]])
    ends = ends[(ends >= start_s + window_s) & (ends <= end_s)]
    return float(np.max(curve.at(ends) - curve.at(ends - window_s)) / window_s), False


def power_swing_w(curve: Curve, start_s: float, end_s: float) -> float | None:
    """99th less 1st percentile of the 0.1 s means; None where the window is too short for any."""
    means = _means(curve, _MEAN_S, start_s, end_s)
    return float(np.percentile(means, 99) - np.percentile(means, 1)) if len(means) else None


def power_ramp_w_per_s(curve: Curve, start_s: float, end_s: float) -> float | None:
    """Largest change, up or down, between the means of two adjacent seconds; None in windows below 2 s."""
    means = _means(curve, _RAMP_S, start_s, end_s)
    apart = round(_RAMP_S / _GRID_S)
    return float(np.max(np.abs(means[apart:] - means[:-apart])) / _RAMP_S) if len(means) > apart else None


def joules_per_token(energy_j: float, tokens: float) -> float:
    """Board energy of the window over the tokens trained in it."""
    return energy_j / tokens


def tokens_per_s_per_kw(tokens: float, energy_j: float) -> float:
    """Tokens per second and kilowatt of board power: tokens per kilojoule."""
    return tokens / (energy_j / 1e3)


def _means(curve: Curve, window_s: float, start_s: float, end_s: float) -> Array:
    """Mean power over `window_s`, every 0.05 s."""
    ends = np.arange(start_s + window_s, end_s, _GRID_S)
    means: Array = (curve.at(ends) - curve.at(ends - window_s)) / window_s
    return means
