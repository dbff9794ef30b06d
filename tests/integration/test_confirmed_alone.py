"""Whole rehearsals through Ray: pools in one rack confirm on warm GPUs and never beside each other, node counts take turns."""

from __future__ import annotations

import os
import subprocess
import sys
from itertools import pairwise

import pytest
import yaml

from autotune.records import Phase
from autotune.results import read_results
from autotune.state_folder import StateFolder
from launchers.outcome import Outcome
from tests.conftest import ROOT

STUDY = {
    "name": "rack",
    "model": {"num_layers": 32, "hidden_size": 4096, "num_attention_heads": 32, "vocab_size": 32000},
    "pools": [
        {"name": "large", "gpu": "h200", "nodes": 2, "gpus_per_node": 8},
        {"name": "small", "gpu": "h200", "gpus_per_node": 8},
    ],
    "power_domains": [{"name": "rack", "nodes": ["large", "small"], "limit_w": 60000}],
    "global_batch_size": 256,
    "seq_length": 4096,
    "baseline": {"tensor_model_parallel_size": 4, "pipeline_model_parallel_size": 2, "use_distributed_optimizer": True},
    "search": {"tensor_model_parallel_size": [2, 4, 8], "micro_batch_size": [1, 2, 4]},
    "budget": {"trials": 3},
    "confirm": {"top": 1, "repeats": 2},
    "measurement": {"steps": 20, "foreign_cpu_fraction": 1.0},
}


COUNTED = {
    **STUDY,
    "pools": [{"name": "h200", "gpu": "h200", "nodes": [1, 3, 2], "gpus_per_node": 8}],
    "power_domains": [{"name": "rack", "nodes": ["h200"], "limit_w": 18000}],
    "global_batch_size": 240,
    "baseline": {"tensor_model_parallel_size": 4, "use_distributed_optimizer": True, "gpu_power_limit_w": 500},
    "search": {"tensor_model_parallel_size": [2, 4, 8], "micro_batch_size": [1, 2, 5], "gpu_power_limit_w": [450, 500, 600]},
}


def rehearse(folder, study):
    """What its pools and node counts showed, and what was printed."""
    file = folder / "study.yaml"
    file.write_text(yaml.safe_dump(study))
    command = [sys.executable, "-m", "autotune.cli", "tune", str(file), "--simulate", "--state", str(folder / "state")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "250"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=380, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    state = StateFolder(folder / "state" / "rack-simulated")
    return read_results(state.read_spec(), state), done.stdout


@pytest.mark.acceptance
@pytest.mark.timeout(400)
def test_node_counts_of_a_pool_take_turns_and_the_one_that_keeps_no_guard_is_left_out(tmp_path):
    counts, printed = rehearse(tmp_path, COUNTED)
    assert [(results.pool.nodes, results.end_reason) for results in counts] == [(1, "budget: 3 trials"), (2, "budget: 3 trials")]
    for results in counts:
        assert any(note.startswith("Not tuned on 3 nodes: power_domains.rack: nothing can be launched") for note in results.notes)
        assert [record.phase for record in results.records].count(Phase.CONFIRM) >= 2
        assert results.best.metrics["pool_gpu_mean_power_w"] > 300 * results.pool.world_size
    ordered = sorted((record.started_s, record.ended_s) for results in counts for record in results.records)
    assert all(before[1] <= after[0] + 0.5 for before, after in pairwise(ordered))
    assert "Most tokens/s in total: pool h200 on 2 nodes, " in printed


@pytest.mark.acceptance
@pytest.mark.timeout(400)
def test_two_pools_of_a_rack_confirm_alone_and_warm(tmp_path):
    pools, _ = rehearse(tmp_path, STUDY)
    assert [(results.end_reason, results.running) for results in pools] == [("budget: 3 trials", 0)] * 2
    for results, other in (pools, pools[::-1]):
        confirming = [record for record in results.records if record.phase is Phase.CONFIRM and record.outcome is Outcome.COMPLETED]
        assert len(confirming) >= 2
        for record in confirming:
            assert record.environment["telemetry.heat"].startswith("settled after ")
            assert abs(record.metrics["temperature_slope_c_per_min"]) < 1.0
            assert not [one for one in other.records if one.started_s < record.ended_s and record.started_s < one.ended_s]
        explored = [record for record in results.records if record.phase is not Phase.CONFIRM and record.metrics]
        hottest_c = max(record.metrics["peak_temperature_c"] for record in confirming)
        assert all(record.metrics["peak_temperature_c"] < hottest_c for record in explored)
