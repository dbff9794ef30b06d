"""Ctrl-C, SIGTERM, SIGHUP and a terminal that closes."""

from __future__ import annotations

import os
import pty
import signal
import time
from pathlib import Path

import pytest
from mlflow import MlflowClient

from autotune.pool_study import STOPPED_BY_USER
from autotune.tracking.server import tracking_uri_of
from launchers.outcome import Outcome
from tests.faults.harness import await_gone, until

CLEAN_END_S = 60.0


def mlflow_runs(study):
    """Status of every run by the role of the run."""
    client = MlflowClient(tracking_uri_of(None, study.state.path))
    experiment = client.get_experiment_by_name("faults")
    runs = client.search_runs([experiment.experiment_id])
    parents = [run.info.status for run in runs if "mlflow.parentRunId" not in run.data.tags]
    return parents, sorted(run.info.status for run in runs if "mlflow.parentRunId" in run.data.tags)


def run_to_mid_trial(study, *options, **popen):
    study.plan("complete", "escape")
    study.start("tune", *options, **popen)
    study.await_file("mid_trial")


def check_clean_end(study):
    """One trial had completed and another was running when the user stopped the study."""
    records = study.records()
    assert [record.outcome for record in records] == [Outcome.COMPLETED, Outcome.LOST]
    assert records[1].detail == STOPPED_BY_USER
    assert study.results()[0].end_reason == STOPPED_BY_USER
    assert study.results()[0].running == 0
    assert mlflow_runs(study) == (["KILLED"], ["FINISHED", "KILLED"])
    assert not study.members()


def test_C027_C051_ctrl_c_ends_the_study_cleanly_and_resume_runs_the_same_candidate_again(new_study):
    study = new_study()
    run_to_mid_trial(study)
    os.killpg(study.driver.pid, signal.SIGINT)  # as a terminal does: to Ray's processes, too
    assert study.wait(CLEAN_END_S) == 130
    check_clean_end(study)
    assert "ended: stopped by the user" in study.log.read_text()
    assert "winner" in study.log.read_text()
    stopped = study.records()[1]
    study.plan("complete")
    assert study.run("resume", "--trials", "2").returncode == 0
    assert study.records()[2].config == stopped.config
    assert mlflow_runs(study) == (["FINISHED"], ["FINISHED", "FINISHED", "KILLED"])


@pytest.mark.acceptance
def test_a_second_ctrl_c_leaves_nothing_and_the_next_command_closes_what_is_open(new_study):
    study = new_study()
    run_to_mid_trial(study)
    members = study.members()
    study.driver.send_signal(signal.SIGINT)
    time.sleep(0.1)  # two signals at once count as one
    study.driver.send_signal(signal.SIGINT)
    took_s = await_gone([*members, *study.members()], 3.0)
    print(f"second Ctrl-C: {len(members)} processes gone after {took_s:.2f} s")
    assert study.wait(1) == 130
    assert mlflow_runs(study)[0] == ["RUNNING"]
    study.plan("complete")
    assert study.run("resume", "--trials", "2").returncode == 0
    assert mlflow_runs(study) == (["FINISHED"], ["FINISHED", "FINISHED"])
    assert study.results()[0].running == 0


@pytest.mark.acceptance
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_other_signals_end_the_study_as_ctrl_c_does(new_study, number):
    study = new_study()
    run_to_mid_trial(study)
    study.driver.send_signal(number)
    assert study.wait(CLEAN_END_S) == 130
    check_clean_end(study)


@pytest.mark.acceptance
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("delay_s", [3, 5, 8])
def test_a_signal_while_the_study_starts_ends_it_too(new_study, number, delay_s):
    study = new_study()
    study.plan("escape")
    study.start()
    until(lambda: "legal candidates" in study.log.read_text(), 60, study.tail)
    time.sleep(delay_s - 3)
    study.driver.send_signal(number)
    assert study.wait(CLEAN_END_S) == 130, study.tail()
    assert "Traceback" not in study.log.read_text(), study.log.read_text()
    assert not study.members()


def open_terminal(study, *options):
    """Start a driver that has a terminal of its own, as in a shell; returns the terminal's other end."""
    ours, theirs = pty.openpty()

    def take_terminal():
        os.setsid()
        os.close(os.open(os.ttyname(theirs), os.O_RDWR))  # a session leader's first terminal becomes its own

    study.start("tune", *options, start_new_session=False, preexec_fn=take_terminal, stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    return ours


def read_terminal(ours):
    """What the terminal shows now; an error at its end is the end."""
    try:
        return os.read(ours, 1 << 16).decode(errors="replace")
    except OSError:
        return ""


@pytest.mark.acceptance
def test_a_terminal_that_closes_ends_the_study_cleanly(new_study):
    study = new_study()
    study.plan("complete", "escape")
    ours = open_terminal(study)
    os.set_blocking(ours, False)

    def mid_trial():
        read_terminal(ours)  # a terminal that nobody reads would block the driver
        return (study.control / "mid_trial").exists()

    until(mid_trial, 90, "a trial")
    os.close(ours)
    for _ in range(2):  # as the shell does with its jobs, and the kernel when the shell has ended
        os.killpg(study.driver.pid, signal.SIGHUP)
        time.sleep(0.2)
    assert study.wait(CLEAN_END_S) == 130
    check_clean_end(study)


@pytest.mark.acceptance
def test_a_detached_study_survives_its_terminal(new_study):
    study = new_study(budget={"trials": 2})
    study.plan("complete", "slow")
    ours = open_terminal(study, "--detach")
    assert study.wait() == 0
    shown = read_terminal(ours)
    os.close(ours)
    assert "running as process" in shown
    until(lambda: not study.members(), 90, (study.state.path / "driver.log").read_text)
    assert [record.outcome for record in study.records()] == [Outcome.COMPLETED] * 2
    assert study.results()[0].end_reason == "budget: 2 trials"
    assert "winner" in Path(study.state.path / "driver.log").read_text()
