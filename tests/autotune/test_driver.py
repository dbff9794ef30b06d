"""The driver around Ray Tune: what it does where a Tuner ends because Ray killed one of its workers."""

from pathlib import Path
from types import SimpleNamespace

import pytest
from ray.exceptions import RayError

from autotune import driver
from autotune.errors import InfrastructureError


class Searching(SimpleNamespace):
    """Trials in flight by id, and how often they were given up."""

    def abandon(self, cause: RayError) -> None:
        self.in_flight.clear()
        self.abandoned.append(cause)


def searching(*trials: str) -> Searching:
    return Searching(in_flight=dict.fromkeys(trials), abandoned=[])


def test_another_tuner_goes_on_where_a_trial_ended_with_the_first(monkeypatch, tmp_path):
    cause, names = RayError("a worker was killed"), []
    searcher, ends = searching("t1"), [cause, None]

    def once(_, scratch: Path, name: str):
        names.append(name)
        return ends.pop(0)

    monkeypatch.setattr(driver, "_fit_once", once)
    driver._fit(searcher, tmp_path)
    assert searcher.abandoned == [cause]
    assert len(set(names)) == 2


def test_tuners_that_end_without_any_trial_are_not_started_for_ever(monkeypatch, tmp_path):
    monkeypatch.setattr(driver, "_fit_once", lambda *_: RayError("the cluster is gone"))
    with pytest.raises(InfrastructureError, match="the cluster is gone") as raised:
        driver._fit(searching(), tmp_path)
    assert "autotune resume" in raised.value.hint
