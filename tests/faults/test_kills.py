"""SIGKILL of every process of a running study, mid-trial and while preloading: nothing of the trial is left, the study goes on."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from launchers.outcome import Outcome
from launchers.process_tree import descendants, read_process
from tests.faults.harness import FaultStudy, await_gone, until

SURVIVED = ("rank", "warm", "supervisor", "guardian", "agent", "tune_worker")
FATAL = ("driver", "raylet")


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    """One study for all kills: each test leaves it, or finds it again, with a trial running."""
    study = FaultStudy(tmp_path_factory.mktemp("kills"))
    yield study
    study.close()


def run_to_mid_trial(study):
    """A trial runs whose ranks try everything to outlive it."""
    (study.control / "slow_preload").unlink(missing_ok=True)
    if study.driver is None or study.driver.poll() is not None:
        study.plan("complete", "escape")
        study.start("tune" if study.driver is None else "resume")
    study.await_file("mid_trial")


def run_to_preload(study, fatal):
    """A trial waits for a warm process that is still importing."""
    if fatal:  # a new driver, whose first preload is slow
        if study.driver is not None and study.driver.poll() is None:
            os.kill(study.pid_of("driver"), signal.SIGKILL)
            study.wait()
            until(lambda: not study.members(), 10, "the end of the driver before")
        (study.control / "slow_preload").touch()
        study.plan("escape")
        study.start("tune" if study.driver is None else "resume")
    else:
        run_to_mid_trial(study)
        (study.control / "slow_preload").touch()
        study.plan("escape")
        os.kill(study.pid_of("warm"), signal.SIGKILL)
    study.await_file("preloading")


def doomed(study, victim):
    """What must be gone after the kill, as it is now."""
    if victim in FATAL:
        return study.members()
    tops = {"rank": (), "warm": ("warm",), "tune_worker": ("tune_worker",)}.get(victim, ("guardian",))
    tops += ("agent",) if victim == "agent" else ()
    pids = [study.pid_of(role) for role in tops]
    below = [process for pid in pids if victim != "tune_worker" for process in descendants(pid)]
    if victim in ("rank", "tune_worker"):
        below = study.trial_processes()
    return [*map(read_process, pids), *below]


def kill(study, victim, phase):
    """Kill it, and return the records before and what the kill took."""
    pid, gone, before = study.pid_of(victim), doomed(study, victim), study.records()
    if phase == "mid-trial":
        assert len(study.trial_processes()) == 8  # two ranks, each with a shell, its sleep, and a daemon
    study.plan(*(("escape",) if phase == "mid-trial, again" else ("complete", "escape")))
    os.kill(pid, signal.SIGKILL)
    took_s = await_gone(gone)
    if victim in SURVIVED:
        until(lambda: len(study.records()) > len(before), 30, "the record of the trial that was lost")
    for name in ("slow_preload", "mid_trial"):  # the lost trial may have gone on writing until the driver ended it
        (study.control / name).unlink(missing_ok=True)
    print(f"SIGKILL of {victim}, {phase}: {len(gone)} processes gone after {took_s:.2f} s")
    return before


def check_survived(study, victim, phase):
    (before_agent, before) = (study.pid_of("agent"), kill(study, victim, phase))
    study.await_file("mid_trial")
    new = study.records()[len(before) :]
    assert [record.outcome for record in new] == [Outcome.LOST, Outcome.COMPLETED], [(r.outcome, r.detail) for r in new]
    assert new[1].config == new[0].config
    assert (study.pid_of("agent") != before_agent) == (victim == "agent")
    return before, new


def check_resumed(study, victim, phase):
    before = kill(study, victim, phase)
    assert study.wait(10) != 0
    until(lambda: not study.members(), 10, "the end of Ray's own daemons")
    study.start("resume")
    study.await_file("mid_trial")
    after = study.records()
    assert [record.number for record in after[: len(before)]] == [record.number for record in before]
    assert [record.outcome for record in after[len(before) :]] == [Outcome.COMPLETED]


def counters(record):
    return {name: record.environment[f"node0.{name}"] for name in ("pid", "supervisors_started", "preloads")}


def test_C025_C026_C031_ranks_and_agents_may_die_and_a_killed_driver_loses_one_trial(study):
    """The fast part of the matrix."""
    run_to_mid_trial(study)
    for role in ("guardian", "supervisor"):  # they end what is below them, and must not be ended before by the session guard
        assert b"RAY_AUTOTUNE_SESSION" not in Path(f"/proc/{study.pid_of(role)}/environ").read_bytes()
    assert b"RAY_AUTOTUNE_SESSION" in Path(f"/proc/{study.pid_of('agent')}/environ").read_bytes()
    before, new = check_survived(study, "rank", "mid-trial")
    assert counters(new[1]) == counters(before[-1]) | {"preloads": "1"}
    check_survived(study, "agent", "mid-trial")
    check_resumed(study, "driver", "mid-trial")


@pytest.mark.acceptance
@pytest.mark.parametrize("victim", SURVIVED)
def test_mid_trial_the_study_goes_on(study, victim):
    run_to_mid_trial(study)
    check_survived(study, victim, "mid-trial")


@pytest.mark.acceptance
@pytest.mark.parametrize("victim", SURVIVED[1:])
def test_while_preloading_the_study_goes_on(study, victim):
    run_to_preload(study, fatal=False)
    before = kill(study, victim, "preloading")
    study.await_file("mid_trial")
    new = study.records()[len(before) :]
    assert [record.outcome for record in new] == [Outcome.LOST, Outcome.COMPLETED], [(r.outcome, r.detail) for r in new]


@pytest.mark.acceptance
@pytest.mark.parametrize("victim", FATAL)
def test_mid_trial_resume_goes_on(study, victim):
    run_to_mid_trial(study)
    check_resumed(study, victim, "mid-trial")


@pytest.mark.acceptance
@pytest.mark.parametrize("victim", FATAL)
def test_while_preloading_resume_goes_on(study, victim):
    run_to_preload(study, fatal=True)
    check_resumed(study, victim, "preloading")


@pytest.mark.acceptance
def test_a_tune_worker_that_dies_again_and_again_ends_the_study_with_that_reason(study):
    run_to_mid_trial(study)
    for _ in range(2):
        kill(study, "tune_worker", "mid-trial, again")
        study.await_file("mid_trial")
    os.kill(study.pid_of("tune_worker"), signal.SIGKILL)
    study.wait()
    assert "3 trials in a row were lost" in study.results()[0].end_reason
    assert not study.members()
