"""Power limits of a trial's GPUs: set before it, and put back to what was requested before, whoever is killed.

The GPUs are scripted: the real pynvml loads our own libnvidia-ml, which keeps what is set and writes every change into a log.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from launchers.outcome import Outcome
from search_spaces.gpus import gpu
from tests.faults.harness import ROOT, START_S, FaultStudy, until
from tests.telemetry.devices import H100, Scenario, environment

BEFORE_MW, ENFORCED_MW, LIMIT_W = 600_000, 550_000, 400
DEVICES = {**H100, "limit_mw": BEFORE_MW, "enforced_mw": ENFORCED_MW, "memory_mib": 500}
RESTORED_S = 10.0
NO_PERMISSION = "E4"
ONCE = [(0, 400.0), (1, 400.0), (0, 600.0), (1, 600.0)]  # what a trial requests
ASKED = 2  # the first two requests asked for the right to, with the limit that was there


class PowerStudy(FaultStudy):
    """A study on two scripted GPUs whose trials run at a power limit."""

    def __init__(self, folder, scenario=None, **changes):
        pool = {"name": "fake", "gpu": "h100-sxm", "gpus_per_node": 2, **changes.pop("pool", {})}
        study = {
            "pools": [pool],
            "gpus": [0, 1],
            "confirm": {"top": 0},
            "baseline": {"precision": "fp32", "gpu_power_limit_w": LIMIT_W},
            "search": {"micro_batch_size": [1, 2, 4, 8, 16, 32], "recompute": ["none", "selective", "full"]},
        }
        super().__init__(folder, **(study | changes))
        self.restore = folder / "restore"
        devices = environment(scenario or Scenario(DEVICES, 2), folder=folder)
        self.environment |= {**devices, "AUTOTUNE_RESTORE": str(self.restore)}

    def calls(self):
        """(GPU, watts) of every limit that was requested."""
        log = self.folder / "calls"
        fields = [line.split() for line in log.read_text().splitlines()] if log.exists() else []
        return [(int(row[3]), int(row[4]) / 1000) for row in fields if row[2].endswith("SetPowerManagementLimit")]

    def limits(self):
        """What is requested of each GPU now."""
        kept = [self.folder / f"nvidia-{gpu}" for gpu in range(2)]
        texts = [path.read_text() if path.exists() else str(BEFORE_MW) for path in kept]
        return [float(text) / 1000 if text else None for text in texts]  # the scripted library is writing it

    def kept(self):
        """Restore records on disk."""
        return list(self.restore.glob("*.json"))


@pytest.fixture
def power_study(tmp_path):
    studies = []

    def make(**changes):
        studies.append(PowerStudy(tmp_path / f"study{len(studies)}", **changes))
        return studies[-1]

    yield make
    for study in studies:
        study.close()


def run_to_mid_trial(study, *before):
    """A trial runs after those."""
    study.plan(*before, "escape")
    study.start()
    study.await_file("mid_trial")
    assert study.limits() == [LIMIT_W, LIMIT_W]
    assert len(study.kept()) == 2  # on disk before the limit was changed


def check_limits_of(records):
    assert {record.outcome for record in records} == {Outcome.COMPLETED}
    for record in records:
        assert record.environment["node0.gpu1.power_limit_requested_w"] == "400"
        assert record.environment["node0.gpu1.power_limit_enforced_w"] == "400"
        assert not record.contaminated


@pytest.mark.acceptance
def test_the_limit_is_set_for_the_trial_and_both_limits_are_logged(power_study):
    study = power_study(budget={"trials": 2})
    study.plan("complete")
    study.start()
    assert study.wait() == 0, study.tail()
    records = study.results()[0].records
    check_limits_of(records)
    assert study.calls()[ASKED:] == ONCE * len(records)
    assert not study.kept()


def restored_after(study, *victims):
    """SIGKILL these, and wait for both GPUs' old limits to be requested."""
    pids, before = [study.pid_of(victim) for victim in victims], len(study.calls())
    study.plan("silent")
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    back = {(0, 600.0), (1, 600.0)}
    until(lambda: back <= set(study.calls()[before:]), RESTORED_S, lambda: f"the old limits: {study.calls()}\n{study.tail()}")


