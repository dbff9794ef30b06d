"""Which trials the infrastructure lost or somebody disturbed, how often, and what of it is launched again."""

from __future__ import annotations

from collections import Counter, deque

from autotune.records import Phase, TrialRecord
from launchers.outcome import Outcome
from search_spaces.config import TrialConfig

MOST_ATTEMPTS = 3
MOST_LOST_IN_A_ROW = 3


class Attempts:
    """Counts the losses of one pool's study.

    Attributes:
        lost_in_a_row: Trials lost since the last one that showed a result.
    """

    def __init__(self) -> None:
        self.lost_in_a_row = 0
        self._lost: Counter[TrialConfig] = Counter()
        self._retries: deque[tuple[TrialConfig, Phase]] = deque()
        self._repeated: set[TrialConfig] = set()
        self._repeats_help = True

    @property
    def pool_is_lost(self) -> bool:
        """Whether so many trials in a row were lost that the pool is at fault."""
        return self.lost_in_a_row >= MOST_LOST_IN_A_ROW

    def used_up(self, config: TrialConfig) -> bool:
        """Whether a candidate was lost so often that it is never launched again."""
        return self._lost[config] >= MOST_ATTEMPTS

    def lost(self, config: TrialConfig, phase: Phase) -> None:
        """A trial was lost now: launch it again, unless its attempts are used up."""
        self.lost_in_a_row += 1
        self.lost_before(config)
        if not self.used_up(config):
            self._retries.append((config, phase))

    def lost_before(self, config: TrialConfig) -> None:
        """A trial was lost under an earlier driver."""
        self._lost[config] += 1

    def showed_result(self, record: TrialRecord) -> None:
        """A trial ended by its own doing: the pool works. A contaminated one is run once more, unless that did not help before."""
        self.lost_in_a_row = 0
        if not record.contaminated:
            self._repeats_help = True
        elif record.config in self._repeated:
            self._repeats_help = False  # the machine stays busy: half of the budget would go into repeats
        elif self._repeats_help and record.outcome is Outcome.COMPLETED:
            self._repeated.add(record.config)
            self._retries.append((record.config, record.phase))

    def next_retry(self) -> tuple[TrialConfig, Phase] | None:
        """What to launch again, oldest loss first; None where nothing waits."""
        return self._retries.popleft() if self._retries else None
