"""A record is stored and read back as it was, whatever is in it."""

import json
import math
from pathlib import Path

import optuna
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.records import RECORD_ATTRIBUTE, Phase, TrialRecord, TrialResult, record_from_trial, record_to_json
from launchers.base import StepRecord
from launchers.outcome import Outcome
from search_spaces.config import TrialConfig
from search_spaces.legality import Violation

numbers = st.floats(allow_nan=False)
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
step_records = st.builds(
    StepRecord,
    iteration=st.integers(1, 100),
    time_s=numbers,
    step_s=numbers,
    loss=numbers,
    grad_norm=st.none() | numbers,
    tokens=st.integers(0, 2**40),
    peak_memory_gib=st.none() | numbers,
)
configs = st.builds(
    TrialConfig,
    tensor_model_parallel_size=st.sampled_from([1, 2, 8]),
    recompute_modules=st.none() | st.just(("core_attn", "mlp")),
    environment=st.lists(st.tuples(texts, texts), max_size=2).map(tuple),
)
records = st.builds(
    TrialRecord,
    study=texts,
    number=st.integers(0, 10**6),
    phase=st.sampled_from(Phase),
    config=configs,
    argv=st.lists(texts, max_size=3).map(tuple),
    outcome=st.sampled_from(Outcome),
    detail=texts,
    value=st.none() | numbers,
    metrics=st.dictionaries(texts, numbers, max_size=3),
    violations=st.lists(st.builds(Violation, texts, numbers, texts), max_size=2).map(tuple),
    steps=st.lists(step_records, max_size=3).map(tuple),
    environment=st.dictionaries(texts, texts, max_size=2),
    log_folder=st.none() | st.just(Path("/logs/trial-0001")),
)


def stored(text):
    return optuna.trial.create_trial(value=1.0, user_attrs={} if text is None else {RECORD_ATTRIBUTE: text})


@given(records)
def test_a_record_survives_the_storage(record):
    assert record_from_trial(stored(record_to_json(record))) == record


def record(**fields):
    return TrialRecord("s", 1, Phase.EXPLORE, TrialConfig(), (), Outcome.NAN, **fields)


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_not_finite_survives(loss):
    text = record_to_json(record(steps=(StepRecord(1, 0.0, 0.1, loss, None, 1, None),)))
    found = record_from_trial(stored(text)).steps[0].loss
    assert found == loss or (math.isnan(found) and math.isnan(loss))
    assert json.loads(text)["steps"][0]["iteration"] == 1


def test_a_trial_whose_driver_died_has_no_record():
    assert record_from_trial(stored(None)) is None


def test_environment_has_one_entry_per_node_and_field():
    result = TrialResult(Outcome.COMPLETED, "", nodes=({"label": "a", "cpus": 4}, {"label": "b"}))
    assert result.environment == {"node0.label": "a", "node0.cpus": "4", "node1.label": "b"}
