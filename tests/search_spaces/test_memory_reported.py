"""Memory that others measured or ran out of, each case named by its number in the collection of real situations."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from search_spaces import memory
from search_spaces.case import read_case
from search_spaces.columns import Columns
from search_spaces.memory import MemoryTable, Software
from search_spaces.memory.outside import CONTEXT_GIB
from search_spaces.normalise import normalise
from tests.search_spaces.memory_cases import Case
from tests.search_spaces.reported_runs import (
    DEEPSEEK_16B,
    DEEPSEEK_PROXY,
    FULL,
    GPT_2,
    GPT_7B,
    LLAMA_3B,
    LLAMA_7B,
    LLAMA_70B,
    MIXTRAL,
    QWEN_7B,
    QWEN_14B,
    RECOMPUTED,
    SMALL_EXPERTS,
)

FUSED = Software(gradient_accumulation_fusion=True)
REGRESSION = Software(hidden_dropout=True, attention_dropout=True)
NATIVE = Software(gradient_accumulation_fusion=True, cross_entropy="native")
IN_PLACE = Software(gradient_accumulation_fusion=True, cross_entropy="te")
TORCH = Software(cross_entropy="torch", separate_main_parameters=False)
OLD = Software(flash_attention=False, hidden_dropout=True, attention_dropout=True)

DURING_A_RUN = {"B029"}
"""Cases about a run in progress, which no prediction can know; `tests/autotune/test_memory_growth.py` runs them."""

WITHIN: dict[str, tuple[Case, Software, int, float, float]] = {
    "B002": ({**GPT_7B, "pp": 4, "vpp": 8, "mbs": 1}, REGRESSION, -1, 47.9, 70.4),
    "B003": ({**GPT_7B, "pp": 4, "vpp": 8, "mbs": 1}, REGRESSION, -1, 47.9, 70.5),
    "B005": ({**GPT_7B, "tp": 4, "mbs": 2}, REGRESSION, -1, 46.1, 67.7),
    "B007": ({**MIXTRAL, "ep": 4, "gbs": 1024}, FUSED, -1, 21.0, 30.9),
    "B009": ({**MIXTRAL, "ep": 8, "vpp": 8, "etp": 1, "gbs": 256}, FUSED, -1, 28.1, 41.3),
    "B010": (SMALL_EXPERTS, NATIVE, -1, 47.6, 70.0),
    "B011": ({**SMALL_EXPERTS, **RECOMPUTED}, NATIVE, -1, 39.0, 57.3),
    "B013": (DEEPSEEK_PROXY, IN_PLACE, -1, 79.9, 117.4),
    "B015": ({**LLAMA_7B, "pp": 2, "mbs": 2, "gbs": 2048, "world_size": 16}, FUSED, 0, 62.0, 76.0),
    "B018": (LLAMA_3B, FUSED, 0, 33000 / 1024, 48000 / 1024),
    "B034": (LLAMA_70B, TORCH, 0, 58.0, 82.0),
}
REJECTED: dict[str, tuple[Case, Software, float]] = {
    "B017": (GPT_2, OLD, 31.7),
    "B023": (DEEPSEEK_16B, TORCH, 79.1),
    "B026": (QWEN_7B, FUSED, 79.1),
}
RULES: set[str] = set()
"""Cases that a test of their own runs, as `runs` notes them."""


def runs(*cases: str) -> Callable[[Callable[[], None]], Callable[[], None]]:
    """Note which cases a test runs."""
    RULES.update(cases)
    return lambda test: test


def table(case: Case, software: Software) -> MemoryTable:
    workload, config = read_case(case)
    return memory.estimate(Columns.of(workload, normalise(workload, config)), software)


def test_every_case_is_run_with_its_own_limits(shared: Path):
    cases = {case["id"]: case["expected"] for case in yaml.safe_load((shared / "data" / "cases" / "memory.yaml").read_text())}
    assert set(cases) == {*WITHIN, *REJECTED, *RULES, *DURING_A_RUN}
    for name, (*_, low, high) in WITHIN.items():
        expected = cases[name]
        assert low == pytest.approx(expected.get("low_gib") or expected["low_mb"] / 1024)
        assert high == pytest.approx(expected.get("high_gib") or expected["high_mb"] / 1024)
    assert {name for name, expected in cases.items() if expected["check"] == "must_reject"} == {*REJECTED, "B025"}


@pytest.mark.parametrize(("case", "software", "stage", "low", "high"), WITHIN.values(), ids=WITHIN)
def test_estimate_is_within(case: Case, software: Software, stage: int, low: float, high: float):
    """What a source does not state is the nearest known configuration: sequence (B015), layers (B018), world size (B007-B013)."""
    assert low <= table(case, software).by_stage(0)[stage] <= high


@pytest.mark.parametrize(("case", "software", "capacity_gib"), REJECTED.values(), ids=REJECTED)
def test_must_reject(case: Case, software: Software, capacity_gib: float):
    assert table(case, software).verdict(capacity_gib)[0] == "does_not_fit"


def test_the_proxy_fits_a_large_board_and_no_small_one():
    """B013: "fits a 186 GB part, must be rejected on any 80 GB part"."""
    found = table(DEEPSEEK_PROXY, IN_PLACE)
    assert found.verdict(184.0)[0] == "fits"
    assert found.verdict(79.1)[0] == "does_not_fit"


@runs("B036")
def test_must_accept_what_a_margin_of_ten_percent_leaves_free():
    """B036: 179 GiB are accepted on a board of 288."""
    case = {**LLAMA_70B, "use_torch_fsdp2": False, "use_distributed_optimizer": True, "fp8_format": None, "mbs": 8}
    found = table(case, IN_PLACE)
    assert found.upper_gib[0] < 259.2
    assert found.verdict(288.0)[0] == "fits"


@runs("B025")
def test_offloaded_state_is_counted_on_the_host():
    """B025: 7 B parameters whose optimiser is offloaded cost each rank 102 GB of the host's memory."""
    case = {**LLAMA_7B, "world_size": 8, "gbs": 64, "optimizer_cpu_offload": True}
    found = table(case, FUSED)
    assert found.host_gib[0] * 1.0737 == pytest.approx(102, rel=0.1)
    assert 8 * found.host_gib[0] * 1.0737 > 0.75 * 1000  # of a node of 1,000 GB, which also holds the ranks themselves
    assert found.by_component(0)["optimizer"] == 0


