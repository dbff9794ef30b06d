"""The searcher between Tune and the pools' studies, with slots that hold nothing."""

import pickle
import random
import threading
from dataclasses import replace
from types import SimpleNamespace

import pytest
from ray.exceptions import OutOfMemoryError
from ray.tune.search import Searcher

from autotune.contamination import Witness
from autotune.errors import InfrastructureError
from autotune.pool_study import STOPPED_BY_USER
from autotune.records import Phase, TrialResult
from autotune.searcher import StudySearcher
from autotune.trial import RESULT_KEY
from launchers.outcome import Outcome

from .study_cases import completed, failed, open_pool, study_spec

POOLS = [{"name": "a", "gpus_per_node": 2}, {"name": "b", "gpus_per_node": 4}]


class FakeSlots:
    """One slot per pool."""

    def __init__(self):
        self.leased, self.repaired, self.ended, self.left = set(), [], [], []
        self.died = None
        self.broken = False

    def lease(self, pool):
        if pool.name in self.leased:
            return None
        self.leased.add(pool.name)
        node_ids = [f"node-of-{pool.name}"]
        return SimpleNamespace(trial_agents=["agent"] * pool.nodes, pool=pool.name, node_ids=node_ids, used=pool.nodes)

    def release(self, slot):
        self.leased.remove(slot.pool)

    def repair(self, slot, *, anew=False):
        self.anew = anew
        self.repaired.append(slot.pool)
        if self.broken:
            raise InfrastructureError("node does not come back")

    def leave(self, slot, faults):
        self.left.append((slot.pool, faults))
        if self.broken:
            raise InfrastructureError("there is no other node")

    def end_trial(self, slot):
        self.ended.append(slot.pool)
        return self.died


@pytest.fixture
def made(tmp_path):
    def make(**fields):
        spec = study_spec(**{"pools": POOLS, "sampler": "grid", **fields})
        studies = [open_pool(spec, pool=number) for number in range(len(spec.pools))]
        slots, launched = FakeSlots(), []
        stopped = threading.Event()
        searcher = StudySearcher(spec, studies, slots, tmp_path, lambda study, proposal: launched.append(study.pool.name), stopped)
        return searcher, studies, slots, launched

    return make


def end(searcher, trial_id, result):
    searcher.on_trial_complete(trial_id, {RESULT_KEY: result})


def test_pools_run_at_the_same_time_and_none_twice(made):
    searcher, _, slots, launched = made()
    assert searcher.suggest("t1")["agents"] == ["agent"]
    assert searcher.suggest("t2") is not None
    assert searcher.suggest("t3") is None
    assert (launched, slots.leased) == (["a", "b"], {"a", "b"})
    end(searcher, "t1", completed())
    assert searcher.suggest("t4")["request"].trial == "case/a/1x2/1"


def test_C012_never_more_trials_than_slots_also_after_a_lost_one(made):
    searcher, _, slots, launched = made(pools=POOLS[:1])
    for number in range(2):
        assert searcher.suggest(f"t{number}") is not None
        assert searcher.suggest("more") is None
        end(searcher, f"t{number}", failed(Outcome.LOST))
    assert launched == ["a", "a"]
    assert slots.repaired == ["a", "a"]


def test_first_trial_of_a_pool_has_twice_the_time_to_start(made):
    searcher, *_ = made(pools=POOLS[:1])
    first = searcher.suggest("t1")["request"].limits.startup_s
    end(searcher, "t1", completed())
    assert first == 2 * searcher.suggest("t2")["request"].limits.startup_s


def test_finished_only_when_every_study_has_ended_and_nothing_runs(made):
    searcher, studies, *_ = made(budget={"trials": 1})
    searcher.suggest("t1")
    searcher.suggest("t2")
    assert searcher.suggest("t3") is None
    end(searcher, "t1", completed())
    assert searcher.suggest("t4") is None
    end(searcher, "t2", completed())
    assert searcher.suggest("t5") == Searcher.FINISHED
    assert [study.end_reason for study in studies] == ["budget: 1 trials"] * 2


