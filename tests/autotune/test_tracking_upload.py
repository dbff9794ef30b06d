"""What a run shall hold: pure, no MLflow."""

import inspect
import json
import math
import socket

import numpy as np
import pytest

from autotune.errors import SpecError, TrackingError
from autotune.records import TrialRecord
from autotune.tracking import RUN_STATUS, check_address, tracking_uri_of, ui_command, ui_environment, ui_tunnel
from autotune.tracking.points import Point
from autotune.tracking.spool import Spool
from autotune.tracking.upload import MAX_ENTITIES, RunUpload, clean_key, clean_keys, evenly, finite, trial_upload
from launchers.outcome import Outcome
from search_spaces.config import TrialConfig
from tests.autotune.tracking_cases import record, step


def points(item: TrialRecord):
    return {(point.key, point.step): point.value for point in trial_upload(item).points}


@pytest.mark.parametrize(
    ("name", "key"),
    [("gpu[0]", "gpu/0"), ("a%", "a_"), ("a=b", "a_b"), ("a(b)", "a_b_"), ("../a", "a"), ("a//b", "a/b"), ("/a", "a"), ("@", "_")]
    + [("..", "_"), ("gpu[0].power", "gpu/0.power"), ("", "_")]
    + [(name, name) for name in ("a_b", "a-b", "a.b", "a b", "a:b", "a/b", "é")],
)
def test_E014_names_are_cleaned_and_good_ones_kept(name, key):
    assert clean_key(name) == key


def test_E002_C045_a_long_parameter_is_cut_by_us_since_servers_do_not():
    assert len(trial_upload(record(argv=("--data-path", "d" * 7000))).params["data_path"]) == 6000


def test_E003_keys_are_cut():
    assert len(clean_key("k" * 251)) == 250


def test_E011_two_names_never_share_a_key():
    assert clean_keys(["a%", "a(", "a_"]) == {"a%": "a_", "a(": "a__2", "a_": "a__3"}


@pytest.mark.parametrize("value", ["N/A", None, True, math.nan, math.inf, -math.inf, np.float32("nan"), [1]])
def test_E015_what_is_no_finite_number_is_no_metric(value):
    assert finite(value) is None


@pytest.mark.parametrize("value", [1, 1.5, np.float32(1.5), np.int64(3)])
def test_numbers_of_numpy_are_numbers(value):
    assert finite(value) == float(value)


def test_E007_E032_nan_points_are_dropped_and_named():
    upload = trial_upload(record(metrics={"power_w": math.nan, "good": 1.0}, steps=(step(1, loss=math.nan), step(2))))
    assert all(math.isfinite(point.value) for point in upload.points)
    assert upload.tags["autotune.metric_missing"] == "power_w,step/loss"
    assert [point.step for point in upload.points if point.key == "step/loss"] == [2]


def test_E010_a_summary_stands_at_the_last_step_and_steps_keep_their_own_time():
    upload = trial_upload(record(steps=(step(5), step(9))))
    summary = next(point for point in upload.points if point.key == "tokens_per_s_per_gpu")
    assert (summary.step, summary.time_ms) == (9, 1_010_000)
    assert [(point.step, point.time_ms) for point in upload.points if point.key == "step/loss"] == [(5, 1_005_000), (9, 1_009_000)]


def test_E035_a_point_without_a_step_cannot_be_made():
    assert inspect.signature(Point).parameters["step"].default is inspect.Parameter.empty
    with pytest.raises(TypeError):
        Point("loss", 1.0)


def test_E005_a_trial_of_many_steps_fits_one_call():
    item = record(steps=tuple(step(iteration) for iteration in range(1, 3001)), metrics={f"m{i}": 1.0 for i in range(150)})
    upload = trial_upload(item)
    assert len(upload.points) + len(upload.params) + len(upload.tags) <= MAX_ENTITIES
    kept = [point.step for point in upload.points if point.key == "step/loss"]
    assert 100 < len(kept) <= 200
    assert (kept[0], kept[-1]) == (1, 3000)
    gaps = [after - before for before, after in zip(kept, kept[1:], strict=False)]
    assert max(gaps) - min(gaps) <= 1


