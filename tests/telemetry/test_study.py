"""A whole study through Ray with scripted GPUs beside its agents: records, MLflow, files. Nothing else sees the devices."""

from __future__ import annotations

import csv
import os
import subprocess
import sys
from datetime import datetime

import pyarrow.parquet as pq
import pytest
import yaml
from mlflow import MlflowClient

from autotune.metric_names import metric_names
from autotune.records import Phase
from autotune.results import read_results
from autotune.state_folder import StateFolder
from launchers.outcome import Outcome
from tests.telemetry.devices import H100, ROOT, Scenario, environment

STUDY = {
    "name": "measured",
    "model": {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 128},
    "global_batch_size": 4,
    "seq_length": 32,
    "baseline": {"precision": "fp32"},
    "search": {"micro_batch_size": [1, 2]},
    "budget": {"trials": 2},
    "confirm": {"soak": {"timeout_s": 0}},
    "measurement": {"steps": 12, "warmup_steps": 2, "interval": 0, "foreign_cpu_fraction": 1.0},
}


def run(tmp_path, script, **changes):
    """The study's folder and its records."""
    values = environment(script, folder=tmp_path)
    telemetry = {"vendors": ["nvidia"], "gpus": ["0", "GPU-00000001"], "env": values}
    pools = [{"name": "laptop", "gpu": "cpu", "gpus_per_node": 1, "telemetry": telemetry}]
    file = tmp_path / "study.yaml"
    file.write_text(yaml.safe_dump({**STUDY, **changes, "pools": pools}))
    command = [sys.executable, "-m", "autotune.cli", "tune", str(file), "--state", str(tmp_path / "state")]
    own = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=own, cwd=ROOT, capture_output=True, text=True, timeout=380, check=False)
    assert done.returncode == 0, done.stderr[-3000:]

    folder = StateFolder(tmp_path / "state" / "measured")
    records = read_results(folder.read_spec(), folder)[0].records
    assert all(set(record.metrics) <= set(metric_names()) for record in records)
    return folder, records


@pytest.mark.acceptance
@pytest.mark.timeout(400)
def test_power_and_throttling_reach_the_record_and_mlflow(tmp_path):
    script = Scenario(H100, 3).set(1, "active_270", 1).set(1, "reasons", 0x40).set(2, "power_mw", 650_000)
    folder, records = run(tmp_path, script, measurement={**STUDY["measurement"], "steps": 60})
    assert len(records) >= 2
    for record in records:
        assert record.metrics["pool_gpu_mean_power_w"] == pytest.approx(600.0, rel=0.01)
        assert record.metrics["throttle_fraction"] == pytest.approx(1.0, abs=0.05)
        assert record.metrics["throttle_events_hw_thermal"] == 1
        assert record.environment["telemetry.throttle.worst_gpu"].startswith("1 ")
        assert "of a core" in record.environment["telemetry.cost.node0"]
        table = pq.read_table(record.log_folder / "telemetry.parquet")
        assert set(table["index"].to_pylist()) == {0, 1, 2}
    _check_mlflow(folder, records)


def _check_mlflow(folder, records):
    client = MlflowClient(f"sqlite:///{folder.path / 'mlflow.db'}")
    (experiment,) = [one for one in client.search_experiments() if one.name == "measured"]
    runs = client.search_runs([experiment.experiment_id], "tags.`autotune.role` = 'trial'")
    assert len(runs) == len(records)
    for run in runs:
        assert "telemetry.parquet" in {item.path for item in client.list_artifacts(run.info.run_id)}
        points = client.get_metric_history(run.info.run_id, "telemetry/power_w")
        record = next(one for one in records if str(one.number) == run.data.tags["autotune.number"])
        assert len(points) > 10
        assert all(record.started_s * 1000 <= point.timestamp <= record.ended_s * 1000 for point in points)
        assert max(point.value for point in points) == pytest.approx(600.0, rel=0.01)