@pytest.mark.parametrize(
    "report",
    [None, {}, {"score": 1.0}, {RESULT_KEY: None}, {RESULT_KEY: "N/A"}, {RESULT_KEY: float("nan")}],
    ids=["C001_none", "C004_empty", "C004_other_key", "C001_key_is_none", "C002_text", "C003_nan"],
)
def test_C001_to_C004_a_report_without_a_result_is_a_lost_trial_and_the_study_goes_on(made, report):
    searcher, studies, slots, _ = made(pools=POOLS[:1])
    searcher.suggest("t1")
    searcher.on_trial_complete("t1", report)
    record = studies[0].records[0]
    assert (record.outcome, record.detail) == (Outcome.LOST, "the Tune worker of this trial died")
    assert slots.ended == ["a"]
    assert searcher.suggest("t2") is not None


def test_unknown_trials_are_passed_over(made):
    searcher, studies, *_ = made()
    searcher.on_trial_complete("never suggested", {RESULT_KEY: completed()})
    assert studies[0].records == []


def test_a_node_that_does_not_come_back_ends_its_pool_only(made):
    searcher, studies, slots, _ = made()
    searcher.suggest("t1")
    slots.broken = True
    end(searcher, "t1", failed(Outcome.LOST))
    assert studies[0].end_reason == "infrastructure: node does not come back"
    assert searcher.suggest("t2")["request"].trial.startswith("case/b/")


def test_G004_ranks_that_ran_another_batch_than_they_were_given_measured_nothing(made):
    searcher, studies, *_ = made(pools=POOLS[:1])
    searcher.suggest("t1")
    result = completed()
    *before, last = result.steps
    end(searcher, "t1", replace(result, steps=(*before, replace(last, tokens=128))))
    record = studies[0].records[0]
    assert record.outcome is Outcome.CRASHED
    assert record.detail.startswith("step 8 trained 128 tokens and the study asks for 512: the ranks did not run the batch")


STUCK = "rank (pid 4711, state D) cannot be ended"


@pytest.mark.parametrize("others", [True, False])
def test_C032_F036_a_broken_node_is_left_and_the_configuration_is_not_blamed(made, others):
    searcher, studies, slots, _ = made()
    searcher.suggest("t1")
    slots.broken = not others
    end(searcher, "t1", replace(failed(Outcome.HUNG), witnesses=(Witness(0, lost=STUCK, broken=STUCK),)))
    assert slots.left == [("a", {0: STUCK})]
    assert studies[0].records[0].outcome is Outcome.LOST
    assert studies[0].end_reason == ("" if others else "infrastructure: there is no other node")
    next_ones = [searcher.suggest("t2"), searcher.suggest("t3")]
    assert [found["request"].trial for found in next_ones if found] == ["case/b/1x4/0"] + ["case/a/1x2/1"] * others


def test_a_completed_trial_on_a_node_that_then_breaks_keeps_its_result(made):
    searcher, studies, slots, _ = made()
    searcher.suggest("t1")
    end(searcher, "t1", replace(completed(), witnesses=(Witness(0, lost=STUCK, broken=STUCK),)))
    assert studies[0].records[0].outcome is Outcome.COMPLETED
    assert slots.left == [("a", {0: STUCK})]


def memory_ran_out_on(node):
    return OutOfMemoryError(f"2 worker(s) were killed due to the node running low on memory. Memory on the node (ID: {node}) was")


@pytest.mark.parametrize("seen_by", ["tune", "agent"])
def test_C034_memory_that_ran_out_on_a_trials_host_ends_it_as_oom_and_no_other_pools(made, seen_by):
    """Tune itself ends where Ray killed its worker; what runs elsewhere is lost, not blamed."""
    searcher, (first, second), slots, _ = made()
    searcher.suggest("t1")
    searcher.suggest("t2")
    if seen_by == "tune":
        searcher.abandon(memory_ran_out_on("node-of-a"))
        assert second.records[0].outcome is Outcome.LOST
    else:
        slots.died = memory_ran_out_on("node-of-a")
        searcher.on_trial_complete("t1", None, error=True)
    record = first.records[0]
    assert record.outcome is Outcome.OOM
    assert "the host ran out of memory (not the GPU)" in record.detail
    assert searcher.suggest("t3")["request"].trial.startswith("case/a/")


@pytest.mark.parametrize("agent_failed", [False, True])
def test_an_agent_that_failed_a_trial_is_replaced_even_if_it_answers_again(made, agent_failed):
    searcher, _, slots, _ = made()
    searcher.suggest("t1")
    end(searcher, "t1", replace(failed(Outcome.LOST), agent_failed=agent_failed))
    assert slots.anew is agent_failed


