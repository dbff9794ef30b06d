"""What a study keeps for people while it runs: the best configuration so far, whatever trial has just ended."""

import json
from unittest.mock import Mock

import pytest

from autotune import study as study_module
from autotune.state_folder import StateFolder
from autotune.study import run_study

from .study_cases import NoLauncher, completed, run_to_end, step_seconds, study_spec


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Runs a study without Ray and MLflow, and gives its results and what its folder says is the best."""
    for name in ("Tracker", "ParentOf"):
        monkeypatch.setattr(study_module, name, Mock())
    monkeypatch.setattr(study_module, "load_launcher", lambda name: NoLauncher())

    def run(spec, answer=lambda proposal: completed(step_seconds(proposal.config))):
        def on_ray(spec, folder, listener, address, stop, studies, runs):
            for study in studies:
                run_to_end(study, answer)

        monkeypatch.setattr(study_module, "_run_on_ray", on_ray)
        (results,) = run_study(spec, StateFolder(tmp_path), Mock())
        file = tmp_path / "best-laptop.json"
        return results, json.loads(file.read_text()) if file.exists() else None

    return run


def test_the_file_of_the_best_names_the_winner_that_confirming_shows(run):
    """The winner is a run of the middle: another run of it, or of the next best, ended last."""
    results, kept = run(study_spec(budget={"trials": 12}, confirm={"top": 2, "repeats": 3}))
    assert results.best.number < max(record.number for record in results.records)
    assert (kept["trial"], kept["config"]) == (results.best.number, results.best.config.changed())


def test_the_file_of_the_best_follows_limits_that_the_study_is_given_later(run):
    _, kept = run(study_spec(budget={"trials": 3}))
    assert kept is not None
    results, kept = run(study_spec(budget={"trials": 3}, limits={"step_time_s": {"max": 1e-6}}))
    assert (results.best, kept) == (None, None)
