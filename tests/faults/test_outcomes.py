"""Every way in which a trial can end by itself, through the whole path: told as what it is, at no cost for the next one."""

from __future__ import annotations

import psutil
import pytest

from launchers.outcome import Outcome
from tests.faults.harness import FaultStudy

SHORT = {
    "foreign_cpu_fraction": 1.0,
    "steps": 100_000,
    "interval": 0.01,
    "warmup_steps": 0,
    "startup_timeout_s": 8,
    "step_timeout_s": 1.5,
    "trial_timeout_s": 120,
}
# Steps of the same length, for ever, and processes that try to outlive the trial.
MEASURED = "escape"
# Behaviour of the trial -> its outcome and what the detail must say. The hang is inside a real gloo collective.
FAULTS = {
    MEASURED: (Outcome.COMPLETED, "measured well enough after "),
    "out_of_memory": (Outcome.OOM, "Tried to allocate 2.00 GiB"),
    "hang": (Outcome.HUNG, "no step within 1.5 s after step 2"),
    "not_a_number": (Outcome.NAN, "the loss of step 2 is nan"),
    "leave": (Outcome.CRASHED, "rank 1: exit code 1"),
    "silent": (Outcome.TIMEOUT, "no first step within 8 s"),
}


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    """A study over all of them, with a trial that completes at the end."""
    folder = tmp_path_factory.mktemp("outcomes")
    study = FaultStudy(
        folder, launcher="tests.faults.launchers:GlooLauncher", measurement=SHORT, budget={"trials": len(FAULTS) + 1}
    )
    try:
        study.plan(*FAULTS, MEASURED)
        study.start()
        assert study.wait(150) == 0, study.tail()
        yield study
    finally:
        study.close()


def test_D004_G003_failures_are_results_and_cost_the_next_trial_neither_agent_nor_preload(ended):
    records = ended.records()
    assert [record.outcome for record in records] == [*(outcome for outcome, _ in FAULTS.values()), Outcome.COMPLETED]
    for record, (_, detail) in zip(records, FAULTS.values(), strict=False):
        assert detail in record.detail
    assert "rank 0 at" in records[2].detail  # where it slept, and where the other one waited for it
    assert "all_reduce" in (records[2].log_folder / "rank1.log").read_text()
    worst = min(record.value for record in records if record.outcome is Outcome.COMPLETED)
    assert all(record.value is not None and record.value <= worst for record in records)
    assert len({record.environment["node0.pid"] for record in records}) == 1
    assert {record.environment["node0.supervisors_started"] for record in records} == {"1"}
    assert [record.environment["node0.preloads"] for record in records[1:]] == ["1"] * len(FAULTS)
    assert ended.results()[0].end_reason == f"budget: {len(FAULTS) + 1} trials"
    assert not ended.members()


def test_a_trial_that_is_measured_well_enough_is_completed_and_leaves_nothing(ended):
    records = [record for record in ended.records() if record.outcome is Outcome.COMPLETED]
    assert len(records) == 2
    for record in records:
        assert record.detail.startswith("measured well enough after ")
        assert 8 <= len(record.steps) < 100
        assert record.metrics["step_interval_fraction"] <= 0.01
    assert records[-1].environment["node0.preloads"] == records[-1].environment["node0.supervisors_started"] == "1"
    assert not ended.members()


@pytest.mark.acceptance
def test_C034_ray_ending_its_workers_on_a_full_host_is_the_hosts_oom_and_the_study_goes_on(new_study):
    """Ray's monitor ends the agent and the Tune worker of a trial whose ranks, no workers of Ray's, take the memory."""
    memory = psutil.virtual_memory()
    free_before_gib = 1.5
    study = new_study(budget={"trials": 3, "confidence": None})
    used = 1.0 - (memory.available - free_before_gib * 1024**3) / memory.total
    study.environment["RAY_memory_usage_threshold"] = f"{used:.4f}"
    study.plan("complete", "fill_host_memory", "complete")
    study.start()
    assert study.wait(150) == 0, study.tail()
    records = study.records()
    assert [record.outcome for record in records] == [Outcome.COMPLETED, Outcome.OOM, Outcome.COMPLETED], study.tail()
    assert "the host ran out of memory (not the GPU)" in records[1].detail
    assert not study.members()
