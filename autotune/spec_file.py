"""Reads the YAML of a study file: a mapping of fields to values, no key twice."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from autotune.errors import NOTHING, SpecError

_WRITE_ONE = "`autotune init` writes a study to start from"


def read_yaml(path: Path) -> dict[str, Any]:
    """The mapping that a file holds.

    Raises:
        SpecError: there is no such file, it is not YAML, not a mapping, or gives a key twice.
    """
    text = _text(path)
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        for field, first, again in _given_twice(root, "", set()):
            problem = f"is given twice, in line {first} and again in line {again} of {path}"
            raise SpecError(field, NOTHING, problem, "keep one of them")
        data = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise SpecError("study file", path, f"is not YAML: {_one_line(error)}", _WRITE_ONE) from None
    if data is None:
        raise SpecError("study file", path, "is empty", _WRITE_ONE)
    if not isinstance(data, dict) or not all(isinstance(key, str) for key in data):
        raise SpecError("study file", path, "is not a mapping of fields to values", _WRITE_ONE)
    return data


def odd_numbers(given: Any, kept: Any, place: tuple[int | str, ...] = ()) -> Iterator[tuple[tuple[int | str, ...], Any, str]]:
    """Numbers that were given as true or false, or are not finite: where, what was given, and what is wrong.

    Args:
        given: What a file holds.
        kept: What it was read as; true and false count as 1 and 0 there.
        place: Keys and positions that lead to both.
    """
    if isinstance(given, Mapping) and isinstance(kept, Mapping):
        for key in given.keys() & kept.keys():
            yield from odd_numbers(given[key], kept[key], (*place, key))
    elif isinstance(given, list | tuple) and isinstance(kept, list | tuple):
        for position, (one, other) in enumerate(zip(given, kept, strict=False)):
            yield from odd_numbers(one, other, (*place, position))
    elif isinstance(kept, int | float) and not isinstance(kept, bool):
        if isinstance(given, bool):
            yield place, given, "must be a number, not true or false"
        elif not math.isfinite(kept):
            yield place, given, "must be a finite number"


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise SpecError("study file", path, "is not a text file", _WRITE_ONE) from None
    except OSError as error:
        problem = f"cannot be read: {(error.strerror or 'error').lower()}"
        raise SpecError("study file", path, problem, f"give the path of a YAML study file; {_WRITE_ONE}") from None


def _given_twice(node: yaml.Node | None, place: str, walked: set[int]) -> Iterator[tuple[str, int, int]]:
    """Keys that one mapping gives twice, with both lines: YAML forbids it, and PyYAML lets the last one win.

    Args:
        node: Where to look, and below.
        place: How the node is reached, for the message.
        walked: Nodes that were seen, by identity: an alias is the node that it names.
    """
    if node is None or id(node) in walked:
        return
    walked.add(id(node))
    if isinstance(node, yaml.SequenceNode):
        for position, item in enumerate(node.value):
            yield from _given_twice(item, f"{place}[{position}]", walked)
    if isinstance(node, yaml.MappingNode):
        lines: dict[tuple[str, str], int] = {}
        for key, value in node.value:
            field, line = f"{place}.{key.value}".removeprefix("."), key.start_mark.line + 1
            if (name := (key.tag, str(key.value))) in lines:
                yield field, lines[name], line
            lines[name] = line
            yield from _given_twice(value, field, walked)


def _one_line(error: yaml.YAMLError) -> str:
    """Problem and place of a YAML error, without the quoted text."""
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        return f"{error.problem} in line {error.problem_mark.line + 1}, column {error.problem_mark.column + 1}"
    return str(error).splitlines()[0]
