"""A site's log comes to the trials that it covers: records, limits, MLflow, the report; and the trials' times go to the site."""

import csv
import json
from dataclasses import replace

import pytest
from mlflow import MlflowClient
from typer.testing import CliRunner

from autotune import cli
from autotune.results import read_results, study_name
from autotune.state_folder import StateFolder
from autotune.storage import JOURNAL_NAME, open_storage
from autotune.sync import INTERVAL_COLUMNS
from autotune.tracking import ParentRun, Tracker
from launchers.outcome import Outcome

from .study_cases import completed, failed, open_pool, optuna_study, study_spec

HOUR = 1772366400.0  # 2026-03-01T12:00:00Z
POOL = {"name": "laptop", "gpu": "cpu", "gpus_per_node": 4, "nodes": 1}


def spec_of(**fields):
    return study_spec(**{"baseline": {"precision": "fp32"}, "sampler": "grid", "pools": [POOL], **fields})


def ran(number, nodes=("n1.site",), step_s=0.1, outcome=Outcome.COMPLETED):
    """What a trial showed whose steps ended at seconds 100 x number + 0 to 7: its steady window goes from second 1.898 to 7."""
    result = completed(step_s) if outcome is Outcome.COMPLETED else failed(outcome)
    steps = tuple(replace(step, time_s=HOUR + 100 * number + place) for place, step in enumerate(result.steps))
    return replace(
        result, steps=steps, nodes=tuple({"hostname": name, "address": f"10.0.0.{rank}"} for rank, name in enumerate(nodes))
    )


@pytest.fixture
def folder(tmp_path):
    return StateFolder(tmp_path / "state" / "case")


def study_of(folder, spec, *results):
    """A study of these trials in a folder, ended."""
    folder.write_spec(spec)
    study = open_pool(spec, open_storage(spec.storage, folder.path))
    for result in results:
        study.finish(study.propose(), result)
    study.close()
    return study


def pdu(folder, *numbers, watts=400.0, name="n1", end_s=10, kind="node"):
    """A log that covers these trials, a reading a second."""
    path = folder.path.parent / "pdu.csv"
    rows = [f"{HOUR + 100 * number + second},{name},{watts}" for number in numbers for second in range(-3, end_s)]
    path.write_text("\n".join([f"time,{kind},watts", *rows]) + "\n")
    return path


def run(folder, *arguments):
    words = ["sync", "case", "--state", folder.path.parent, *arguments]
    return CliRunner().invoke(cli.app, [str(word) for word in words], env={"COLUMNS": "200"})


def sync(folder, path):
    """What `--json` says of the only pool."""
    done = run(folder, "--pdu", path, "--json")
    assert done.exit_code == 0, done.output
    (found,) = json.loads(done.stdout)
    return found


def records(folder):
    (results,) = read_results(folder.read_spec(), folder)
    return results.records


def test_measured_watts_come_to_the_records_of_the_trials_that_are_covered(folder):
    study_of(folder, spec_of(), ran(0), ran(1), ran(2))
    found = sync(folder, pdu(folder, 0, 1))
    assert (found["changed"], found["unchanged"], found["not_covered"]) == ([0, 1], [], [2])
    first, _, last = records(folder)
    assert first.metrics["pool_wall_mean_power_w"] == pytest.approx(400.0)
    assert first.metrics["pool_wall_energy_j"] == pytest.approx(400.0 * 5.102)
    assert first.environment["telemetry.wall.source"] == "log pdu.csv"
    assert first.attached == "pdu.csv"
    assert not [name for name in last.metrics if "wall" in name]
    assert last.attached == ""


def test_a_window_that_is_half_covered_gets_nothing_and_is_counted(folder):
    study_of(folder, spec_of(), ran(0), ran(1, outcome=Outcome.OOM))
    found = sync(folder, pdu(folder, 0, end_s=5))
    assert (found["changed"], found["not_covered"], found["runs"]) == ([], [0, 1], 0)
    assert "0 trials got their watts at the wall" in run(folder, "--pdu", pdu(folder, 0, end_s=5)).stdout