def test_C007_trials_stopped_by_the_user_are_lost_and_no_failure_of_theirs(made):
    searcher, studies, slots, _ = made()
    searcher.suggest("t1")
    searcher.suggest("t2")
    searcher._stopped_by_user.set()
    end(searcher, "t1", failed(Outcome.STOPPED))
    end(searcher, "t2", completed())
    assert searcher.suggest("t3") == Searcher.FINISHED
    stopped, done = studies[0].records[0], studies[1].records[0]
    assert (stopped.outcome, stopped.detail, done.outcome) == (Outcome.LOST, STOPPED_BY_USER, Outcome.COMPLETED)
    assert stopped.config in {
        studies[0].table.config(row) for row in range(len(studies[0].table)) if studies[0].candidates._open[row]
    }
    assert slots.repaired == []


def test_wall_time_ends_the_study_but_a_fault_of_its_last_trial_stays_a_fault(made, monkeypatch):
    now = [1000.0]
    monkeypatch.setattr("autotune.searcher.time.time", lambda: now[0])
    searcher, studies, *_ = made(pools=POOLS[:1], budget={"wall_time_s": 60})
    searcher.suggest("t1")
    now[0] += 61
    assert searcher.suggest("t2") is None
    end(searcher, "t1", failed(Outcome.OOM))
    assert studies[0].records[0].outcome is Outcome.OOM
    assert searcher.suggest("t3") == Searcher.FINISHED
    assert studies[0].end_reason == "budget: 60 s of wall time"


def test_tune_may_pickle_and_save_it(made, tmp_path):
    searcher, *_ = made()
    assert pickle.loads(pickle.dumps(searcher)).__dict__ == {}
    searcher.save(str(tmp_path / "state"))
    assert not (tmp_path / "state").exists()


def test_a_result_of_the_wrong_kind_is_no_result(made):
    searcher, studies, *_ = made(pools=POOLS[:1])
    searcher.suggest("t1")
    end(searcher, "t1", TrialResult(Outcome.OOM, "why"))
    assert studies[0].records[0].detail == "why"


CONFIRMED = {"budget": {"trials": 3}, "confirm": {"top": 1, "repeats": 2}}


def domains(*nodes):
    """A rack for each."""
    return [{"name": f"rack-{number}", "nodes": fed, "limit_w": 1e6} for number, fed in enumerate(nodes)]


def played(searcher, next_to_end):
    """Runs a study to its end; (pool, phase, first tick, last tick) of each trial."""
    running, spans = {}, []
    for tick in range(400):
        while isinstance(launched := searcher.suggest(f"t{tick}.{len(running)}"), dict):
            running |= dict.fromkeys(searcher.in_flight.keys() - running.keys(), tick)
        if not running:
            assert launched == Searcher.FINISHED
            return spans
        trial_id = next_to_end(list(running))
        flight = searcher.in_flight[trial_id]
        spans.append((flight.study.pool.name, flight.proposal.phase, running.pop(trial_id), tick))
        end(searcher, trial_id, completed())
    raise AssertionError("the study did not end")


def disturbed(spans):
    """Confirming trials beside which one of the other pool ran."""
    confirming = [span for span in spans if span[1] is Phase.CONFIRM]
    return [one for one in confirming for other in spans if one[0] != other[0] and one[2] <= other[3] and other[2] <= one[3]]


# Which of the running trials ends next.
ORDERS = {"oldest": lambda ids: ids[0], "newest": lambda ids: ids[-1], "any": random.Random(1).choice}
ROOM = {"name": "room", "nodes": ["rack-0", "rack-1"], "limit_w": 1e6}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(
    ("feeds", "alone"),
    [
        (domains(["a", "b"]), True),
        ([*domains(["a"], ["b"]), ROOM], True),
        (domains(2), True),
        (domains(["a"], ["b"]), False),
        ([], False),
    ],
    ids=["one rack", "two racks of one room", "a rack for nodes of any pool", "two racks", "none"],
)
def test_confirming_trials_run_alone_in_their_power_domain_and_the_study_ends(made, order, feeds, alone):
    searcher, studies, slots, _ = made(power_domains=feeds, **CONFIRMED)
    spans = played(searcher, ORDERS[order])
    assert [study.end_reason for study in studies] == ["budget: 3 trials"] * 2
    confirming = [pool for pool, phase, *_ in spans if phase is Phase.CONFIRM]
    assert min(confirming.count(pool) for pool in "ab") >= 2
    assert bool(disturbed(spans)) is not alone
    assert not slots.leased


