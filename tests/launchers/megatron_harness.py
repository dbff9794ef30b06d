"""One warm process for many trials: torch and megatron are imported once, each rank of a trial is a fork of that process."""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from launchers.base import RankContext, Rendezvous
from launchers.megatron_core.launcher import MegatronCoreLauncher
from search_spaces.config import TrialConfig
from search_spaces.model import Workload

ROOT = Path(__file__).resolve().parents[2]
TRIAL_LIMIT_S = 30


@dataclass(frozen=True)
class Run:
    """What one trial gave back."""

    steps: list[dict[str, Any]]
    errors: list[str]
    start_s: float
    wall_s: float

    @property
    def losses(self) -> list[float]:
        assert not self.errors, self.errors[0]
        assert self.steps, f"no step within {TRIAL_LIMIT_S} s"
        return [step["loss"] for step in self.steps]


class WarmTrials:
    """Handle of the warm process, in the test's process. One-rank runs, the references, are kept."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self._references: dict[str, Run] = {}

    def reference(self, workload: Workload, config: TrialConfig, *, steps: int, seed: int) -> Run:
        """The same workload in the same precision on one rank, without any parallelism."""
        alone = workload.model_copy(update={"world_size": 1})
        job = MegatronCoreLauncher().job(alone, TrialConfig(precision=config.precision), steps=steps, seed=seed)
        key = json.dumps(job)
        if key not in self._references:
            self._references[key] = self.run(job)
        return self._references[key]

    def run(self, job: dict[str, Any]) -> Run:
        assert self._process.stdin and self._process.stdout
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        return Run(**json.loads(self._process.stdout.readline()))


@contextlib.contextmanager
def warm_trials() -> Iterator[WarmTrials]:
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"}
    argv = [sys.executable, "-m", "tests.launchers.megatron_harness"]
    with subprocess.Popen(argv, cwd=ROOT, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield WarmTrials(process)
        finally:
            assert process.stdin
            process.stdin.close()


def _serve() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for module in MegatronCoreLauncher.preload:
        import_module(module)
    for line in sys.stdin:
        answers.write(json.dumps(_run(json.loads(line))) + "\n")
        answers.flush()


def _run(job: dict[str, Any]) -> dict[str, Any]:
    rendezvous = Rendezvous("127.0.0.1", _free_port(), job["world_size"], 0, job["world_size"])
    read, write = os.pipe()
    started_s = time.time()
    children = [_fork(job, rank, rendezvous, write) for rank in range(job["world_size"])]
    os.close(write)
    events = _events(read, children)
    for child in children:
        os.waitpid(child, 0)
    steps = [event for event in events if event["event"] == "step"]
    return {
        "steps": steps,
        "errors": [event["error"] for event in events if event["event"] == "error"],
        "start_s": steps[0]["time_s"] - steps[0]["step_s"] - started_s if steps else 0.0,
        "wall_s": time.time() - started_s,
    }


def _fork(job: dict[str, Any], rank: int, rendezvous: Rendezvous, write: int) -> int:
    child = os.fork()
    if child:
        return child

    def emit(event: dict[str, Any]) -> None:
        os.write(write, (json.dumps(event) + "\n").encode())

    faulthandler.dump_traceback_later(TRIAL_LIMIT_S - 1)
    signal.alarm(TRIAL_LIMIT_S)
    try:
        import_module("launchers.megatron_core.trial").main(job, RankContext(rank, rank, rendezvous, emit))
    except BaseException:
        emit({"event": "error", "error": f"rank {rank}: {traceback.format_exc()[-3000:]}"})
        os._exit(1)
    os._exit(0)


def _events(read: int, children: list[int]) -> list[dict[str, Any]]:
    """Events until all ranks have closed the pipe; one rank's error ends the others, which would wait for it."""
    events: list[dict[str, Any]] = []
    with os.fdopen(read) as stream:
        for line in stream:
            events.append(json.loads(line))
            if events[-1]["event"] == "error":
                for child in children:
                    os.kill(child, signal.SIGKILL)
                break
    return events


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


if __name__ == "__main__":
    _serve()
