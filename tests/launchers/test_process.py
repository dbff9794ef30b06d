"""Trials in a process tree: limits, first causes, logs, environments, and what a failed trial costs the next."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from launchers import process
from launchers.base import StepRecord
from launchers.outcome import Outcome
from launchers.process import LaunchRequest, Limits, Supervised, SupervisorLostError, node_environment, run_trial
from search_spaces.hardware import RankEnvironment

LIMITS = Limits(startup_s=10, step_s=5, trial_s=30)
SHORT = Limits(startup_s=0.5, step_s=0.5, trial_s=5)
ON_PATH = {"PYTHONPATH": str(Path(__file__).parent / "programs" / "on_path")}


def finish(tree, request, limits=LIMITS, on_event=lambda event: None):
    *steps, end = run_trial(tree, request, limits, on_event=on_event)
    assert all(isinstance(step, StepRecord) for step in steps)
    return steps, end


def is_running(pid):
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_steps_come_back_and_the_trial_completes(tree, request_of):
    steps, end = finish(tree, request_of("steps", {"steps": 4}, num_ranks=4))
    assert [step.iteration for step in steps] == [1, 2, 3, 4]
    assert end.outcome is Outcome.COMPLETED, end.detail
    assert end.exit_codes == dict.fromkeys(range(4), 0)
    assert end.survivors == ()


FAILURES = {
    "OOM": (
        "fail",
        {"0": [0, "oom", "CUDA out of memory. Tried to allocate 2.00 GiB."]},
        Outcome.OOM,
        "Tried to allocate 2.00 GiB",
    ),
    "host memory": ("fail", {"1": [0, "memory", ""]}, Outcome.OOM, "host memory"),
    "assertion": ("fail", {"0": [0, "assertion", "heads not divisible"]}, Outcome.CRASHED, "heads not divisible"),
    "exit code": ("fail", {"1": [0, "exit", "3"]}, Outcome.CRASHED, "exit code 3"),
    "segmentation fault": ("fail", {"1": [0, "signal", "SIGSEGV"]}, Outcome.CRASHED, "SIGSEGV"),
    "killed from outside": ("fail", {"1": [0, "signal", "SIGKILL"]}, Outcome.LOST, "SIGKILL"),
    "failed and cannot end": ("fail", {"1": [0, "stuck", "of this"]}, Outcome.CRASHED, "of this"),
    "exit with a text": ("exit_text", {}, Outcome.CRASHED, "bad number of heads"),
    "chained": ("fail", {"1": [0, "chained", "CUDA out of memory."]}, Outcome.OOM, "GPU memory"),
    "not a number": ("nan", {}, Outcome.NAN, "step 3"),
    "hang": ("hang", {}, Outcome.HUNG, "after step 2"),
    "no first step": ("hang", {"steps": 0}, Outcome.TIMEOUT, "no first step"),
    "no step at all": ("steps", {"steps": 0}, Outcome.CRASHED, "without having reported a step"),
    "no such program": ("no_such_program", {}, Outcome.CRASHED, "No such file"),
    "module without main": ("launchers.base", {}, Outcome.CRASHED, "has no attribute 'main'"),
}


@pytest.mark.parametrize("name", FAILURES)
def test_a_failure_is_told_and_costs_the_next_trial_no_preload(tree, request_of, name):
    program, job, outcome, detail = FAILURES[name]
    begin_s = time.monotonic()
    _, end = finish(tree, request_of(program, job), SHORT if outcome in (Outcome.HUNG, Outcome.TIMEOUT) else LIMITS)
    assert end.outcome is outcome, end
    assert detail in end.detail
    assert time.monotonic() - begin_s < 5
    warm_pid = tree.warm_pid
    _, end = finish(tree, request_of("steps"))
    assert end.outcome is Outcome.COMPLETED, end
    assert (tree.preloads, tree.supervisors_started, tree.warm_pid) == (1, 1, warm_pid)


def test_a_hang_says_where_each_rank_was(tree, request_of):
    request = request_of("hang", num_ranks=2)
    _, end = finish(tree, request, SHORT)
    assert "rank 0 at " in end.detail
    assert "rank 1 at " in end.detail
    assert "threading.py" in end.detail
    assert "in wait_for_ever" in (request.log_folder / "rank0.log").read_text()


def test_the_first_cause_wins_over_what_it_does_to_the_others(tree, request_of):
    job = {"0": [0, "runtime", "Connection closed by peer [127.0.0.1]:4242"], "1": [0.3, "oom", "CUDA out of memory."]}
    _, end = finish(tree, request_of("fail", job))
    assert (end.outcome, end.verdict.rank) == (Outcome.OOM, 1)


def test_ranks_that_wait_for_a_failed_one_are_ended_after_a_grace_period(tree, request_of):
    begin_s = time.monotonic()
    _, end = finish(tree, request_of("fail", {"0": [0, "assertion", "no"]}, num_ranks=4))
    assert end.outcome is Outcome.CRASHED
    assert end.killed == 3
    assert time.monotonic() - begin_s < 3


def test_C040_the_whole_trial_has_a_limit(tree, request_of):
    _, end = finish(tree, request_of("steps", {"steps": 1000}), Limits(startup_s=10, step_s=10, trial_s=0.5))
    assert end.outcome is Outcome.TIMEOUT
    assert "over 0.5 s" in end.detail


def test_a_node_without_the_reporting_rank_waits_for_no_steps(tree, request_of):
    _, end = finish(tree, request_of("hang", {"steps": 0}, world_size=4), Limits(startup_s=0.1, step_s=0.1, trial_s=1.0))
    assert end.outcome is Outcome.TIMEOUT
    assert "the trial took over" in end.detail
    _, end = finish(tree, request_of("steps", world_size=4))
    assert end.outcome is Outcome.COMPLETED


def test_a_slow_consumer_is_not_a_hang(tree, request_of):
    trial = run_trial(tree, request_of("steps", {"steps": 3}), Limits(startup_s=10, step_s=0.3, trial_s=30))
    items = []
    for item in trial:
        items.append(item)
        time.sleep(0.5)
    assert items[-1].outcome is Outcome.COMPLETED, items[-1]


def test_the_host_running_out_of_memory_is_told_from_the_gpu(tree, request_of, monkeypatch):
    kills = iter([7, 8])
    monkeypatch.setattr(process, "host_oom_kills", lambda: next(kills))
    _, end = finish(tree, request_of("fail", {"1": [0, "signal", "SIGKILL"]}))
    assert end.outcome is Outcome.OOM, end
    assert "not the GPU" in end.detail


def test_C032_a_process_that_cannot_be_ended_makes_its_node_broken(tree, request_of, monkeypatch):
    """In uninterruptible sleep, inside a driver or a dead network disk."""
    ending = tree.end_trial
    stuck = {"survivors": ["rank (pid 4711, state D)"]}
    monkeypatch.setattr(tree, "end_trial", lambda trial, limit_s: ending(trial, limit_s) | stuck)
    *_, end = finish(tree, request_of("steps"))
    assert end.broken == "rank (pid 4711, state D) cannot be ended"


def test_a_large_job_arrives_whole(tree, request_of):
    events = []
    _, end = finish(tree, request_of("steps", {"steps": 1, "pad": "x" * 3_000_000}), on_event=events.append)
    assert end.outcome is Outcome.COMPLETED
    assert [event["event"] for event in events if event["event"] != "rank_exit"] == ["launched", "step"]


def test_a_flood_of_events_and_output_loses_nothing(tree, request_of):
    numbers = {0: [], 1: []}
    request = request_of("noisy", {"events": 3000})
    note = lambda event: numbers[event["rank"]].append(event["number"]) if event["event"] == "note" else None  # noqa: E731
    steps, end = finish(tree, request, on_event=note)
    assert end.outcome is Outcome.COMPLETED, end
    assert len(steps) == 1
    assert numbers == dict.fromkeys((0, 1), list(range(3000)))
    assert (request.log_folder / "rank0.log").stat().st_size == 3000 * 201 + 14_000


def test_an_event_too_long_for_the_pipe_is_the_programs_error(open_tree, request_of):
    tree = open_tree(RankEnvironment(python=sys.executable, env=ON_PATH))
    _, end = finish(tree, request_of("report", {"emit_bytes": 4096}))
    assert end.outcome is Outcome.CRASHED
    assert "at most 4096 fit" in end.detail


def test_closing_early_ends_the_trial(tree, request_of):
    supervisor = psutil.Process(tree.poll(5)["supervisor_pid"])
    trial = run_trial(tree, request_of("hang"), LIMITS)
    next(trial)
    ranks = [process for process in supervisor.children(recursive=True) if process.pid != tree.warm_pid]
    assert ranks
    trial.close()
    assert not any(is_running(rank.pid) for rank in ranks)


def test_the_warm_process_keeps_to_one_thread(open_tree):
    tree = open_tree(preload=["numpy"])
    tree.poll(5)
    assert tree.poll(60)["threads"] == 1


def report_of(tree, request):
    events = []
    _, end = finish(tree, request, on_event=events.append)
    variables = {event["name"]: event["value"] for event in events if event["event"] == "variable"}
    return next(event for event in events if event["event"] == "report"), variables, end


def test_ranks_get_the_pools_environment_and_nothing_of_ours(open_tree, request_of, monkeypatch):
    for name in ("PYTHONPATH", "VIRTUAL_ENV", "RAY_JOB_ID", "LD_LIBRARY_PATH", "KEPT"):
        monkeypatch.setenv(name, "/of/the/agent")
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    tree = open_tree(RankEnvironment(python=sys.executable, env=ON_PATH | {"POOL": "a", "BOTH": "pool"}))
    report, variables, end = report_of(tree, request_of("report", num_ranks=1, env={"BOTH": "trial"}))
    assert end.outcome is Outcome.CRASHED, "it reports no step"
    assert report["mark"] == "found"
    assert not {"VIRTUAL_ENV", "RAY_JOB_ID", "LD_LIBRARY_PATH", "PYTHONDONTWRITEBYTECODE"} & set(variables)
    assert variables["PYTHONPATH"] == ON_PATH["PYTHONPATH"]
    assert (variables["KEPT"], variables["POOL"], variables["BOTH"]) == ("/of/the/agent", "a", "trial")
    assert (variables["RANK"], variables["WORLD_SIZE"], variables["MASTER_ADDR"]) == ("0", "1", "127.0.0.1")
    folder = Path(process.__file__).parent
    assert report["package"] == [str(folder)]
    of_itself = subprocess.run(
        [sys.executable, "-I", "-c", "import sys; print(*sys.path)"], capture_output=True, text=True, check=True
    )
    added = set(report["path"]) - set(of_itself.stdout.split())
    assert not {str(folder), str(folder.parent), "/of/the/agent"} & added


def test_ranks_run_in_the_pools_python(open_tree, request_of, tmp_path):
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "pool")], check=True)
    tree = open_tree(RankEnvironment(python=str(tmp_path / "pool" / "bin" / "python"), env=ON_PATH))
    report, _, _ = report_of(tree, request_of("report", num_ranks=1))
    assert report["prefix"] == str(tmp_path / "pool")


def test_the_nodes_environment_is_that_of_the_raylet_with_the_agents_gpus(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    monkeypatch.setenv("LD_LIBRARY_PATH", "/of/the/agent")
    env = {
        "LD_LIBRARY_PATH": "/of/the/node",
        "RAY_ADDRESS": "x",
        "PYTHONPATH": "y",
        "VIRTUAL_ENV": "z",
        "CUDA_VISIBLE_DEVICES": "0,3",
    }
    raylet = subprocess.Popen(["sleep", "60"], env=env)
    try:
        time.sleep(0.1)
        assert node_environment(raylet.pid) == {"LD_LIBRARY_PATH": "/of/the/node", "CUDA_VISIBLE_DEVICES": "3"}
    finally:
        raylet.kill()
        raylet.wait()
    assert "LD_LIBRARY_PATH" not in node_environment(None)


def script(path, text):
    path.write_text("#!/bin/sh\n" + text)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def test_setup_file_and_container_prefix(open_tree, request_of, tmp_path):
    (tmp_path / "setup.sh").write_text("echo setting up\nexport FROM_SETUP=yes\nread line || true\n")
    prefix = script(tmp_path / "container", 'echo "a banner" ; IN_CONTAINER=$1 ; export IN_CONTAINER ; shift ; "$@"\n')
    stop = ("touch", str(tmp_path / "stopped"))
    environment = RankEnvironment(
        python=sys.executable, setup=str(tmp_path / "setup.sh"), container=(prefix, "image"), container_stop=stop, env=ON_PATH
    )
    tree = open_tree(environment)
    _, variables, _ = report_of(tree, request_of("report", num_ranks=1))
    assert (variables["FROM_SETUP"], variables["IN_CONTAINER"]) == ("yes", "image")
    _, end = finish(tree, request_of("hang"), SHORT)
    assert end.outcome is Outcome.HUNG
    _, end = finish(tree, request_of("steps"))
    assert (end.outcome, tree.preloads) == (Outcome.COMPLETED, 1)
    assert not (tmp_path / "stopped").exists()
    assert tree.close()["container_stop"]["exit_code"] == 0
    assert (tmp_path / "stopped").exists()


def can_unshare():
    return subprocess.run(["unshare", "--pid", "--fork", "--mount-proc", "true"], check=False, capture_output=True).returncode == 0


@pytest.mark.skipif(not can_unshare(), reason="needs the right to open a pid namespace")
@pytest.mark.parametrize("victim", [None, "supervisor", "guardian"])
def test_ranks_in_a_pid_namespace(open_tree, request_of, victim):
    tree = open_tree(RankEnvironment(python=sys.executable, container=("unshare", "--pid", "--fork", "--mount-proc")))
    event = tree.poll(5)
    trial = run_trial(tree, request_of("escape"), LIMITS)
    next(trial)
    processes = psutil.Process(event["guardian_pid"]).children(recursive=True)
    if victim:
        os.kill(event[f"{victim}_pid"], signal.SIGKILL)
        *_, end = trial
        assert end.outcome is Outcome.LOST
        gone, alive = psutil.wait_procs(processes, timeout=10)
        assert not alive
        return
    trial.close()
    alive = [item for item in psutil.Process(event["guardian_pid"]).children(recursive=True) if is_running(item.pid)]
    assert len(alive) == 3, "supervisor, prefix and warm process"
    _, end = finish(tree, request_of("steps"))
    assert (end.outcome, tree.preloads) == (Outcome.COMPLETED, 1)


BAD_ENVIRONMENTS = {
    "no python": (RankEnvironment(python="/no/such/python"), (), "cannot execute /no/such/python"),
    "no container": (
        RankEnvironment(python=sys.executable, container=("/no/such/tool", "run")),
        (),
        "cannot execute /no/such/tool",
    ),
    "no setup file": (RankEnvironment(python=sys.executable, setup="/no/such/setup.sh"), (), "/no/such/setup.sh"),
    "failing setup file": (RankEnvironment(python=sys.executable, setup="{tmp}/setup.sh"), (), "ended with status 3"),
    "no python after setup": (RankEnvironment(python="/no/such/python", setup="{tmp}/good.sh"), (), "/no/such/python"),
    "preload fails": (RankEnvironment(python=sys.executable, env=ON_PATH), ("broken_import",), "this pool lacks something"),
}


@pytest.mark.parametrize("name", BAD_ENVIRONMENTS)
@pytest.mark.parametrize("wait_s", [0.0, 0.5])
def test_a_pool_that_cannot_start_python_is_lost_at_once(open_tree, request_of, tmp_path, name, wait_s):
    (tmp_path / "setup.sh").write_text("echo 'module not found' >&2; return 3\n")
    (tmp_path / "good.sh").write_text("true\n")
    environment, preload, detail = BAD_ENVIRONMENTS[name]
    setup = environment.setup.format(tmp=tmp_path) if environment.setup else None
    tree = open_tree(environment.model_copy(update={"setup": setup}), preload=preload)
    time.sleep(wait_s)
    for _ in range(2):
        begin_s = time.monotonic()
        _, end = finish(tree, request_of("steps"))
        assert end.outcome is Outcome.LOST
        assert detail in end.detail
        assert time.monotonic() - begin_s < 3
    assert tree.preloads == 0


def test_a_log_folder_that_cannot_be_written_is_lost(tree, request_of):
    request = request_of("steps")
    request.log_folder.mkdir(parents=True)
    (request.log_folder / "rank0.log").mkdir()
    _, end = finish(tree, request)
    assert end.outcome is Outcome.LOST
    assert "cannot open a rank's log" in end.detail


def test_a_stopped_warm_process_is_replaced(tree, request_of):
    trial = run_trial(tree, request_of("hang"), LIMITS)
    next(trial)
    os.kill(tree.warm_pid, signal.SIGSTOP)
    trial.close()
    _, end = finish(tree, request_of("steps"))
    assert (end.outcome, tree.preloads) == (Outcome.COMPLETED, 2)


def test_a_supervisor_that_does_not_answer_is_an_error(tree, request_of):
    supervisor_pid = tree.poll(5)["supervisor_pid"]
    os.kill(supervisor_pid, signal.SIGSTOP)
    try:
        with pytest.raises(SupervisorLostError, match="did not answer"):
            tree.end_trial("none", timeout_s=0.2)
    finally:
        os.kill(supervisor_pid, signal.SIGCONT)


def test_a_supervisor_that_does_not_answer_loses_the_trial_not_the_slot(tree, request_of, monkeypatch):
    monkeypatch.setattr(process, "_END_S", 0.3)
    supervisor_pid = tree.poll(5)["supervisor_pid"]
    rank_pids = {}
    trial = run_trial(tree, request_of("hang"), SHORT, on_event=lambda event: rank_pids.update(event.get("pids", {})))
    next(trial)
    os.kill(supervisor_pid, signal.SIGSTOP)
    *_, end = trial
    assert end.outcome is Outcome.LOST, end
    assert "did not answer" in end.detail
    assert not any(is_running(pid) for pid in rank_pids.values())
    _, end = finish(tree, request_of("steps"))
    assert (end.outcome, tree.supervisors_started) == (Outcome.COMPLETED, 2)


def test_a_supervisor_that_cannot_be_started_is_lost(request_of, monkeypatch):
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    _, end = finish(Supervised(RankEnvironment(python="python3")), request_of("steps"))
    assert end.outcome is Outcome.LOST
    assert "/no/such/python" in end.detail


def test_the_logs_of_the_ranks_are_apart(tree, request_of):
    request: LaunchRequest = request_of("fail", {"0": [0, "assertion", "of rank 0"], "1": [0, "assertion", "of rank 1"]})
    finish(tree, request)
    logs = [(request.log_folder / f"rank{rank}.log").read_text() for rank in (0, 1)]
    assert ["of rank 0" in logs[0], "of rank 1" in logs[0], "of rank 1" in logs[1]] == [True, False, True]
    assert all("Traceback" in log for log in logs)
