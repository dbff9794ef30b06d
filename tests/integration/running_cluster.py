"""A Ray cluster of several nodes on this machine for a test; see `ray_cluster.py`."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path

from tests.faults.harness import ROOT


class RunningCluster:
    """The cluster's process and its address."""

    def __init__(self, folder, nodes):
        self.environment = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": "of-the-test-cluster",
            "RAY_TMPDIR": str(folder),
            "FAULTS": str(folder),
        }
        command = [sys.executable, str(Path(__file__).with_name("ray_cluster.py")), *map(json.dumps, nodes)]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": (folder / "cluster.log").open("wb")}
        self.process = subprocess.Popen(command, env=self.environment, text=True, start_new_session=True, **pipes)
        self.address = self.process.stdout.readline().strip()
        assert self.address, (folder / "cluster.log").read_text()

    def ask(self, line):
        """Number of living nodes after that command."""
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        return int(next(line for line in self.process.stdout if line.strip().isdigit()))  # Ray warns there, too

    def close(self):
        self.process.stdin.close()
        try:
            self.process.wait(30)
        finally:
            if self.process.poll() is None:
                os.killpg(self.process.pid, signal.SIGKILL)


@contextmanager
def running_cluster(nodes):
    """The cluster, and nothing of it afterwards."""
    folder = Path(tempfile.mkdtemp(prefix="rc", dir="/tmp"))  # Unix sockets have 107 characters
    try:
        running = RunningCluster(folder, nodes)
        try:
            yield running
        finally:
            running.close()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
