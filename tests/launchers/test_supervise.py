"""Whatever is killed, and whenever, nothing that a trial started outlives it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import psutil
import pytest

from launchers.outcome import Outcome
from launchers.process import Limits, run_trial
from launchers.process_tree import Process, descendants, end_descendants, is_alive, read_process
from search_spaces.hardware import RankEnvironment

PROGRAMS = Path(__file__).parent / "programs"
ON_PATH = {"PYTHONPATH": str(PROGRAMS / "on_path")}
LIMITS = Limits(startup_s=20, step_s=20, trial_s=60)
ESCAPING_PROCESSES = 8  # two ranks, and each with a shell, its sleep, and a daemon
GONE_S = 10.0


def wait_until(condition, limit_s=GONE_S, what="condition"):
    deadline_s = time.monotonic() + limit_s
    while not (value := condition()):
        assert time.monotonic() < deadline_s, f"{what} not within {limit_s} s"
        time.sleep(0.02)
    return value


def alive(processes):
    return [process for process in processes if is_running(process)]


def is_running(process):
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def marked(mark):
    """The warm process and all that comes from it, wherever it hangs in the process tree: the mark is in its environment."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get("TEST_MARK") == mark:
                found.append(process)
    return alive(found)


@pytest.fixture
def mark():
    return uuid.uuid4().hex


def assert_gone(processes):
    assert processes
    wait_until(lambda: not alive(processes), what=f"end of {processes}")


@pytest.fixture
def fake_raylet():
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
    yield process
    process.kill()
    process.wait()


@pytest.fixture
def exit_mark(tmp_path):
    """A command that notes which processes named in `watched` were alive when it ran."""
    script = tmp_path / "exit.py"
    script.write_text(
        "import os, sys\n"
        "pids = open(sys.argv[1]).read().split() if os.path.exists(sys.argv[1]) else []\n"
        "def state(pid):\n"
        "    return open(f'/proc/{pid}/stat').read().rpartition(')')[2].split()[0]\n"
        "left = [pid for pid in pids if os.path.exists(f'/proc/{pid}') and state(pid) not in 'ZX']\n"
        "print(*left, file=open(sys.argv[2], 'a'))\n"
    )
    return [sys.executable, str(script), str(tmp_path / "watched"), str(tmp_path / "exit_ran")]


def started_tree(open_tree, mark="", exit_mark=(), **options):
    tree = open_tree(RankEnvironment(python=sys.executable, env=ON_PATH | {"TEST_MARK": mark}), **options)
    tree.set_exit_command(exit_mark)
    event = tree.poll(10)
    assert event["event"] == "supervisor"
    return tree, event


def keepers(event):
    return [psutil.Process(event["guardian_pid"]), psutil.Process(event["supervisor_pid"])]


def victim_pid(victim, event, fake_raylet):
    return fake_raylet.pid if victim == "raylet" else event[f"{victim}_pid"]


@pytest.mark.parametrize("victim", ["guardian", "supervisor", "raylet"])
def test_all_ends_with_a_keeper_in_mid_trial(open_tree, request_of, fake_raylet, exit_mark, mark, tmp_path, victim):
    tree, event = started_tree(open_tree, mark, exit_mark, raylet_pid=fake_raylet.pid)
    steps = run_trial(tree, request_of("escape"), LIMITS)
    next(steps)
    processes = marked(mark)
    assert len(processes) == ESCAPING_PROCESSES + 1
    (tmp_path / "watched").write_text(" ".join(str(process.pid) for process in processes))
    of_tree = keepers(event)
    os.kill(victim_pid(victim, event, fake_raylet), signal.SIGKILL)
    *_, end = steps
    assert end.outcome is Outcome.LOST, end
    assert_gone(processes + of_tree)
    assert (tmp_path / "exit_ran").read_text().splitlines() == [""], "exit command: once, after the last descendant"
    assert not tree.alive


