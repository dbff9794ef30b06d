"""Coefficients: the few numbers that datasheets do not say, per kind of GPU and link. Their values are in coefficients.yaml."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict, PositiveFloat

_FILE = Path(__file__).with_name("coefficients.yaml")
MEANING = 3
"""Raised whenever a coefficient comes to mean something else: those refitted before are not taken for these."""


class Coefficients(BaseModel):
    """How much of a datasheet's figure real kernels reach. All positive; a fit moves their logarithms.

    Attributes:
        gemm: Share of the dense 16-bit peak that a large aligned matrix product reaches, power and clocks included.
        gemm_low: The same of the 8-bit peak, for 8-bit and narrower products, casts apart.
        tail: Waves of tiles lost at the end of a matrix product; makes small products slower.
        attention: Share of the 16-bit peak in fused attention, exponentials apart.
        memory: Share of the memory bandwidth in element-wise kernels.
        launch_us: Host microseconds per kernel, the framework's Python included.
        inside: Share of the link's bandwidth that collectives reach inside a domain.
        between: The same between domains.
        latency: Measured latency of a collective's step over the link's stated one.
        overlap: Share of communication hidden where an overlap is switched on and there is work to hide it behind.
        tp_hidden: Share of the backward pass's tensor parallel exchange that products beside it hide without `tp_comm_overlap`.
        step_ms: Milliseconds of every step that no part explains (data, logging, clipping's synchronisation).
        micro_batch_ms: Milliseconds of every micro-batch on every stage that no part explains (schedule, hand-over).
        imbalance: Load of the busiest expert rank over the mean under real routing.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    gemm: PositiveFloat = 0.7
    gemm_low: PositiveFloat = 0.67
    tail: PositiveFloat = 1.0
    attention: PositiveFloat = 0.8
    memory: PositiveFloat = 0.75
    launch_us: PositiveFloat = 30.0
    inside: PositiveFloat = 0.6
    between: PositiveFloat = 0.6
    latency: PositiveFloat = 1.5
    overlap: PositiveFloat = 0.8
    tp_hidden: PositiveFloat = 0.5
    step_ms: PositiveFloat = 10.0
    micro_batch_ms: PositiveFloat = 0.5
    imbalance: PositiveFloat = 1.15

    def vector(self) -> list[float]:
        """The natural logarithms of the coefficients, in the order of the fields."""
        return [math.log(getattr(self, name)) for name in NAMES]

    @classmethod
    def of_vector(cls, logs: list[float]) -> Coefficients:
        """The coefficients with these logarithms."""
        return cls(**{name: math.exp(value) for name, value in zip(NAMES, logs, strict=True)})


NAMES = tuple(Coefficients.model_fields)


@cache
def _file() -> dict[str, Any]:
    return dict(yaml.safe_load(_FILE.read_text(encoding="utf-8"))) if _FILE.is_file() else {}


def shipped(gpu: str, without: str | None = None) -> Coefficients:
    """The coefficients for a kind of GPU.

    Args:
        gpu: Name in hardware.yaml; a user's own GPU gets the general coefficients.
        without: Group of published rows that must not have been used to fit them.
    """
    held_out: Mapping[str, Any] = _file().get("without", {}).get(without, {}).get("gpus", {})
    return Coefficients(**held_out.get(gpu, _file().get("gpus", {}).get(gpu, {})))


def is_fitted(gpu: str) -> bool:
    """Whether published measurements of this kind of GPU, or of its like, are behind its coefficients."""
    return gpu in _file().get("gpus", {})
