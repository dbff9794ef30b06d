"""Runs one trial in a node's process tree: limits, the first cause of a failure, and a clean end whatever happens."""

from __future__ import annotations

import math
import os
import re
import signal
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field, fields
from pathlib import Path

from launchers.base import StepRecord
from launchers.limits import Limits
from launchers.log_causes import last_words
from launchers.outcome import Evidence, Outcome, RankEnd, Verdict, classify
from launchers.rank_environment import node_environment
from launchers.supervised import Event, LaunchRequest, Supervised, SupervisorLostError

__all__ = [
    "Event",
    "LaunchRequest",
    "Limits",
    "Supervised",
    "SupervisorLostError",
    "TrialEnd",
    "node_environment",
    "run_trial",
]

_GRACE_S = 1.0
_STACKS_S = 0.3
_END_S = 40.0
_POLL_S = 0.25
_TAIL_BYTES = 1 << 16
_STEP_FIELDS = tuple(item.name for item in fields(StepRecord))
_INNERMOST_FRAME = re.compile(r'^Current thread .*\(most recent call first\):\n  File "([^"]+)", line (\d+) in (\S+)', re.MULTILINE)


@dataclass(frozen=True, slots=True)
class TrialEnd:
    """How a trial ended on this node; by then its processes are gone, except for the survivors.

    Attributes:
        verdict: Outcome, detail and first cause.
        num_steps: Steps reported.
        started_s: Unix time of the launch.
        ended_s: Unix time after the clean-up.
        exit_codes: Exit code by rank, negative for a signal, of ranks that ended by themselves.
        killed: Processes that were ended.
        survivors: Processes that could not be killed.
        broken: Why the node should be set aside; empty where it is sound.
    """

    verdict: Verdict
    num_steps: int
    started_s: float
    ended_s: float
    exit_codes: dict[int, int]
    killed: int
    survivors: tuple[str, ...]
    broken: str = ""

    @property
    def outcome(self) -> Outcome:
        """How the trial ended."""
        return self.verdict.outcome

    @property
    def detail(self) -> str:
        """Why, for a person."""
        return self.verdict.detail


def run_trial(
    supervised: Supervised,
    request: LaunchRequest,
    limits: Limits,
    *,
    stop: Callable[[], bool] = lambda: False,
    on_event: Callable[[Event], None] = lambda _event: None,
    hang_signal: Callable[[float], str] = lambda _silent_s: "",
) -> Generator[StepRecord | TrialEnd, None, None]:
    """Run a trial: yields its steps as they come, then one `TrialEnd`.

    Starts the process tree where it is not running. Closing the iterator early ends the trial's processes, too, and so does `stop`
    answering True, within a quarter of a second. A node that does not hold the reporting rank sees no steps, so only `trial_s` and
    failures of its own ranks end its part. `on_event` sees every event of the trial, also those that are not steps. `hang_signal`
    is told the seconds since the last step; where it says why the trial hangs, the trial is HUNG before its limit.
    """
    watch = _Watch(supervised, request, limits, stop, on_event, hang_signal)
    try:
        yield from watch.steps()
    finally:
        watch.end()
    yield watch.result()


def host_oom_kills() -> int:
    """Processes that the out-of-memory killer has ended since this machine started, 0 where the kernel does not say."""
    try:
        lines = Path("/proc/vmstat").read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)