@pytest.mark.acceptance
@pytest.mark.timeout(400)
def test_watts_at_the_wall_from_a_command_and_from_a_log(tmp_path):
    """A command measures while the study runs; then a log of the same times, cut by the intervals that the study tells."""
    pools = [{"name": "laptop", "gpu": "cpu", "gpus_per_node": 1, "wall_power_command": "echo 412 Watts"}]
    long_enough = {**STUDY["measurement"], "steps": 400, "racing": False, "trial_timeout_s": 120}
    file = tmp_path / "study.yaml"
    file.write_text(yaml.safe_dump({**STUDY, "name": "wall", "pools": pools, "confirm": {"top": 0}, "measurement": long_enough}))
    assert autotune("tune", file, "--state", tmp_path / "state").returncode == 0
    folder = StateFolder(tmp_path / "state" / "wall")
    for record in completed_records(folder):
        assert record.metrics["pool_wall_mean_power_w"] == pytest.approx(412.0)
        assert record.environment["telemetry.wall.source"] == "wall_power_command"
        assert "wall" in pq.read_table(record.log_folder / "telemetry.parquet")["vendor"].to_pylist()

    told = autotune("sync", "wall", "--state", tmp_path / "state", "--intervals", "-")
    rows = list(csv.DictReader(told.stdout.splitlines()))
    assert len(rows) == len(completed_records(folder))
    times = [datetime.fromisoformat(rows[0][f"steady_{end}_utc"]).timestamp() for end in ("start", "end")]
    log = tmp_path / "pdu.csv"
    readings = [f"{second},{rows[0]['nodes']},500" for second in range(int(times[0]) - 2, int(times[1]) + 3)]
    log.write_text("\n".join(["time,node,watts", *readings]))
    done = autotune("sync", "wall", "--state", tmp_path / "state", "--pdu", log)
    assert "1 trials got their watts at the wall" in done.stdout, done.stdout + done.stderr
    means = [record.metrics["pool_wall_mean_power_w"] for record in completed_records(folder)]
    assert means[0] == pytest.approx(500.0)
    assert means[1:] == pytest.approx([412.0] * len(means[1:]))
    client = MlflowClient(f"sqlite:///{folder.path / 'mlflow.db'}")
    (experiment,) = [one for one in client.search_experiments() if one.name == "wall"]
    runs = client.search_runs([experiment.experiment_id], "tags.`autotune.role` = 'trial'")
    shown = {run.data.tags["autotune.number"]: run.data.metrics["pool_wall_mean_power_w"] for run in runs}
    assert shown == {str(record.number): record.metrics["pool_wall_mean_power_w"] for record in completed_records(folder)}


def completed_records(folder):
    records = [one for one in read_results(folder.read_spec(), folder)[0].records if one.outcome is Outcome.COMPLETED]
    assert len(records) >= 2
    return records


def autotune(*words):
    own = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    command = [sys.executable, "-m", "autotune.cli", *map(str, words)]
    return subprocess.run(command, env=own, cwd=ROOT, capture_output=True, text=True, timeout=380, check=False)


@pytest.mark.acceptance
@pytest.mark.timeout(400)
def test_confirming_trials_run_on_until_temperatures_have_come_to_rest(tmp_path):
    """All GPUs stay at 50 degrees, so the first window of 4 seconds shows it; the program is asked for steps of 12 seconds."""
    soak = {"timeout_s": 12, "window_s": 4, "slope_c_per_min": 1}
    _, records = run(tmp_path, Scenario(H100, 3), confirm={"top": 1, "repeats": 2, "steps": 12, "soak": soak})
    confirming = [record for record in records if record.phase is Phase.CONFIRM]
    assert len(confirming) >= 2
    for record in confirming:
        assert record.outcome is Outcome.COMPLETED
        assert record.environment["telemetry.heat"].startswith("settled after ")
        assert record.metrics["soak_s"] >= 4.0
        assert len(record.steps) == record.metrics["soak_steps"] + 10
        assert record.metrics.get("temperature_slope_c_per_min", 0.0) == 0.0
    for record in records:
        assert ("telemetry.heat" in record.environment) == (record.phase is Phase.CONFIRM)
        assert record.metrics["start_temperature_c"] == 50.0
