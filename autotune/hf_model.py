"""Shapes from a Hugging Face config.json that a person names: errors say which file, which field and what to do."""

from __future__ import annotations

import json
from pathlib import Path

from pydantic import ValidationError

from autotune.errors import NOTHING, SpecError
from autotune.spec_errors import spec_error
from search_spaces.model import ModelSpec


def shapes_of(path: Path, field: str) -> ModelSpec:
    """The shapes in a Hugging Face config.json.

    Args:
        path: The file, or its folder.
        field: What names it, for messages.

    Raises:
        SpecError: there is no such file, it is no JSON object, its architecture is unknown, or a field is missing or wrong.
    """
    hint = "give the config.json of a Hugging Face model, or write a study with the shapes"
    try:
        return ModelSpec.from_hf(path)
    except OSError as error:
        raise SpecError(field, path, f"cannot be read: {(error.strerror or 'error').lower()}", hint) from None
    except json.JSONDecodeError as error:
        raise SpecError(field, path, f"is not JSON: {error.msg.lower()} in line {error.lineno}", hint) from None
    except ValidationError as error:
        found = str(spec_error(error, ModelSpec))
        raise SpecError(
            f"{field} {path}", NOTHING, found, "shapes have Megatron's names here; mend that field in the file"
        ) from None
    except UnicodeDecodeError:
        raise SpecError(field, path, "is not a text file", hint) from None
    except TypeError:
        raise SpecError(field, path, "is no JSON object with numbers where shapes are", hint) from None
    except ValueError as error:
        raise SpecError(field, path, str(error).splitlines()[0], hint) from None
