"""A study in processes of its own: `autotune tune` on fake ranks, and what a test needs to hurt it and to look at it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import yaml

from autotune.results import read_results
from autotune.state_folder import StateFolder
from launchers.process_tree import descendants, is_alive, read_process
from tests.faults.launchers import ON_PATH

ROOT = Path(__file__).resolve().parents[2]
START_S = 90.0
_PRELOADS_CHILD = b"sleep\x004242\x00"

STUDY = {
    "name": "faults",
    "model": {"num_layers": 4, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 128},
    "pools": [{"name": "fake", "gpu": "cpu", "gpus_per_node": 2}],
    "global_batch_size": 64,
    "seq_length": 32,
    "launcher": "tests.faults.launchers:FaultLauncher",
    "baseline": {"precision": "fp32"},
    "search": {
        "micro_batch_size": [1, 2, 4, 8, 16, 32],
        "recompute": ["none", "selective", "full"],
        "use_distributed_optimizer": [False, True],
        "tensor_model_parallel_size": [1, 2],
    },
    "budget": {"trials": 60, "confidence": None},
    "confirm": {"top": 0},
    "measurement": {
        "steps": 5,
        "warmup_steps": 0,
        "foreign_cpu_fraction": 1.0,  # the machine that runs the tests may be busy
        "interval": 0,  # ranks that step for ever are to be killed, not measured
        "startup_timeout_s": 60,
        "step_timeout_s": 20,
        "trial_timeout_s": 600,
    },
    "sampler": "grid",
}


def until(condition, limit_s, what):
    """Wait until `condition()` is true, and return it."""
    deadline_s = time.monotonic() + limit_s
    while not (found := condition()):
        assert time.monotonic() < deadline_s, f"not within {limit_s:g} s: {what() if callable(what) else what}"
        time.sleep(0.02)
    return found


def command_of(pid):
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


class FaultStudy:
    """One study folder, and the driver that is running on it."""

    def __init__(self, folder, **changes):
        self.folder = folder
        self.control = folder / "control"
        self.control.mkdir(parents=True)
        self.file = folder / "study.yaml"
        self.log = folder / "driver.log"
        self.driver = None
        self.environment = {**os.environ, "PYTHONPATH": str(ROOT), "FAULTS": str(self.control)}
        study = STUDY | changes
        ranks = {"env": {"FAULTS": str(self.control), "PYTHONPATH": str(ON_PATH)}}
        study["pools"] = [{"environment": ranks, **pool} for pool in study["pools"]]
        self.file.write_text(yaml.safe_dump(study))
        self.state = StateFolder(folder / "state" / study["name"])

    def plan(self, *behaviours):
        """What the next trials do; the last one stays."""
        for name in ("mid_trial", "preloading"):
            (self.control / name).unlink(missing_ok=True)
        partial = self.control / "plan.partial"
        partial.write_text("\n".join(behaviours))
        partial.replace(self.control / "plan")

    def command(self, verb, *options):
        what = [str(self.file)] if verb == "tune" else [str(self.state.path)]
        return [sys.executable, "-m", "autotune.cli", verb, *what, "--state", str(self.folder / "state"), *options]

    def start(self, verb="tune", *options, wrapper=(), **popen):
        """Start a driver in a session of its own."""
        popen = {"start_new_session": True, "stdin": subprocess.DEVNULL, **popen}
        with self.log.open("ab") as log:
            streams = {"stdout": log, "stderr": log} if "stdout" not in popen else {}
            command = [*wrapper, *self.command(verb, *options)]
            self.driver = subprocess.Popen(command, cwd=ROOT, env=self.environment, **streams, **popen)
        return self.driver

    def run(self, verb, *options, timeout_s=START_S):
        """A whole command; its output."""
        command = self.command(verb, *options)
        return subprocess.run(
            command, cwd=ROOT, env=self.environment, capture_output=True, text=True, timeout=timeout_s, check=False
        )

    def wait(self, limit_s=START_S):
        """The driver's exit code."""
        try:
            return self.driver.wait(limit_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the driver did not end within {limit_s:g} s:\n{self.tail()}") from None

    def await_file(self, name, limit_s=START_S):
        """Wait for something that ranks or the warm process touch."""

        def seen():
            assert self.driver.poll() is None, f"the driver ended with {self.driver.poll()}:\n{self.tail()}"
            return (self.control / name).exists()

        until(seen, limit_s, lambda: f"{name}\n{self.tail()}")

    def tail(self):
        return self.log.read_text()[-3000:]

    def results(self):
        return read_results(self.state.read_spec(), self.state)

    def records(self):
        """Of the first pool, in order."""
        return list(self.results()[0].records)

    def members(self):
        """Every living process of this study, whoever its parent is: all inherit one variable."""
        entry = f"FAULTS={self.control}".encode()
        found = []
        for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
            try:
                carries = entry in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            except OSError:
                continue
            if carries and (process := read_process(pid)) and is_alive(process.key):
                found.append(process)
        return found

    def pid_of(self, role):
        """The process number of the driver, agent, Tune worker, raylet, guardian, supervisor, warm process or of one rank."""
        if role == "driver":
            return self.driver.pid
        members = {process.pid: process for process in self.members()}
        if role in ("agent", "tune_worker", "raylet"):
            sign = {"agent": b"ray::NodeAgent", "tune_worker": b"ray::ResourceTrainable", "raylet": b"/raylet/raylet\0"}[role]
            return next(pid for pid in members if sign in command_of(pid))
        supervisor = next(pid for pid, process in members.items() if self._supervises(pid) and self._supervises(process.parent))
        if role in ("supervisor", "guardian"):
            return supervisor if role == "supervisor" else members[supervisor].parent
        warm = next(pid for pid, process in members.items() if process.parent == supervisor)
        if role == "warm":
            return warm
        return next(pid for pid, process in members.items() if process.parent == warm and b"warm" in command_of(pid))

    @staticmethod
    def _supervises(pid):
        return command_of(pid).endswith(b"entry.py\0supervise\0")

    def trial_processes(self):
        """Ranks and all that they started, however they hide."""
        below = descendants(self.pid_of("warm"))
        return [process for process in below if command_of(process.pid) != _PRELOADS_CHILD]

    def close(self):
        """End whatever is left, by process number."""
        if self.driver is not None and self.driver.poll() is None:
            self.driver.kill()
            self.driver.wait()
        deadline_s = time.monotonic() + 10.0
        while (left := self.members()) and time.monotonic() < deadline_s:
            for process in left:
                if is_alive(process.key):
                    os.kill(process.pid, signal.SIGKILL)
            time.sleep(0.1)


def await_gone(processes, limit_s=10.0):
    """Wait for the end of these very processes; how long that took."""
    begin_s = time.monotonic()
    alive = lambda: [process for process in processes if is_alive(process.key)]  # noqa: E731
    until(lambda: not alive(), limit_s, lambda: f"the end of {[(p.pid, command_of(p.pid)) for p in alive()]}")
    return time.monotonic() - begin_s
