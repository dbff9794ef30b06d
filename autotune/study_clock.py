"""The time of a study: of the wall, or virtual, where a rehearsal's trials take the seconds that real ones would."""

from __future__ import annotations

import time


class StudyClock:
    """Tells when a pool's next trial starts.

    In virtual time every pool has a timeline of its own, on which the trials of its nodes follow one another; timelines meet where
    trials have to wait for those of another pool.

    Attributes:
        opened_s: Unix time from which this run of the study counts.
    """

    def __init__(self, opened_s: float, *, virtual: bool) -> None:
        """Start at `opened_s`; what is not virtual follows the wall clock."""
        self.opened_s = opened_s
        self._virtual = virtual
        self._reached_s: dict[str, float] = {}

    def now_s(self, *pools: str) -> float:
        """Unix time at which all of these pools have got so far."""
        return max(self._reached_s.get(pool, self.opened_s) for pool in pools) if self._virtual else time.time()

    def reach(self, time_s: float, *pools: str) -> None:
        """The trials of these pools are over by then."""
        for pool in pools:
            self._reached_s[pool] = max(time_s, self._reached_s.get(pool, self.opened_s))
