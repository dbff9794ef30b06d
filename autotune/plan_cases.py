"""`autotune plan --jsonl`: a case a line in, a prediction a line out."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from pydantic import ValidationError

from autotune.errors import NOTHING, SpecError
from autotune.machines import find_gpu
from autotune.spec_errors import nearest
from search_spaces.case import BALANCED, NO_CASE, IllegalCaseError, no_case, parse_case, read_case
from search_spaces.check import verdict_json, verdicts
from search_spaces.coefficients import shipped
from search_spaces.columns import Columns
from search_spaces.device_rules import device_violations
from search_spaces.gpus import GpuSpec, Links, LinkSpec, OwnHardware, link_names, links_of
from search_spaces.legality import Violation, check
from search_spaces.normalise import normalise
from search_spaces.prediction import Machines, Prediction, Routing, predict
from search_spaces.whole import MOST_GPUS_PER_NODE

_PLACES = {"inside", "between"}
_BALANCED_FLAG = "--moe-router-force-load-balancing"


def run_jsonl(lines: Iterable[str], megatron: str = "0.19") -> Iterator[str]:
    """One prediction a line for one case a line.

    The keys are those of `search_spaces.case.read_case` and `gpu`, `gpus_per_node` (none = at most 8) and `links`: the name of the
    network between nodes, or {"inside": link, "between": link} where a link is a name or an entry as in hardware.yaml.

    Raises:
        SpecError: after the last answer, where a line is not a case, or names an unknown GPU or link: the first of these.
    """
    yield from _answered(_answer(line, number, megatron) for number, line in enumerate(lines, start=1) if line.strip())


def check_jsonl(lines: Iterable[str], megatron: str = "0.19") -> Iterator[str]:
    """One verdict a line for one case a line.

    Raises:
        SpecError: after the last answer, where a line is not a case: the first of these.
    """
    yield from _answered(verdicts(lines, megatron))


def _answered(answers: Iterable[dict[str, Any]]) -> Iterator[str]:
    """Answers as lines of JSON."""
    first = ""
    for answer in answers:
        no_cases = [violation["message"] for violation in answer.get("violations", ()) if violation["name"] == NO_CASE]
        first = first or next(iter(no_cases), "")
        yield json.dumps(answer)
    if first:
        raise SpecError("standard input", NOTHING, first, "one JSON object a line; the other lines were answered")


def prediction_json(prediction: Prediction) -> dict[str, Any]:
    """A prediction as plain values."""
    return {
        "origin": prediction.origin,
        "fits": prediction.fits,
        "memory_gib": prediction.memory_gib,
        "memory_gib_by_stage": list(prediction.memory_gib_by_stage),
        "memory_by_component": prediction.memory_by_component,
        "device_gib": prediction.device_gib,
        "upper_gib": prediction.upper_gib,
        "headroom_gib": prediction.headroom_gib,
        "step_time_s": prediction.step_time_s,
        "step_time_error": prediction.step_time_error,
        "time_by_part_s": prediction.time_by_part_s,
        "tokens_per_s_per_gpu": prediction.tokens_per_s_per_gpu,
        "mean_power_w": prediction.mean_power_w,
        "peak_power_w": prediction.peak_power_w,
        "gpus_per_board": prediction.gpus_per_board,
        "largest_part": prediction.slowest_part,
        "largest_component": prediction.largest_component,
    }


def _answer(line: str, number: int, megatron: str) -> dict[str, Any]:
    """The prediction of a line's case, or its violations, as plain values."""
    try:
        return _predicted(parse_case(line, number), number, megatron)
    except IllegalCaseError as error:
        return verdict_json(error.violations)
    except SpecError as error:
        return verdict_json(no_case(number, f"{error}; {error.hint}").violations)


def _predicted(case: dict[str, Any], number: int, megatron: str) -> dict[str, Any]:
    """The prediction of a case, or its violations, as plain values.

    Raises:
        IllegalCaseError: it has no GPU, or cannot be read.
        SpecError: its GPU or a link is unknown.
    """
    if not isinstance(case.get("gpu"), str):
        raise no_case(number, 'is no JSON object with a `gpu`; add e.g. "gpu": "h200"')
    device = find_gpu(case["gpu"], "gpu")
    workload, config = read_case(case, megatron)
    if (workload.device == "cpu") != (device.vendor == "cpu"):
        raise IllegalCaseError([Violation("one_device", 1.0, f"gpu={device.name} and device={workload.device} differ; keep one")])
    violations = check(workload, config) + device_violations(device, workload, config)
    if violations:
        return verdict_json(violations)
    per_node = _gpus_per_node(case, workload.world_size)
    machines = Machines(device, _links(device, per_node, case.get("links")), shipped(device.name))
    columns = Columns.of(workload, normalise(workload, config))
    return {"legal": True, **prediction_json(predict(columns, machines, _routing(case)).row(0))}


def _gpus_per_node(case: Mapping[str, Any], world_size: int) -> int:
    """GPUs of a node.

    Raises:
        SpecError: what is given is no such number.
    """
    given = case.get("gpus_per_node")
    if given is None:
        return min(world_size, 8)
    if not isinstance(given, int) or isinstance(given, bool) or not 1 <= given <= MOST_GPUS_PER_NODE:
        raise SpecError("gpus_per_node", given, f"must be a whole number from 1 to {MOST_GPUS_PER_NODE:,}", "GPUs of each node")
    return given


def _routing(case: Mapping[str, Any]) -> Routing:
    """Whether the case forces the experts' load to balance."""
    return "balanced" if case.get(BALANCED) or _BALANCED_FLAG in (case.get("extra") or ()) else "real"


def _links(device: GpuSpec, gpus_per_node: int, given: Any) -> Links:
    """The links of a case: names of shipped ones, or entries of its own."""
    wanted = given if isinstance(given, Mapping) else {"between": given}
    for place in set(wanted) - _PLACES:
        raise SpecError("links", place, "is no place of a link", f"the places are {' and '.join(sorted(_PLACES))}")
    own = _own_links({place: entry for place, entry in wanted.items() if isinstance(entry, Mapping)})
    names = {place: place if place in own else entry for place, entry in wanted.items()}
    for name in names.values():
        if name is not None and (not isinstance(name, str) or name not in {*own, *link_names()}):
            raise SpecError("links", name, "is not a known link", nearest(str(name), link_names()))
    return links_of(device, gpus_per_node, names.get("between"), names.get("inside"), own)


def _own_links(entries: Mapping[str, Any]) -> dict[str, LinkSpec]:
    """A case's own links, checked.

    Raises:
        SpecError: an entry is no link.
    """
    try:
        return OwnHardware.model_validate({"links": entries}).links
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(map(str, first["loc"]))
        hint = "an entry has the fields of those in hardware.yaml"
        raise SpecError(field, first["input"], first["msg"].lower(), hint) from None
