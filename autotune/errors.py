"""The service's errors. A configuration's own fault is a result (`launchers.outcome`), never an exception."""

from __future__ import annotations

import reprlib
from pathlib import Path
from typing import Final

NOTHING: Final = object()
_values = reprlib.Repr()
_values.maxstring = _values.maxother = 70
_values.maxdict = 3


def shown(value: object) -> str:
    """A value as messages show it: at most a line of it."""
    return _values.repr(value)


class AutotuneError(Exception):
    """Root of all errors that the command line shows without a traceback.

    Attributes:
        hint: What the person can do about it; may be empty.
    """

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint


class SpecError(AutotuneError):
    """A study file or option is wrong: field, value (`NOTHING` where there is none) and hint. Exit code 2."""

    def __init__(self, field: str, value: object, problem: str, hint: str = "") -> None:
        got = repr(str(value)) if isinstance(value, Path) else shown(value)
        super().__init__(f"{field}: {problem}" + ("" if value is NOTHING else f" (got {got})"), hint)
        self.field = field
        self.value = value
        self.problem = problem


class InfrastructureError(AutotuneError):
    """Nodes, drivers, storage or the tracking server are at fault, not the configuration. Exit code 1."""


class TrackingError(InfrastructureError):
    """The MLflow store cannot be reached or refuses a write."""
