"""NodeAgent: one actor per node of a slot. It runs the node's ranks under the supervisor and streams what they report.

The agent lives in our environment, the ranks in the pool's own; see `launchers.process`.
"""

from __future__ import annotations

import functools
import logging
import os
import socket
import threading
import time
from collections.abc import Generator, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ray

from autotune.contamination import Witness
from autotune.power_restore import restore_left_behind
from autotune.run_spread import RunSpread
from autotune.session_guard import SESSION_VARIABLE
from autotune.spec_parts import Measurement, Soaking
from autotune.surroundings import Surroundings
from autotune.telemetry.node import BoardsGuard, NodeGpus, run_measured
from autotune.telemetry.series import NodeTelemetry
from launchers.base import Rendezvous, StepRecord, free_port
from launchers.process import Event, LaunchRequest, Limits, Supervised, TrialEnd, run_trial
from launchers.process_tree import read_process
from search_spaces.hardware import PoolSpec, RankEnvironment

log = logging.getLogger(__name__)
_ALL = "*"
_MEASUREMENT = Measurement()
_END_S = 25.0


@dataclass(frozen=True, slots=True)
class AgentSetup:
    """What an agent needs for its whole life.

    Attributes:
        pool: The pool; its environment says where ranks run.
        preload: Modules that the warm process imports once.
        labels: Labels that the agent's node must carry.
        gpus: GPUs of the ranks, where pools take turns with them; empty: those that Ray assigns to the agent.
    """

    pool: PoolSpec
    preload: tuple[str, ...]
    labels: dict[str, str]
    gpus: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class SlotRequest:
    """One trial as the agents of a slot receive it.

    Attributes:
        trial: Unique id, for logs.
        program: The launcher's rank program.
        job: What the program reads.
        limits: Time limits, by the wall clock.
        log_folder: Folder for the ranks' logs on each node.
        measurement: When it is measured well enough, and what happens where somebody else uses its GPUs.
        gpu_power_limit_w: Power limit of its GPUs; None = as found.
        beaten_s: Step seconds that the trial has to reach to be of use; it ends where it cannot. None = it runs to its end.
        spread: Run-to-run spread of the study so far.
        guards: What its boards may draw while it runs.
        soak: How warm its GPUs have to be before its steps count; None = they need not be.
        most_steps: Steps that its program is asked for where it may have to run on until they are.
        virtual_limits: Time limits in virtual time; None = the trial is real.
    """

    trial: str
    program: str
    job: dict[str, Any]
    limits: Limits
    log_folder: Path
    measurement: Measurement = _MEASUREMENT
    gpu_power_limit_w: int | None = None
    beaten_s: float | None = None
    spread: RunSpread = RunSpread()
    guards: tuple[BoardsGuard, ...] = ()
    soak: Soaking | None = None
    most_steps: int = 0
    virtual_limits: Limits | None = None


