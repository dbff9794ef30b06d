"""A pool with several node counts: a study for each, in turns on one slot, and the report that compares them."""

from __future__ import annotations

import io
import json
import threading
from types import SimpleNamespace
from typing import Any

import optuna
import pytest
import yaml
from optuna.storages import InMemoryStorage
from typer.testing import CliRunner

from autotune import placement, progress
from autotune import study as study_module
from autotune.cli import app
from autotune.errors import SpecError
from autotune.placement import Slot, Slots
from autotune.pool_study import PoolStudy
from autotune.progress import Progress
from autotune.results import read_driver, read_results
from autotune.searcher import StudySearcher
from autotune.simulation import simulated
from autotune.spec import StudySpec, pool_key
from autotune.state_folder import StateFolder
from autotune.storage import open_storage
from autotune.sync import intervals_csv
from autotune.trial import RESULT_KEY
from launchers.outcome import Outcome

from .study_cases import NoLauncher, completed, failed, study_data, study_spec
from .test_guards import NODE
from .test_guards import spec as guarded

COUNTED = {"name": "h", "gpus_per_node": 2, "nodes": [2, 1, 4]}
ALONE = {"name": "other", "gpus_per_node": 2}


def spec_of(**fields: Any) -> StudySpec:
    return study_spec(**{"pools": [COUNTED, ALONE], "sampler": "grid", **fields})


def opened(spec: StudySpec, storage: Any = None) -> list[PoolStudy]:
    """Every study of a spec, with a launcher that starts nothing."""
    kept = storage or InMemoryStorage()
    return [PoolStudy(spec, pool, NoLauncher(), kept, lambda study, record: None) for pool in spec.studied_pools]


def slots_of(*pools: Any) -> Slots:
    """A slot for each pool, with agents that are only names."""
    slots = Slots(None, "case")  # type: ignore[arg-type]
    for pool in pools:
        names = [f"{pool.name}{rank}" for rank in range(pool.nodes)]
        slots._slots.append(Slot(pool, None, agents=names, node_ids=names))  # type: ignore[arg-type]
    return slots


def largest(spec: StudySpec) -> list[Any]:
    return list(study_module._hosts(spec, opened(spec)))


def test_each_node_count_is_a_study_of_its_own_over_its_own_candidates(tmp_path):
    spec = spec_of()
    studies = study_module.open_studies(spec, StateFolder(tmp_path), InMemoryStorage(), lambda study, record: None)
    assert [study.name for study in studies] == ["case/h/2x2", "case/h/1x2", "case/h/4x2", "case/other/1x2"]
    assert [study.workload.world_size for study in studies] == [4, 2, 8, 2]
    assert len({len(study.table) for study in studies[:3]}) == 3


def test_the_slot_of_a_pool_holds_as_many_nodes_as_its_largest_unended_study_takes():
    spec = spec_of()
    studies = opened(spec)
    assert [(host.name, host.nodes) for host in study_module._hosts(spec, studies)] == [("h", 4), ("other", 1)]
    studies[2].end_reason = studies[3].end_reason = "budget"
    assert [(host.name, host.nodes) for host in study_module._hosts(spec, studies)] == [("h", 2)]
    twin = simulated(spec)
    assert [(host.name, host.world_size) for host in study_module._hosts(twin, opened(twin))] == [("h", 1), ("other", 1)]


def test_the_node_counts_of_a_pool_take_turns_on_the_first_nodes_of_its_slot_and_other_pools_run_beside_them(tmp_path):
    spec = spec_of(budget={"trials": 2})
    studies = opened(spec)
    searcher = StudySearcher(spec, studies, slots_of(*largest(spec)), tmp_path, lambda *_: None, threading.Event())
    seen, folders, number = [], [], 0
    while isinstance(launched := searcher.suggest(f"t{number}"), dict) or searcher.in_flight:
        if isinstance(launched, dict):
            seen.append((launched["request"].trial, launched["agents"]))
            folders.append(launched["request"].log_folder)
        running = [flight.study.pool.name for flight in searcher.in_flight.values()]
        assert len(set(running)) == len(running)
        number += 1
        if len(running) == 2 or launched is None:
            searcher.on_trial_complete(next(iter(searcher.in_flight)), {RESULT_KEY: completed()})
    agents = {trial.rpartition("/")[0]: agents for trial, agents in seen}
    assert agents == {
        "case/h/2x2": ["h0", "h1"],
        "case/h/1x2": ["h0"],
        "case/h/4x2": ["h0", "h1", "h2", "h3"],
        "case/other/1x2": ["other0"],
    }
    counts = [trial.split("/")[2] for trial, _ in seen if "/h/" in trial]
    assert counts == ["2x2", "1x2", "4x2"] * 2
    assert len(set(folders)) == len(folders) == 8
    assert {folder.parent.name for folder in folders} == {"h@2", "h@1", "h@4", "other"}


