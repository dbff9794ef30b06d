"""The Tune trainable: leases a slot's agents for one trial and merges what the nodes report.

A small actor that Tune reuses. It holds no GPU and no process of the trial, so that its own death costs little.
"""

from __future__ import annotations

import functools
import os
import time
from dataclasses import dataclass, field
from typing import Any

import ray
from ray import tune
from ray.exceptions import RayError

from autotune.contamination import Witness
from autotune.lost_actors import verdict_of_loss
from autotune.metrics import readable
from autotune.node_agent import SlotRequest
from autotune.racing import Enough, enough
from autotune.records import TrialResult
from autotune.rehearsed import VirtualTrial
from autotune.settling import Settling
from autotune.telemetry.clocks import ClockOffset, clock_offset
from autotune.telemetry.series import NodeTelemetry
from autotune.telemetry_summary import TrialTelemetry
from launchers.base import StepRecord
from launchers.outcome import Outcome, Verdict, classify_nodes
from launchers.process import TrialEnd
from search_spaces.hardware import GPU_SELECTION

RESULT_KEY = "autotune_result"
_END_GRACE_S = 15.0


@dataclass(slots=True)
class Merged:
    """Steps, measurements and verdicts of all nodes so far.

    Attributes:
        enough_s: Unix time at which the steps told enough; None before.
        why_enough: What they told.
        raced_out: Whether that is that the trial is of no use.
        settling: Follows the temperatures of a trial that waits for them.
        virtual: The time of a rehearsed trial; None for a real one.
    """

    steps: list[StepRecord] = field(default_factory=list)
    telemetry: list[NodeTelemetry] = field(default_factory=list)
    clocks: tuple[ClockOffset, ...] = ()
    verdicts: list[Verdict] = field(default_factory=list)
    witnesses: list[Witness] = field(default_factory=list)
    agent_failed: bool = False
    enough_s: float | None = None
    why_enough: str = ""
    raced_out: bool = False
    settling: Settling | None = None
    virtual: VirtualTrial | None = None

    @property
    def cut(self) -> Verdict | None:
        """How a limit in virtual time ended a rehearsed trial; None where none has."""
        return self.virtual.cut if self.virtual is not None else None

    def failed(self) -> bool:
        """Whether a node has ended otherwise than well."""
        return self.cut is not None or any(verdict.outcome is not Outcome.COMPLETED for verdict in self.verdicts)

    def take(self, item: object) -> None:
        """Keep what a node reported, but not the steps that a trial ran on for after it told enough, until it was ended."""
        match item:
            case StepRecord() if self.enough_s is None and (self.virtual is None or self.virtual.stepped(item.step_s)):
                self.steps.append(item)
            case NodeTelemetry():
                self.telemetry.append(item)
            case Witness():
                self.witnesses.append(item)
            case TrialEnd():
                self.verdicts.append(item.verdict)

    def look(self, request: SlotRequest) -> None:
        """Note whether the steps tell enough now."""
        if self.enough_s is not None or self.cut is not None:
            return
        if self.settling is not None:
            why = self.settling.stepped(self.steps[-1])
            found = Enough(why, raced_out=False) if why else None
        else:
            seconds = [step.step_s for step in readable(self.steps)]
            found = enough(seconds, request.measurement, request.beaten_s, request.spread)
        if found is not None:
            self.enough_s, self.why_enough, self.raced_out = time.time(), found.why, found.raced_out

    def verdict(self) -> Verdict:
        """One verdict for the trial. What breaks while it is being ended, because it told enough, is no fault."""
        if self.cut is not None:
            return self.cut
        found = classify_nodes(self.verdicts)
        if self.enough_s is None or not (found.outcome is Outcome.STOPPED or found.secondary or self._is_later(found)):
            return found
        return Verdict(Outcome.COMPLETED, self.why_enough)

    def _is_later(self, verdict: Verdict) -> bool:
        return verdict.time_s is not None and self.enough_s is not None and verdict.time_s >= self.enough_s


