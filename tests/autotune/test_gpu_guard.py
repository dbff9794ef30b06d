"""Others on a trial's GPUs: seen before the launch and during the trial, named, and what follows from it."""

from __future__ import annotations

import os

import pytest

from autotune import gpu_guard, surroundings
from autotune.gpu_guard import GpuGuard, busy
from autotune.spec_parts import Measurement
from autotune.surroundings import Surroundings
from autotune.telemetry import GpuProcess
from launchers.gpu_sample import Throttle
from launchers.outcome import Outcome
from search_spaces.hardware import PoolSpec

from .gpu_fakes import FakeGpu

POOL = PoolSpec(name="a", gpu="h100-sxm", gpus_per_node=1)
OTHER = GpuProcess(os.getppid(), 40.0)


class NoTree:
    """Stands in for the supervisor: keeps the exit command."""

    def __init__(self):
        self.commands = []

    def set_exit_command(self, argv):
        self.commands.append(list(argv))


@pytest.fixture(autouse=True)
def host_processes(monkeypatch):
    monkeypatch.setattr(gpu_guard, "sees_host_processes", lambda: True)


def guarded(gpu, *looks):
    """A guard's view after these changes of the GPU's reading."""
    guard = GpuGuard([gpu], lambda: {os.getpid()})
    for look in looks:
        gpu.reading |= look
        guard.look()
    return guard


def test_a_free_gpu_is_free_and_the_drivers_own_reserve_is_nobodys():
    gpu = FakeGpu()
    assert busy([gpu]) == ""
    gpu.reading["memory_used_gib"] = 1.2
    assert busy([gpu]) == ""
    gpu.reading["memory_used_gib"] = None
    assert busy([gpu]) == ""


def test_foreign_memory_is_named_and_a_hidden_owner_too(monkeypatch):
    gpu = FakeGpu(3)
    gpu.reading["memory_used_gib"] = 40.0
    assert busy([gpu]) == "40.0 GiB of GPU 3 in use by a process that this container does not see"
    gpu.running = (OTHER,)
    assert f"(pid {os.getppid()}, user " in busy([gpu])
    monkeypatch.setattr(gpu_guard, "sees_host_processes", lambda: False)
    assert f"pid {os.getppid()} of the host" in busy([gpu])  # a process here may have the same number


def test_only_others_processes_disturb_a_trial():
    gpu = FakeGpu()
    gpu.running = (GpuProcess(os.getpid(), 60.0),)
    assert guarded(gpu, {}).disturbances == ()
    gpu.running += (OTHER,)
    guard = guarded(gpu, {}, {})
    assert len(guard.disturbances) == 1  # once, however often it is seen
    assert f"pid {os.getppid()}" in guard.foreign_memory
    assert "40.0 GiB" in guard.foreign_memory


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"clocks_locked": True}, "locked the clocks"),
        ({"throttling": (Throttle.POWER_BRAKE,)}, "throttled from outside"),
        ({"power_limit_w": 500.0}, "power limit of GPU 0 from 650 to 500 W"),
        ({"throttling": (Throttle.POWER_CAP, Throttle.SW_THERMAL)}, ""),
    ],
)
def test_what_somebody_does_to_the_device_is_told_and_what_the_trial_does_is_not(change, word):
    found = guarded(FakeGpu(), {}, change).disturbances
    assert [word in text for text in found] == [True] * bool(word)


def test_where_processes_are_hidden_the_memory_that_stays_tells(monkeypatch):
    monkeypatch.setattr(gpu_guard, "sees_host_processes", lambda: False)
    gpu = FakeGpu()
    with GpuGuard([gpu], set) as guard:
        gpu.reading["memory_used_gib"] = 30.5
    assert guard.foreign_memory == "30.0 GiB of GPU 0 are in use after the trial's end"


