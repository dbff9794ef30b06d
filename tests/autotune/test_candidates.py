"""The candidate table's bookkeeping: every candidate is open until it is proposed."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from optuna.distributions import IntDistribution

from autotune.candidates import Candidates, candidate_table
from autotune.launchable import accepted
from search_spaces.legality import check
from search_spaces.normalise import normalise

from .study_cases import STEP_LIMITED, NoLauncher, study_spec

SPEC = study_spec()
TABLE = candidate_table(SPEC, SPEC.pools[0])


def fresh(spec=SPEC, table=TABLE):
    return Candidates(table, spec.baseline, np.ones(len(table), dtype=bool))


def test_the_table_holds_only_legal_candidates_and_each_once():
    configs = [TABLE.config(row) for row in range(len(TABLE))]
    assert len(configs) == len(set(configs)) == 46
    assert not any(check(TABLE.workload, config) for config in configs)


def test_indices_and_configurations_are_two_ways_to_say_the_same():
    candidates = fresh()
    for row in range(len(TABLE)):
        config = TABLE.config(row)
        assert candidates.config(candidates.params(config)) == config


@settings(max_examples=200, deadline=None)
@given(st.fixed_dictionaries({name: st.integers(0, d.high) for name, d in fresh().distributions.items()}))
def test_any_point_is_a_candidate_or_illegal(params):
    candidates = fresh()
    config = candidates.config(params)
    assert normalise(TABLE.workload, config) == config
    assert candidates.is_open(config) == (not check(TABLE.workload, config))


def test_every_knob_with_a_choice_is_an_index():
    distributions = fresh().distributions
    assert distributions == {
        "tensor_model_parallel_size": IntDistribution(0, 2),
        "pipeline_model_parallel_size": IntDistribution(0, 2),
        "micro_batch_size": IntDistribution(0, 3),
        "use_distributed_optimizer": IntDistribution(0, 1),
    }
    one = study_spec(search={"tensor_model_parallel_size": [2], "micro_batch_size": [1, 2]})
    assert list(fresh(one, candidate_table(one, one.pools[0])).distributions) == ["micro_batch_size"]


def test_seen_is_closed_and_reopened():
    candidates, config = fresh(), TABLE.config(7)
    candidates.mark_seen(config)
    assert (candidates.left, candidates.is_open(config), candidates.is_seen(config)) == (45, False, True)
    candidates.mark_seen(config)
    assert candidates.left == 45
    candidates.reopen(config)
    assert (candidates.left, candidates.is_open(config), candidates.is_seen(config)) == (46, True, False)


def test_nearest_open_is_the_point_itself_then_a_neighbour_then_none():
    candidates = fresh()
    wanted = candidates.params(TABLE.config(20))
    found = []
    while (params := candidates.nearest_open(wanted)) is not None:
        found.append(params)
        candidates.mark_seen(candidates.config(params))
    assert found[0] == wanted
    ranges = {name: d.high for name, d in candidates.distributions.items()}
    distances = [sum(abs(p[name] - wanted[name]) / ranges[name] for name in ranges) for p in found]
    assert distances == sorted(distances)
    assert len(found) == 46
    assert candidates.first_open() is None


def test_first_open_follows_the_table():
    candidates = fresh()
    candidates.mark_seen(TABLE.config(0))
    assert candidates.config(candidates.first_open()) == TABLE.config(1)


def test_what_the_launcher_refuses_is_not_open():
    launcher = NoLauncher(lambda config: config.micro_batch_size > 1)
    allowed, refused = accepted(TABLE, launcher)
    assert refused == {STEP_LIMITED: int((~allowed).sum())}
    candidates = Candidates(TABLE, SPEC.baseline, allowed)
    assert candidates.left == sum(TABLE.config(row).micro_batch_size == 1 for row in range(len(TABLE)))


def test_knobs_not_searched_keep_the_baseline():
    spec = study_spec(baseline={"precision": "fp32", "tensor_model_parallel_size": 2})
    table = candidate_table(spec, spec.pools[0])
    assert {table.config(row).precision for row in range(len(table))} == {"fp32"}


def test_another_spelling_is_the_same_candidate():
    spec = study_spec(search={"tensor_model_parallel_size": [1, 2], "sequence_parallel": [False, True]})
    table = candidate_table(spec, spec.pools[0])
    candidates = fresh(spec, table)
    one = candidates.config({"tensor_model_parallel_size": 0, "sequence_parallel": 1})
    assert one == candidates.config({"tensor_model_parallel_size": 0, "sequence_parallel": 0})
    candidates.mark_seen(one)
    assert not candidates.is_open(candidates.config({"tensor_model_parallel_size": 0, "sequence_parallel": 0}))
