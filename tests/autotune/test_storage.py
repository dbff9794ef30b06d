"""Where a study is kept: journal by default, any URL by option; nothing is lost but the trial that was running."""

import errno
import os
import sqlite3
import threading
import time

import pytest
from optuna.samplers import RandomSampler

from autotune import storage as storage_module
from autotune.candidates import candidate_table, fingerprint
from autotune.errors import InfrastructureError, SpecError
from autotune.filesystem import LockReport
from autotune.storage import JOURNAL_NAME, absolute_url, failing_as_ours, open_storage, open_study
from launchers.outcome import Outcome

from .study_cases import MODEL, POOL, completed, failed, open_pool, optuna_study, run_to_end, study_spec

SPEC = study_spec(search={"tensor_model_parallel_size": [1, 2, 4], "micro_batch_size": [1, 2]})
URLS = {
    "journal": (None, JOURNAL_NAME),
    "journal URL": ("journal://{folder}/deep/own.log", "deep/own.log"),
    "sqlite": ("sqlite:///{folder}/deep/study.db", "deep/study.db"),
}


@pytest.fixture(params=URLS)
def opened(request, tmp_path):
    url, file = URLS[request.param]
    return lambda: open_storage(url and url.format(folder=tmp_path), tmp_path), tmp_path / file


def test_a_killed_driver_loses_at_most_the_running_trial(opened):
    open_it, file = opened
    before = open_pool(SPEC, open_it())
    done = [before.finish(before.propose(), completed(seconds)) for seconds in (0.2, 0.1)]
    done.append(before.finish(before.propose(), failed(Outcome.OOM)))
    running = before.propose()
    assert file.exists()
    after = open_pool(SPEC, open_it())
    assert list(after.records) == done
    assert (after.launched, after.best.number) == (3, 1)
    rest = run_to_end(after, lambda proposal: completed())
    assert running.config in {proposal.config for proposal in rest}
    assert len(done) + len(rest) == len(after.table)


