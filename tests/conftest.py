"""Shared fixtures."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SHARED = Path(os.environ.get("AUTOTUNE_SHARED", ROOT.parent / "shared"))


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of published figures and cases; tests that need it are skipped where it is absent."""
    if not SHARED.is_dir():
        pytest.skip(f"no folder of published cases at {SHARED} (set AUTOTUNE_SHARED)")
    return SHARED
