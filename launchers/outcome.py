"""How a trial ended."""

from __future__ import annotations

from enum import StrEnum


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
