"""How a trial ended, and why: the first cause, not what the other ranks said when it tore them down."""

from __future__ import annotations

import math
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from launchers.log_causes import Cause, cause_of_log, last_words


class Outcome(StrEnum):
    """The end of a trial. All but LOST are results, told to the sampler; LOST is the infrastructure's fault and is retried."""

    COMPLETED = "COMPLETED"
    REFUSED = "REFUSED"
    OOM = "OOM"
    HUNG = "HUNG"
    TIMEOUT = "TIMEOUT"
    NAN = "NAN"
    CRASHED = "CRASHED"
    OVER_GUARD = "OVER_GUARD"
    STOPPED = "STOPPED"
    LOST = "LOST"


_SHELL = 128
_SENT_FROM_OUTSIDE = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


@dataclass(frozen=True, slots=True)
class RankEnd:
    """How one rank failed or ended.

    Attributes:
        rank: Its number in the trial.
        time_s: Unix time of its first sign of failure, or of its end.
        code: Exit code, negative for a signal; None where it had reported an error but not ended yet.
        error: The exception it reported, as `Type: message`.
        log_tail: The end of its log.
    """

    rank: int
    time_s: float
    code: int | None
    error: str | None = None
    log_tail: str = ""

    @property
    def failed(self) -> bool:
        """True unless it ended with exit code 0 and reported no error."""
        return bool(self.code) or self.error is not None


@dataclass(frozen=True, slots=True)
class Evidence:
    """Everything that says how a trial ended on one node.

    Attributes:
        ends: The ranks that had ended, or reported an error, before anybody ended the trial.
        num_ranks: Ranks that this node started.
        num_steps: Steps reported.
        expects_steps: False on a node that does not hold the reporting rank.
        last_loss: Loss of the last step.
        limit: HUNG or TIMEOUT where that limit was hit.
        limit_detail: Which limit, and where the ranks were.
        lost: What happened to the process tree itself: warm process, supervisor.
        host_oom_kills: Processes that the host's out-of-memory killer ended meanwhile.
    """

    ends: Sequence[RankEnd] = ()
    num_ranks: int = 1
    num_steps: int = 0
    expects_steps: bool = True
    last_loss: float | None = None
    limit: Outcome | None = None
    limit_detail: str = ""
    lost: str | None = None
    host_oom_kills: int = 0


@dataclass(frozen=True, slots=True)
class Verdict:
    """The outcome with its reason.

    Attributes:
        outcome: How the trial ended.
        detail: Why, for a person: the cause, then the last lines of the log that shows it.
        rank: The rank that failed first, where one did.
        time_s: Unix time of that failure.
        secondary: True where this node only saw that somebody else had failed; another node's verdict counts.
    """

    outcome: Outcome
    detail: str
    rank: int | None = None
    time_s: float | None = None
    secondary: bool = False


def classify(evidence: Evidence) -> Verdict:
    """Say how a trial ended, from what one node saw of it."""
    if evidence.last_loss is not None and not math.isfinite(evidence.last_loss):
        return Verdict(Outcome.NAN, f"the loss of step {evidence.num_steps} is {evidence.last_loss}")
    if failed := [end for end in evidence.ends if end.failed]:
        return _first_cause([_verdict_of_rank(end, evidence.host_oom_kills) for end in failed])
    if evidence.lost is not None:
        return _verdict_of_loss(evidence.lost, evidence.host_oom_kills)
    if evidence.limit is not None:
        return Verdict(evidence.limit, evidence.limit_detail)
    if len(evidence.ends) < evidence.num_ranks:
        return Verdict(Outcome.STOPPED, f"ended after step {evidence.num_steps}")
    if evidence.expects_steps and not evidence.num_steps:
        return Verdict(Outcome.CRASHED, "all ranks ended without having reported a step")
    return Verdict(Outcome.COMPLETED, "")


def classify_nodes(verdicts: Sequence[Verdict]) -> Verdict:
    """One verdict for a trial from those of its nodes: the first cause, if any node saw one.

    A node that only saw connections break, or was told to stop, gives way to the one that saw why.
    """
    faults = [verdict for verdict in verdicts if verdict.outcome not in (Outcome.COMPLETED, Outcome.STOPPED)]
    if faults:
        return _first_cause(faults)
    return next((verdict for verdict in verdicts if verdict.outcome is Outcome.STOPPED), verdicts[0])


def _first_cause(verdicts: Sequence[Verdict]) -> Verdict:
    return min(verdicts, key=lambda verdict: (verdict.secondary, verdict.time_s if verdict.time_s is not None else math.inf))


def _verdict_of_rank(end: RankEnd, host_oom_kills: int) -> Verdict:
    cause = _cause_of_rank(end, host_oom_kills)
    words = last_words(end.log_tail) or end.error
    detail = f"rank {end.rank}: {cause.meaning}" + (f"\n{words}" if words and words != cause.meaning else "")
    return Verdict(Outcome(cause.outcome), detail, end.rank, end.time_s, cause.secondary)


def _cause_of_rank(end: RankEnd, host_oom_kills: int) -> Cause:
    sent = _signal_of(end.code)
    if sent in _SENT_FROM_OUTSIDE and end.error is None:
        if sent == signal.SIGKILL and host_oom_kills:
            return Cause("OOM", "the host ran out of memory (not the GPU) and its out-of-memory killer ended the rank")
        return Cause("LOST", f"ended from outside by {signal.Signals(sent).name}; no sign of memory running out")
    if cause := cause_of_log(f"{end.log_tail}\n{end.error or ''}"):
        return cause
    return Cause("CRASHED", end.error or _ending(end.code))


def _signal_of(code: int | None) -> int | None:
    """The signal that ended a rank, also one that a shell or a container around it reports as 128 and its number."""
    if code is None or 0 <= code <= _SHELL:
        return None
    return -code if code < 0 else code - _SHELL


def _ending(code: int | None) -> str:
    if code is not None and code < 0:
        return f"ended by {signal.Signals(-code).name}"
    return f"exit code {code}"


def _verdict_of_loss(lost: str, host_oom_kills: int) -> Verdict:
    if host_oom_kills:
        return Verdict(Outcome.OOM, f"the host ran out of memory (not the GPU): {lost}, and the out-of-memory killer was at work")
    return Verdict(Outcome.LOST, lost)
