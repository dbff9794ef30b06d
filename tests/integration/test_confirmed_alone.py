"""A whole rehearsal through Ray: two pools in one rack confirm on warm GPUs, and never beside each other."""

from __future__ import annotations

import os
import subprocess
import sys

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


@pytest.mark.acceptance
@pytest.mark.timeout(400)
def test_two_pools_of_a_rack_confirm_alone_and_warm(tmp_path):
    file = tmp_path / "study.yaml"
    file.write_text(yaml.safe_dump(STUDY))
    command = [sys.executable, "-m", "autotune.cli", "tune", str(file), "--simulate", "--state", str(tmp_path / "state")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=380, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    folder = StateFolder(tmp_path / "state" / "rack-simulated")
    pools = read_results(folder.read_spec(), folder)
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
