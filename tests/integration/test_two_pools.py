"""Several pools in one study: on the labelled nodes of a Ray cluster at once, on one machine in turns."""

from __future__ import annotations

import ast
import json
import subprocess
import time
from itertools import pairwise

import pytest
from mlflow import MlflowClient

from autotune.tracking.server import tracking_uri_of
from launchers.outcome import Outcome
from tests.faults.harness import FaultStudy, await_gone, until
from tests.integration.running_cluster import running_cluster
from tests.telemetry.devices import H100 as H100_80GB
from tests.telemetry.devices import Scenario, environment

MEASUREMENT = {
    "steps": 4,
    "warmup_steps": 1,
    "foreign_cpu_fraction": 1.0,
    "startup_timeout_s": 150,
    "step_timeout_s": 60,
    "trial_timeout_s": 300,
}
H100, B200 = {"gpu-kind": "H100"}, {"gpu-kind": "B200"}
SITE = {"site": "laboratory"}
NODES = (
    {"num_cpus": 1},
    {"num_cpus": 2, "num_gpus": 6, "labels": {"autotune-pool-small": "yes", **H100, **SITE}},
    {"num_cpus": 2, "num_gpus": 4, "labels": {"autotune-pool-large": "yes", **B200, **SITE}},
)
CPU_POOLS = [{"name": "small", "gpu": "cpu", "gpus_per_node": 2}, {"name": "large", "gpu": "cpu", "gpus_per_node": 4}]


@pytest.fixture(scope="module")
def cluster():
    with running_cluster(NODES) as running:
        yield running


def joining(cluster, folder, **changes):
    """A study whose driver joins the cluster."""
    study = FaultStudy(folder, **changes)
    # Agents and Tune workers are children of the cluster's nodes and see its FAULTS; ranks and the driver see their own.
    study.environment |= {name: value for name, value in cluster.environment.items() if name.startswith("RAY_")}
    return study


@pytest.fixture
def study_on(cluster, tmp_path):
    """Make studies whose driver joins the cluster."""
    studies = []

    def make(**changes):
        studies.append(joining(cluster, tmp_path / f"study{len(studies)}", **changes))
        return studies[-1]

    yield make
    for study in studies:
        study.close()


def labels_of(record):
    return ast.literal_eval(record.environment["node0.labels"])


def gpus_of(record):
    return ast.literal_eval(record.environment["node0.gpus"])


def spans(results):
    return [(record.started_s, record.ended_s) for record in results.records]


@pytest.mark.timeout(400)
def test_C044_two_cpu_pools_train_megatron_at_the_same_time_on_their_own_nodes(cluster, study_on):
    study = study_on(launcher="megatron_core", pools=CPU_POOLS, global_batch_size=8, budget={"trials": 2}, measurement=MEASUREMENT)
    study.start("tune", "--address", cluster.address)
    assert study.wait(360) == 0, study.tail()
    small, large = study.results()
    for results, ranks in ((small, 2), (large, 4)):
        assert results.outcomes == {Outcome.COMPLETED: 2}, [record.detail for record in results.records]
        for record in results.records:
            assert labels_of(record)[f"autotune-pool-{results.pool.name}"] == "yes"
            assert len(list(record.log_folder.glob("rank*.log"))) == ranks
    nodes = [{record.environment["node0.node_id"] for record in results.records} for results in (small, large)]
    assert len(nodes[0] | nodes[1]) == 2
    assert any(a < d and c < b for a, b in spans(small) for c, d in spans(large))  # at the same time
    check_mlflow(study)
    check_best(study, small, large)
    assert cluster.ask("nodes") == len(NODES)


def check_mlflow(study):
    """One parent run for each pool, and below it that pool's trials."""
    client = MlflowClient(tracking_uri_of(None, study.state.path))
    runs = client.search_runs([client.get_experiment_by_name("faults").experiment_id])
    parents = {run.info.run_id: run.info.run_name for run in runs if "mlflow.parentRunId" not in run.data.tags}
    children = [run.data.tags["mlflow.parentRunId"] for run in runs if "mlflow.parentRunId" in run.data.tags]
    assert sorted(parents.values()) == ["large x1", "small x1"]
    assert sorted(children) == sorted([*parents] * 2)


def check_best(study, small, large):
    best = json.loads(study.run("best", "--json").stdout)
    assert [pool["pool"] for pool in best["pools"]] == ["small", "large"]
    assert [pool["best"]["trial"] for pool in best["pools"]] == [small.best.number, large.best.number]
    faster = max((small, large), key=lambda results: results.best_tokens_per_s)
    assert best["overall"] == faster.pool.name


