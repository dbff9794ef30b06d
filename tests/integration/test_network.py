"""A study needs no network, opens no connection to the outside, and listens on loopback only."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest

from launchers.outcome import Outcome
from tests.faults.harness import START_S, FaultStudy, command_of, until

CPU_STUDY = {
    "launcher": "megatron_core",
    "pools": [{"name": "fake", "gpu": "cpu", "gpus_per_node": 2}],
    "global_batch_size": 8,
    "budget": {"trials": 2},
    "measurement": {
        "steps": 40,
        "warmup_steps": 1,
        "foreign_cpu_fraction": 1.0,  # the machine that runs the tests may be busy
        "interval": 0,
        "startup_timeout_s": 150,
        "step_timeout_s": 60,
        "trial_timeout_s": 300,
    },
}
LOOPBACK = ("127.", "::1", "::ffff:127.")
# Brings up loopback, the only interface of a new network namespace, without any tool for it.
UP = """
import fcntl, os, socket, struct, sys
with socket.socket() as probe:
    fcntl.ioctl(probe, 0x8914, struct.pack("16sh14x", b"lo", 1))
assert [name for _, name in socket.if_nameindex() if name != "lo" and open(f"/sys/class/net/{name}/operstate").read() == "up"] == []
os.execvp(sys.argv[1], sys.argv[1:])
"""


@pytest.fixture
def real_study(tmp_path):
    study = FaultStudy(tmp_path / "study", **CPU_STUDY)
    yield study
    study.close()


@pytest.fixture
def short_folder():
    """Unix sockets have at most 107 characters."""
    folder = Path(tempfile.mkdtemp(prefix="f", dir="/tmp"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


def sockets(process):
    """(kind, local address, remote address) of a process's sockets."""
    try:
        return [
            (connection.status, connection.laddr.ip if connection.laddr else "", connection.raddr.ip if connection.raddr else "")
            for connection in psutil.Process(process.pid).net_connections("inet")
        ]
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return []


@pytest.mark.acceptance
@pytest.mark.timeout(400)
def test_a_study_talks_to_nobody_and_listens_on_loopback_only(real_study):
    study = real_study
    study.start()
    seen, commands, looks = {}, set(), 0
    while study.driver.poll() is None:
        for process in study.members():
            commands.add(command_of(process.pid))
            for found in sockets(process):
                seen.setdefault(found, command_of(process.pid)[:120])
        looks += 1
        time.sleep(0.1)
    assert study.wait(1) == 0, study.tail()
    assert [record.outcome for record in study.records()] == [Outcome.COMPLETED] * 2
    assert looks > 20
    for name in (b"gcs_server", b"raylet", b"ray::NodeAgent", b"entry.py\0warm", b"autotune.cli"):
        assert any(name in command for command in commands), name
    assert any(status == psutil.CONN_LISTEN for status, _, _ in seen)
    outside = {key: who for key, who in seen.items() if not all(ip.startswith(LOOPBACK) for ip in key[1:] if ip)}
    assert outside == {}


@pytest.mark.acceptance
@pytest.mark.timeout(400)
@pytest.mark.skipif(shutil.which("unshare") is None or os.geteuid() != 0, reason="only root may make a network namespace")
def test_a_study_works_with_no_network_at_all(real_study):
    if subprocess.run(["unshare", "-n", "true"], check=False).returncode:
        pytest.skip("this machine allows no network namespaces")
    real_study.start(wrapper=("unshare", "-n", sys.executable, "-c", UP))
    assert real_study.wait(300) == 0, real_study.tail()
    assert [record.outcome for record in real_study.records()] == [Outcome.COMPLETED] * 2


@pytest.mark.acceptance
def test_a_private_ray_joins_nobody_asks_for_a_token_and_leaves_no_folder(tmp_path, short_folder):
    """RAY_ADDRESS names a cluster that does not exist: whoever tried to join it would fail."""
    study = FaultStudy(tmp_path / "study", budget={"trials": 2})
    study.environment |= {"RAY_ADDRESS": "127.0.0.1:1", "TMPDIR": str(short_folder)}
    study.plan("complete", "escape")
    try:
        study.start()
        study.await_file("mid_trial")
        (folder,) = short_folder.glob("autotune-*")
        assert not [path for path in Path("/tmp/ray").glob("*") if path.stat().st_mtime > study.file.stat().st_mtime]
        check_strangers_are_refused(study)
        store = int(option_of(study.pid_of("raylet"), "object_store_memory"))
        assert store == 200 * 1024 * 1024
        assert not any(
            b"dashboard" in command_of(p.pid) and b"--include-dash=true" in command_of(p.pid).lower() for p in study.members()
        )
        study.driver.terminate()
        assert study.wait() == 130
        until(lambda: not folder.exists(), 10, folder)
        assert not list(short_folder.glob("autotune-*"))
    finally:
        study.close()


@pytest.mark.acceptance
def test_a_long_temporary_folder_is_not_used(tmp_path):
    """Batch systems set TMPDIR to long paths, in which Ray's sockets have no room."""
    study = FaultStudy(tmp_path / "study", budget={"trials": 1})
    study.environment["TMPDIR"] = str(tmp_path / "of-a-batch-system" / ("job" * 20))
    Path(study.environment["TMPDIR"]).mkdir(parents=True)
    study.plan("complete")
    try:
        ended = study.run("tune")
        assert ended.returncode == 0, ended.stdout + ended.stderr
    finally:
        study.close()


def option_of(pid, name):
    words = command_of(pid).decode().split("\0")
    return next(word.partition("=")[2] for word in words if word.startswith(f"--{name}="))


def check_strangers_are_refused(study):
    """A process without the token cannot join, one with it can: so it is the token that counts."""
    gcs = option_of(study.pid_of("raylet"), "gcs-address")
    raylet = Path(f"/proc/{study.pid_of('raylet')}/environ").read_bytes().split(b"\0")
    token = next(entry for entry in raylet if entry.startswith(b"RAY_AUTH_TOKEN=")).decode().partition("=")[2]
    code = f"from ray._raylet import GcsClient; print('joined', len(GcsClient(address={gcs!r}).get_all_node_info(timeout=10)))"
    for secret, joined in ((token, True), ("0" * 64, False)):
        environment = {**study.environment, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secret}
        tried = subprocess.run(
            [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=START_S, check=False
        )
        assert ("joined 1" in tried.stdout) == joined, tried.stdout + tried.stderr
        assert ("Unauthenticated" in tried.stderr) != joined, tried.stdout + tried.stderr
