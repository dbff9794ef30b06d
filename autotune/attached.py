"""What is attached to a trial after its end, such as its watts at the wall from a site's log.

Optuna takes no attribute of a trial that has ended, so it lies in an attribute of the study, one for each trial, and is merged into
the trial's record whenever that is read. The record and what Optuna was told stay as they were.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import optuna

from autotune.records import TrialRecord
from autotune.wall_metrics import ESTIMATED, is_measured

_ATTRIBUTE = "attached."
_MARKS = "telemetry."
_WALL = f"{_MARKS}wall."


@dataclass(frozen=True, slots=True)
class Attached:
    """Watts at the wall of one trial, from a log.

    Attributes:
        source: The log.
        metrics: As `wall_metrics` names them.
        marks: What a reader must know of them.
    """

    source: str
    metrics: Mapping[str, float]
    marks: Mapping[str, str]

    def merged(self, record: TrialRecord) -> TrialRecord:
        """The record with it. It takes the place of all that was measured or estimated of the same before."""
        replaced = {f"{name}{ESTIMATED}" for name in self.metrics}
        kept = {name: value for name, value in record.metrics.items() if not is_measured(name) and name not in replaced}
        facts = {name: text for name, text in record.environment.items() if not name.startswith(_WALL)}
        marks = {f"{_MARKS}{name}": text for name, text in self.marks.items()}
        return replace(record, metrics={**kept, **self.metrics}, environment={**facts, **marks}, attached=self.source)


def attach(study: optuna.Study, number: int, what: Attached) -> bool:
    """Keep it with the study; whether that changed anything."""
    key, value = f"{_ATTRIBUTE}{number}", asdict(what)
    if study.user_attrs.get(key) == value:
        return False
    study.set_user_attr(key, value)
    return True


def with_attached(record: TrialRecord, attributes: Mapping[str, Any]) -> TrialRecord:
    """A trial's record with what the attributes of its study attach to it."""
    what = attributes.get(f"{_ATTRIBUTE}{record.number}")
    return record if what is None else Attached(**what).merged(record)
