"""Fixtures of the tracking tests."""

import pytest

from autotune.tracking import Tracker
from tests.autotune.tracking_cases import copied, migrated


@pytest.fixture
def state(tmp_path_factory, tmp_path):
    """A state folder whose MLflow store is migrated already: once per test run."""
    return copied(migrated(tmp_path_factory.getbasetemp()), tmp_path / "state")


@pytest.fixture
def tracker(state):
    """A tracker on that store, closed at the end."""
    tracker = Tracker(None, state)
    yield tracker
    tracker.close(0)