class NodeAgent:
    """Ray actor that owns one node's supervisor. Reused by all trials of a slot; `preloads` counts what that saved."""

    def __init__(self, setup: AgentSetup) -> None:
        self._setup = setup
        self._context = ray.get_runtime_context()
        self._raylet_pid = os.getppid()
        self._check_labels()
        self._gpus = self._assigned_gpus()
        if self._gpus:
            for problem in restore_left_behind()[1]:
                log.warning("%s", problem)
        self._devices = NodeGpus(setup.pool, self._gpus)
        self._check_gpus()
        self._stopped = ""
        self._running = threading.Lock()
        self._private = SESSION_VARIABLE in os.environ
        # The guardian ends what is below it in order and with the exit command: the session guard must not see them.
        os.environ.pop(SESSION_VARIABLE, None)
        self._supervised = Supervised(self._environment(), preload=setup.preload, raylet_pid=self._raylet_pid)
        self._supervised.start()

    def _assigned_gpus(self) -> list[str]:
        if self._setup.pool.device == "cpu":
            return []
        return list(self._setup.gpus) or [str(gpu) for gpu in ray.get_gpu_ids()]

    def _environment(self) -> RankEnvironment:
        environment = self._setup.pool.environment
        return environment.model_copy(update={"env": {"CUDA_VISIBLE_DEVICES": ",".join(self._gpus), **environment.env}})

    def describe(self) -> dict[str, Any]:
        """Who and where this agent is; counters for tests and reports.

        Raises:
            RuntimeError: where the node's raylet has died: Ray lets an agent outlive it.
        """
        if os.getppid() != self._raylet_pid:
            raise RuntimeError("the raylet of this node died; this agent outlives it for a minute and runs no more trials")
        return {
            "node_id": self._context.get_node_id(),
            "labels": self._context.get_node_labels(),
            "hostname": socket.gethostname(),
            "address": ray.util.get_node_ip_address(),
            "pid": os.getpid(),
            "gpus": self._gpus,
            "gpu_uuids": [gpu.info.uuid for gpu in self._devices.charged if gpu.info.is_board],
            "preloads": self._supervised.preloads,
            "supervisors_started": self._supervised.supervisors_started,
        }

    def free_port(self) -> int:
        """A port on this node that nothing listens on now."""
        return free_port()

    def clock(self) -> float:
        """Unix time on this node."""
        return time.time()

    def run(
        self, request: SlotRequest, node_rank: int, nodes: int, master_addr: str, master_port: int
    ) -> Iterator[StepRecord | NodeTelemetry | Witness | TrialEnd]:
        """Run this node's share of a trial on so many nodes. Always returns within the limits.

        Yields:
            Steps as they come, what was measured and seen beside them, and the end last.
        """
        launch = self._launch(request, node_rank, nodes, master_addr, master_port)
        # The trial before this one may still be ending where the Tune worker that waited for it has died.
        with self._one_trial(f"{self._stopped or 'the trial before'} has not ended"):
            around = Surroundings(self._devices.charged, self._setup.pool, self._supervised, self._own_roots)
            with around.of(request.gpu_power_limit_w, request.measurement, lambda: self._is_stopped(request)):
                end = around.refusal or (yield from self._measured(launch, request, around))
            yield _seen(around.witness(node_rank), end)
            yield end

    def measure(self, request: SlotRequest, node_rank: int, nodes: int, master_addr: str, master_port: int) -> list[Event]:
        """Run this node's share of a program that measures: the "figures" that its ranks emitted. Returns within the limits."""
        launch = self._launch(request, node_rank, nodes, master_addr, master_port)
        stop = functools.partial(self._is_stopped, request)
        events: list[Event] = []
        with self._one_trial("a trial has not ended"):
            for _ in run_trial(self._supervised, launch, request.limits, stop=stop, on_event=events.append):
                pass
        return [event for event in events if event["event"] == "figures"]

    def slopes_c_per_min(self, start_s: float, end_s: float) -> list[float | None]:
        """How fast temperatures of the running trial's GPUs changed, between two instants of this node's clock; see `Recording`."""
        return self._devices.slopes_c_per_min(start_s, end_s)

    def _launch(self, request: SlotRequest, node_rank: int, nodes: int, master_addr: str, master_port: int) -> LaunchRequest:
        per_node = self._setup.pool.gpus_per_node
        first = node_rank * per_node
        return LaunchRequest(
            trial=request.trial,
            program=request.program,
            job=request.job,
            rendezvous=Rendezvous(
                master_addr=master_addr,
                master_port=master_port or self.free_port(),
                world_size=nodes * per_node,
                node_rank=node_rank,
                ranks_per_node=per_node,
            ),
            ranks=tuple(range(first, first + per_node)),
            log_folder=request.log_folder,
        )

    def _measured(
        self, launch: LaunchRequest, request: SlotRequest, around: Surroundings
    ) -> Generator[StepRecord | NodeTelemetry, None, TrialEnd]:
        stop, node_rank = functools.partial(self._is_stopped, request), launch.rendezvous.node_rank
        items = run_measured(self._devices, self._supervised, launch, request.limits, node_rank, stop, around.hangs, request.guards)
        with closing(items):
            for item in items:
                if isinstance(item, TrialEnd):
                    return item
                if isinstance(item, StepRecord):
                    around.stepped(item)
                yield item
        raise AssertionError("a trial ended without its end")

    def _is_stopped(self, request: SlotRequest) -> bool:
        return self._stopped in (request.trial, _ALL)

    def _own_roots(self) -> set[int]:
        """What the study itself runs on this node hangs below these processes; on a private Ray the driver is one."""
        raylet = read_process(self._raylet_pid) if self._private else None
        roots = {os.getpid(), self._raylet_pid, self._supervised.guardian_pid, raylet.parent if raylet else None}
        return {root for root in roots if root is not None and root > 1}

    def stop(self, trial: str) -> None:
        """End that trial, also one whose `run` is still to come, and wait for its end; its `run` reports STOPPED.

        Raises:
            RuntimeError: where it does not end.
        """
        self._stopped = trial
        with self._one_trial(f"{trial} did not end"):
            return

    def close(self) -> None:
        """End everything that this agent started."""
        self.stop(_ALL)
        self._supervised.close()

    @contextmanager
    def _one_trial(self, problem: str) -> Iterator[None]:
        if not self._running.acquire(timeout=_END_S):
            raise RuntimeError(f"{problem} within {_END_S:g} s")
        try:
            yield
        finally:
            self._running.release()

    def _check_gpus(self) -> None:
        """Ray's number of GPUs is what somebody or its own search told it; the driver's counts, where it can be asked."""
        seen = sum(gpu.info.vendor == "nvidia" and gpu.info.is_board for gpu in self._devices.gpus)
        if 0 < seen < len(self._gpus):
            raise RuntimeError(f"Ray assigns {len(self._gpus)} GPUs on this node, but the driver sees {seen}")

    def _check_labels(self) -> None:
        seen = self._context.get_node_labels()
        missing = {name: value for name, value in self._setup.labels.items() if seen.get(name) != value}
        if missing:
            raise RuntimeError(f"this node does not carry {missing}; its labels are {seen}")


def _seen(witness: Witness, end: TrialEnd) -> Witness:
    """With what the trial's end says of this node. A process that hangs in its kernel is no fault of the configuration."""
    if not end.broken:
        return witness
    return replace(witness, broken=f"{socket.gethostname()}: {end.broken}", lost=witness.lost or end.broken)