def run_on_agents(agents: list[Any], request: SlotRequest) -> TrialResult:
    """Run one trial on a slot's agents. Never raises for the trial's or an agent's fault: those are outcomes."""
    launched_s = time.time()
    merged = Merged(virtual=None if request.virtual_limits is None else VirtualTrial(request.virtual_limits))
    nodes: tuple[dict[str, Any], ...] = ()
    try:
        nodes = tuple(ray.get([agent.describe.remote() for agent in agents], timeout=_END_GRACE_S))
        address, port = nodes[0]["address"], 0
        if len(agents) > 1:
            port = ray.get(agents[0].free_port.remote(), timeout=_END_GRACE_S)
            merged.clocks = tuple(_clock_of(agent) for agent in agents)
        if request.soak is not None:
            slopes = functools.partial(_slopes_c_per_min, agents, merged.clocks)
            merged.settling = Settling(request.soak, request.measurement, request.most_steps, slopes)
        streams = [
            agent.run.options(num_returns="streaming").remote(request, rank, len(agents), address, port)
            for rank, agent in enumerate(agents)
        ]
        limit_s = request.limits.startup_s + request.limits.trial_s + _END_GRACE_S
        _follow(agents, request, streams, merged, deadline_s=launched_s + limit_s)
    except RayError as error:
        merged.agent_failed = True
        merged.verdicts.append(verdict_of_loss(error, "an agent"))
    verdict = merged.verdict()
    return TrialResult(
        outcome=verdict.outcome,
        detail=verdict.detail,
        steps=tuple(merged.steps),
        launched_s=launched_s,
        ended_s=time.time(),
        nodes=nodes,
        log_folder=request.log_folder,
        agent_failed=merged.agent_failed,
        raced_out=merged.raced_out and verdict.outcome is Outcome.COMPLETED,
        settled=merged.settling.ended() if merged.settling is not None else None,
        witnesses=tuple(sorted(merged.witnesses, key=lambda witness: witness.node_rank)),
        virtual_s=merged.virtual.took_s if merged.virtual is not None else None,
        telemetry=TrialTelemetry(tuple(sorted(merged.telemetry, key=lambda one: one.node)), merged.clocks),
    )


def _clock_of(agent: Any) -> ClockOffset:
    return clock_offset(lambda: float(ray.get(agent.clock.remote(), timeout=_END_GRACE_S)), time.time)


def _slopes_c_per_min(agents: list[Any], clocks: tuple[ClockOffset, ...], start_s: float, end_s: float) -> list[float | None]:
    """Of the GPUs of all nodes, each asked for the same time on its own clock; steps are on the last node's."""
    ahead_s = [clock.offset_s - clocks[-1].offset_s for clock in clocks] or [0.0]
    asked = [agent.slopes_c_per_min.remote(start_s + s, end_s + s) for agent, s in zip(agents, ahead_s, strict=True)]
    return [slope for node in ray.get(asked, timeout=_END_GRACE_S) for slope in node]


def _follow(agents: list[Any], request: SlotRequest, streams: list[Any], merged: Merged, deadline_s: float) -> None:
    """Consume all nodes' streams; the first node that fails ends the others, and enough steps end them all."""
    running = list(streams)
    stopped = False
    while running:
        ready, _ = ray.wait(running, num_returns=1, timeout=max(0.0, deadline_s - time.time()))
        if not ready:
            merged.verdicts.append(Verdict(Outcome.LOST, "an agent did not report the end of the trial within its limits"))
            return
        if _take(ready[0], running, merged):
            merged.look(request)
        if (merged.failed() or merged.enough_s) and not stopped:
            stopped = True
            deadline_s = time.time() + _END_GRACE_S
            ray.wait([agent.stop.remote(request.trial) for agent in agents], num_returns=len(agents), timeout=_END_GRACE_S)


def _take(stream: Any, running: list[Any], merged: Merged) -> bool:
    """Take one item of a node; whether it is a step."""
    try:
        item = ray.get(next(stream))
    except StopIteration:
        running.remove(stream)
        return False
    except RayError:
        running.remove(stream)
        raise
    merged.take(item)
    return isinstance(item, StepRecord)


class MegatronTrial(tune.Trainable):
    """One Tune trial = one `step` = one whole trial. Its config holds `agents` and `request`."""

    def setup(self, config: dict[str, Any]) -> None:
        """Keep what to run. Ray leaves an actor without GPUs those of its node: this one must never touch them."""
        os.environ.update(dict.fromkeys(GPU_SELECTION, ""))
        self._launch = config

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        """Reuse this actor for the next trial."""
        self._launch = new_config
        return True

    def step(self) -> dict[str, Any]:
        """Run the trial."""
        result = run_on_agents(self._launch["agents"], self._launch["request"])
        return {RESULT_KEY: result, "done": True}
