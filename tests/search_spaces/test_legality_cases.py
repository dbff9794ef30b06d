"""Configurations that people reported: Megatron's verdict, and the rule that gives its cause."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from autotune.cli import app
from search_spaces.check import run_jsonl

CAUSES: dict[str, list[str]] = yaml.safe_load((Path(__file__).parent / "legality_causes.yaml").read_text())


@pytest.fixture(scope="module")
def cases(shared: Path) -> list[dict[str, Any]]:
    """The reported configurations."""
    found: list[dict[str, Any]] = yaml.safe_load((shared / "data" / "legality" / "cases.yaml").read_text())
    return found


@pytest.fixture(scope="module")
def verdicts(cases: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Our verdict on each, by its id."""
    lines = run_jsonl(json.dumps(case["input"]) for case in cases)
    return {case["id"]: json.loads(line) for case, line in zip(cases, lines, strict=True)}


def test_verdicts_are_megatrons(cases: list[dict[str, Any]], verdicts: dict[str, dict[str, Any]]) -> None:
    assert {case["id"]: verdicts[case["id"]]["legal"] for case in cases} == {
        case["id"]: case["expected"] == "valid" for case in cases
    }


def test_every_illegal_case_is_refused_by_its_cause(cases: list[dict[str, Any]], verdicts: dict[str, dict[str, Any]]) -> None:
    illegal = [case["id"] for case in cases if case["expected"] == "invalid"]
    found = {name: [violation["name"] for violation in verdicts[name]["violations"]] for name in illegal}
    assert found == {name: CAUSES.get(name, ["no cause is written down for this case"]) for name in illegal}


def test_messages_name_values_and_the_nearest_legal(verdicts: dict[str, dict[str, Any]]) -> None:
    for name, (rule, parts) in MESSAGES.items():
        (message,) = [violation["message"] for violation in verdicts[name]["violations"] if violation["name"] == rule]
        assert not [part for part in parts if part not in message], (name, message)


MESSAGES: dict[str, tuple[str, list[str]]] = {
    "A001": ("heads_over_tensor_ranks", ["=15 ", "=2;", "1 or 3"]),
    "A009": ("ffn_over_tensor_ranks", ["=13824", "=5;", "4 or 6"]),
    "A014": ("batch_over_replicas", ["=100", "=4 x data parallel 8 = 32", "25 or 50"]),
    "A015": ("batch_over_replicas", ["=8 is smaller", "=2 x data parallel 8 = 16", ": 8"]),
    "A020": ("layers_over_stages", ["30 layers", "=4;", "3 or 5"]),
    "A026": ("layers_per_virtual_stage", ["=2 ", "40 layers", "=8;", "1 or 5"]),
    "A027": ("interleaving_needs_stages", ["2 virtual stages", "it is 1", "nearest: 2"]),
    "A035": ("micro_batch_group", ["runs 2 micro-batches", "=4 and", "the 8 micro-batches"]),
    "A039": ("uneven_stages_over_virtual_stages", ["first 7, middle 8", "2 virtual stages", "nearest: 1"]),
    "A041": ("uneven_stages", ["first stage 10, last stage 12", "2 of 24", "nearest rest: 0"]),
    "A056": ("sequence_over_tensor_ranks", ["=4100", "=2 = 2050", "=4;", "2 or 5"]),
    "A063": ("hierarchical_context_sizes", ["to 6", "=4"]),
    "A069": ("bf16_layers_over_stage", ["start_in_bf16=9", "the 8 layers"]),
    "A071": ("low_precision_tokens", ["7984 tokens", "by 32", "7968 or 8000"]),
    "A072": ("low_precision_width", ["hidden_size=4096", "1375", "16;", "1360 or 1376"]),
    "A086": ("offload_needs_one_stage", ["size=1", "it is 2"]),
    "A111": ("expert_layer_pattern", ["27 entries", "num_layers=28"]),
    "A112": ("rank_order", ["size=2", "= 2 ranks", "= 8 ranks"]),
    "A133": ("latent_attention_excludes_groups", ["num_query_groups=8", "drop one"]),
    "A140": ("value_of_micro_batch_size", ["micro_batch_size=0", "greater than 0"]),
    "A143": ("heads_over_query_groups", ["=32", "=12", "8 or 16"]),
}
"""What the message of a case's rule must say: its own values, and the legal ones next to them."""


def test_command_line_gives_the_same_verdicts(cases: list[dict[str, Any]], verdicts: dict[str, dict[str, Any]]) -> None:
    lines = "\n".join(json.dumps(case["input"]) for case in cases)
    answer = CliRunner().invoke(app, ["check", "--jsonl"], input=lines)
    assert answer.exit_code == 0, answer.output
    assert list(map(json.loads, answer.stdout.splitlines())) == list(verdicts.values())
