"""Disturbed trials: who is told, over which steps, what is repeated, and what is not blamed on the configuration."""

from __future__ import annotations

import subprocess
import sys
import time
from dataclasses import replace

import pytest

from autotune.contamination import Witness, contamination, foreign_cpu
from autotune.host_load import ENDED, HostLoad, HostWatch, Look, between, busy_ticks, foreign_fraction
from autotune.host_load import TICKS_PER_S as TICKS
from autotune.records import Phase
from autotune.steady_state import Window, steady_window
from launchers.outcome import Outcome
from launchers.process_tree import Process, read_process

from .study_cases import completed, failed, open_pool, steps_of, study_spec

HOG = [sys.executable, "-c", "while True: pass"]
DISTURBED = (Witness(disturbances=("hog (pid 1, user anna)",)),)


def loads(*shares, owner="hog (pid 1, user anna)"):
    return tuple(HostLoad(1000.0 + place, 1001.0 + place, share, owner) for place, share in enumerate(shares))


def burn(process, seconds):
    """Wait until a process has used that much processor time, however busy the machine is."""
    ticks = TICKS * seconds
    deadline_s = time.monotonic() + 60
    while read_process(process.pid).cpu_ticks < ticks:
        assert time.monotonic() < deadline_s
        time.sleep(0.05)


@pytest.mark.parametrize("own", [False, True])
def test_a_hog_is_foreign_and_named_unless_it_is_the_studys_own(own):
    hog = subprocess.Popen(HOG)
    try:
        with HostWatch(lambda: {hog.pid} if own else set()) as watch:
            burn(hog, 1.0)
    finally:
        hog.kill()
        hog.wait()
    share = sum(load.foreign_fraction * (load.end_s - load.begin_s) for load in watch.loads)
    named = [load for load in watch.loads if f"pid {hog.pid}," in load.owner]
    if own:
        assert not named
    else:  # on a busy machine somebody else may be named before it
        assert share > 0
        assert all(load.owner for load in watch.loads if load.foreign_fraction > 0.5)


def test_who_used_most_is_named_and_what_the_trial_used_is_not_foreign():
    def look(time_s, busy, own, *others):
        found = [Process(pid, 1, 1, "R", 1, name, ticks) for pid, name, ticks in others]
        return Look(time_s, busy, own, {process.key: process for process in found})

    before = look(0.0, 1000, 500, (7, "old", 900), (8, "hog", 0))
    now = look(2.0, 1000 + 4 * TICKS, 500 + 3 * TICKS, (7, "old", 901), (8, "hog", TICKS))
    load = between(before, now, num_cores=4)
    assert load.foreign_fraction == pytest.approx(1 / 8)
    assert load.owner.startswith("hog (pid 8, user ")


def test_load_that_no_living_process_explains_is_told_as_such():
    def look(time_s, busy):
        return Look(time_s, busy, 0, {(7, 1): Process(7, 1, 1, "S", 1, "idle", 900)})

    assert between(look(0.0, 1000), look(2.0, 1000 + TICKS), num_cores=1).owner == ENDED
    assert between(look(0.0, 1000), look(2.0, 1000), num_cores=1).owner == ""


def test_busy_time_counts_the_wanted_cores_only_and_neither_idle_nor_guest(tmp_path):
    stat = tmp_path / "stat"
    stat.write_text("cpu  9 9 9 9\ncpu0 1 2 4 1000 1000 8 16 32 64 64\ncpu1 100 0 0 5 0 0 0 0 0 0\ncpu10 7 0 0 0\nintr 5\n")
    assert busy_ticks(frozenset({0}), stat) == 1 + 2 + 4 + 8 + 16 + 32
    assert busy_ticks(frozenset({1, 10}), stat) == 107


