"""A study has one driver: the second is refused before it changes anything, one that died does not stop the next."""

import json
import os
import re
import signal
import subprocess
import sys
import time

import optuna
import pytest
from optuna.trial import TrialState
from typer.testing import CliRunner

from autotune import one_driver
from autotune.cli import app
from autotune.errors import SpecError
from autotune.one_driver import Driver, only_driver, running_driver
from autotune.state_folder import StateFolder
from autotune.storage import open_storage
from autotune.study import driving
from launchers.outcome import Outcome

from .study_cases import completed, open_pool, study_spec

NAME = "case/laptop/1x4"
EVERY_S, DEAD_S, LIMIT_S = 0.2, 1.5, 60.0
URLS = {"journal": "journal://{folder}/own.log", "sqlite": "sqlite:///{folder}/own.db"}
if postgres := os.environ.get("AUTOTUNE_TEST_POSTGRES"):
    URLS["postgresql"] = postgres

# Forks a driver for every line that it reads: it tells its number, then "held", lives until it is killed, and says "lost" where
# another one has taken over. Its end is told, too.
DRIVERS = f"""
import json, os, signal, sys
from pathlib import Path
from autotune import one_driver
from autotune.storage import open_storage
one_driver.SEEN_EVERY_S, one_driver.DEAD_AFTER_S, one_driver._LOOK_S = {EVERY_S}, {DEAD_S}, 0.05
say = lambda what: print(what, flush=True)

def drive(url, name, machine):
    one_driver._machine = lambda: machine
    say(os.getpid())
    with one_driver.only_driver(open_storage(url, Path("/nowhere")), [name], lambda why: say("lost: " + why)):
        say("held")
        while True:
            signal.pause()

for line in sys.stdin:
    driver = os.fork()
    if driver == 0:
        drive(*json.loads(line))
    os.waitpid(driver, 0)
    say("ended")
"""

# Drivers that start at the same moment, on machines of their own: a line for each that goes on, or is refused.
RACE = f"""
import os, sys
from pathlib import Path
from autotune import one_driver
from autotune.errors import SpecError
from autotune.storage import open_storage
url, name, count, apart = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4] == "apart"
one_driver.SEEN_EVERY_S, one_driver.DEAD_AFTER_S, one_driver._LOOK_S = {EVERY_S}, 20.0, 0.02
start, go = os.pipe()
tell, told = os.pipe()
children = []
for number in range(count):
    children.append(os.fork())
    if children[-1] == 0:
        os.close(go)
        one_driver._machine = lambda: str(number * apart)
        os.read(start, 1)
        try:
            with one_driver.only_driver(open_storage(url, Path("/nowhere")), [name], lambda why: os.write(told, b"lost\\n")):
                os.write(told, b"held\\n")
                sys.stdin.read()
        except SpecError:
            os.write(told, b"refused\\n")
        except BaseException as error:
            os.write(told, repr(error).encode() + b"\\n")
        os._exit(0)
os.close(go)
os.close(told)
heard = os.fdopen(tell)
for _ in range(count):
    print(heard.readline(), end="", flush=True)
sys.stdin.read()
for child in children:
    os.waitpid(child, 0)
print(heard.read(), end="")
"""


@pytest.fixture(params=URLS)
def url(request, tmp_path):
    return URLS[request.param].format(folder=tmp_path)


@pytest.fixture
def name():
    return f"case-{os.getpid()}-{time.time_ns()}/laptop/1x4"


class Forked:
    """A driver in a process of its own, on this machine or on another one."""

    def __init__(self, drivers, url, name, machine):
        self._drivers, self._ended = drivers, False
        print(json.dumps([url, name, machine]), file=drivers.stdin, flush=True)
        self.pid = int(self.says())
        assert self.says() == "held\n"

    def says(self):
        return self._drivers.stdout.readline()

    def kill(self):
        """Kill it and see its end."""
        if not self._ended:
            os.kill(self.pid, signal.SIGKILL)
            self._ended = "ended\n" in iter(self.says, "")