@pytest.mark.acceptance
@pytest.mark.timeout(400)
def test_node_counts_of_a_pool_are_tuned_in_turns_on_the_first_nodes_of_one_slot(cluster, study_on):
    pool = {"name": "both", "gpu": "cpu", "nodes": [2, 1], "gpus_per_node": 2, "labels": SITE}
    study = study_on(launcher="megatron_core", pools=[pool], global_batch_size=8, budget={"trials": 2}, measurement=MEASUREMENT)
    study.start("tune", "--address", cluster.address)
    assert study.wait(360) == 0, study.tail()
    two, one = study.results()
    used = []
    for results, nodes in ((two, 2), (one, 1)):
        assert (results.pool.nodes, results.outcomes) == (nodes, {Outcome.COMPLETED: 2}), [r.detail for r in results.records]
        for record in results.records:
            found = [name for name in record.environment if name.endswith(".node_id")]
            assert len(found) == nodes
            assert len(list(record.log_folder.glob("rank*.log"))) == 2 * nodes
            used.append(record.environment["node0.node_id"])
    assert len(set(used)) == 1
    assert len(list((study.state.log_root / "both" / "figures").glob("rank*.log"))) == 4  # measured once, on the whole slot
    ordered = sorted(spans(two) + spans(one))
    assert all(before[1] <= after[0] + 0.5 for before, after in pairwise(ordered))
    for results in (two, one):
        kept = json.loads((study.state.path / f"best-both@{results.pool.nodes}.json").read_text())
        assert kept["trial"] == results.best.number
    best = json.loads(study.run("best", "--json").stdout)
    faster = max((two, one), key=lambda results: results.best_tokens_per_s)
    assert (best["overall"], best["overall_nodes"]) == ("both", faster.pool.nodes)


@pytest.mark.acceptance
def test_C019_C037_gpu_pools_get_their_number_of_gpus_and_share_none(cluster, study_on):
    """On Ray's word for GPUs: no rank touches one."""
    pools = [
        {"name": "four", "gpu": "H100", "gpus_per_node": 4, "labels": H100},
        {"name": "two", "gpu": "H100", "gpus_per_node": 2, "labels": H100},
        {"name": "other", "gpu": "B200", "gpus_per_node": 4, "labels": B200},
    ]
    study = study_on(pools=pools, budget={"trials": 2})
    study.plan("slow")
    study.start("tune", "--address", cluster.address)
    assert study.wait() == 0, study.tail()
    seen = {}
    for results in study.results():
        assert results.outcomes == {Outcome.COMPLETED: 2}, [record.detail for record in results.records]
        for record in results.records:
            seen[results.pool.name] = gpus_of(record)
            assert labels_of(record).items() >= results.pool.labels.items()
            visible = {path.read_text().strip() for path in record.log_folder.glob("rank*.log")}
            assert visible == {f"visible: {','.join(gpus_of(record))}"}
    assert [len(gpus) for gpus in seen.values()] == [4, 2, 4]
    assert not set(seen["four"]) & set(seen["two"])
    assert len(set(seen["four"])) == 4


NOT_HERE = {
    "C020": [{"name": "typo", "gpu": "B300", "gpus_per_node": 4, "labels": {"gpu-kind": "B300"}}],
    "C016": [{"name": "big", "gpu": "B200", "gpus_per_node": 8, "labels": B200}],
}