@runs("B016", "B019", "B022")
def test_stages_differ():
    """B016, B019, B022: one number for all stages is wrong by a wide margin; the fullest counts."""
    found = table({**GPT_7B, "pp": 4, "mbs": 1}, FUSED)
    stages = found.by_stage(0)
    assert found.memory_gib[0] == pytest.approx(stages.max())
    assert stages.max() > 1.3 * stages.min()
    uneven = {**LLAMA_7B, "num_layers": 8, "pp": 4, "world_size": 4, "gbs": 4, "pipeline_model_parallel_layout": "Et|tt|tt|tttL"}
    assert table(uneven, FUSED).by_component(0, 3)["weights"] > 1.4 * table(uneven, FUSED).by_component(0, 1)["weights"]


@runs("B020")
def test_eight_bits_do_not_lower_memory_by_themselves():
    """B020: bf16 weights stay beside their FP8 copies."""
    case = {**LLAMA_7B, "world_size": 8, "gbs": 64, "use_distributed_optimizer": True}
    eight_bit = {**case, "fp8_format": "hybrid", "fp8_recipe": "delayed"}
    assert table(eight_bit, FUSED).by_component(0)["weights"] > 1.9 * table(case, FUSED).by_component(0)["weights"]


@runs("B021")
def test_experts_cost_activations():
    """B021: the stock formula has no term for them."""
    dense = {key: value for key, value in MIXTRAL.items() if "moe" not in key and key != "num_experts"}
    assert (
        table({**MIXTRAL, "gbs": 64}, FUSED).by_component(0)["activations"]
        > 1.3 * (table({**dense, "gbs": 64}, FUSED).by_component(0)["activations"])
    )


@runs("B033")
def test_memory_is_constant_where_each_rank_has_as_many_tokens():
    """B033: 32k tokens on one rank to 256k on eight, measured 83.9 to 84.5 GiB."""
    case = {**LLAMA_7B, "world_size": 8, "mbs": 1, "use_torch_fsdp2": True, **FULL}
    found = [table({**case, "seq_length": 32768 * cp, "cp": cp, "gbs": 8 // cp}, TORCH).memory_gib[0] for cp in (1, 2, 4, 8)]
    assert max(found) / min(found) < 1.02


@runs("B038")
def test_the_first_step_lacks_the_moments():
    """B038: a steady peak is the first one plus 8 bytes per parameter over the data parallel ranks, on two splits."""
    for split, parameters in (({"tp": 1, "pp": 4, "vpp": 8, "mbs": 1}, 1946161152), ({"tp": 4, "mbs": 2}, 1711278080)):
        last = table({**GPT_7B, **split}, REGRESSION)
        optimizer = last.by_component(0, len(last.by_stage(0)) - 1)["optimizer"]
        assert optimizer == pytest.approx(12 * parameters / 2 / 2**30, rel=2e-3)


@runs("B027")
def test_the_parts_and_their_overhead_are_compared_with_the_device():
    """B027: neither weights and optimiser alone, nor those and activations without overhead, is what a device must hold."""
    found = table(QWEN_14B, FUSED)
    parts = found.by_component(0)
    states = parts["weights"] + parts["gradients"] + parts["optimizer"]
    for too_small in (states, states + parts["activations"]):
        assert found.verdict(too_small)[0] == "does_not_fit"
    assert found.verdict(1.2 * (states + parts["activations"]))[0] == "fits"


@runs("B028")
def test_tensors_are_not_compared_with_what_the_board_shows():
    """B028: a board shows 21 GB of which tensors are a part; context and unused segments are the rest."""
    found = table({**LLAMA_7B, "tp": 8, "mbs": 1, "world_size": 8, "gbs": 8, "seq_length": 4096}, FUSED)
    assert found.device_gib[0] == pytest.approx(21, rel=0.15)
    assert found.device_gib[0] - found.memory_gib[0] > CONTEXT_GIB


@runs("B035")
def test_interleaving_costs_only_what_is_in_flight():
    """B035: it may cost nothing. With as many micro-batches as stages the fullest stage holds the same, with more it holds more."""

    def fullest(micro_batches: int, chunks: int | None) -> float:
        case = {**GPT_7B, "pp": 4, "world_size": 4, "mbs": 1, "vpp": chunks, "gbs": micro_batches}
        return float(table(case, FUSED).memory_gib[0])

    assert fullest(4, 2) == pytest.approx(fullest(4, None))
    assert fullest(64, 2) > 1.1 * fullest(64, None)
