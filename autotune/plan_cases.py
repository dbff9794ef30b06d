"""`autotune plan --jsonl`: a case a line in, a prediction a line out."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from typing import Any

from pydantic import ValidationError

from autotune.errors import SpecError
from autotune.machines import find_gpu
from autotune.spec_errors import nearest
from search_spaces.case import IllegalCaseError, read_case
from search_spaces.coefficients import shipped
from search_spaces.columns import Columns
from search_spaces.gpus import GpuSpec, Links, LinkSpec, OwnHardware, link_names, links_of
from search_spaces.legality import check
from search_spaces.normalise import normalise
from search_spaces.prediction import Machines, Prediction, Routing, predict

BALANCED = "moe_router_force_load_balancing"
_BALANCED_FLAG = "--moe-router-force-load-balancing"


def run_jsonl(lines: Iterable[str], megatron: str = "0.19") -> Iterator[str]:
    """One prediction a line for one case a line.

    The keys are those of `search_spaces.case.read_case` and `gpu`, `gpus_per_node` (none = at most 8) and `links`: the name of the
    network between nodes, or {"inside": link, "between": link} where a link is a name or an entry as in hardware.yaml.

    Raises:
        SpecError: a line is not a case, or names an unknown GPU or link.
    """
    for number, line in enumerate(lines, start=1):
        if line.strip():
            yield json.dumps(_answer(_parsed(line, number), number, megatron))


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
        "largest_part": prediction.slowest_part,
        "largest_component": prediction.largest_component,
    }


def _parsed(line: str, number: int) -> dict[str, Any]:
    """The case in a line."""
    try:
        case = json.loads(line)
    except json.JSONDecodeError as error:
        raise SpecError(f"line {number}", line.strip(), f"is not JSON: {error}", "one JSON object a line") from None
    if not isinstance(case, dict) or not isinstance(case.get("gpu"), str):
        raise SpecError(f"line {number}", line.strip(), "is no JSON object with a `gpu`", 'add e.g. "gpu": "h200"')
    return case


def _answer(case: dict[str, Any], number: int, megatron: str) -> dict[str, Any]:
    """A case's prediction, or its violations, as plain values."""
    device = find_gpu(case["gpu"], f"line {number}: gpu")
    given = {"device": "cpu", **case} if device.vendor == "cpu" else case
    try:
        workload, config = read_case(given, megatron)
        violations = check(workload, config)
    except IllegalCaseError as error:
        violations = error.violations
    if violations:
        return {"legal": False, "violations": [asdict(violation) for violation in violations]}
    per_node = int(case.get("gpus_per_node") or min(workload.world_size, 8))
    machines = Machines(device, _links(device, per_node, case.get("links"), number), shipped(device.name))
    columns = Columns.of(workload, normalise(workload, config))
    return {"legal": True, **prediction_json(predict(columns, machines, _routing(case)).row(0))}


def _routing(case: Mapping[str, Any]) -> Routing:
    """Whether the case forces the experts' load to balance."""
    return "balanced" if case.get(BALANCED) or _BALANCED_FLAG in case.get("extra", ()) else "real"


def _links(device: GpuSpec, gpus_per_node: int, given: Any, number: int) -> Links:
    """The links of a case: names of shipped ones, or entries of its own."""
    wanted = given if isinstance(given, Mapping) else {"between": given}
    own = _own_links({place: entry for place, entry in wanted.items() if isinstance(entry, Mapping)}, number)
    names = {place: place if place in own else entry for place, entry in wanted.items()}
    for name in names.values():
        if name is not None and name not in own and name not in link_names():
            raise SpecError(f"line {number}: links", name, "is not a known link", nearest(str(name), link_names()))
    return links_of(device, gpus_per_node, names.get("between"), names.get("inside"), own)


def _own_links(entries: Mapping[str, Any], number: int) -> dict[str, LinkSpec]:
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
        raise SpecError(f"line {number}: {field}", first["input"], first["msg"].lower(), hint) from None
