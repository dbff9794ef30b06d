"""What the driver of a long study keeps of trials that have ended."""

from __future__ import annotations

import psutil
import pytest

from tests.faults.harness import until

TRIALS, WARM = 160, 40
MOST_MIB_PER_TRIAL = 200 / 450
SEARCH = {
    "micro_batch_size": [1, 2, 4, 8, 16, 32],
    "recompute": ["none", "selective", "full", "full:uniform:2", "full:block:1"],
    "use_distributed_optimizer": [False, True],
    "tensor_model_parallel_size": [1, 2],
    "pipeline_model_parallel_size": [1, 2],
}


@pytest.mark.acceptance
def test_C049_a_drivers_memory_hardly_grows_with_the_trials_that_ended(new_study):
    """200 MB between trial 50 and 500 are the limit."""
    study = new_study(budget={"trials": TRIALS, "confidence": None}, search=SEARCH)
    study.plan("complete")
    study.start()
    driver = psutil.Process(study.driver.pid)
    until((study.state.path / "study.yaml").exists, 60, study.tail)
    until(lambda: len(study.records()) >= WARM, 90, study.tail)
    before = driver.memory_info().rss
    seen = []
    until(lambda: seen.append(driver.memory_info().rss) or len(study.records()) >= TRIALS - 10, 90, study.tail)
    growth_mib = (max(seen) - before) / 2**20
    print(f"{growth_mib:.0f} MiB more after {TRIALS - 10 - WARM} trials more")
    assert growth_mib < MOST_MIB_PER_TRIAL * (TRIALS - 10 - WARM)
