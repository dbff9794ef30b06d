"""What a killed driver may leave in Optuna's journal: a lock file, half a line. Neither blocks or breaks the next one."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import optuna
import pytest

from autotune.storage import JOURNAL_NAME, drop_stale_lock, open_storage

# Forks a writer for every line that it reads, and tells the writer's number once its storage is open, and its end.
WRITERS = """
import os
import sys
from pathlib import Path
from autotune.storage import drop_stale_lock, open_storage
import optuna
optuna.logging.set_verbosity(optuna.logging.ERROR)
folder = Path(sys.argv[1])

def write():
    drop_stale_lock(None, folder)
    study = optuna.create_study(study_name="s", storage=open_storage(None, folder), load_if_exists=True)
    print(os.getpid(), flush=True)
    while True:
        trial = study.ask()
        trial.set_user_attr("record", "x" * 20000)
        study.tell(trial, 1.0)

for _ in sys.stdin:
    writer = os.fork()
    if writer == 0:
        write()
    os.waitpid(writer, 0)
    print("ended", flush=True)
"""


def journal_of(folder):
    study = optuna.create_study(study_name="s", storage=open_storage(None, folder), load_if_exists=True)
    study.add_trial(optuna.create_trial(value=1.0))
    return folder / JOURNAL_NAME


@pytest.mark.parametrize("rest", [b'{"op_code":4,"wor', b"x" * 5000])
def test_half_a_line_is_cut_off(tmp_path, rest):
    journal = journal_of(tmp_path)
    whole = journal.read_bytes()
    journal.write_bytes(whole + rest)
    study = optuna.load_study(study_name="s", storage=open_storage(None, tmp_path))
    assert journal.read_bytes() == whole
    study.add_trial(optuna.create_trial(value=2.0))
    again = optuna.load_study(study_name="s", storage=open_storage(None, tmp_path))
    assert [trial.value for trial in again.trials] == [1.0, 2.0]


def test_a_lock_that_was_left_does_not_block(tmp_path):
    journal = journal_of(tmp_path)
    journal.with_name(journal.name + ".lock").touch()
    begin_s = time.monotonic()
    drop_stale_lock(None, tmp_path)
    journal_of(tmp_path)
    assert time.monotonic() - begin_s < 5


@pytest.mark.acceptance
def test_a_journal_that_others_may_write_keeps_its_lock(tmp_path):
    """Only the state folder's own journal has one driver; elsewhere the lock's age decides."""
    journal = journal_of(tmp_path)
    lock = journal.with_name(journal.name + ".lock")
    lock.touch()
    with journal.open("ab") as half_written:
        half_written.write(b"{")
    code = "import sys; from pathlib import Path; from autotune.storage import drop_stale_lock, open_storage\n"
    code += "drop_stale_lock(sys.argv[1], Path('/')); open_storage(sys.argv[1], Path('/'))"
    with pytest.raises(subprocess.TimeoutExpired):
        subprocess.run([sys.executable, "-c", code, f"journal://{journal}"], timeout=10, check=False)
    assert lock.exists()


def test_nothing_is_made_where_nothing_is(tmp_path):
    drop_stale_lock(None, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_writer_that_is_killed_again_and_again_loses_no_told_trial(tmp_path):
    told = 0
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", WRITERS, str(tmp_path)], **pipes) as writers:
        for kill in range(6):
            print("write", file=writers.stdin, flush=True)
            writer = int(writers.stdout.readline())
            time.sleep(0.05 + 0.03 * kill)
            os.kill(writer, signal.SIGKILL)
            assert writers.stdout.readline() == "ended\n"
            study = optuna.load_study(study_name="s", storage=open_storage(None, tmp_path))
            complete = study.get_trials(states=[optuna.trial.TrialState.COMPLETE])
            assert len(complete) >= told
            assert all(len(trial.user_attrs["record"]) == 20000 for trial in complete)
            told = len(complete)
    assert told > 6
    open_storage(None, tmp_path)
    assert all(json.loads(line) for line in (tmp_path / JOURNAL_NAME).read_text().splitlines())