@pytest.mark.parametrize("victim", ["guardian", "supervisor", "raylet", "warm"])
def test_all_ends_with_a_keeper_while_preloading(open_tree, fake_raylet, exit_mark, mark, victim):
    tree, event = started_tree(open_tree, mark, exit_mark, raylet_pid=fake_raylet.pid, preload=["slow_import"])
    wait_until(lambda: any(process.name() == "sleep" for process in marked(mark)))
    warm, *rest = marked(mark)
    assert len(rest) == 1
    of_tree = [] if victim == "warm" else keepers(event)
    os.kill(warm.pid if victim == "warm" else victim_pid(victim, event, fake_raylet), signal.SIGKILL)
    assert_gone([warm, *rest, *of_tree])
    last = tree.poll(5)
    assert last["event"] == ("warm_exit" if victim == "warm" else "supervisor_exit")
    assert tree.alive == (victim == "warm")


@pytest.mark.parametrize("phase", ["trial", "preload"])
def test_all_ends_with_the_agent(exit_mark, mark, tmp_path, phase):
    preload = ["slow_import"] if phase == "preload" else []
    options = {"python": sys.executable, "preload": preload, "env": ON_PATH | {"TEST_MARK": mark}}
    options |= {"program": str(PROGRAMS / "escape.py"), "log_folder": str(tmp_path), "exit_command": exit_mark}
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    agent = subprocess.Popen([sys.executable, str(PROGRAMS / "agent.py"), json.dumps(options)], env=env, stdout=subprocess.PIPE)
    of_tree = keepers(json.loads(agent.stdout.readline()))
    if phase == "trial":
        agent.stdout.readline()
    else:
        wait_until(lambda: any(process.name() == "sleep" for process in marked(mark)))
    processes = marked(mark)
    assert len(processes) == (ESCAPING_PROCESSES + 1 if phase == "trial" else 2)
    agent.kill()
    agent.wait()
    assert_gone(processes + of_tree)
    assert (tmp_path / "exit_ran").exists()


@pytest.mark.parametrize("victim", ["warm", "rank"])
def test_trial_ends_but_the_tree_stays(open_tree, request_of, mark, victim):
    tree, _ = started_tree(open_tree, mark)
    pids = {}
    steps = run_trial(tree, request_of("escape"), LIMITS, on_event=lambda event: pids.update(event.get("pids", {})))
    next(steps)
    next(steps)
    warm_pid = tree.warm_pid
    of_trial = [process for process in marked(mark) if process.pid != warm_pid]
    assert len(of_trial) == ESCAPING_PROCESSES
    os.kill(warm_pid if victim == "warm" else pids["1"], signal.SIGKILL)
    *_, end = steps
    assert end.outcome is Outcome.LOST, end
    assert not alive(of_trial), "gone by the time that the trial's end is told"
    *_, end = run_trial(tree, request_of("steps"), LIMITS)
    assert end.outcome is Outcome.COMPLETED, end
    assert (tree.preloads, tree.supervisors_started) == ((2, 1) if victim == "warm" else (1, 1))
    assert (tree.warm_pid == warm_pid) == (victim == "rank")


def test_the_end_of_a_trial_ends_its_escaped_processes_only(open_tree, request_of, mark):
    tree, _ = started_tree(open_tree, mark)
    steps = run_trial(tree, request_of("escape"), LIMITS)
    next(steps)
    assert len(marked(mark)) == ESCAPING_PROCESSES + 1
    steps.close()
    assert [process.pid for process in marked(mark)] == [tree.warm_pid]


def test_what_a_completed_trial_leaves_behind_ends_with_it(open_tree, request_of, mark):
    tree, _ = started_tree(open_tree, mark)
    *_, end = run_trial(tree, request_of("escape", {"steps": 2}), LIMITS)
    assert (end.outcome, end.killed) == (Outcome.COMPLETED, ESCAPING_PROCESSES - 2)
    assert [process.pid for process in marked(mark)] == [tree.warm_pid]


