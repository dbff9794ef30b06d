"""Reads the YAML of a study file: a mapping of fields to values, no key twice."""

from __future__ import annotations

from collections.abc import Iterator
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
