"""What a study may say of each knob, turned into ordered values: lists, ranges, powers of two, auto, and groups of knobs."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from search_spaces.auto import auto_group, auto_knob
from search_spaces.config import TrialConfig
from search_spaces.model import Workload

RECOMPUTE = ("recompute_granularity", "recompute_method", "recompute_num_layers", "recompute_modules")
GROUPS: dict[str, tuple[str, ...]] = {
    "pipeline": (
        "pipeline_model_parallel_size",
        "num_virtual_stages_per_pipeline_rank",
        "decoder_first_pipeline_num_layers",
        "decoder_last_pipeline_num_layers",
        "account_for_embedding_in_pipeline_split",
        "account_for_loss_in_pipeline_split",
    ),
    "recompute": RECOMPUTE,
    "optimizer": ("use_distributed_optimizer", "overlap_grad_reduce", "overlap_param_gather"),
    "fsdp": ("use_megatron_fsdp", "data_parallel_sharding_strategy", "ckpt_format"),
    "fp8": ("fp8_format", "fp8_recipe", "fp8_param_gather"),
    "cuda_graphs": ("cuda_graph_impl", "cuda_graph_modules"),
    "optimizer_offload": ("optimizer_cpu_offload", "optimizer_offload_fraction", "use_precision_aware_optimizer"),
    "activation_offload": ("cpu_offloading_num_layers",),
    "expert_overlap": ("overlap_moe_expert_parallel_comm", "delay_wgrad_compute", "moe_token_dispatcher_type"),
}
AUTO_SPACE = (
    "tensor_model_parallel_size",
    "pipeline",
    "context_parallel_size",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
    "micro_batch_size",
    "sequence_parallel",
    "recompute",
    "optimizer",
)
MOST_CHOICES = 10_000


@dataclass(frozen=True, slots=True)
class Dimension:
    """Knobs that are chosen together, and their combinations of values.

    Attributes:
        knobs: Names of the knobs.
        rows: One value per knob in each row.
    """

    knobs: tuple[str, ...]
    rows: tuple[tuple[Any, ...], ...]


def dimensions(workload: Workload, choices: Mapping[str, Any] | str, base: TrialConfig) -> tuple[Dimension, ...]:
    """The dimensions of a search, in the order of the knobs in `TrialConfig`.

    Args:
        workload: What is trained.
        choices: Knob or group name to its choices, or "auto" for what is worth trying.
        base: Values of the knobs that a group's item leaves out.

    Raises:
        ValueError: a name is unknown, a value is not one that the knob can have, or a knob is chosen twice.
    """
    spoken = _spoken(choices)
    found = [
        _group(workload, name, wanted, base) if name in GROUPS else _knob(workload, name, wanted) for name, wanted in spoken.items()
    ]
    chosen = [knob for dimension in found for knob in dimension.knobs]
    twice = sorted({knob for knob in chosen if chosen.count(knob) > 1})
    if twice:
        raise ValueError(f"chosen more than once, by itself and in a group: {', '.join(twice)}")
    order = list(TrialConfig.model_fields)
    return tuple(sorted(found, key=lambda dimension: order.index(dimension.knobs[0])))


def _spoken(choices: Mapping[str, Any] | str) -> dict[str, Any]:
    """Choices by name, with `auto` spelled out and recompute's knobs read as one group where only its granularity is given."""
    if isinstance(choices, str):
        if choices != "auto":
            raise ValueError(f"search is a mapping of knobs to choices, or auto; got {choices!r}")
        return dict.fromkeys(AUTO_SPACE, "auto")
    spoken = dict(choices)
    if "recompute_granularity" in spoken and not {"recompute_method", "recompute_num_layers"} & set(spoken):
        spoken["recompute"] = spoken.pop("recompute_granularity")
    known = [*TrialConfig.model_fields, *GROUPS]
    for name in spoken:
        if name not in known:
            nearest = difflib.get_close_matches(name, known, n=1, cutoff=0.3)
            raise ValueError(f"unknown knob {name!r}" + (f"; nearest: {nearest[0]}" if nearest else ""))
    return spoken


def _knob(workload: Workload, name: str, wanted: Any) -> Dimension:
    """The dimension of one knob."""
    values = auto_knob(workload, name) if wanted == "auto" else _expand(workload, name, wanted)
    checked = tuple(dict.fromkeys(parse_value(name, value) for value in values))
    if not checked:
        raise ValueError(f"{name} has no choices")
    return Dimension((name,), tuple((value,) for value in ordered(checked)))


