"""MIG instances: their own memory, and their board's power, which cannot be split between them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from autotune.telemetry.base import ALL_FIELDS, Fields, Gpu, GpuInfo, GpuProcess, PowerLimitError
from launchers.gpu_sample import GpuSample

_SHARED = "MIG: the board's power, shared with its other instances"


@dataclass
class MigInstance:
    """One instance.

    Args:
        board: The GPU that it is a part of.
        uuid: Its own name.
        memory_used_gib: Reads its own memory in use; None where that fails.
    """

    board: Gpu
    uuid: str
    memory_used_gib: Callable[[], float | None]
    info: GpuInfo = field(init=False)

    def __post_init__(self) -> None:
        """Name it."""
        self.info = replace(self.board.info, uuid=self.uuid, mig=True)

    @property
    def gaps(self) -> dict[str, str]:
        """Why fields cannot be read."""
        return {**self.board.gaps, "power_w": _SHARED, "utilization": "MIG: not told by instance"}

    @property
    def lost(self) -> str:
        """Why its board is gone."""
        return self.board.lost

    def read(self, fields: frozenset[Fields] = ALL_FIELDS) -> GpuSample:
        """The board's reading with the instance's memory."""
        own: dict[str, Any] = {"gpu": self.uuid, "utilization": None}
        if Fields.SLOW in fields:
            own["memory_used_gib"] = self.memory_used_gib()
        return replace(self.board.read(fields), **own)

    def enforced_power_limit_w(self) -> float:
        """The board's."""
        return self.board.enforced_power_limit_w()

    def requested_power_limit_w(self) -> float:
        """The board's."""
        return self.board.requested_power_limit_w()

    def set_power_limit_w(self, watts: float) -> None:
        """Never: the limit belongs to the board."""
        raise PowerLimitError(f"{self.uuid}: a MIG instance has no power limit of its own ({watts:g} W)", "set the board's")

    def processes(self) -> tuple[GpuProcess, ...] | None:
        """The board's: NVML does not list them by instance without rights."""
        return self.board.processes()