def test_a_second_time_changes_nothing(folder):
    study_of(folder, spec_of(), ran(0), ran(1))
    path = pdu(folder, 0)
    sync(folder, path)
    before, journal = records(folder), (folder.path / JOURNAL_NAME).read_bytes()
    again = sync(folder, path)
    assert (again["changed"], again["unchanged"], again["not_covered"]) == ([], [0], [1])
    assert records(folder) == before
    assert (folder.path / JOURNAL_NAME).read_bytes() == journal


def test_another_log_adds_its_trials_and_corrects_those_that_it_covers(folder):
    study_of(folder, spec_of(), ran(0), ran(1))
    sync(folder, pdu(folder, 0))
    found = sync(folder, pdu(folder, 1))
    assert (found["changed"], found["not_covered"]) == ([1], [0])
    assert [record.attached for record in records(folder)] == ["pdu.csv"] * 2
    assert sync(folder, pdu(folder, 0, watts=500.0))["changed"] == [0]
    assert records(folder)[0].metrics["pool_wall_mean_power_w"] == pytest.approx(500.0)


def test_a_log_takes_the_place_of_what_was_measured_or_estimated_before(folder, monkeypatch):
    """Whole: a short peak of the command would stand beside a longer one of the log as if they were of one meter."""
    before = {
        "pool_wall_peak_power_w_1s": 450.0,
        "pool_wall_peak_power_w_10s_estimated": 460.0,
        "pool_wall_peak_power_w_0.1s_estimated": 470.0,
        "pool_gpu_mean_power_w": 300.0,
    }
    monkeypatch.setattr("autotune.pool_study.derived", lambda metrics, *machines: before)
    study_of(folder, spec_of(), ran(0))
    path = folder.path.parent / "pdu.csv"
    path.write_text("time,node,watts\n" + "".join(f"{HOUR + second},n1,400\n" for second in (-3, 0, 2, 4, 6, 8)))
    sync(folder, path)
    (record,) = records(folder)
    names = {name for name in record.metrics if "wall" in name and "peak" in name and name.startswith("pool")}
    measured = {f"pool_wall_peak_power_w_{seconds}s" for seconds in (10, 60, 900)}
    assert names == measured | {"pool_wall_peak_power_w_0.1s_estimated"}
    assert record.metrics["pool_gpu_mean_power_w"] == 300.0


def test_the_sum_needs_every_node(folder):
    study_of(folder, spec_of(), ran(0, nodes=("n1", "n2")))
    sync(folder, pdu(folder, 0))
    (record,) = records(folder)
    assert record.metrics["node_wall_mean_power_w"] == pytest.approx(400.0)
    assert "pool_wall_mean_power_w" not in record.metrics
    assert "node 1" in record.environment["telemetry.wall.not_covered"]


def test_a_limit_is_judged_on_what_was_measured(folder):
    """Trial 1 wins as long as nothing is known; the meter says that it crosses the limit. The same after a resume."""
    domains = [{"name": "rack", "nodes": ["laptop"], "limit_w": 450}]
    spec = spec_of(power_domains=domains)
    study_of(folder, spec, ran(0, step_s=0.2), ran(1, step_s=0.1))
    assert read_results(spec, folder)[0].best.number == 1
    path = folder.path.parent / "pdu.csv"
    rows = [f"{HOUR + 100 * number + second},n1,{watts}" for number, watts in ((0, 400.0), (1, 500.0)) for second in range(-3, 10)]
    path.write_text("\n".join(["time,node,watts", *rows]))
    assert sync(folder, path)["winner"] == 0
    (results,) = read_results(spec, folder)
    assert results.best.number == 0
    assert results.explanation == ()
    (violation,) = results.records[1].violations
    assert violation.name == "limit_rack"
    assert violation.message == "rack gave 500 W measured at the wall (pool_wall_peak_power_w_1s), and 450 W are allowed"
    assert open_pool(spec, open_storage(None, folder.path)).best.number == 0
    assert json.loads((folder.path / "best-laptop.json").read_text())["trial"] == 0
    text = CliRunner().invoke(cli.app, ["best", "case", "--state", str(folder.path.parent)], env={"COLUMNS": "200"}).stdout
    assert "At the wall, all nodes together: winner 400 W (measured, log pdu.csv)" in text


