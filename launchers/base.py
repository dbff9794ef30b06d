"""Contracts between the service, a launcher and the ranks it starts. Standard library only: ranks import this file too."""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from search_spaces.config import TrialConfig
    from search_spaces.legality import Violation
    from search_spaces.model import Workload


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One optimiser step of a trial, as its last rank reports it.

    Attributes:
        iteration: Counted from 1.
        time_s: Unix time at which the step ended, on the reporting rank's clock.
        step_s: Seconds of the step.
        loss: Mean loss per token over the global batch.
        grad_norm: Norm of the whole gradient; None where it was not computed.
        tokens: Tokens of the step over all ranks.
        peak_memory_gib: Largest peak over all ranks so far (CUDA: allocated; CPU: resident set).
    """

    iteration: int
    time_s: float
    step_s: float
    loss: float
    grad_norm: float | None
    tokens: int
    peak_memory_gib: float | None

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for one JSON line."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """Where the ranks of a trial meet, and which of them this node starts."""

    master_addr: str
    master_port: int
    world_size: int
    node_rank: int
    ranks_per_node: int


def free_port(address: str = "") -> int:
    """A port that nothing listens on now, at this address of this machine; "" = at all."""
    with socket.socket() as probe:
        probe.bind((address, 0))
        return int(probe.getsockname()[1])


PER_NODE = ("$NODE_RANK", "$MASTER_ADDR")
"""In the words of a command for several nodes: which of them runs it, from 0, and the address of the first."""


@dataclass(frozen=True, slots=True)
class Command:
    """A command that a person could type, the same on every node.

    Attributes:
        argv: Its words, in which what `PER_NODE` names is set on each node.
        env: Environment variables that it needs.
        cwd: Folder to run it in; None = any.
    """

    argv: tuple[str, ...]
    env: Mapping[str, str]
    cwd: str | None = None


@dataclass(frozen=True, slots=True)
class RankContext:
    """What a rank knows of itself. `emit` sends one event (at most 4 KiB as JSON) to the agent, from any rank."""

    rank: int
    local_rank: int
    rendezvous: Rendezvous
    emit: Callable[[dict[str, Any]], None]


class Launcher(Protocol):
    """One way to run a trial. Ranks run `program`'s `main(job, context)` in processes forked from a warm one.

    Attributes:
        name: Name in study files.
        program: Dotted module below `launchers`, or the path of a Python file; it defines
            `main(job: dict, context: RankContext) -> None` and needs torch, megatron-core and the standard library only.
        preload: Modules that the warm process imports once.

    A launcher may also have a `figures_program`: a rank program that measures the nodes before the first trial and emits from every
    rank what `launchers.megatron_core.figures` emits. Its job is {"device": "cuda" or "cpu"}.
    """

    name: str
    program: str
    preload: tuple[str, ...]

    def refusals(self, workload: Workload, config: TrialConfig) -> list[Violation]:
        """What this launcher or the workload's device cannot run, beyond Megatron's own rules."""
        ...

    def job(self, workload: Workload, config: TrialConfig, *, steps: int, seed: int) -> dict[str, Any]:
        """The plain values (JSON) that `program` reads."""
        ...

    def command(self, workload: Workload, config: TrialConfig, folder: Path, *, steps: int, seed: int) -> Command:
        """A torchrun command line that runs the same trial by hand; files it needs are written into `folder`."""
        ...