def waiting(searcher):
    """Pool a has explored and waits to confirm, while b still explores."""
    searcher.suggest("a1")
    searcher.suggest("b1")
    for number in range(2, 5):
        end(searcher, f"a{number - 1}", completed(0.1 * number))
        assert (searcher.suggest(f"a{number}") is None) == (number == 4)


def test_one_that_waits_holds_no_slot_and_is_counted_from_its_launch(made, monkeypatch):
    now = [1000.0]
    monkeypatch.setattr("autotune.searcher.time.time", lambda: now[0])
    searcher, _, slots, launched = made(power_domains=domains(["a", "b"]), **CONFIRMED)
    waiting(searcher)
    assert (slots.leased, launched) == ({"b"}, ["a", "b", "a", "a"])
    now[0] += 500.0
    end(searcher, "b1", completed())
    assert searcher.suggest("next") is not None
    flight = searcher.in_flight["next"]
    assert (flight.study.pool.name, flight.proposal.phase, flight.proposal.proposed_s) == ("a", Phase.CONFIRM, 1500.0)
    assert searcher.suggest("b2") is None, "b waits while a confirms"
    end(searcher, "next", completed())
    assert searcher.suggest("b2")["request"].trial.startswith("case/b/")


def test_pools_around_one_that_waits_launch_nothing_so_that_it_waits_for_running_trials_only(made):
    pools = [*POOLS, {"name": "c", "gpus_per_node": 2}]
    one_rack = {**CONFIRMED, "budget": {"trials": 2}, "power_domains": domains(["a", "b", "c"])}
    searcher, _, slots, launched = made(pools=pools, **one_rack)
    for trial in ("a1", "b1", "c1"):
        assert searcher.suggest(trial) is not None
    end(searcher, "a1", completed())
    assert searcher.suggest("a2") is not None
    end(searcher, "a2", completed())
    assert searcher.suggest("a waits") is None
    end(searcher, "b1", completed())
    assert searcher.suggest("b still explores, and would keep a waiting") is None
    end(searcher, "c1", completed())
    assert searcher.suggest("now")["request"].trial.startswith("case/a/")
    assert (slots.leased, launched) == ({"a"}, ["a", "b", "c", "a", "a"])


def test_one_that_waits_does_not_keep_a_stopped_study_from_ending(made):
    searcher, studies, _, _ = made(power_domains=domains(["a", "b"]), **CONFIRMED)
    waiting(searcher)
    searcher._stopped_by_user.set()
    assert searcher.suggest("more") is None
    end(searcher, "b1", failed(Outcome.STOPPED))
    assert searcher.suggest("more") == Searcher.FINISHED
    assert [record.phase for record in studies[0].records].count(Phase.CONFIRM) == 0
    assert studies[0].results().running == 0


def requests(made, **pool):
    """What a study's exploring and confirming trials are asked for."""
    measurement = {"steps": 8, "warmup_steps": 2, "trial_timeout_s": 100}
    searcher, *_ = made(pools=[{"name": "a", "gpus_per_node": 2, **pool}], measurement=measurement, **CONFIRMED)
    found = []
    while isinstance(launched := searcher.suggest(f"t{len(found)}"), dict):
        end(searcher, f"t{len(found)}", completed(10.0))
        found.append(launched["request"])
    return found[:3], found[3:]


def test_a_confirming_trial_is_asked_for_more_steps_and_time_where_gpus_have_to_warm_up(made):
    exploring, confirming = requests(made, telemetry={"vendors": ["nvidia"]})
    assert {(one.job["steps"], one.soak, one.limits.trial_s) for one in exploring} == {(8, None, 100.0)}
    for one in confirming:
        assert one.soak.timeout_s == 600.0
        assert (one.measurement.steps, one.limits.trial_s) == (16, 2 * 100.0 + 600.0)
        assert one.job["steps"] == one.most_steps == pytest.approx(16 + 1.25 * 600.0 / 10.1, abs=2)


def test_on_a_cpu_pool_a_confirming_trial_takes_as_many_steps_as_ever(made):
    _, confirming = requests(made)
    assert {one.job["steps"] for one in confirming} == {16}
