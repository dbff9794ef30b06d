"""The table of telemetry cases, and which test covers which."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
FILE = Path(os.environ.get("AUTOTUNE_SHARED", ROOT.parent / "shared")) / "data/cases/telemetry.yaml"
COVERED: set[str] = set()
NOT_COVERED: dict[str, str] = {}
"""Why a case has no test, by its id."""


@cache
def cases():
    if not FILE.is_file():
        pytest.skip(f"no telemetry cases at {FILE} (set AUTOTUNE_SHARED)")
    return {case["id"]: case for case in yaml.safe_load(FILE.read_text())}


def case(name):
    """Input and expectation of a case; a file without it skips the test."""
    found = cases().get(name)
    if found is None:
        pytest.skip(f"{FILE} has no case {name}")
    return found["input"], found["expected"]


def covers(*names):
    """Marks a test as the one of these cases, and names them in its id."""
    COVERED.update(names)
    return pytest.mark.parametrize("name", names)
