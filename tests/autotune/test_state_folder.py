"""A study's folder: its spec, its one driver, its best so far."""

import json
import os
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from autotune.errors import SpecError
from autotune.one_driver import Driver
from autotune.state_folder import StateFolder, find_study

from .study_cases import completed, open_pool, study_spec

HOLD = """
import sys
from pathlib import Path
from autotune.state_folder import StateFolder
with StateFolder(Path(sys.argv[1])).locked():
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def other_driver(tmp_path):
    command = [sys.executable, "-c", HOLD, str(tmp_path)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.communicate()


def test_spec_is_kept_as_it_was(tmp_path):
    folder, spec = StateFolder(tmp_path / "new"), study_spec(seed=7, baseline={"precision": "fp32"})
    folder.write_spec(spec)
    assert folder.read_spec() == spec


def test_relative_urls_are_kept_absolute(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = StateFolder(tmp_path / "state")
    folder.write_spec(study_spec(storage="sqlite:///s.db", tracking_uri="sqlite:///m.db"))
    monkeypatch.chdir("/")
    spec = folder.read_spec()
    assert (spec.storage, spec.tracking_uri) == (f"sqlite:///{tmp_path}/s.db", f"sqlite:///{tmp_path}/m.db")


def test_a_second_driver_is_refused_and_the_first_is_named(tmp_path, other_driver):
    folder = StateFolder(tmp_path)
    with (
        pytest.raises(SpecError, match=rf"another driver runs it \(host .*, pid {other_driver.pid}, seen 0 s ago\)"),
        folder.locked(),
    ):
        pass
    assert folder.driver().pid == other_driver.pid


def test_a_driver_that_has_not_said_who_it_is_yet_holds_its_folder(tmp_path, other_driver):
    (tmp_path / "driver.json").unlink()
    folder = StateFolder(tmp_path)
    with pytest.raises(SpecError, match=r"another driver runs it \(seen 0 s ago\)"), folder.locked():
        pass


def test_a_killed_driver_leaves_the_folder_free(tmp_path, other_driver):
    other_driver.kill()
    other_driver.wait()
    folder = StateFolder(tmp_path)
    assert (tmp_path / "driver.json").exists()
    assert folder.driver() is None
    with folder.locked():
        assert folder.driver().pid == os.getpid()
    assert folder.driver() is None


def test_a_driver_that_raises_leaves_no_trace(tmp_path):
    folder = StateFolder(tmp_path)
    with pytest.raises(RuntimeError), folder.locked():
        raise RuntimeError
    assert folder.driver() is None
    assert not (tmp_path / "driver.json").exists()


def test_another_process_with_the_same_number_is_not_the_driver(tmp_path):
    me = Driver.here()
    for other in (replace(me, start_ticks=me.start_ticks - 1), replace(me, machine="another boot")):
        (tmp_path / "driver.json").write_text(json.dumps(asdict(other)))
        assert StateFolder(tmp_path).driver() is None


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    for place in (tmp_path / "file" / "mine", Path("/proc/autotune/mine")):
        for use in (lambda folder: folder.write_spec(study_spec()), lambda folder: folder.locked().__enter__()):
            with pytest.raises(SpecError, match="--state: cannot hold the study's state") as error:
                use(StateFolder(place))
            assert str(place) in str(error.value)


def test_best_so_far_is_one_whole_file_per_pool(tmp_path):
    study = open_pool(study_spec())
    record = study.finish(study.propose(), completed())
    StateFolder(tmp_path).write_best("laptop", record)
    best = json.loads((tmp_path / "best-laptop.json").read_text())
    assert (best["trial"], best["argv"], best["config"]) == (0, list(record.argv), record.config.changed())
    assert [path.name for path in tmp_path.iterdir()] == ["best-laptop.json"]


def test_a_study_is_found_by_folder_name_and_file(tmp_path):
    root = tmp_path / "root"
    StateFolder(root / "case").write_spec(study_spec())
    file = root / "case" / "study.yaml"
    for text in (str(root / "case"), "case", str(file)):
        assert find_study(text, root).path == root / "case"


def test_an_unknown_study_names_the_known_ones(tmp_path):
    with pytest.raises(SpecError) as caught:
        find_study("nope", tmp_path)
    assert caught.value.hint == f"there are no studies in {tmp_path} yet"
    StateFolder(tmp_path / "case").write_spec(study_spec())
    with pytest.raises(SpecError) as caught:
        find_study("nope", tmp_path)
    assert (str(caught.value), caught.value.hint) == ("study: no such study (got 'nope')", f"studies in {tmp_path}: case")