@pytest.fixture(scope="module")
def refused(cluster, tmp_path_factory):
    """What studies of pools that the cluster does not have are told; their drivers start Python and Ray side by side."""
    studies = {case: joining(cluster, tmp_path_factory.mktemp(case), pools=pools) for case, pools in NOT_HERE.items()}
    try:
        begin_s = time.monotonic()
        for study in studies.values():
            study.plan("complete")
            study.start("tune", "--address", cluster.address, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        said = {case: study.driver.communicate(timeout=60)[1] for case, study in studies.items()}
        print(f"refused after {time.monotonic() - begin_s:.1f} s, Python and Ray started")
        assert [study.driver.returncode for study in studies.values()] == [1] * len(studies), said
        assert not any("Traceback" in text for text in said.values()), said
        yield said
    finally:
        for study in studies.values():
            study.close()


def test_C020_a_pool_that_no_node_belongs_to_is_refused_with_the_known_labels(refused):
    message = refused["C020"]
    assert "gpu-kind=B300" in message
    assert "gpu-kind=H100" in message
    assert "gpu-kind=B200" in message


def test_C016_more_gpus_than_the_nodes_have_are_refused_before_anything_waits(refused):
    assert "needs 8 GPUs on each node; Ray sees [4.0]" in refused["C016"]


@pytest.mark.acceptance
def test_C025_C051_C052_a_killed_driver_leaves_the_cluster_none_of_its_processes_and_the_nodes_free(cluster, study_on):
    study = study_on(pools=CPU_POOLS[:1], budget={"trials": 2})
    study.plan("escape")
    study.start("tune", "--address", cluster.address)
    study.await_file("mid_trial")
    members = study.members()
    assert len(members) == 10  # the driver, the warm process and the trial's 8
    study.driver.kill()
    took_s = await_gone(members)
    print(f"SIGKILL of a driver that had joined a cluster: {len(members)} processes gone after {took_s:.2f} s")
    assert cluster.ask("nodes") == len(NODES)
    study.plan("complete")
    study.start("tune", "--address", cluster.address)  # of the same name, at once
    assert study.wait() == 0, study.tail()
    assert study.results()[0].outcomes[Outcome.COMPLETED] == 2


@pytest.mark.acceptance
@pytest.mark.timeout(400)
def test_two_nodes_of_one_trial_are_measured_on_one_clock(cluster, study_on, tmp_path):
    """One scripted 300 W GPU of each node is the trial's: 600 W over both, and the difference of the clocks is bounded."""
    devices = environment(Scenario(H100_80GB, 2), folder=tmp_path)
    telemetry = {"vendors": ["nvidia"], "gpus": ["1"], "env": devices}
    pool = {"name": "both", "gpu": "cpu", "nodes": 2, "gpus_per_node": 1, "labels": SITE, "telemetry": telemetry}
    changes = {"launcher": "megatron_core", "pools": [pool], "global_batch_size": 8, "budget": {"trials": 1}}
    study = study_on(**changes, measurement={**MEASUREMENT, "steps": 10})
    study.start("tune", "--address", cluster.address)
    assert study.wait(360) == 0, study.tail()
    record = study.records()[0]  # a busy machine has it repeated
    assert record.metrics["pool_gpu_mean_power_w"] == pytest.approx(600.0, rel=0.01)
    assert record.metrics["pool_gpu_peak_power_w_1s"] == pytest.approx(600.0, rel=0.01)
    assert {"telemetry.cost.node0", "telemetry.cost.node1"} <= record.environment.keys()
    agree = record.environment["telemetry.clocks"]
    assert float(agree.split()[-2]) < 5.0


@pytest.mark.acceptance
def test_a_node_that_goes_away_ends_only_its_own_pool(cluster, study_on):
    """The last test on this cluster."""
    study = study_on(pools=CPU_POOLS, budget={"trials": 16})
    study.plan("slow")
    study.start("tune", "--address", cluster.address)
    until((study.state.path / "study.yaml").exists, 60, study.tail)
    until(lambda: sum(bool(results.records) for results in study.results()) == 2, 90, study.tail)
    begin_s = time.monotonic()
    cluster.ask("remove 2")
    assert study.wait(170) == 0, study.tail()
    small, large = study.results()
    assert small.end_reason == "budget: 16 trials"
    assert small.outcomes == {Outcome.COMPLETED: 16}
    assert large.end_reason.startswith("infrastructure: pool 'large' needs 1 node(s)")
    assert large.outcomes[Outcome.LOST] == 1
    assert cluster.ask("nodes") == len(NODES) - 1
    stall_s = max(after.ended_s - before.ended_s for before, after in pairwise(small.records))
    print(
        f"the other pool ended {time.monotonic() - begin_s:.0f} s later; its longest pause between two trials was {stall_s:.1f} s"
    )


@pytest.mark.acceptance
@pytest.mark.parametrize("gpu", ["cpu", "H100"])
def test_pools_of_one_machine_take_turns(tmp_path, gpu):
    pools = [{**pool, "gpu": gpu} for pool in CPU_POOLS]
    study = FaultStudy(tmp_path / "study", pools=pools, budget={"trials": 3})
    study.environment["CUDA_VISIBLE_DEVICES"] = "4,5,6,7,MIG-1234"
    study.plan("slow")
    try:
        study.start()
        assert study.wait() == 0, study.tail()
    finally:
        study.close()
    small, large = study.results()
    assert small.outcomes == large.outcomes == {Outcome.COMPLETED: 3}
    ordered = sorted(spans(small) + spans(large))
    assert all(before[1] <= after[0] + 0.5 for before, after in pairwise(ordered))
    assert [gpus_of(results.records[0]) for results in (small, large)] == (
        [["4", "5"], ["4", "5", "6", "7"]] if gpu == "H100" else [[], []]
    )


@pytest.mark.acceptance
def test_more_gpus_than_this_machine_has_are_refused(tmp_path):
    study = FaultStudy(tmp_path / "study", pools=[{"name": "big", "gpu": "H100", "gpus_per_node": 64}])
    study.environment.pop("CUDA_VISIBLE_DEVICES", None)
    study.plan("complete")
    try:
        ended = study.run("tune")
    finally:
        study.close()
    assert ended.returncode == 1
    assert "needs 64 GPUs on each node; Ray sees" in ended.stderr, ended.stderr