def test_E038_at_most_199_keys_stand_at_one_step():
    upload = trial_upload(record(steps=(), metrics={f"gpu[{i}].power_w": 1.0 for i in range(1200)}))
    assert len(upload.points) == 199
    assert int(upload.tags["autotune.metrics_left_out"]) > 1000
    assert len(json.loads(upload.texts["metrics.json"])) == 1200


def test_evenly_keeps_both_ends():
    assert evenly(3, 5) == [0, 1, 2]
    assert evenly(101, 3) == [0, 50, 100]
    assert evenly(10, 1) == [9]


def test_fixed_arguments_and_knobs_are_parameters():
    params = trial_upload(record(config=TrialConfig(recompute_modules=("core_attn", "mlp")))).params
    assert params["num_layers"] == "4"
    assert params["bf16"] == "true"
    assert params["tensor_model_parallel_size"] == "1"
    assert params["recompute_modules"] == '["core_attn", "mlp"]'
    assert set(TrialConfig.model_fields) <= set(params)


def test_E021_numeric_knobs_are_metrics_too():
    values = points(record(config=TrialConfig(tensor_model_parallel_size=8, sequence_parallel=True)))
    assert values[("knob/tensor_model_parallel_size", 2)] == 8.0
    assert ("knob/sequence_parallel", 2) not in values


def test_every_outcome_has_a_status():
    assert set(RUN_STATUS) == set(Outcome)
    assert {outcome for outcome, status in RUN_STATUS.items() if status == "FINISHED"} == {Outcome.COMPLETED, Outcome.STOPPED}
    assert RUN_STATUS[Outcome.LOST] == "KILLED"


def test_detail_keeps_the_end_of_the_trace():
    assert trial_upload(record(detail="x" * 9000 + "OutOfMemoryError")).tags["autotune.detail"].endswith("xOutOfMemoryError")


def test_an_upload_survives_the_spool_and_a_torn_line_is_dropped(tmp_path):
    path = tmp_path / "spool.jsonl"
    spool = Spool(path)
    uploads = [trial_upload(record(number)) for number in range(3)]
    for upload in uploads:
        spool.append(upload)
    path.write_text(path.read_text() + uploads[0].to_json()[:50])
    again = Spool(path)
    assert again.read() == uploads
    assert all(isinstance(upload, RunUpload) for upload in again.read())
    again.append(uploads[0])
    again.settle(3, uploads[2:])
    assert Spool(path).read() == [uploads[2], uploads[0]]
    again.settle(2, [])
    assert not path.exists()


def test_C045_a_folder_store_is_refused_with_a_hint(tmp_path):
    for uri in ("file:./mlruns", "./mlruns", "ftp://host"):
        with pytest.raises(TrackingError) as caught:
            tracking_uri_of(uri, tmp_path)
        assert "sqlite" in caught.value.hint
    assert tracking_uri_of("postgresql+psycopg2://u@h/db", tmp_path) == "postgresql+psycopg2://u@h/db"


def test_the_ui_serves_a_state_folder_on_loopback(tmp_path):
    command = ui_command(tmp_path, port=5123)
    assert f"sqlite:///{tmp_path}/mlflow.db" in command
    assert command[command.index("--host") + 1] == "127.0.0.1"
    assert ui_environment({"MLFLOW_DISABLE_TELEMETRY": "false"})["MLFLOW_DISABLE_TELEMETRY"] == "true"
    assert "ssh -N -L 5123:127.0.0.1:5123 box" in ui_tunnel(5123, "box")
    with pytest.raises(TrackingError) as caught:
        ui_command("http://tracker:5000")
    assert "http://tracker:5000" in caught.value.hint


def test_an_address_that_cannot_be_listened_on_is_refused_with_the_reason():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(SpecError, match="Address already in use") as told:
            check_address("127.0.0.1", port)
        assert f"127.0.0.1:{port}" in str(told.value) and "--port" in str(told.value.hint)
    check_address("127.0.0.1", port)
    with pytest.raises(SpecError, match="203.0.113.1:5000"):
        check_address("203.0.113.1", 5000)