@pytest.fixture(scope="module")
def drivers():
    """What forks drivers, one at a time: only once are imports waited for."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", DRIVERS], **pipes) as running:
        yield running


@pytest.fixture
def start(drivers):
    """Start a driver; it ends with the test."""
    started = []

    def begin(url, name, machine=""):
        started.append(Forked(drivers, url, name, machine or one_driver._machine()))
        return started[-1]

    yield begin
    for driver in started:
        driver.kill()


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(one_driver, "SEEN_EVERY_S", EVERY_S)
    monkeypatch.setattr(one_driver, "DEAD_AFTER_S", DEAD_S)
    monkeypatch.setattr(one_driver, "_LOOK_S", 0.05)


def no_waiting(_seconds):
    raise AssertionError("this can be known at once")


def drive(url, name, tmp_path):
    return only_driver(open_storage(url, tmp_path), [name], pytest.fail)


def states(url, name, tmp_path):
    """Of the drivers so far."""
    study = optuna.load_study(study_name=f"{name}/drivers", storage=open_storage(url, tmp_path))
    return [trial.state for trial in study.get_trials()]


def test_a_second_driver_is_refused_and_the_first_is_named(url, name, tmp_path, start, monkeypatch):
    first = start(url, name)
    monkeypatch.setattr(one_driver.time, "sleep", no_waiting)
    with pytest.raises(SpecError) as caught, drive(url, name, tmp_path):
        pass
    host = re.escape(os.uname().nodename)
    expected = rf"study: another driver runs it \(host {host}, pid {first.pid}, seen \d+ s ago\) \(got '{name}'\)"
    assert re.fullmatch(expected, str(caught.value))
    assert f"`kill -INT {first.pid}` on" in caught.value.hint
    assert states(url, name, tmp_path) == [TrialState.RUNNING]


def test_a_driver_that_was_killed_on_this_machine_stops_nobody(url, name, tmp_path, start, monkeypatch):
    first = start(url, name)
    first.kill()
    monkeypatch.setattr(one_driver.time, "sleep", no_waiting)
    with drive(url, name, tmp_path):
        assert states(url, name, tmp_path) == [TrialState.FAIL, TrialState.RUNNING]
    assert states(url, name, tmp_path) == [TrialState.FAIL, TrialState.COMPLETE]
    with drive(url, name, tmp_path):
        pass


def test_a_driver_on_another_machine_is_refused_once_it_says_that_it_lives(url, name, tmp_path, start):
    first = start(url, name, "another boot")
    with pytest.raises(SpecError, match=f"pid {first.pid}, seen 0 s ago"), drive(url, name, tmp_path):
        pass
    assert states(url, name, tmp_path) == [TrialState.RUNNING]


def test_a_driver_whose_machine_is_gone_stops_the_next_no_longer_than_the_limit(url, name, tmp_path, start, caplog):
    first = start(url, name, "another boot")
    first.kill()
    with drive(url, name, tmp_path):
        assert states(url, name, tmp_path) == [TrialState.FAIL, TrialState.RUNNING]
    assert [record.getMessage() for record in caplog.records if record.name == one_driver.__name__] == [
        f"{name}: waiting up to 1.5 s for a sign of its driver on {os.uname().nodename}"
    ]


def test_a_driver_that_was_taken_for_dead_learns_of_it(url, name, tmp_path, start):
    first = start(url, name, "another boot")
    os.kill(first.pid, signal.SIGSTOP)
    with drive(url, name, tmp_path):
        os.kill(first.pid, signal.SIGCONT)
        assert first.says() == f"lost: another driver has taken over {name}: this one was not seen for 1.5 s\n"


@pytest.mark.parametrize("machines", ["apart", "together"])
def test_of_drivers_that_start_at_once_one_goes_on(url, name, machines):
    command = [sys.executable, "-c", RACE, url, name, "6", machines]
    race = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    heard = sorted(race.stdout.readline() for _ in range(6))
    rest, _ = race.communicate(timeout=LIMIT_S)
    assert (heard, rest) == (["held\n"] + 5 * ["refused\n"], "")


def test_a_driver_elsewhere_is_shown_as_long_as_it_was_just_seen(url, name, tmp_path, start, monkeypatch):
    storage = open_storage(url, tmp_path)
    assert running_driver(storage, name) is None
    first = start(url, name, "another boot")
    assert running_driver(storage, name).pid == first.pid
    first.kill()
    monkeypatch.setattr(one_driver, "DEAD_AFTER_S", 0.0)
    assert running_driver(storage, name) is None


def test_of_drivers_of_several_studies_the_one_that_is_refused_holds_none(tmp_path):
    storage = open_storage(None, tmp_path)
    with only_driver(storage, ["b"], pytest.fail):
        with pytest.raises(SpecError, match="got 'b'"), only_driver(storage, ["b", "a"], pytest.fail):
            pass
        with only_driver(storage, ["a"], pytest.fail):
            pass


def test_a_driver_says_that_it_lives_and_for_how_long_it_did(tmp_path):
    storage = open_storage(None, tmp_path)
    with only_driver(storage, [NAME], pytest.fail):
        study = optuna.load_study(study_name=f"{NAME}/drivers", storage=storage)
        first = study.trials[0].user_attrs["seen_s"]
        deadline_s = time.monotonic() + LIMIT_S
        while study.trials[0].user_attrs["seen_s"] == first and time.monotonic() < deadline_s:
            time.sleep(0.05)
        seen = study.trials[0].user_attrs["seen_s"]
        assert seen > first
    assert study.trials[0].value >= seen - first


@pytest.mark.parametrize("options", [[], ["--detach"]])
def test_tune_beside_a_driver_elsewhere_ends_with_exit_code_2_and_changes_nothing(tmp_path, start, options):
    url, spec = f"sqlite:///{tmp_path}/own.db", study_spec()
    held = open_pool(spec, open_storage(url, tmp_path))
    held.finish(held.propose(), completed())
    running = held.propose()
    first = start(url, NAME)
    StateFolder(tmp_path / "file").write_spec(spec)
    file = str(tmp_path / "file" / "study.yaml")
    study = optuna.load_study(study_name=NAME, storage=open_storage(url, tmp_path))
    before = study.trials, study.user_attrs
    result = CliRunner().invoke(app, ["tune", file, "--state", str(tmp_path / "new"), "--storage", url, *options])
    assert result.exit_code == 2
    assert result.stderr.startswith(f"error: study: another driver runs it (host {os.uname().nodename}, pid {first.pid}, seen ")
    assert result.stderr.count("error:") == result.stderr.count("hint:") == 1
    assert [path.name for path in (tmp_path / "new" / "case").iterdir()] == ["driver.lock"]
    study = optuna.load_study(study_name=NAME, storage=open_storage(url, tmp_path))
    assert (study.trials, study.user_attrs) == before
    assert held.finish(running, completed()).outcome is Outcome.COMPLETED


def test_a_study_is_driven_in_its_folder_and_in_its_storage(tmp_path):
    spec = study_spec(storage=f"journal://{tmp_path}/shared.log")
    with driving(spec, StateFolder(tmp_path / "one")):
        assert StateFolder(tmp_path / "one").driver() == Driver.here()
        with pytest.raises(SpecError, match=f"got '{NAME}'"), driving(spec, StateFolder(tmp_path / "two")):
            pass
    with driving(spec, StateFolder(tmp_path / "two")):
        pass
