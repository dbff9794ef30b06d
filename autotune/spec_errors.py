"""Turns pydantic's errors about a study file into one message: field, value, what is wrong, and what to do."""

from __future__ import annotations

import difflib
import inspect
import re
from collections.abc import Iterable, Sequence
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails, PydanticCustomError

from autotune.errors import NOTHING, SpecError
from search_spaces.config import TrialConfig, knobs
from search_spaces.presets import NAMES as PRESETS

_WRONG = "wrong_in_study"
_WRITE_ONE = "`autotune init` writes a study to start from"
_NAMES = "letters a to z, digits, `.`, `_` and `-`, at most 63 of them, the first a letter or digit"
_PROBLEMS = {
    "missing": "is missing",
    "extra_forbidden": "is not a known field",
    "string_pattern_mismatch": "cannot be a name",
    "too_short": "is empty",
    "int_parsing": "must be a whole number",
    "int_type": "must be a whole number",
    "int_from_float": "must be a whole number",
    "float_parsing": "must be a number",
    "float_type": "must be a number",
    "bool_parsing": "must be true or false",
    "bool_type": "must be true or false",
    "string_type": "must be text (in quotes where YAML reads something else)",
    "dict_type": "must be a mapping",
    "model_type": "must be a mapping",
    "tuple_type": "must be a list",
}
# Members of a union that pydantic names in a location, e.g. "dict[str,any]".
_UNION_TAG = re.compile(r".*[\[(].*|int|constrained-int|tuple|str|none")


def wrong(field: str, value: object, problem: str, hint: str) -> PydanticCustomError:
    """For validators: an error about `field`, below the model that raises it."""
    context = {"field": field, "value": value, "problem": problem, "hint": hint}
    return PydanticCustomError(_WRONG, "{field}: {problem}", context)


def spec_error(error: ValidationError, model: type[BaseModel]) -> SpecError:
    """The first problem as field, value and hint; the others are named."""
    details = error.errors()
    first = details[0]
    field = _path(_location(first))
    others = dict.fromkeys(path for path in (_path(_location(other)) for other in details[1:]) if not field.startswith(path))
    problem, advice = _problem(first), _hint(first, model)
    if _contradicts(first) and (split := re.fullmatch(r"(.*) \((.*)\)", problem)):
        problem, advice = split.groups()
    problem += f"; also wrong: {', '.join(others)}" if others else ""
    return SpecError(field, _value(first), problem, advice)


def field_error(location: Sequence[int | str], value: object, problem: str, model: type[BaseModel]) -> SpecError:
    """What is wrong with the field at a location."""
    return SpecError(_path(location), value, problem, _meaning(location, model) or _WRITE_ONE)


def nearest(name: str, known: Iterable[str]) -> str:
    """A hint that names the nearest of the known names, or all of them where none is near."""
    names = list(known)
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    return f"did you mean {near[0]!r}?" if near else f"known: {', '.join(names)}"


def _location(detail: ErrorDetails) -> tuple[int | str, ...]:
    parts = [part for part in detail["loc"] if isinstance(part, int) or not _UNION_TAG.fullmatch(part)]
    return (*parts, detail["ctx"]["field"]) if detail["type"] == _WRONG else tuple(parts)


def _path(location: Sequence[int | str]) -> str:
    """`pools[0].gpus_per_node`."""
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in location)
    return text.removeprefix(".") or "study"


def _problem(detail: ErrorDetails) -> str:
    if detail["type"] == _WRONG:
        return str(detail["ctx"]["problem"])
    if detail["loc"][:1] == ("search",):
        return f"must be a mapping of knobs to choices, auto, or a preset ({', '.join(PRESETS)})"
    known = _PROBLEMS.get(detail["type"])
    if known is None:
        return detail["msg"].removeprefix("Value error, ").replace("Input should be", "must be")
    return "is not a knob" if detail["type"] == "extra_forbidden" and "baseline" in detail["loc"] else known


def _value(detail: ErrorDetails) -> object:
    if detail["type"] == _WRONG:
        return detail["ctx"]["value"]
    return NOTHING if detail["type"] == "missing" or _contradicts(detail) else detail["input"]


def _contradicts(detail: ErrorDetails) -> bool:
    """Whether fields of one part contradict each other: the message names their values, and the whole part is no help."""
    return detail["type"] not in _PROBLEMS and isinstance(detail["input"], dict | BaseModel)


def _hint(detail: ErrorDetails, model: type[BaseModel]) -> str:
    location = _location(detail)
    if detail["type"] == _WRONG:
        return str(detail["ctx"]["hint"])
    if detail["type"] == "extra_forbidden":
        return nearest(str(location[-1]), _model_at(location[:-1], model).model_fields)
    if detail["type"] == "missing":
        where = f"below `{_path(location[:-1])}`" if len(location) > 1 else "to the study file"
        return f"add `{location[-1]}:` {where}; `autotune init` writes a complete one"
    if detail["type"] == "string_pattern_mismatch":
        return _NAMES
    return _meaning(location, model) or _WRITE_ONE


def _meaning(location: Sequence[int | str], model: type[BaseModel]) -> str:
    """What the field is, from its model's docstring, or what the study's field around it is."""
    names = [part for part in location if isinstance(part, str)]
    if not names:
        return ""
    owner, name = _model_at(names[:-1], model), names[-1]
    if owner is TrialConfig:
        return f"{name}: {knobs()[name].description}"
    found = re.search(rf"^    {re.escape(name)}: ((?:.+\n?)(?:^ {{8}}.+\n?)*)", inspect.getdoc(owner) or "", re.MULTILINE)
    if found:
        return f"{name}: {' '.join(found.group(1).split())}"
    return _meaning(names[:1], model) if len(names) == 2 else ""  # noqa: PLR2004  a name of the study's own, such as a metric's


def _model_at(location: Sequence[int | str], model: type[BaseModel]) -> type[BaseModel]:
    """The innermost model on the way to a location."""
    for part in location:
        field = model.model_fields.get(str(part))
        kinds = (field.annotation, *get_args(field.annotation)) if field else ()
        model = next((kind for kind in kinds if _is_model(kind)), model)
    return model


def _is_model(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, BaseModel)
