"""What a person sees while a study runs: a live table on a terminal; elsewhere a line per trial, and now and then what is left."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from autotune.baseline import without_baseline
from autotune.forecast import Forecast, lasting
from autotune.pool_study import PoolStudy
from autotune.proposal import Proposal
from autotune.records import Phase, TrialRecord, short
from autotune.report import remark, throughput, trial_table
from autotune.simulation import is_simulated, note
from autotune.spec import StudySpec, pool_title
from launchers.outcome import Outcome

_ROWS = 14
_FORECAST_EVERY = 5  # trials
_MINUTES_FROM_S = 90


class Progress:
    """A `study.Listener` that shows trials, the best so far, refusals and the time left."""

    def __init__(self, console: Console, spec: StudySpec) -> None:
        self._console = console
        self._spec = spec
        self._budget = spec.budget
        self._best = "knee" if spec.pareto else "best"
        self._live = Live(console=console, auto_refresh=False, transient=True) if console.is_terminal else None
        self._studies: list[PoolStudy] = []
        self._running: dict[str, Proposal] = {}
        self._recent: list[TrialRecord] = []
        self._refused = 0
        self._told: set[str] = set()
        self._explored = 0
        self._due = False
        self._forecasts: dict[str, Forecast | None] = {}
        self._started_s = time.time()
        self._began_s, self._reached_s = math.inf, -math.inf  # of the trials that ended; virtual where they are rehearsed
        self._launched_before = 0

    def __enter__(self) -> Self:
        """Begin to draw."""
        if self._live:
            self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Leave the terminal as it was."""
        if self._live:
            self._live.stop()

    def opened(self, studies: list[PoolStudy]) -> None:
        """Say how large the spaces are, what is there already, and what else a person should know before the first trial."""
        self._studies = studies
        self._launched_before = sum(study.launched for study in studies)
        for words in note(self._spec):
            self._line(words)
        for study in studies:
            known = f", {study.launched} trials known" if study.launched else ""
            self._console.print(f"{study.name}: {len(study.table):,} legal candidates{known}; starting Ray and the first trial ...")
            if broken := study.violations(study.baseline):
                self._line(f"{study.name}: {without_baseline(broken, study.candidates.left)}")
            self._tell(study, [words for words in study.results().notes if words not in note(self._spec)])

    def launched(self, study: PoolStudy, proposal: Proposal) -> None:
        """Show it as running, and after some trials what is left."""
        self._running[study.name], self._forecasts[study.name] = proposal, proposal.forecast
        if self._live is None and self._due:
            self._line(f"{self._spec.name}: {self._summary()}")
        self._due = False
        self._draw()

    def ended(self, study: PoolStudy, record: TrialRecord) -> None:
        """Show how it ended; refused proposals are counted, not listed."""
        if record.outcome is Outcome.REFUSED:
            self._refused += 1
            return
        self._running.pop(study.name, None)
        self._began_s, self._reached_s = min(self._began_s, record.started_s), max(self._reached_s, record.ended_s)
        self._recent = [*self._recent, record][-_ROWS:]
        if self._live is None:
            best = f"   {self._best} so far: trial {study.best.number}" if study.best else ""
            shown = f"{throughput(record)}  {short(record.config)}  {remark(record)}"
            self._line(f"{record.study} trial {record.number}: {shown}{best}")
        if record.phase is not Phase.CONFIRM:
            self._explored += 1
            self._due = self._explored % _FORECAST_EVERY == 0
        self._tell(study, study.notes)
        self._draw()

    def _tell(self, study: PoolStudy, notes: Sequence[str]) -> None:
        """What a study does not do although it was asked for, or does otherwise than is meant, once."""
        for line in (f"{study.name}: {words}" for words in notes):
            if line not in self._told:
                self._told.add(line)
                self._line(line)

    def _line(self, text: str) -> None:
        self._console.print(text, soft_wrap=True, highlight=False, markup=False)

    def _draw(self) -> None:
        if self._live:
            running = [(name, str(p.trial.number), short(p.config)) for name, p in self._running.items()]
            self._live.update(Group(trial_table(self._recent, running), Text(self._summary(), style="bold")), refresh=True)

    def _summary(self) -> str:
        launched = sum(study.launched for study in self._studies)
        parts = [f"{launched} of {self._budget.trials * len(self._studies)} trials", f"{self._refused} refused before launch"]
        for study in self._studies:
            if study.best:
                title = pool_title(self._spec, study.pool)
                parts.append(f"{self._best} on {title}: {throughput(study.best)} tokens/s per GPU (trial {study.best.number})")
        for study in self._studies:
            if (forecast := self._forecast(study)) is not None:
                parts.append(f"remaining budget on {pool_title(self._spec, study.pool)}: {forecast.words()}")
        if (left := self._left(launched)) is not None:
            parts.append(left)
        return "   ".join(parts)

    def _forecast(self, study: PoolStudy) -> Forecast | None:
        """What its budget buys as of its last launch; None once it explores no more."""
        return None if study.end_reason else self._forecasts.get(study.name)

    def _left(self, launched: int) -> str | None:
        """What is left of this run, by its pace and the budgets; of a rehearsal in virtual time, as its budgets are, and here.

        None before the first trial has ended, and once nothing is left.
        """
        elapsed_s = time.time() - self._started_s
        counted_s = self._reached_s - self._began_s if is_simulated(self._spec) else elapsed_s
        done = launched - self._launched_before
        if not done or counted_s <= 0:
            return None
        left_s = counted_s / done * sum(one.trials for study in self._studies if (one := self._forecast(study)) is not None)
        if self._budget.wall_time_s is not None:
            left_s = min(left_s, self._budget.wall_time_s - counted_s)
        if left_s <= 0:
            return None
        if not is_simulated(self._spec):
            return f"about {lasting(left_s)} left"
        return f"about {lasting(left_s)} of virtual time left, {lasting(left_s * elapsed_s / counted_s)} here"