def test_a_term_of_the_objective_may_come_from_a_log(folder):
    """Slower at half of the watts is better once joules count, and are known."""
    spec = spec_of(objective={"tokens_per_s_per_gpu": 1, "pool_wall_joules_per_token": -1})
    study_of(folder, spec, ran(0, step_s=0.1), ran(1, step_s=0.12))
    assert read_results(spec, folder)[0].best.number == 0
    path = folder.path.parent / "pdu.csv"
    rows = [f"{HOUR + 100 * number + second},n1,{watts}" for number, watts in ((0, 400), (1, 200)) for second in range(-3, 10)]
    path.write_text("\n".join(["time,node,watts", *rows]))
    sync(folder, path)
    assert read_results(spec, folder)[0].best.number == 1


def test_a_domains_own_log(folder):
    spec = spec_of(power_domains=[{"name": "Rack-7", "nodes": ["laptop"], "limit_w": 3000, "window_s": 5}])
    study_of(folder, spec, ran(0), ran(1))
    sync(folder, pdu(folder, 0, watts=3300.0, name="rack-7", kind="domain"))
    first, second = records(folder)
    assert first.metrics["domain_Rack-7_mean_power_w"] == pytest.approx(3300.0)
    assert first.environment["telemetry.wall.source"] == "log pdu.csv"
    assert [violation.name for violation in first.violations] == ["limit_Rack-7"]
    assert first.violations[0].amount == pytest.approx(0.1)
    assert "domain_Rack-7_peak_power_w_10s" in first.violations[0].message
    assert second.violations == ()


def test_mlflow_carries_it(state):
    folder = StateFolder(state / "case")
    folder.path.mkdir()
    (state / "mlflow.db").rename(folder.path / "mlflow.db")
    spec = spec_of(power_domains=[{"name": "rack", "nodes": ["laptop"], "limit_w": 300}])
    study = study_of(folder, spec, ran(0), ran(1))
    tracker = Tracker(None, folder.path)
    parent = tracker.open_parent(ParentRun(study.name, spec.name, "laptop"))
    for record in study.records:
        tracker.log_trial(record)
    tracker.close_parent(parent, "FINISHED")
    assert tracker.close(60) == 0
    assert sync(folder, pdu(folder, 0))["runs"] == 1
    client = MlflowClient(tracker.tracking_uri)
    first, second = (run_of(client, number) for number in (0, 1))
    assert first.data.metrics["pool_wall_mean_power_w"] == pytest.approx(400.0)
    assert first.data.tags["autotune.env.telemetry.wall.source"] == "log pdu.csv"
    assert first.data.tags["autotune.violations"] == "limit_rack"
    assert "pool_wall_mean_power_w" not in second.data.metrics
    assert {run.info.status for run in (first, second, client.get_run(parent))} == {"FINISHED"}
    sync(folder, pdu(folder, 0))
    again = run_of(client, 0)
    assert (again.data.metrics, again.data.tags, again.info.end_time) == (first.data.metrics, first.data.tags, first.info.end_time)
    assert len(client.get_metric_history(again.info.run_id, "pool_wall_mean_power_w")) == 1
    assert sync(folder, pdu(folder, 0, watts=250.0))["changed"] == [0]
    assert run_of(client, 0).data.metrics["pool_wall_mean_power_w"] == pytest.approx(250.0)
    assert run_of(client, 0).data.tags["autotune.violations"] == ""


def run_of(client, number):
    (experiment,) = [one for one in client.search_experiments() if one.name == "case"]
    (found,) = client.search_runs([experiment.experiment_id], f"tags.`autotune.number` = '{number}'")
    return found


