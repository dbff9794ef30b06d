"""When a pool's study has explored enough: a budget is used up, or little is left to gain."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from autotune.acquisition import Choice
from autotune.budget import used_up
from autotune.confirm_budget import MOST_FOR_CONFIRMING
from autotune.forecast import Forecast, forecast_of
from autotune.ledger import Ledger
from autotune.spec import StudySpec

_FEWEST_TO_CONVERGE = 8
_SURE_IN_A_ROW = 3


class Stopping:
    """The budgets of one pool's study.

    Attributes:
        deadline_s: Unix time at which the study ends; exploring ends earlier, so that the best can be confirmed. None = no limit.
    """

    def __init__(self, spec: StudySpec) -> None:
        self.deadline_s: float | None = None
        self._now_s: Callable[[], float] = time.time
        self._opened_s = time.time()
        self._spec = spec
        self._sure: set[int] = set()

    def follow(self, now_s: Callable[[], float], deadline_s: float | None) -> None:
        """Go by this clock from now on, until that time."""
        self._now_s, self._opened_s, self.deadline_s = now_s, now_s(), deadline_s

    def reason(self, ledger: Ledger, running: int, outlook: Choice | None) -> str:
        """Why nothing new is tried any more; empty while it is.

        Args:
            ledger: What ended.
            running: Trials that run now.
            outlook: What the last proposal promised; see `CandidateSampler.outlook`.
        """
        if (left_s := self._left_s(ledger)) is not None and left_s < 0:
            return "budget: wall time, less what confirming takes"
        so_far = ledger.spent
        return self._converged(so_far.trials, outlook) or used_up(
            self._spec.budget, replace(so_far, trials=so_far.trials + running), ledger.exploring_budget()
        )

    def _converged(self, trials: int, outlook: Choice | None) -> str:
        """That little is left to gain, and how sure that is; empty while there may be more.

        A model is sure too early now and then: it has to be so before several trials in a row.
        """
        wanted = self._spec.budget.confidence
        if wanted is None or outlook is None or trials < _FEWEST_TO_CONVERGE or outlook.chance_of_gain > 1.0 - wanted:
            self._sure.clear()
            return ""
        self._sure.add(trials)
        if len(self._sure) < _SURE_IN_A_ROW:
            return ""
        within = " at the risk that limits leave" if self._spec.limits else ""
        return f"converged: the chance that a further trial gains 1 %{within} is {outlook.chance_of_gain:.1%}"

    def forecast(self, ledger: Ledger, running: int, untried: int, outlook: Choice | None) -> Forecast:
        """What the rest of the budget buys, from a trial on that is launched now.

        Args:
            ledger: What ended.
            running: Trials that run beside it.
            untried: Candidates that are left after it.
            outlook: What it promises; see `CandidateSampler.outlook`.
        """
        return forecast_of(ledger.exploring_budget(), ledger, self._left_s(ledger), running, untried, outlook)

    def _left_s(self, ledger: Ledger) -> float | None:
        """Seconds left for exploring, less than none where it is over: confirming is kept its time, but never most of the study's.

        None = no limit.
        """
        if self.deadline_s is None:
            return None
        most_s = MOST_FOR_CONFIRMING * (self.deadline_s - self._opened_s)
        confirming_s = min(ledger.confirming_s(), most_s) if ledger.fewest_confirming_s() <= most_s else 0.0
        return self.deadline_s - confirming_s - self._now_s()

    def seconds_left(self) -> float | None:
        """Seconds until the study ends; None = no limit."""
        return None if self.deadline_s is None else self.deadline_s - self._now_s()