@dataclass(slots=True)
class _Watch:
    supervised: Supervised
    request: LaunchRequest
    limits: Limits
    stop: Callable[[], bool]
    on_event: Callable[[Event], None]
    hang_signal: Callable[[float], str]
    started_s: float = field(default_factory=time.time)
    begin_s: float = field(default_factory=time.monotonic)
    last_step_s: float = 0.0
    num_steps: int = 0
    last_loss: float | None = None
    errors: dict[int, Event] = field(default_factory=dict)
    exits: dict[int, Event] = field(default_factory=dict)
    limit: Outcome | None = None
    limit_detail: str = ""
    lost: str | None = None
    oom_kills_before: int = 0
    grace_until_s: float | None = None
    ended: Event = field(default_factory=dict)

    def _all_ended(self) -> bool:
        return len(self.exits) == len(self.request.ranks)

    def _is_over(self) -> bool:
        diverged = self.last_loss is not None and not math.isfinite(self.last_loss)
        grace_is_over = self.grace_until_s is not None and time.monotonic() >= self.grace_until_s
        return bool(self.lost or self.limit or diverged or grace_is_over or self._all_ended() or self.stop())

    def _deadlines(self) -> Iterator[tuple[float, Outcome, str]]:
        sees = self.request.has_reporting_rank
        return self.limits.deadlines(self.begin_s, self.last_step_s, self.num_steps, sees_steps=sees)

    def _patience_s(self) -> float:
        ends_s = [deadline_s for deadline_s, _, _ in self._deadlines()]
        ends_s += [self.grace_until_s] if self.grace_until_s is not None else []
        return min(_POLL_S, max(0.0, min(ends_s) - time.monotonic()))

    def _check_limits(self) -> None:
        if self._is_over() or self.grace_until_s is not None:
            return
        for deadline_s, outcome, detail in self._deadlines():
            if time.monotonic() >= deadline_s:
                self.limit, self.limit_detail = outcome, detail
                return
        if self.last_step_s and (reason := self.hang_signal(time.monotonic() - self.last_step_s)):
            self.limit, self.limit_detail = Outcome.HUNG, reason

    def _note(self, event: Event) -> None:
        match event["event"]:
            case "step":
                self.num_steps, self.last_loss = event["iteration"], event["loss"]
            case "rank_error":
                self.errors[event["rank"]] = event
                self._begin_grace()
            case "rank_exit":
                self.exits[event["rank"]] = event
                if event["code"]:
                    self._begin_grace()
            case "launch_failed":
                self.lost = event["detail"]
            case "warm_exit":
                self.lost = _describe_warm_exit(event)
            case "supervisor_exit":
                self.lost = f"the supervisor ended: {event['reason']}"

    def _begin_grace(self) -> None:
        """Let the other ranks report their own errors, so that the first cause is among them."""
        if self.grace_until_s is None:
            self.grace_until_s = time.monotonic() + _GRACE_S

    def _dump_stacks(self) -> None:
        self.supervised.dump_stacks()
        time.sleep(_STACKS_S)
        tails = {rank: self._log_tail(rank) for rank in self.request.ranks if rank not in self.exits}
        places = [f"rank {rank} {place}" for rank, tail in tails.items() if (place := innermost_frame(tail))]
        self.limit_detail = "\n".join([self.limit_detail, *places])

    def _log_tail(self, rank: int) -> str:
        return read_tail(self.request.log_folder / f"rank{rank}.log")

    def _rank_ends(self) -> Iterator[RankEnd]:
        for rank in {**self.errors, **self.exits}:
            error, leave = self.errors.get(rank, {}), self.exits.get(rank, {})
            time_s = min(event["time_s"] for event in (error, leave) if event)
            failed = error or leave["code"]
            yield RankEnd(rank, time_s, leave.get("code"), error.get("error"), self._log_tail(rank) if failed else "")

    def _evidence(self) -> Evidence:
        return Evidence(
            ends=tuple(self._rank_ends()),
            num_ranks=len(self.request.ranks),
            num_steps=self.num_steps,
            expects_steps=self.request.has_reporting_rank,
            last_loss=self.last_loss,
            limit=self.limit,
            limit_detail=self.limit_detail,
            lost=self.lost,
            host_oom_kills=host_oom_kills() - self.oom_kills_before,
        )

    def steps(self) -> Iterator[StepRecord]:
        """Launch, and follow the trial until it has a reason to end."""
        self.oom_kills_before = host_oom_kills()
        try:
            self.supervised.start()
            self.supervised.launch(self.request)
        except (SupervisorLostError, OSError) as error:
            self.lost = f"the trial could not be launched: {error}"
        while not self._is_over():
            event = self.supervised.poll(self._patience_s())
            if event is None and not self.supervised.alive:
                self.lost = "the supervisor was closed"
            if event and (event.get("trial") == self.request.trial or event["event"] == "supervisor_exit"):
                self._note(event)
                self.on_event(event)
                if event["event"] == "step":
                    yield StepRecord(**{name: event[name] for name in _STEP_FIELDS})
                    self.last_step_s = time.monotonic()  # what the consumer needs between two steps is not the ranks' time
            self._check_limits()

    def end(self) -> None:
        """End the trial's processes."""
        try:
            if self.limit:
                self._dump_stacks()
            self.ended = self.supervised.end_trial(self.request.trial, _END_S)
        except SupervisorLostError as error:
            self.lost = self.lost or str(error)
            self._kill_supervisor()
        if self.ended.get("event") == "supervisor_exit" and not self.lost and not self._all_ended():
            self.lost = f"the supervisor ended: {self.ended['reason']}"

    def _kill_supervisor(self) -> None:
        try:
            self.ended = self.supervised.kill()
        except SupervisorLostError as error:
            self.lost = f"{self.lost}; {error}"

    def result(self) -> TrialEnd:
        """Judge it."""
        survivors = tuple(self.ended.get("survivors", ()))
        return TrialEnd(
            verdict=classify(self._evidence()),
            num_steps=self.num_steps,
            started_s=self.started_s,
            ended_s=time.time(),
            exit_codes={rank: event["code"] for rank, event in self.exits.items()},
            killed=self.ended.get("killed", 0),
            survivors=survivors,
            broken=f"{', '.join(survivors)} cannot be ended" if survivors else "",
        )


def _describe_warm_exit(event: Event) -> str:
    code = event["code"]
    how = f"by {signal.Signals(-code).name}" if code is not None and code < 0 else f"with exit code {code}"
    when = "during a trial" if event["ready"] else "before it was ready"
    return "\n".join(part for part in (f"the warm process ended {how} {when}", last_words(event["tail"])) if part)


def innermost_frame(tail: str) -> str | None:
    """Where the main thread was in the last stack dump of a log."""
    dumps = _INNERMOST_FRAME.findall(tail)
    return "at {}:{} in {}".format(*dumps[-1]) if dumps else None


def read_tail(path: Path) -> str:
    """The end of a log; empty where there is none."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL_BYTES))
            return file.read().decode(errors="replace")
    except OSError:
        return ""