def test_only_the_nodes_of_the_lost_trial_are_repaired(monkeypatch):
    spec = spec_of(pools=[COUNTED])
    slots = slots_of(*largest(spec))
    asked, started = [], []
    monkeypatch.setattr(placement, "_answers", lambda agent: asked.append(agent) or False)
    monkeypatch.setattr(placement, "ray", SimpleNamespace(kill=lambda agent: None))
    monkeypatch.setattr(slots, "_start_agent", lambda slot, rank: started.append(rank))
    slot = slots.lease(spec.studied_pools[0])
    assert slots.lease(spec.studied_pools[2]) is None
    slots.repair(slot)
    assert (asked, started) == (["h0", "h1"], [0, 1])
    slots.release(slot)
    assert slots.lease(spec.studied_pools[2]).trial_agents == ["h0", "h1", "h2", "h3"]


def guarded_at(limit_w: float) -> StudySpec:
    """Three nodes at 400 W per GPU draw 13,667 W at the wall, two 9,111 W, one 4,556 W."""
    pool = {"name": "h", "gpu": "h200", "nodes": [1, 2, 3], "gpus_per_node": 8, "node_overhead_w": 1000, "psu_efficiency": 0.9}
    feed = {"name": "rack", "nodes": ["h"], "limit_w": limit_w}
    return simulated(guarded(pools=[pool], power_domains=[feed], global_batch_size=96))


def test_a_node_count_at_which_nothing_keeps_a_guard_is_left_out_and_named(tmp_path):
    spec, storage = guarded_at(9200.0), InMemoryStorage()
    studies = study_module.open_studies(spec, StateFolder(tmp_path), storage, lambda study, record: None)
    assert [study.pool.nodes for study in studies] == [1, 2]
    assert len(optuna.get_all_study_names(storage)) == 2
    bound = f"at the wall, rack may draw {NODE.wall_w(400.0 * 24, 3):,.0f} W or more"
    for study in studies:
        (said,) = [note for note in study.results().notes if note.startswith("Not tuned on 3 nodes: power_domains.rack: ")]
        assert bound in said
        assert "gpu_power_limit_w" in said


def test_where_no_node_count_keeps_a_guard_the_study_is_refused_and_nothing_is_kept(tmp_path):
    path = tmp_path / "study.yaml"
    path.write_text(yaml.safe_dump(guarded_at(4000.0).model_dump(mode="json", exclude_defaults=True)))
    result = CliRunner().invoke(app, ["tune", str(path), "--detach", "--state", str(tmp_path / "state")])
    assert result.exit_code == 2, result.output
    message = result.stderr.splitlines()
    assert message[0].startswith(
        "error: power_domains.rack: nothing can be launched under 4,000 W: at the wall, rack may draw 4,556 W or more"
    )
    assert message[1].startswith("hint: search lower values of gpu_power_limit_w")
    folder = StateFolder(tmp_path / "state" / "guarded-simulated")
    assert all(name.endswith("/drivers") for name in optuna.get_all_study_names(open_storage(None, folder.path)))


def test_what_else_is_wrong_with_a_node_count_is_refused(tmp_path):
    spec, storage = spec_of(), InMemoryStorage()
    opened(spec, storage)
    changed = spec_of(search={"micro_batch_size": [1, 2]})
    with pytest.raises(SpecError, match="case/h/2x2"):
        study_module.open_studies(changed, StateFolder(tmp_path), storage, lambda study, record: None)


# Tokens of a step are 512: 4 ranks make 5,069 tokens/s in total in 0.101 s.
SECONDS = {2: 0.1, 1: 0.3, 4: 0.102}


