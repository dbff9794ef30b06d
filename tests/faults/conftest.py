"""Studies that are cleared away after the test, whatever happened in them."""

from __future__ import annotations

import pytest

from tests.faults.harness import FaultStudy


@pytest.fixture
def new_study(tmp_path):
    """Make studies; nothing of them outlives the test."""
    studies = []

    def make(name="one", **changes):
        studies.append(FaultStudy(tmp_path / name, **changes))
        return studies[-1]

    yield make
    for study in studies:
        study.close()