def test_each_trial_sets_and_logs_its_limit_and_a_killed_driver_leaves_it_to_the_exit_command(power_study):
    study = power_study()
    run_to_mid_trial(study, "complete", "complete")
    records = study.records()
    check_limits_of(records)
    assert len(records) == 2
    assert study.calls()[ASKED:] == ONCE * 2 + ONCE[:2]
    restored_after(study, "driver")
    until(lambda: study.limits() == [600.0, 600.0] and not study.kept(), RESTORED_S, study.calls)


@pytest.mark.acceptance
@pytest.mark.parametrize("victim", ["rank", "agent", "supervisor", "guardian", "warm", "tune_worker", "raylet"])
def test_limits_come_back_within_ten_seconds_whoever_is_killed(power_study, victim):
    study = power_study()
    run_to_mid_trial(study)
    restored_after(study, victim)


@pytest.mark.acceptance
def test_where_the_whole_process_tree_is_killed_the_next_agent_puts_them_back(power_study):
    study = power_study()
    run_to_mid_trial(study)
    restored_after(study, "guardian", "supervisor", "agent")


@pytest.mark.acceptance
@pytest.mark.parametrize("next_start", ["doctor", "resume"])
def test_where_nothing_is_left_the_next_start_puts_them_back(power_study, next_start):
    study = power_study()
    run_to_mid_trial(study)
    pids = [study.pid_of(role) for role in ("guardian", "supervisor", "agent", "driver")]
    for end in (signal.SIGSTOP, signal.SIGKILL):  # none may act on another's end
        for pid in pids:
            os.kill(pid, end)
    study.wait()
    study.close()  # as a node that goes down takes what its ranks had started
    assert study.limits() == [LIMIT_W, LIMIT_W]
    assert len(study.kept()) == 2
    before = len(study.calls())
    study.plan("silent")
    if next_start == "doctor":
        command = [sys.executable, "-m", "autotune.cli", "doctor", "--state", str(study.folder / "state")]
        answer = subprocess.run(
            command, cwd=ROOT, env=study.environment, capture_output=True, text=True, timeout=START_S, check=False
        )
        assert "now back: 600 W on GPU-00000000-0000" in " ".join(answer.stdout.split()), answer.stdout
        assert not study.kept()
    else:
        study.start("resume")
    until(lambda: {(0, 600.0), (1, 600.0)} <= set(study.calls()[before:]), 60, study.tail)


@pytest.mark.acceptance
def test_without_the_right_the_knob_is_dropped_by_name_and_the_report_says_what_to_ask_for(power_study):
    study = power_study(scenario=Scenario(DEVICES, 2).set("*", "set_limit", NO_PERMISSION), budget={"trials": 2})
    study.plan("complete")
    study.start()
    assert study.wait() == 0, study.tail()
    assert {record.config.gpu_power_limit_w for record in study.results()[0].records} == {None}
    note = study.results()[0].notes[0]
    assert note.startswith("gpu_power_limit_w was dropped: ")
    assert "ask the administrator" in note
    assert "gpu_power_limit_w was dropped" in study.tail()
    assert not study.kept()


def test_a_limit_outside_of_the_devices_range_is_refused_before_anything_starts(power_study):
    wide = {**gpu("h100-sxm").model_dump(mode="json", exclude={"name", "source"}), "power_limit_w": [100, 1000]}
    study = power_study(baseline={"precision": "fp32", "gpu_power_limit_w": 900}, hardware={"gpus": {"h100-sxm": wide}})
    done = study.run("tune")
    assert done.returncode == 2
    assert "900" in done.stderr
    assert "take 200 to 700 W" in " ".join(done.stderr.split())
    assert not study.members()


@pytest.mark.acceptance
def test_a_site_sets_limits_with_its_own_command(power_study, tmp_path):
    script = tmp_path / "site-power"
    script.write_text(f'#!/bin/sh\necho "$1" "$2" >> {tmp_path}/asked\necho "$2"000 > {tmp_path}/study0/nvidia-"$1"\n')
    script.chmod(0o755)
    study = power_study(
        scenario=Scenario(DEVICES, 2).set("*", "set_limit", NO_PERMISSION),
        pool={"power_limit_command": f"{script} {{gpu}} {{watts}}"},
        budget={"trials": 1},
    )
    study.plan("complete")
    study.start()
    assert study.wait() == 0, study.tail()
    assert study.results()[0].records[0].environment["node0.gpu0.power_limit_requested_w"] == "400"
    assert (tmp_path / "asked").read_text().split("\n")[2:6] == ["0 400", "1 400", "0 600", "1 600"]
    assert study.limits() == [600.0, 600.0]
    assert not study.calls()
