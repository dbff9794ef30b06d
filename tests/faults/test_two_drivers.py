"""Two drivers on one study's storage, each with a folder of its own, as on two hosts."""

from __future__ import annotations

import socket

import optuna
import pytest
from optuna.trial import TrialState

from autotune.storage import open_storage
from tests.faults.harness import await_gone


@pytest.mark.acceptance
def test_the_second_is_refused_and_the_first_ends_where_it_was_taken_for_dead(new_study, tmp_path):
    url = f"journal://{tmp_path}/shared.log"
    first, second = (new_study(name, storage=url) for name in ("first", "second"))
    first.plan("complete", "escape")
    first.start()
    first.await_file("mid_trial")
    storage = open_storage(url, tmp_path)
    tuned = optuna.load_study(study_name="faults/fake/1x2", storage=storage)
    before = tuned.trials
    assert [trial.state for trial in before] == [TrialState.COMPLETE, TrialState.RUNNING]

    refused = second.run("tune")
    assert refused.returncode == 2
    assert f"another driver runs it (host {socket.gethostname()}, pid {first.driver.pid}, seen" in refused.stderr
    assert (tuned.trials, second.members(), (second.state.path / "study.yaml").exists()) == (before, [], False)

    members = first.members()
    drivers = optuna.load_study(study_name="faults/fake/1x2/drivers", storage=storage)
    drivers.tell(0, state=TrialState.FAIL)
    assert first.wait() == 1
    assert "error: another driver has taken over faults/fake/1x2: this one was not seen for 30 s" in first.tail()
    await_gone(members)
    assert tuned.trials == before

    second.plan("complete")
    assert second.run("tune", "--trials", "2", timeout_s=120).returncode == 0
    assert [trial.state for trial in tuned.trials] == [TrialState.COMPLETE, TrialState.FAIL, TrialState.COMPLETE]