@pytest.fixture
def root(tmp_path):
    spec, folder = spec_of(pools=[COUNTED]), StateFolder(tmp_path / "case")
    folder.write_spec(spec)
    for study in opened(spec, open_storage(None, folder.path)):
        for result in (completed(2 * SECONDS[study.pool.nodes]), failed(Outcome.OOM), completed(SECONDS[study.pool.nodes])):
            study.finish(study.propose(), result)
        study.close()
    return tmp_path


def run(root, *arguments):
    return CliRunner().invoke(app, [*arguments, "--state", str(root)], env={"COLUMNS": "200"})


def test_best_says_which_node_count_trains_fastest_and_from_which_it_is_not_told_apart(root):
    found = json.loads(run(root, "best", "case", "--json").stdout)
    assert (found["overall"], found["overall_nodes"]) == ("h", 2)
    assert [(pool["pool"], pool["nodes"]) for pool in found["pools"]] == [("h", 2), ("h", 1), ("h", 4)]
    lines = run(root, "best", "case").stdout.splitlines()
    assert lines[-1] == "Most tokens/s in total: pool h on 2 nodes, 5,069 tokens/s; not told apart from h on 4 nodes"
    rows = [line.split()[:3] for line in lines[-4:-1]]
    assert rows == [["h", "2", "5,069"], ["h", "1", "1,690"], ["h", "4", "4,970"]]


def test_export_takes_the_fastest_node_count_or_the_one_asked_for(root):
    for arguments, nodes in (((), 2), (("--nodes", "4"), 4), (("--pool", "h", "--nodes", "1"), 1)):
        found = json.loads(run(root, "export", "case", "--json", *arguments).stdout)
        assert (found["nodes"], found["world_size"]) == (nodes, 2 * nodes)
    refused = run(root, "export", "case", "--nodes", "3")
    assert refused.exit_code == 2
    assert "nodes: the study has no results at such a node count (got 3)" in refused.stderr
    assert "hint: pools of case: h, 2 nodes; h, 1 node; h, 4 nodes" in refused.stderr


def test_status_and_the_table_of_times_tell_the_node_counts_apart(root):
    folder = StateFolder(root / "case")
    spec = folder.read_spec()
    assert [result.study for result in read_results(spec, folder)] == ["case/h/2x2", "case/h/1x2", "case/h/4x2"]
    with study_module.driving(spec, folder):
        assert read_driver(spec, folder) is not None
    rows = [line.split(",")[:2] for line in intervals_csv(spec, folder).splitlines()[1:]]
    assert rows == [[str(number), pool_key(spec, pool)] for pool in spec.studied_pools for number in range(3)]


def test_the_command_of_trial_1_is_shown_for_each_node_count(tmp_path):
    path = tmp_path / "study.yaml"
    path.write_text(yaml.safe_dump(study_data(pools=[COUNTED])))
    shown = run(tmp_path, "tune", str(path), "--print-command").stdout
    for nodes in COUNTED["nodes"]:
        assert f"# pool h, {'1 node' if nodes == 1 else f'{nodes} nodes; run it on each of the {nodes} nodes'}" in shown
        assert (tmp_path / "case" / "first-trial" / f"h@{nodes}").is_dir()


def test_progress_names_the_node_count(monkeypatch):
    spec = spec_of(pools=[COUNTED])
    studies = opened(spec)
    studies[1].finish(studies[1].propose(), completed())
    shown = Progress(progress.Console(), spec)
    shown._studies = studies
    assert "best on h, 1 node: " in shown._summary()


def test_progress_tells_once_what_cannot_be_measured_here():
    spec = spec_of(pools=[COUNTED], objective={"tokens_per_s_per_gpu": 1.0, "joules_per_token": -1.0})
    (study, *_), stream = opened(spec), io.StringIO()
    shown = Progress(progress.Console(file=stream, width=60), spec)
    for _ in range(2):
        shown.ended(study, study.finish(study.propose(), completed()))
    first, note, second = stream.getvalue().splitlines()
    assert note == f"{study.name}: objective: without joules_per_token, which cannot be measured on pool h."
    assert "trial 0" in first and "trial 1" in second
