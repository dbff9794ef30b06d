"""Finding: what one check of the doctor says."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import StrEnum


class Status(StrEnum):
    """How bad a finding is: fine, works with a loss, or a study would fail."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class Finding:
    """The answer of one check.

    Attributes:
        name: What was checked, in a word or two.
        status: How bad it is.
        detail: What was found.
        fix: What to type or change; empty where nothing is wrong.
    """

    name: str
    status: Status
    detail: str
    fix: str = ""

    def to_dict(self) -> dict[str, str]:
        """Plain values, for JSON."""
        return {name: str(value) for name, value in asdict(self).items()}