@pytest.mark.parametrize(
    ("silent_s", "reading", "hangs"),
    [
        (60.0, {"power_w": 150.0}, True),
        (60.0, {"power_w": 500.0}, False),
        (60.0, {"power_w": 150.0, "utilization": 0.3}, False),
        (60.0, {"power_w": None}, False),
        (5.0, {"power_w": 150.0}, False),
    ],
)
def test_full_utilisation_at_a_fraction_of_the_power_is_a_hang(silent_s, reading, hangs):
    gpu = FakeGpu()
    guard = guarded(gpu, {})
    guard.stepped()
    gpu.reading |= reading
    guard.look()
    found = guard.hangs(silent_s, step_s=1.0)
    assert ("spin at 150 W in place of 600 W" in found) == hangs
    assert not guard.hangs(silent_s, step_s=100.0)  # slow steps are silent for long


@pytest.mark.parametrize(("when_busy", "fatal"), [("skip", False), ("fail", True), ("wait", False)])
def test_a_trial_on_busy_gpus_is_lost_by_name_and_changes_no_limit(when_busy, fatal, monkeypatch, tmp_path):
    monkeypatch.setenv("AUTOTUNE_RESTORE", str(tmp_path))
    monkeypatch.setattr(gpu_guard, "_PERIOD_S", 0.01)
    gpu, tree = FakeGpu(), NoTree()
    gpu.running = (OTHER,)
    around = Surroundings([gpu], POOL, tree, set)
    with around.of(400, Measurement(when_busy=when_busy, busy_timeout_s=0.05), lambda: False):
        pass
    assert around.refusal.verdict.outcome is Outcome.LOST
    assert f"pid {os.getppid()}" in around.refusal.verdict.detail
    assert bool(around.witness(0).fatal) == fatal
    assert not gpu.asked
    assert not tree.commands


def test_waiting_ends_when_the_gpu_is_free(monkeypatch, tmp_path):
    monkeypatch.setenv("AUTOTUNE_RESTORE", str(tmp_path))
    monkeypatch.setattr(gpu_guard, "_PERIOD_S", 0.01)
    gpu, asked = FakeGpu(), []

    def leaves():
        asked.append(1)
        gpu.running = (OTHER,) if len(asked) < 3 else ()
        return gpu.running

    gpu.processes = leaves
    around = Surroundings([gpu], POOL, NoTree(), set)
    with around.of(None, Measurement(), lambda: False):
        assert around.refusal is None


def test_the_exit_command_is_there_before_the_limit_changes_and_goes_when_it_is_back(monkeypatch, tmp_path):
    monkeypatch.setenv("AUTOTUNE_RESTORE", str(tmp_path))
    gpu, tree, order = FakeGpu(), NoTree(), []
    gpu.own_set, tree.own_set = gpu.set_power_limit_w, tree.set_exit_command
    monkeypatch.setattr(gpu, "set_power_limit_w", lambda watts: (order.append(watts), gpu.own_set(watts)))
    monkeypatch.setattr(tree, "set_exit_command", lambda argv: (order.append(bool(argv)), tree.own_set(argv)))
    around = Surroundings([gpu], POOL, tree, set)
    with around.of(400, Measurement(), lambda: False):
        assert (order, gpu.requested_w, len(list(tmp_path.glob("*.json")))) == ([True, 400], 400, 1)
    assert order == [True, 400, 700.0, False]
    assert around.witness(0).facts["gpu0.power_limit_requested_w"] == "400"
    assert around.witness(0).facts["gpu0.power_limit_enforced_w"] == "400"
    assert not list(tmp_path.glob("*.json"))


def test_a_limit_that_cannot_be_set_is_not_the_configurations_fault(monkeypatch, tmp_path):
    monkeypatch.setenv("AUTOTUNE_RESTORE", str(tmp_path))
    gpu = FakeGpu()
    gpu.may_set = False
    around = Surroundings([gpu], POOL, NoTree(), set)
    with around.of(400, Measurement(), lambda: False):
        assert "NO_PERMISSION" in around.refusal.verdict.detail
    blind = Surroundings([], POOL, NoTree(), set)
    with blind.of(400, Measurement(), lambda: False):
        assert "cannot be reached" in blind.refusal.verdict.detail
    assert surroundings.Witness(0, facts={}) == blind.witness(0)