def test_during_a_study_its_driver_is_left_alone(state):
    """The parent run and the driver's trials stay RUNNING, and no best configuration is written beside the driver's own."""
    folder = StateFolder(state / "case")
    folder.path.mkdir()
    (state / "mlflow.db").rename(folder.path / "mlflow.db")
    spec = spec_of()
    folder.write_spec(spec)
    study = open_pool(spec, open_storage(None, folder.path))
    tracker = Tracker(None, folder.path)
    parent = tracker.open_parent(ParentRun(study.name, spec.name, "laptop"))
    tracker.log_trial(study.finish(study.propose(), ran(0)))
    running = study.propose()
    with folder.locked():
        assert sync(folder, pdu(folder, 0))["changed"] == [0]
        assert MlflowClient(tracker.tracking_uri).get_run(parent).info.status == "RUNNING"
    assert not (folder.path / "best-laptop.json").exists()
    assert study.finish(running, ran(1)).outcome is Outcome.COMPLETED
    assert [record.attached for record in records(folder)] == ["pdu.csv", ""]
    tracker.close(60)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("time,node,watts\n1,n1,400\n2,n1,many\n", "pdu.csv line 3, watts: is not a number of watts (got 'many')"),
        ("time,node,watts\n1,other,400\n2,other,400\n", "--pdu: names none of this study's nodes and power domains"),
        ("", "--pdu: is empty"),
    ],
)
def test_a_wrong_log_is_exit_code_2_and_nothing_is_written(text, message, folder):
    study_of(folder, spec_of(), ran(0))
    path = folder.path.parent / "pdu.csv"
    path.write_text(text)
    before = {file: file.read_bytes() for file in folder.path.rglob("*") if file.is_file()}
    done = run(folder, "--pdu", path)
    assert done.exit_code == 2
    assert message in done.stderr
    assert "hint: " in done.stderr
    assert {file: file.read_bytes() for file in folder.path.rglob("*") if file.is_file()} == before


def test_times_go_to_the_site(folder):
    study_of(folder, spec_of(), ran(0, nodes=("n1.site", "n2.site")), ran(1, outcome=Outcome.OOM))
    done = run(folder, "--intervals", "-")
    assert done.exit_code == 0, done.output
    first, second = csv.DictReader(done.stdout.splitlines())
    assert tuple(first) == INTERVAL_COLUMNS
    assert (first["trial"], first["pool"], first["nodes"]) == ("0", "laptop", "n1.site n2.site")
    assert first["steady_start_utc"] == "2026-03-01T12:00:01.898Z"
    assert first["steady_end_utc"] == "2026-03-01T12:00:07.000Z"
    assert first["start_utc"].endswith("Z")
    assert first["start_utc"] <= first["end_utc"]
    assert second["trial"] == "1"
    path = folder.path.parent / "out.csv"
    assert "2 launched trials" in run(folder, "--intervals", path).stdout
    assert path.read_text() == done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "give one of --pdu and --intervals"),
        (("--pdu", "a.csv", "--intervals", "-"), "give one of --pdu and --intervals"),
        (("--pdu", "/nonexistent.csv"), "--pdu: cannot be read: no such file"),
        (("--intervals", "/nonexistent/out.csv"), "--intervals: cannot be written: no such file"),
    ],
)
def test_wrong_options_are_exit_code_2(arguments, message, folder):
    study_of(folder, spec_of(), ran(0))
    done = run(folder, *arguments)
    assert done.exit_code == 2
    assert message in done.stderr


def test_a_simulated_study_has_no_wall(folder):
    folder.write_spec(spec_of(launcher="simulated"))
    done = run(folder, "--pdu", pdu(folder, 0))
    assert done.exit_code == 2
    assert "is simulated" in done.stderr


def test_what_is_attached_lies_with_the_study_and_the_record_stays(folder):
    study = study_of(folder, spec_of(), ran(0))
    told = optuna_study(study).trials[0].user_attrs["record"]
    sync(folder, pdu(folder, 0))
    reopened = open_pool(spec_of(), open_storage(None, folder.path))
    assert study_name(spec_of(), spec_of().pools[0]) == reopened.name
    assert optuna_study(reopened).trials[0].user_attrs["record"] == told
    assert "attached.0" in optuna_study(reopened).user_attrs
    assert reopened.records[0].metrics["pool_wall_mean_power_w"] == pytest.approx(400.0)