def test_shares_are_weighted_by_their_overlap_with_the_window():
    seen = loads(0.9, 0.2, 0.4)
    assert foreign_fraction(seen, 1001.0, 1003.0)[0] == pytest.approx(0.3)
    assert foreign_fraction(seen, 1000.5, 1001.5)[0] == pytest.approx(0.55)
    assert foreign_fraction(seen, 2000.0, 2001.0) == foreign_fraction((), 0.0, 1.0) == (0.0, "")


def test_the_steady_window_leaves_start_and_warm_up_out():
    steps = [replace(step, step_s=1.0, time_s=1000.0 + step.iteration) for step in steps_of(1.0, count=20)]
    window = steady_window(steps, 3)
    assert (window.start_s, window.end_s) == (1003.0, 1020.0)
    assert steady_window((), 3) is None


def test_only_the_window_and_only_cpu_pools_are_judged_by_their_cores_and_the_worst_node_counts():
    quiet, hogged = Witness(0, loads(0.9, 0.02, 0.02)), Witness(1, loads(0.0, 0.3, 0.3))
    window = Window(1001.0, 1003.0, 0)
    assert contamination((quiet,), window, on_cpu=True) == ""
    assert contamination((quiet, hogged), window, on_cpu=True) == "others used 30% of the cores, most of it hog (pid 1, user anna)"
    assert contamination((hogged,), window, on_cpu=False) == ""
    assert contamination((hogged,), None, on_cpu=True) == ""
    assert foreign_cpu((quiet, hogged), window)[0] == pytest.approx(0.3)
    assert contamination(DISTURBED, None, on_cpu=False) == "hog (pid 1, user anna)"


def test_a_contaminated_trial_is_flagged_told_and_repeated_once():
    study = open_pool(study_spec())
    first = study.propose()
    record = study.finish(first, replace(completed(0.2), witnesses=DISTURBED))
    assert (record.outcome, record.contaminated) == (Outcome.COMPLETED, "hog (pid 1, user anna)")
    assert record.value == 0.0, "the first measurement is the reference"
    again = study.propose()
    assert (again.config, again.phase) == (first.config, Phase.BASELINE)
    clean = study.finish(again, completed(0.1))
    assert study.results().baseline == clean
    assert study.propose().config != first.config


@pytest.mark.parametrize("within", [True, False])
def test_what_a_disturbed_trial_kept_is_no_answer_once_its_repeat_crosses_the_limit(within):
    """The baseline is disturbed and seems to keep the limit; undisturbed it is at 0.4 s, and another configuration at 0.3 s."""
    study = open_pool(study_spec(limits={"step_time_s": {"max": 0.35 if within else 0.25}}))
    study.finish(study.propose(), replace(completed(0.1), witnesses=DISTURBED))
    assert study.results().best.number == 0, "nothing else is known of it"
    study.finish(study.propose(), completed(0.4))
    other = study.finish(study.propose(), completed(0.3))
    shown = study.results()
    assert (shown.best, shown.nearest) == ((other, None) if within else (None, other))


def test_repeats_that_are_disturbed_too_are_not_repeated_and_end_the_repeating_until_it_is_quiet():
    study = open_pool(study_spec())
    configs = []
    for disturbed in (True, True, True, False, True, False):
        proposal = study.propose()
        configs.append(proposal.config)
        study.finish(proposal, replace(completed(), witnesses=DISTURBED if disturbed else ()))
    assert configs[0] == configs[1]
    assert configs[4] == configs[5]
    assert len(set(configs)) == 4


def test_what_somebody_else_explains_is_not_blamed_on_the_configuration():
    foreign = (Witness(lost="40.0 GiB of GPU 3 belong to train.py (pid 7, user anna)"),)
    study = open_pool(study_spec())
    proposal = study.propose()
    record = study.finish(proposal, replace(failed(Outcome.OOM), witnesses=foreign))
    assert (record.outcome, record.value) == (Outcome.LOST, None)
    assert "pid 7, user anna" in record.detail
    retry = study.propose()
    assert retry.config == proposal.config
    again = study.finish(retry, replace(failed(Outcome.NAN), witnesses=foreign))
    assert again.outcome is Outcome.NAN
