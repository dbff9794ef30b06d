"""The fields of a Hugging Face config.json by any of their names, and the error that says which one is missing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from search_spaces.whole import LARGEST, MOST_LAYERS


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

    def whole(self, *names: str, least: int = 1, most: int = LARGEST, default: int | None = None) -> int:
        """The same as a whole number that can be reckoned with.

        Raises:
            UnknownModelError: it is missing without a default, is no whole number, or is out of range.
        """
        value = self.need(*names) if default is None else self.get(*names, default=default)
        if isinstance(value, int) and not isinstance(value, bool) and least <= value <= most:
            return value
        raise UnknownModelError(f"config.json: {' or '.join(names)} must be a whole number from {least} to {most:,}, not {value!r}")

    @property
    def layers(self) -> int:
        """Layers, for patterns that name each of them."""
        return self.whole("num_hidden_layers", most=MOST_LAYERS)

    def get(self, *names: str, default: Any = None) -> Any:
        """The first of these fields that is given, else the default."""
        return next((self.raw[name] for name in names if self.raw.get(name) is not None), default)