def test_both_keepers_killed_at_once_leaves_no_rank(open_tree, request_of, mark):
    tree, event = started_tree(open_tree, mark)
    steps = run_trial(tree, request_of("hang"), LIMITS)
    next(steps)
    processes = marked(mark)
    for pid in (event["guardian_pid"], event["supervisor_pid"]):
        os.kill(pid, signal.SIGKILL)
    *_, end = steps
    assert end.outcome is Outcome.LOST
    assert_gone(processes)


def test_close_ends_all_and_runs_the_exit_command(open_tree, request_of, exit_mark, mark, tmp_path):
    tree, _ = started_tree(open_tree, mark, exit_mark)
    steps = run_trial(tree, request_of("escape"), LIMITS)
    next(steps)
    report = tree.close()
    assert report["exit_command"]["exit_code"] == 0
    assert not marked(mark)
    assert (tmp_path / "exit_ran").read_text() == "\n"
    *_, end = steps
    assert end.outcome is Outcome.LOST


def test_exit_command_has_a_time_limit(open_tree):
    tree, _ = started_tree(open_tree)
    tree.set_exit_command(["sleep", "300"], timeout_s=0.3)
    begin_s = time.monotonic()
    assert tree.close()["exit_command"]["timed_out"] is True
    assert time.monotonic() - begin_s < 5


def test_a_tree_starts_again_after_its_end(open_tree, request_of):
    tree, event = started_tree(open_tree)
    os.kill(event["supervisor_pid"], signal.SIGKILL)
    wait_until(lambda: (tree.poll(0.1) or {}).get("event") == "supervisor_exit")
    *_, end = run_trial(tree, request_of("steps"), LIMITS)
    assert end.outcome is Outcome.COMPLETED, end
    assert tree.supervisors_started == 2


def test_a_process_that_cannot_be_killed_is_reported(monkeypatch):
    stuck = Process(pid=4711, start_ticks=1, parent=1, state="D", num_threads=1, name="rank")
    monkeypatch.setattr("launchers.process_tree.descendants", lambda _root: [stuck])
    monkeypatch.setattr("launchers.process_tree.kill_exactly", lambda _process: True)
    ended = end_descendants(1, limit_s=0.05, reap=lambda: None)
    assert ended.survivors == ("rank (pid 4711, state D)",)


def test_a_process_whose_main_thread_alone_has_ended_is_not_dead():
    """Its leader looks like a zombie, but waits for threads that may hold a GPU, and cannot be collected yet."""
    sleeper = "import ctypes, threading, time; threading.Thread(target=time.sleep, args=(60,)).start()"
    others = {process.key for process in descendants(os.getpid())}
    child = subprocess.Popen([sys.executable, "-c", f"{sleeper}; ctypes.CDLL(None).pthread_exit(None)"])
    process = wait_until(lambda: (found := read_process(child.pid)) and found.state == "Z" and found, what="end of the main thread")
    assert is_alive(process.key)
    ended = end_descendants(os.getpid(), keep=others, limit_s=5, reap=child.poll)
    assert (ended.killed, ended.survivors, child.poll()) == (1, (), -signal.SIGKILL)


def test_the_dead_are_collected_after_the_last_look(monkeypatch):
    """One that died between a collection and the look that found nobody would else be met, and reported, in the next trial."""
    done = []
    monkeypatch.setattr("launchers.process_tree.descendants", lambda _root: done.append("look") or [])
    end_descendants(1, limit_s=1.0, reap=lambda: done.append("collect"))
    assert done[-1] == "collect"


def test_a_process_is_known_by_its_start_time_too():
    process = read_process(os.getpid())
    assert is_alive(process.key)
    assert not is_alive((process.pid, process.start_ticks - 1))
    assert read_process(2**22 + 1) is None
