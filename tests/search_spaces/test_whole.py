"""Divisors, and that a message about a misfit stays short work for the largest numbers that are accepted."""

import json
import math

import pytest

from search_spaces import whole
from search_spaces.case import read_case
from search_spaces.check import explain
from search_spaces.layout import parse_layout
from search_spaces.legality import check
from search_spaces.rules.base import near_divisors, near_multiples_or_divisors

PRIME, MANY = 999_999_937, 735_134_400  # the largest prime below 10**9, and the number below it with most divisors (1,344)
CASE = {"num_layers": 24, "hidden_size": 4096, "num_attention_heads": 32, "vocab_size": 128000, "ffn_hidden_size": 14336}
CASE |= {"world_size": 16, "gbs": 64, "seq_length": 4096, "tp": 2, "pp": 2, "sp": True}


@pytest.mark.parametrize("number", [0, 1, 2, 12, 36, 97, 5040, 9973])
def test_divisors_are_those_found_one_by_one(number):
    assert whole.divisors(number) == [n for n in range(1, number + 1) if number % n == 0]


def test_divisors_of_large_numbers():
    assert whole.divisors(PRIME) == [1, PRIME]
    assert len(whole.divisors(MANY)) == 1344
    assert all(MANY % n == 0 for n in whole.divisors(MANY))


@pytest.mark.parametrize(("total", "value"), [(36, 5), (36, 1), (36, 40), (97, 12), (0, 3), (8, 3), (8, 12), (6, 6)])
def test_the_nearest_are_those_found_one_by_one(total, value):
    def nearest(legal):
        below, above = [n for n in legal if n < value][-1:], [n for n in legal if n > value][:1]
        return " or ".join(map(str, below + above)) or "none"

    every = range(1, 2 * (total + value))
    assert near_divisors(total, value)() == nearest([n for n in every if total and total % n == 0])
    if total:
        assert near_multiples_or_divisors(total, value)() == nearest([n for n in every if total % n == 0 or n % total == 0])


@pytest.mark.parametrize("number", [PRIME, MANY, 10**9])
@pytest.mark.parametrize(
    "key", ["num_attention_heads", "num_query_groups", "ffn_hidden_size", "gbs", "seq_length", "tp", "mbs", "num_experts", "ep"]
)
def test_no_message_takes_a_step_per_number(monkeypatch, key, number):
    """What is counted are the candidates for the nearest: two per divisor or so, not one per number below the total."""
    counted = []
    monkeypatch.setattr("search_spaces.rules.base.near", lambda value, legal: str(counted.append(len(list(legal)))))
    case = CASE | {key: number} | ({"hidden_size": number} if key == "num_attention_heads" else {})
    try:
        check(*read_case(json.loads(json.dumps(case))))
    except ValueError as error:
        assert "divisible" in str(error)
    assert max(counted, default=0) <= 1344 + 3
    assert math.isqrt(number) > 1344


@pytest.mark.parametrize("key", ["vpp", "decoder_first_pipeline_num_layers", "tp", "mbs"])
def test_the_nearest_change_of_the_largest_number_is_one_that_is_accepted(key):
    verdict = explain(*read_case(CASE | {key: whole.LARGEST}))
    assert not verdict.legal


@pytest.mark.parametrize("layout", ["Et*999999999|tL", "E(t*99999)*99999|L", "Et*" + "9" * 5000 + "|L", "E(t|)*900000|L"])
def test_a_layout_without_end_is_refused_before_it_is_written_out(layout):
    broken = check(*read_case(CASE | {"pipeline_model_parallel_layout": layout}))
    assert "more than 100,000 layers" in {violation.name: violation.message for violation in broken}["layout_form"]


def test_a_long_layout_is_read():
    assert parse_layout("E(t*5|)*20000L").decoders == 100_000
