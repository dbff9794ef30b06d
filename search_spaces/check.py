"""One configuration explained: legal or not, every reason, and the nearest legal change."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from search_spaces.advice import advise
from search_spaces.case import IllegalCaseError, parse_case, read_case
from search_spaces.choices import ordered
from search_spaces.columns import Columns
from search_spaces.config import TrialConfig
from search_spaces.device_rules import limit_findings, violations
from search_spaces.gpus import gpu
from search_spaces.legality import RULES, check
from search_spaces.model import Workload
from search_spaces.normalise import normalise
from search_spaces.rules.base import Violation
from search_spaces.space import SearchSpace
from search_spaces.whole import LARGEST

MOST_COMBINATIONS = 200_000
_SIZES = ("parallel_size", "micro_batch_size", "instances")


@dataclass(frozen=True, slots=True)
class Verdict:
    """What Megatron would say of one configuration.

    Attributes:
        legal: Whether it accepts it.
        violations: Every reason why not.
        nearest: The nearest legal configuration; None where it is legal already or no change of knobs helps.
        change: The knobs that differ in `nearest`, with their new values.
        advice: What is legal but seldom good.
    """

    legal: bool
    violations: list[Violation]
    nearest: TrialConfig | None
    change: dict[str, Any]
    advice: list[str] = field(default_factory=list)


def explain(workload: Workload, config: TrialConfig) -> Verdict:
    """Whether a configuration is legal, every reason why not, and the legal one that changes the fewest knobs the least."""
    violations = check(workload, config)
    nearest = nearest_legal(workload, config) if violations else None
    start = normalise(workload, config)
    change = {} if nearest is None else _difference(start, nearest)
    return Verdict(not violations, violations, nearest, change, advise(workload, start))


def nearest_legal(workload: Workload, config: TrialConfig) -> TrialConfig | None:
    """The legal configuration that changes the fewest knobs, and those the least; None where no change was found."""
    start = normalise(workload, config)
    knobs = _involved(workload, start)
    while knobs:
        choices = {knob: _alternatives(workload, start, knob) for knob in knobs}
        if math.prod(len(values) for values in choices.values()) <= MOST_COMBINATIONS:
            break
        knobs = knobs[:-1]
    else:
        return None
    table = SearchSpace(workload, choices, start).table()
    rows = min(range(len(table)), key=lambda row: _distance(start, table.config(row)), default=None)
    return None if rows is None else table.config(rows)


def verdicts(lines: Iterable[str], megatron: str = "0.19") -> Iterator[dict[str, Any]]:
    """One verdict for one case a line, as plain values; a line that is no case has one too (keys: `case.read_case`)."""
    for number, line in enumerate(lines, start=1):
        if line.strip():
            try:
                case = parse_case(line, number)
                broken = check(*(read := read_case(case, megatron))) + _beyond_device(case.get("gpu"), *read)
            except IllegalCaseError as error:
                broken = error.violations
            yield verdict_json(broken)


def _beyond_device(name: Any, workload: Workload, config: TrialConfig) -> list[Violation]:
    """Limits that the case's GPU does not take, where it names one that is known; what Megatron accepts does not depend on it."""
    try:
        device = gpu(str(name))
    except KeyError:
        return []
    return violations(limit_findings(device, Columns.of(workload, config)))


def run_jsonl(lines: Iterable[str], megatron: str = "0.19") -> Iterator[str]:
    """The same as lines of JSON."""
    return map(json.dumps, verdicts(lines, megatron))


def verdict_json(broken: list[Violation]) -> dict[str, Any]:
    """A verdict as plain values."""
    return {"legal": not broken, "violations": [asdict(violation) for violation in broken]}


def _involved(workload: Workload, config: TrialConfig) -> list[str]:
    """The knobs that broken rules look at, those of most broken rules first; group partners stay out."""
    votes: dict[str, int] = {}
    for rule in RULES:
        columns = Columns.of(workload, config)
        if rule(columns).broken.any():
            for knob in columns.asked:
                votes[knob] = votes.get(knob, 0) + 1
    order = list(TrialConfig.model_fields)
    return sorted(votes, key=lambda knob: (-votes[knob], order.index(knob)))


def _alternatives(workload: Workload, config: TrialConfig, knob: str) -> list[Any]:
    """The knob's own value and others to try: its default, on/off, and nearby sizes."""
    value, default = getattr(config, knob), TrialConfig.model_fields[knob].default
    found = [value, default]
    if isinstance(default, bool):
        found.append(not value)
    elif knob.endswith(_SIZES):
        top = workload.global_batch_size if knob == "micro_batch_size" else workload.world_size
        sizes = [n for n in range(1, min(top, 64) + 1) if top % n == 0]
        found += sorted(sizes, key=lambda n: abs(math.log(n / (value or 1))))[:6]
    elif isinstance(value, int) and not isinstance(value, bool):
        found += [n for n in (value - 1, value + 1, value // 2, value * 2) if 0 < n <= LARGEST]
    elif value is None and knob in _SPELLED:
        found += _SPELLED[knob]
    return list(ordered(dict.fromkeys(found)))


_SPELLED: dict[str, list[Any]] = {
    "recompute_method": ["uniform"],
    "recompute_num_layers": [1],
    "expert_tensor_parallel_size": [1],
    "fp8_format": [],
    "fp4_format": [],
}


def _difference(start: TrialConfig, end: TrialConfig) -> dict[str, Any]:
    """The knobs that differ, with their new values."""
    return {name: getattr(end, name) for name in TrialConfig.model_fields if getattr(end, name) != getattr(start, name)}


def _distance(start: TrialConfig, end: TrialConfig) -> tuple[int, float]:
    """How far a configuration is: knobs changed, then how much the sizes changed."""
    change = _difference(start, end)
    steps = 0.0
    for name, value in change.items():
        old = getattr(start, name)
        both = isinstance(old, int) and isinstance(value, int) and old > 0 and value > 0
        steps += abs(math.log(value / old)) if both else 1.0
    return len(change), steps


def main(argv: list[str]) -> int:
    """Read cases from standard input and write verdicts: `python -m search_spaces.check --jsonl [--megatron 0.16]`."""
    version = argv[argv.index("--megatron") + 1] if "--megatron" in argv else "0.19"
    for line in run_jsonl(sys.stdin, version):
        sys.stdout.write(line + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