def test_relative_urls_are_made_absolute(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert absolute_url("sqlite:///study.db") == f"sqlite:///{tmp_path}/study.db"
    assert absolute_url("sqlite:///a/study.db?timeout=5") == f"sqlite:///{tmp_path}/a/study.db?timeout=5"
    assert absolute_url("journal://a.log") == f"journal://{tmp_path}/a.log"


@pytest.mark.parametrize("url", ["sqlite:////data/s.db", "journal:///data/s.log", "postgresql://u@h/d", "http://mlflow:5000"])
def test_other_urls_stay_as_they_are(url):
    assert absolute_url(url) == url


@pytest.mark.parametrize("url", ["sqlite://", "sqlite:///", "sqlite:///:memory:", "journal://"])
def test_what_would_not_outlive_the_driver_is_refused(tmp_path, url):
    with pytest.raises(SpecError, match="names no file"):
        open_storage(url, tmp_path)


def on_network_disk(folder):
    return f"/dev/sda1 / ext4 rw 0 0\nserver:/export {folder} nfs4 rw 0 0\n"


@pytest.mark.parametrize("url", [None, "sqlite:///{folder}/study.db", "journal://{folder}/own.log"])
@pytest.mark.parametrize("holds", [True, False])
def test_a_file_on_a_network_disk_is_used_only_after_the_lock_test_passed(tmp_path, monkeypatch, url, holds):
    tested = []

    def report(folder):
        assert folder.is_dir()
        tested.append(folder)
        return LockReport(holds, True, True, "" if holds else "record locks: step 2 answered ok")

    monkeypatch.setattr(storage_module, "lock_report", report)
    folder = tmp_path / "new"
    url = url and url.format(folder=folder)
    if holds:
        open_pool(SPEC, open_storage(url, folder, mounts=on_network_disk(tmp_path)))
    else:
        with pytest.raises(
            InfrastructureError, match=r"on a network disk whose file locks do not hold.*step 2 answered ok"
        ) as caught:
            open_storage(url, folder, mounts=on_network_disk(tmp_path))
        assert "postgresql://" in caught.value.hint
        assert list(folder.iterdir()) == []
    assert tested == [folder]


def test_the_real_lock_test_passes_on_a_local_disk_that_is_called_a_network_disk(tmp_path):
    open_pool(SPEC, open_storage(None, tmp_path / "new", mounts=on_network_disk(tmp_path)))
    assert [path.name for path in (tmp_path / "new").iterdir()] == [JOURNAL_NAME]


def test_a_local_disk_and_a_server_need_no_lock_test(tmp_path, monkeypatch):
    monkeypatch.setattr(storage_module, "lock_report", lambda folder: pytest.fail("no test needed"))
    open_storage(None, tmp_path, mounts="/dev/sda1 / ext4 rw 0 0\n")


# Lines from the end of a trial: its state, its constraint, its record; before them the trial's parameters.
@pytest.mark.parametrize(("lines", "known"), [(0, True), (1, True), (2, False), (3, False)])
def test_a_truncated_last_line_costs_at_most_the_running_trial(tmp_path, lines, known):
    study = open_pool(SPEC, open_storage(None, tmp_path))
    first = study.finish(study.propose(), completed())
    second = study.finish(study.propose(), completed())
    journal = tmp_path / JOURNAL_NAME
    whole = journal.read_bytes().splitlines(keepends=True)
    kept = whole[: len(whole) - lines]
    journal.write_bytes(b"".join(kept)[: -len(kept[-1]) // 2])
    after = open_pool(SPEC, open_storage(None, tmp_path))
    assert list(after.records) == ([first, second] if known else [first])
    assert after.launched == len(after.records)
    run_to_end(after, lambda proposal: completed())
    again = open_pool(SPEC, open_storage(None, tmp_path))
    assert list(again.records) == list(after.records)
    assert again.launched == len(after.table)


def test_a_journal_of_one_partial_line_is_begun_anew(tmp_path):
    (tmp_path / JOURNAL_NAME).write_text('{"op_code": 0, "worker')
    assert open_pool(SPEC, open_storage(None, tmp_path)).propose() is not None


def test_a_whole_journal_is_not_touched_and_not_locked(tmp_path):
    open_pool(SPEC, open_storage(None, tmp_path))
    before = (tmp_path / JOURNAL_NAME).read_bytes()
    storage_module._drop_partial_line(tmp_path / JOURNAL_NAME, None)
    assert (tmp_path / JOURNAL_NAME).read_bytes() == before


def test_the_last_newline_is_found_far_from_the_end(tmp_path, monkeypatch):
    monkeypatch.setattr(storage_module, "_BLOCK_BYTES", 4)
    path = tmp_path / "text"
    for text in ("", "a", "abcdefghij", "a\nbcdefghijklmnop", "abcdefgh\n", "ab\ncd\nefghijk"):
        path.write_text(text)
        with path.open("rb") as file:
            assert storage_module._end_of_last_line(file.fileno(), len(text)) == text.rfind("\n") + 1


def test_a_journal_that_is_none_is_an_error_with_its_path(tmp_path):
    (tmp_path / JOURNAL_NAME).write_text("not a journal\nat all\n")
    with pytest.raises(InfrastructureError, match=JOURNAL_NAME):
        open_storage(None, tmp_path)


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(InfrastructureError, match=r"cannot be created: (not a directory|file exists)"):
        open_storage(None, tmp_path / "file" / "state")


def test_a_missing_driver_package_is_said_at_once(tmp_path):
    begin = time.monotonic()
    with pytest.raises(InfrastructureError) as caught:
        open_storage("mysql+nosuchdriver://user:secret@host/db", tmp_path, wait_s=30)
    assert time.monotonic() - begin < 5
    assert "host/db does not answer" in str(caught.value)
    assert "secret" not in str(caught.value)


def test_a_reader_beside_the_driver_sees_whole_trials(tmp_path):
    study = open_pool(SPEC, open_storage(None, tmp_path))
    stop, seen = threading.Event(), []

    def read():
        while not stop.is_set():
            seen.append(len(optuna_study(study)._storage.get_all_studies()))
            open_storage(None, tmp_path)

    reader = threading.Thread(target=read)
    reader.start()
    run_to_end(study, lambda proposal: completed())
    stop.set()
    reader.join()
    assert seen
    assert len(open_pool(SPEC, open_storage(None, tmp_path)).records) == len(study.table)


@pytest.mark.skipif(
    "AUTOTUNE_TEST_POSTGRES" not in os.environ, reason="no PostgreSQL server (set AUTOTUNE_TEST_POSTGRES to its URL)"
)
def test_D040_postgresql_survives_closed_connections(tmp_path):
    spec = study_spec(name=f"case-{os.getpid()}-{time.time_ns()}", search={"tensor_model_parallel_size": [1, 2]})
    storage = open_storage(os.environ["AUTOTUNE_TEST_POSTGRES"], tmp_path)
    study = open_pool(spec, storage)
    proposal = study.propose()
    with storage.engine.connect() as connection:
        from sqlalchemy import text  # noqa: PLC0415

        connection.execute(
            text("select pg_terminate_backend(pid) from pg_stat_activity where pid <> pg_backend_pid() and usename = current_user")
        )
    assert study.finish(proposal, completed()).outcome is Outcome.COMPLETED


def test_what_changed_is_named_with_both_values(opened):
    open_it, _ = opened
    open_pool(SPEC, open_it())
    pool = {**POOL, "gpus_per_node": 2}
    changed = study_spec(
        search={"tensor_model_parallel_size": [1, 2], "micro_batch_size": [1, 2]},
        global_batch_size=32,
        model={**MODEL, "num_layers": 4},
        baseline={"tensor_model_parallel_size": 2},
        pools=[pool],
    )
    with pytest.raises(SpecError) as raised:
        open_study(
            open_it(),
            "case/laptop/1x4",
            RandomSampler(),
            fingerprint(changed, changed.pools[0], candidate_table(changed, changed.pools[0])),
        )
    for words in (
        "another workload and choices and baseline: model.num_layers was 8, now 4",
        "global_batch_size was 16, now 32",
        "gpus_per_node was 4, now 2",
        "search.tensor_model_parallel_size was [1, 2, 4], now [1, 2]",
        "baseline.tensor_model_parallel_size was not given, now 2",
    ):
        assert words in str(raised.value)
    assert "micro_batch_size" not in str(raised.value)


def test_trials_of_another_kind_of_gpu_or_of_another_twin_are_not_taken_over(opened):
    open_it, _ = opened

    def study(gpu, seed=0, launcher="megatron_core"):
        return study_spec(pools=[{**POOL, "gpu": gpu}], seed=seed, launcher=launcher, name=launcher.partition(":")[0])

    open_pool(study("h200"), open_it())
    open_pool(study("h200-sxm-141gb", seed=1), open_it())
    with pytest.raises(SpecError, match="with another gpu: pool's gpu was 'h200-sxm-141gb', now 'h100-sxm-80gb'"):
        open_pool(study("h100"), open_it())
    open_pool(study("h200", launcher="simulated:physics"), open_it())
    with pytest.raises(SpecError, match="with another seed: seed was 0, now 1"):
        open_pool(study("h200", seed=1, launcher="simulated:physics"), open_it())


def test_a_study_of_an_earlier_version_is_compared_as_far_as_it_says(opened):
    open_it, _ = opened
    kept = optuna_study(open_pool(SPEC, open_it()))
    held = {key: value for key, value in kept.user_attrs["fingerprint"].items() if key != "gpu"}
    del held["workload"]["settings"]["train_iters"], held["workload"]["model"]["qk_layernorm"]
    kept.set_user_attr("fingerprint", held)
    open_pool(SPEC, open_it())
    held["workload"]["settings"]["optimizer"] = "sgd"
    kept.set_user_attr("fingerprint", held)
    with pytest.raises(SpecError, match="settings.optimizer was 'sgd', now 'adam'"):
        open_pool(SPEC, open_it())


@pytest.mark.acceptance
def test_D039_a_locked_sqlite_file_is_waited_for_and_then_told_as_the_storages_fault(tmp_path, monkeypatch):
    monkeypatch.setattr(storage_module, "_FILE_LOCK_S", 1)
    study = open_pool(SPEC, open_storage(f"sqlite:///{tmp_path}/study.db", tmp_path))
    other = sqlite3.connect(tmp_path / "study.db", check_same_thread=False)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(InfrastructureError, match=r"Optuna's storage failed: .*database is locked"), failing_as_ours():
        study.propose()
    release = threading.Timer(0.3, other.rollback)
    release.start()
    assert study.propose() is not None
    release.join()


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS])
def test_a_disk_that_fails_is_told_with_its_file_and_what_to_do(number):
    with pytest.raises(InfrastructureError, match=f"/a/file: {os.strerror(number).lower()}") as told, failing_as_ours():
        raise OSError(number, os.strerror(number), "/a/file")
    assert "autotune resume" in told.value.hint


def test_other_errors_of_the_system_keep_their_trace():
    with pytest.raises(ConnectionResetError), failing_as_ours():
        raise ConnectionResetError
