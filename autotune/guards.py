"""Guards bind every launch: a trial starts only if its upper bound keeps them. Watts of power domains are watts at the wall.

The bound of a GPU is the power limit that is enforced on it: its own, or the one that the trial sets. Where a guard says
`bound: predicted`, it is the upper end of what is predicted instead. Boards answer a limit within about a second; over shorter
windows they may pass it by the band of the power model.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from autotune.errors import SpecError
from autotune.power_domains import nodes_fed
from autotune.spec import StudySpec
from autotune.telemetry.node import BoardsGuard
from search_spaces.columns import Columns
from search_spaces.gpus import GpuSpec
from search_spaces.hardware import PoolSpec
from search_spaces.legality import Violation
from search_spaces.power import PEAK_BAND
from search_spaces.prediction import Predictions
from search_spaces.wall_power import NodePower

Floats = npt.NDArray[np.float64]

_SETTLED_S = 1.0
_PREFIX = "guard_"
_OWN_GUARD = f"{_PREFIX}gpu_power_guard_w"


class UnkeptGuardError(SpecError):
    """No candidate of a pool at one node count can keep a guard. Raised before anything of that study is kept."""


@dataclass(frozen=True, slots=True)
class Guard:
    """One bound on every launch of a pool.

    Attributes:
        name: Its rule, such as `guard_rack-7` or `guard_gpu_peak_power_w`.
        limit_w: Watts that must not be passed.
        upper_w: What each candidate may draw at most, float (rows,).
        of: What draws these watts, for a person.
    """

    name: str
    limit_w: float
    upper_w: Floats
    of: str

    @property
    def kept(self) -> npt.NDArray[np.bool_]:
        """Which candidates keep it, bool (rows,)."""
        return self.upper_w <= self.limit_w

    def violation(self, row: int) -> Violation | None:
        """What is wrong with one candidate; None where it keeps the guard."""
        over = float(self.upper_w[row]) / self.limit_w - 1.0
        if over <= 0:
            return None
        text = f"{self.of} may draw {self.upper_w[row]:,.0f} W, and {self.limit_w:,.0f} W are allowed"
        return Violation(self.name, over, f"{text}; a lower gpu_power_limit_w helps")


def guards_of(spec: StudySpec, pool: PoolSpec, columns: Columns, predictions: Predictions | None) -> list[Guard]:
    """Every guard of a pool, with the bounds of these rows.

    Args:
        spec: The study: its power domains, and its `gpu_power_guard_w`.
        pool: One of its pools.
        columns: The candidates, or one configuration.
        predictions: Of the same rows; None where the pool's GPU is not known.

    Raises:
        SpecError: there is something to guard on GPUs of which nothing is known.
    """
    domains = [(domain, fed) for domain in spec.power_domains if (fed := nodes_fed(domain, pool, spec.power_domains))]
    if pool.device == "cpu" or not (domains or spec.gpu_power_guard_w):
        return []
    if predictions is None:
        raise SpecError("power_domains", pool.gpu, "nothing is known of these GPUs", "describe them under `hardware` in the study")
    found = []
    if spec.gpu_power_guard_w is not None:
        board_w = _enforced_w(columns, predictions, 1.0) * predictions.machines.gpu.dies_per_package
        found.append(Guard(_OWN_GUARD, spec.gpu_power_guard_w, board_w, "a GPU"))
    node = NodePower.of(pool, predictions.machines.gpu)
    for domain, fed in domains:
        device_w = _enforced_w(columns, predictions, domain.window_s)
        if domain.bound == "predicted":
            device_w = np.minimum(device_w, predictions.peak_power_w * (1.0 + PEAK_BAND))
        upper_w = np.asarray(node.wall_w(device_w * pool.gpus_per_node * fed, fed))
        found.append(Guard(f"{_PREFIX}{domain.name}", domain.limit_w, upper_w, f"at the wall, {domain.name}"))
    return found


def boards_guards(spec: StudySpec, pool: PoolSpec, gpu: GpuSpec) -> tuple[BoardsGuard, ...]:
    """What the boards of each node of a trial may be measured to draw: a node's equal share of every domain."""
    found = [BoardsGuard(device_w=spec.gpu_power_guard_w)] if spec.gpu_power_guard_w is not None else []
    node = NodePower.of(pool, gpu)
    for domain in spec.power_domains:
        if fed := nodes_fed(domain, pool, spec.power_domains):
            node_w = (domain.limit_w / fed - node.overhead_w) * node.psu_efficiency
            found.append(BoardsGuard(node_w=node_w, window_s=domain.window_s))
    return tuple(found) if pool.device != "cpu" else ()


def _enforced_w(columns: Columns, predictions: Predictions, window_s: float) -> Floats:
    """Watts that the power limits let one device draw over a window, float (rows,)."""
    gpu = predictions.machines.gpu
    asked = np.broadcast_to(columns.number("gpu_power_limit_w"), (len(columns),))
    enforced = np.where(asked > 0, asked, gpu.power_limit_w[1]) / gpu.dies_per_package
    return np.asarray(enforced * (1.0 if window_s >= _SETTLED_S else 1.0 + PEAK_BAND), dtype=float)


def keep(allowed: npt.NDArray[np.bool_], guards: Sequence[Guard]) -> tuple[npt.NDArray[np.bool_], Counter[str]]:
    """Which of the allowed candidates keep every guard, bool (rows,), and how many each guard refuses of those before it left."""
    refused: Counter[str] = Counter()
    for guard in guards:
        refused[guard.name] += int((allowed & ~guard.kept).sum())
        allowed = allowed & guard.kept
    return allowed, +refused


def check_someone_can(guards: Sequence[Guard]) -> None:
    """Refuse guards that no candidate can keep.

    Raises:
        UnkeptGuardError: with the lowest bound.
    """
    for guard in guards:
        if len(guard.upper_w) and not guard.kept.any():
            own = guard.name == _OWN_GUARD
            field = guard.name.removeprefix(_PREFIX) if own else f"power_domains.{guard.name.removeprefix(_PREFIX)}"
            problem = (
                f"nothing can be launched under {guard.limit_w:,.0f} W: {guard.of} may draw {guard.upper_w.min():,.0f} W or more"
            )
            hint = "search lower values of gpu_power_limit_w"
            hint += "" if own else " (`autotune plan` shows them), or give the domain `bound: predicted`"
            raise UnkeptGuardError(field, guard.limit_w, problem, hint)
