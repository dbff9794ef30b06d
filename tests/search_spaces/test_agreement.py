"""Our verdicts against Megatron's own on random cases."""

from __future__ import annotations

import itertools
import os
import random
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.legality_agreement import BEFORE_RULES, EXCEPTIONS, ONLY_OURS, UNASKED, ask_all, compare, lacking
from benchmarks.legality_aimed import AIMS, aimed
from benchmarks.legality_cases import broken, legal, sample
from benchmarks.legality_space import WORKLOADS
from search_spaces.columns import Columns
from search_spaces.config import TrialConfig
from search_spaces.legality import RULES
from search_spaces.model import Workload
from search_spaces.space import SearchSpace
from tests.search_spaces.test_legal_properties import layers_per_chunk

LARGEST_WORLD = 256  # larger ones cost the fake process group seconds; the benchmark goes up to 4096
ROOT = Path(__file__).parents[2]
PYTHON_019 = os.environ.get("AUTOTUNE_MEGATRON_019_PYTHON", "")
MEGATRON_LM = os.environ.get("AUTOTUNE_MEGATRON_LM", "")


def agreement(command: list[str], megatron: str, count: int) -> dict[str, Any]:
    """The comparison on freshly drawn cases; the seed is in the report."""
    seed = random.SystemRandom().randrange(2**32)
    drawn = (case for case in sample(2 * count, megatron, seed, per_rule=0) if case["world_size"] <= LARGEST_WORLD)
    cases = list(itertools.islice(drawn, count))
    answers = [answer for answer in ask_all(command, cases, workers=2) if answer is not None]
    assert len(answers) == count
    return {**compare(cases, answers, megatron, asked_arguments=megatron == "0.19" or bool(MEGATRON_LM)), "seed": seed}


@pytest.mark.timeout(900)
@pytest.mark.skipif(sys.version_info >= (3, 12), reason="Megatron-Core 0.16 is installed for Python 3.11 only")
@pytest.mark.parametrize("count", [100, pytest.param(300, marks=pytest.mark.acceptance)])
def test_sample_against_megatron_016(count: int) -> None:
    pytest.importorskip("megatron.core", reason="needs Megatron-Core")
    command = [sys.executable, str(ROOT / "benchmarks" / "megatron_016_oracle.py")]
    report = agreement([*command, *(["--megatron-lm", MEGATRON_LM] if MEGATRON_LM else [])], "0.16", count)
    assert not report["wrong"], report
    assert report["counts"]["megatron valid"] >= count // 4


def test_every_rule_has_cases_aimed_at_it() -> None:
    names = {rule.__name__ for rule in RULES} - set(ONLY_OURS) | BEFORE_RULES
    assert names == set(AIMS)
    assert all(set(reasons) <= names for reasons in UNASKED.values())


def test_an_aimed_case_is_one_field_from_a_legal_one() -> None:
    rng = random.Random(7)
    near = [legal(rng, "0.19") for _ in range(20)]
    pairs = list(aimed("batch_over_replicas", 3, near, lambda case: broken(case, "0.19"), rng))
    assert len(pairs) == 3
    for case, bad in pairs:
        assert broken(case, "0.19") == [] and broken(bad, "0.19") == ["batch_over_replicas"]
        assert len([name for name in bad if bad[name] != case.get(name)]) == 1


def test_rules_asked_too_seldom_are_told() -> None:
    case = legal(random.Random(1), "0.19")
    report = compare([case], [{"verdict": "valid"}], "0.19", asked_arguments=True) | {"per_rule": 30}
    assert "batch_over_replicas" in lacking(report)
    assert not set(lacking(report)) & {*EXCEPTIONS, *UNASKED["0.19"]}
    assert compare([case], [{"verdict": "invalid"}], "0.19", asked_arguments=True)["counts"]["false accept"] == 1


def test_sample_against_megatron_019(shared: Path) -> None:
    oracle = shared / "tools" / "megatron_oracle.py"
    _skip_without(oracle)
    report = agreement([PYTHON_019, str(oracle)], "0.19", 40)
    assert not report["wrong"], report


@pytest.mark.acceptance
@pytest.mark.timeout(7200)
def test_300_cases_against_megatron_019(shared: Path) -> None:
    oracle = shared / "tools" / "megatron_oracle.py"
    _skip_without(oracle)
    report = agreement([PYTHON_019, str(oracle)], "0.19", 300)
    assert not report["wrong"], report


@pytest.mark.acceptance
def test_every_accepted_candidate_of_large_spaces(large_workload: Workload) -> None:
    table = SearchSpace(large_workload, "auto").table()
    columns: Columns = table.columns
    world = large_workload.world_size
    assert len(table) >= 100_000
    assert (columns.model_ranks * columns.dp == world).all()
    assert (columns.expert_ranks * (world // columns.expert_ranks) == world).all()
    for row in random.Random(0).sample(range(len(table)), 300):
        config = table.config(row)
        assert TrialConfig.from_argv(config.argv()) == config
        assert table.find(config) == row
        layers = layers_per_chunk(large_workload, config)
        alone = config.account_for_embedding_in_pipeline_split + config.account_for_loss_in_pipeline_split
        assert min(layers) >= 0
        assert sum(layers) == large_workload.model.num_layers
        assert layers.count(0) <= alone  # Megatron's own bound: a chunk may hold the embedding or the loss by itself


def _skip_without(oracle: Path) -> None:
    """Skip where Megatron 0.19 cannot be asked."""
    if not PYTHON_019 or not oracle.exists():
        pytest.skip(
            "set AUTOTUNE_MEGATRON_019_PYTHON to a Python 3.12 with megatron-core[training] 0.19; also needs the oracle script"
        )


@pytest.fixture(params=["Llama-3.1-405B on 16,384 GPUs", "DeepSeek-V3 on 2,048 GPUs"])
def large_workload(request: pytest.FixtureRequest) -> Workload:
    """The two largest workloads of the speed benchmark."""
    return WORKLOADS[request.param]