def _group(workload: Workload, name: str, wanted: Any, base: TrialConfig) -> Dimension:
    """The dimension of a group of knobs."""
    items = auto_group(workload, name) if wanted == "auto" else _listed(wanted)
    knobs = GROUPS[name]
    rows = []
    for item in items:
        values = _recompute(item) if name == "recompute" and isinstance(item, str | None | bool) else item
        if not isinstance(values, Mapping):
            raise ValueError(f"{name}: an item is a mapping of its knobs ({', '.join(knobs)}) to values, got {item!r}")
        stray = set(values) - set(knobs)
        if stray:
            raise ValueError(f"{name} has no knob {sorted(stray)[0]!r}; its knobs: {', '.join(knobs)}")
        rows.append(tuple(parse_value(knob, values[knob]) if knob in values else getattr(base, knob) for knob in knobs))
    if not rows:
        raise ValueError(f"{name} has no choices")
    return Dimension(knobs, tuple(dict.fromkeys(rows)))


def _recompute(item: Any) -> dict[str, Any]:
    """A recompute mode in words: none, selective, selective:mlp,core_attn, full, full:block:4."""
    if item in (None, "none", False):
        return dict.fromkeys(RECOMPUTE)
    kind, _, rest = str(item).partition(":")
    if kind == "selective":
        return {"recompute_granularity": kind, "recompute_modules": tuple(rest.split(",")) if rest else None}
    if kind == "full":
        method, _, layers = (rest or "uniform:1").partition(":")
        return {"recompute_granularity": kind, "recompute_method": method, "recompute_num_layers": int(layers or 1)}
    raise ValueError(f"unknown recompute mode {item!r}; legal: none, selective, selective:MODULES, full, full:METHOD:LAYERS")


def _expand(workload: Workload, name: str, wanted: Any) -> Sequence[Any]:
    """Values from a list, one value, powers_of_two or a range."""
    if wanted == "powers_of_two":
        return _powers(1, _bound(workload, name))
    if isinstance(wanted, Mapping):
        if set(wanted) == {"powers_of_two"}:
            return _powers(*_pair(name, wanted["powers_of_two"]))
        if set(wanted) == {"range"}:
            low, high = _pair(name, wanted["range"])
            if high - low >= MOST_CHOICES:
                raise ValueError(f"{name}: a range of {high - low + 1:,} choices is too long; at most {MOST_CHOICES:,}")
            return range(low, high + 1)
        raise ValueError(f"{name}: choices are a list, one value, auto, powers_of_two, or one of powers_of_two/range: [low, high]")
    return _listed(wanted)


def _listed(wanted: Any) -> Sequence[Any]:
    """A list, or one value as a list."""
    return list(wanted) if isinstance(wanted, Sequence) and not isinstance(wanted, str) else [wanted]


def _pair(name: str, argument: Any) -> tuple[int, int]:
    """The two ends of a range."""
    if not isinstance(argument, Sequence) or len(argument) != 2:
        raise ValueError(f"{name}: powers_of_two and range take [low, high], got {argument!r}")
    return int(argument[0]), int(argument[1])


def _bound(workload: Workload, name: str) -> int:
    """The largest value that makes sense for a size knob."""
    if name == "micro_batch_size":
        return workload.global_batch_size
    if name.endswith("parallel_size"):
        return workload.world_size
    raise ValueError(f"{name}: powers_of_two needs its ends here: powers_of_two: [low, high]")


def _powers(low: int, high: int) -> list[int]:
    """Powers of two from low to high."""
    return [1 << exponent for exponent in range(high.bit_length()) if low <= 1 << exponent <= high]


def parse_value(name: str, value: Any) -> Any:
    """A knob's value as `TrialConfig` holds it; "none" stands for none where that is not a value by itself.

    Raises:
        ValueError: the knob cannot have this value.
    """
    wanted = tuple(value) if isinstance(value, list) else value
    for candidate in (wanted, None) if value == "none" else (wanted,):
        try:
            read = getattr(TrialConfig.model_validate({name: candidate}), name)
        except ValidationError:
            continue
        if not isinstance(value, bool) or isinstance(read, bool):  # true is no 1
            return read
    raise ValueError(f"{name} cannot be {value!r} ({TrialConfig.model_fields[name].annotation})")


def ordered(values: Iterable[Any]) -> tuple[Any, ...]:
    """Values in the order that a sampler sees: numbers ascending with none first, everything else as given."""
    given = tuple(values)
    if all(value is None or isinstance(value, int | float) for value in given):
        return tuple(sorted(given, key=lambda value: (value is not None, value or 0)))
    return given
