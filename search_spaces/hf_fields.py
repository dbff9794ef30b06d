"""The fields of a Hugging Face config.json by any of their names, and the error that says which one is missing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class UnknownModelError(ValueError):
    """A config.json whose shapes cannot be read, with what is missing."""


class Fields:
    """A config's fields, by any of several names; missing ones are named together with the family."""

    def __init__(self, kind: str, raw: Mapping[str, Any]) -> None:
        self.kind = kind
        self.raw = raw

    def need(self, *names: str) -> Any:
        """The first of these fields that is given."""
        value = self.get(*names)
        if value is None:
            raise UnknownModelError(f"config.json of model_type {self.kind!r} lacks {' or '.join(names)}")
        return value

    def get(self, *names: str, default: Any = None) -> Any:
        """The first of these fields that is given, else the default."""
        return next((self.raw[name] for name in names if self.raw.get(name) is not None), default)
