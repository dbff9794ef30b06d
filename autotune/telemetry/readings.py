"""Readings: asks a device for one field after another and remembers why one cannot be read. Shared by the vendors' modules."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from typing import TypeVar

T = TypeVar("T")


class Fault(Enum):
    """What a vendor's error means for the field that was asked for."""

    ABSENT = auto()
    """The device or driver has no such thing: do not ask again."""
    PERMISSION = auto()
    """It has, but not for this process: the fix is administrative; do not ask again."""
    LOST = auto()
    """The whole device is gone."""
    PASSING = auto()
    """This time only, as far as anybody knows."""


@dataclass(frozen=True, slots=True)
class Failure:
    """A vendor's error in our words."""

    fault: Fault
    text: str


class Readings:
    """One device's fields.

    Args:
        errors: What the vendor's binding raises.
        translate: What such an error means.

    Attributes:
        gaps: Why a field cannot be read, by its name.
        lost: Why the device is gone; empty while it answers.
    """

    def __init__(self, errors: tuple[type[Exception], ...], translate: Callable[[Exception], Failure]) -> None:
        self._errors = errors
        self._translate = translate
        self._settled: set[str] = set()
        self.gaps: dict[str, str] = {}
        self.lost = ""

    def get(self, name: str, call: Callable[..., T], *arguments: object) -> T | None:
        """The answer of `call`; None where it failed now, or said before that it always will."""
        if self.lost or name in self._settled:
            return None
        try:
            return call(*arguments)
        except self._errors as error:
            self.note(name, self._translate(error))
            return None

    def note(self, name: str, failure: Failure) -> None:
        """Keep why a field was not read."""
        if failure.fault is Fault.LOST:
            self.lost = failure.text
        elif failure.fault is not Fault.PASSING:
            self._settled.add(name)
        self.gaps.setdefault(name, failure.text)

    def absent(self, name: str) -> bool:
        """Whether the field will never be read."""
        return bool(self.lost) or name in self._settled
