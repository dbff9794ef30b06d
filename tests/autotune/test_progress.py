"""Where there is no terminal, what is left and what crosses a limit is told as well, and no line is cut or broken."""

from __future__ import annotations

import io
import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from autotune import progress as progress_module
from autotune.gains import Gains
from autotune.pool_study import PoolStudy
from autotune.progress import Progress
from autotune.records import TrialResult
from autotune.report import remark, throughput, trial_table
from autotune.sampler import CandidateSampler
from autotune.spec import StudySpec
from autotune.state_folder import StateFolder
from autotune.storage import open_storage
from launchers.outcome import Outcome
from tests.autotune.study_cases import PROMISED, NoLauncher, completed, failed, open_pool, step_seconds, study_spec


def watched(spec: StudySpec, trials: int, width: int = 500) -> tuple[PoolStudy, str]:
    """A study of so many trials, and what was printed of it to a file."""
    output = io.StringIO()
    with Progress(Console(file=output, width=width), spec) as progress:
        study = open_pool(spec)
        study._on_record = progress.ended
        progress.opened([study])
        for _ in range(trials):
            proposal = study.propose()
            assert proposal is not None
            progress.launched(study, proposal)
            study.finish(proposal, completed(step_seconds(proposal.config)))
    return study, output.getvalue()


def test_every_fifth_trial_says_what_is_left_and_what_the_next_may_bring(monkeypatch: pytest.MonkeyPatch) -> None:
    promised = replace(PROMISED, gains=Gains(*(np.full(9, math.log(1 + share)) for share in (0.05, 0.01, 0.12))))
    monkeypatch.setattr(CandidateSampler, "outlook", property(lambda _: promised))
    study, shown = watched(study_spec(budget={"trials": 20}), 11)
    told = [line for line in shown.splitlines() if line.startswith("case: ")]
    assert [line.split("   ")[0] for line in told] == ["case: 5 of 20 trials", "case: 10 of 20 trials"]
    gain = "expected gain 5.0% (80 %: 1.0% to 12.0%), of the next trial 2.0%; at most 40% chance that any gains 1 %"
    for left, line in zip((15, 10), told, strict=True):
        assert f"remaining budget on laptop: about {left} trials (limited by trials): " in line
        assert gain in line and line.endswith(" left")
    assert study.launched == 11


def test_a_front_has_a_knee_so_far_and_no_best() -> None:
    spec = study_spec(pareto=True, objective={"tokens_per_s_per_gpu": 1, "step_time_s": -1})
    _, shown = watched(spec, 6)
    assert "   knee so far: trial 0\n" in shown and "   knee on laptop: " in shown
    assert "best" not in shown


LARGE = {"pools": [{"name": "h200", "gpu": "h200", "gpus_per_node": 8}], "launcher": "simulated"}


@pytest.mark.parametrize(
    ("budget", "left"),
    [
        ({"trials": 8}, "about 45 min of virtual time left, 15 s here"),
        ({"trials": 8, "wall_time_s": 5000}, "about 8 min of virtual time left, 3 s here"),
        ({"trials": 8, "wall_time_s": 4000}, ""),
    ],
)
def test_what_is_left_of_a_rehearsal_is_virtual_as_its_budgets_are(
    monkeypatch: pytest.MonkeyPatch, budget: dict[str, int], left: str
) -> None:
    """Five trials of 15 virtual minutes took 5 s each: 4,500 s are used of the wall time, and 25 s of the person's."""
    now_s = 1e9
    monkeypatch.setattr(progress_module.time, "time", lambda: now_s)
    spec, output = study_spec(**LARGE, budget=budget), io.StringIO()
    study, shown = open_pool(spec), Progress(Console(file=output, width=500), spec)
    study._on_record = shown.ended
    shown.opened([study])
    for number in range(6):
        now_s += 5.0
        proposal = replace(study.propose(), proposed_s=2e9 + 900.0 * number)
        now_s -= 5.0 * (number == 5)
        shown.launched(study, proposal)
        study.finish(proposal, replace(completed(), virtual_s=900.0))
    told = [line for line in output.getvalue().splitlines() if line.startswith("case: ")]
    assert [line.split("   ")[-1] for line in told if line.endswith("here")] == [left] * bool(left)
    assert len(told) == 1


def test_what_is_left_of_a_study_is_in_its_own_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 1e9
    monkeypatch.setattr(progress_module.time, "time", lambda: now_s)
    spec = study_spec(budget={"trials": 8})
    study, shown = open_pool(spec), Progress(Console(file=io.StringIO()), spec)
    shown.opened([study])
    for _ in range(5):
        now_s += 100.0
        shown.ended(study, study.finish(study.propose(), completed()))
    shown.launched(study, study.propose())
    assert shown._summary().endswith("   about 5 min left")


def test_a_trial_that_crosses_a_limit_says_so_on_its_line_and_in_the_table() -> None:
    study, shown = watched(study_spec(limits={"step_time_s": {"max": 0.1}}), 10)
    lines = [line for line in shown.splitlines() if " trial " in line]
    crossing = [ended for ended in study.records if ended.violations and ended.outcome is Outcome.COMPLETED]
    assert 0 < len(crossing) < 10
    for ended in study.records:
        (line,) = [line for line in lines if f" trial {ended.number}: " in line] or [""]
        assert ("over a limit: step_time_s " in line) == (ended in crossing)
        assert not line or remark(ended) in line
    table = Console(file=io.StringIO(), width=500, record=True)
    table.print(trial_table(crossing))
    assert "beyond its limit (at most 0.1)" in table.export_text()


@pytest.mark.parametrize("width", [80, 120])
def test_on_a_narrow_terminal_the_table_keeps_study_trial_and_figure(width: int) -> None:
    study = open_pool(study_spec())
    for _ in range(11):
        study.finish(study.propose(), completed(0.5))
    study.finish(study.propose(), replace(failed(Outcome.OOM), detail="rank 0: GPU memory ran out, and much more is told " * 5))
    table = Console(file=io.StringIO(), width=width, record=True)
    table.print(trial_table(study.records))
    _, *lines = table.export_text().splitlines()
    assert len(lines) == len(study.records)
    for line, ended in zip(lines, study.records, strict=True):
        assert line.split()[:2] == [ended.study, str(ended.number)]
        assert throughput(ended) in line


def test_why_a_trial_failed_is_one_line() -> None:
    study = open_pool(study_spec())
    ended = study.finish(study.propose(), failed(Outcome.OOM))
    assert remark(ended) == "told to end as OOM"


def test_nothing_is_cut_where_the_output_is_no_terminal(tmp_path: Path) -> None:
    spec, folder = study_spec(launcher="simulated"), StateFolder(tmp_path / "case")
    folder.write_spec(spec)
    study = PoolStudy(spec, spec.pools[0], NoLauncher(), open_storage(None, folder.path), lambda owner, record: None)
    proposal = study.propose()
    assert proposal is not None
    why = "a reason of many words " * 8 + "the end"
    study.finish(proposal, TrialResult(Outcome.CRASHED, why))
    environment = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
    command = [sys.executable, "-m", "autotune.cli", "status", "case", "--state", str(tmp_path)]
    shown = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120, env=environment).stdout
    assert why in shown
