"""Cases: one JSON object that names a model, a world and a configuration, as people report them."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from functools import cache
from typing import Any, NoReturn

from pydantic import ValidationError

from search_spaces.argv import arguments, knobs_from_argv
from search_spaces.config import TrialConfig, knobs
from search_spaces.gpus import arch_major
from search_spaces.layer_pattern import layer_pattern
from search_spaces.model import ModelSpec, RunSettings, Workload
from search_spaces.rules.base import Violation

SHORT_NAMES = {
    "tp": "tensor_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "vpp": "num_virtual_stages_per_pipeline_rank",
    "cp": "context_parallel_size",
    "ep": "expert_model_parallel_size",
    "etp": "expert_tensor_parallel_size",
    "sp": "sequence_parallel",
    "mbs": "micro_batch_size",
    "gbs": "global_batch_size",
    "microbatch_group_size_per_vp_stage": "microbatch_group_size_per_virtual_pipeline_stage",
}
NO_CASE = "no_case"
"""Name of the violation of a line that holds no case."""
_WORLD = frozenset({"world_size", "global_batch_size", "seq_length", "device", "extra"})
BALANCED = "moe_router_force_load_balancing"
"""Whether a case's experts get equal shares; it changes no rule."""
_MACHINES = frozenset({"gpu", "gpus_per_node", "links", BALANCED})
_PASSED_OVER = frozenset({"id", "cpu_offloading", "no_gradient_accumulation_fusion", "skip_model_build"})
LOW_PRECISIONS = {
    "fp8": ("fp8_format", "hybrid"),
    "fp4": ("fp4_format", "e2m1"),
    "nvfp4": ("fp4_format", "e2m1"),
}
"""What may follow a precision after a plus: the knob that it gives and its value."""
DEFAULT_ENV = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
_FLAGS = {"--" + name.replace("_", "-"): name for name in (*ModelSpec.model_fields, *RunSettings.model_fields)}
"""Arguments of shapes and of the run."""


class IllegalCaseError(ValueError):
    """A case that is refused before any rule can be asked: a value out of range, or two arguments that contradict each other.

    Attributes:
        violations: What is wrong with it.
    """

    def __init__(self, violations: list[Violation]) -> None:
        super().__init__("; ".join(violation.message for violation in violations))
        self.violations = violations


def read_case(case: Mapping[str, Any], megatron: str = "0.19") -> tuple[Workload, TrialConfig]:
    """The workload and configuration of a case.

    Args:
        case: Shapes, world size, global batch, sequence length and knobs, under Megatron's names or `SHORT_NAMES` (`known_keys`).
            Keys with value None count as not given; without `env` the ranks have CUDA_DEVICE_MAX_CONNECTIONS=1.
        megatron: "0.16" or "0.19", the version whose rules hold.

    Raises:
        IllegalCaseError: the case cannot be written as a workload and a configuration, or has a key that is not known.
    """
    try:
        given = _with_extra(_spelled_out(case))
        if not isinstance(balanced := given.get(BALANCED, False), bool):
            raise IllegalCaseError([Violation(f"value_of_{BALANCED}", 1.0, f"{BALANCED}={balanced!r} must be true or false")])
        config = TrialConfig.model_validate(_config_fields(given))
        return _workload(given, config, megatron), config
    except ValidationError as error:
        raise IllegalCaseError([_violation(item) for item in error.errors()]) from error
    except (ValueError, SyntaxError) as error:
        if isinstance(error, IllegalCaseError):
            raise
        raise IllegalCaseError([Violation("spelling", 1.0, str(error))]) from error


def parse_case(line: str, number: int) -> dict[str, Any]:
    """The case in a line of JSON.

    Raises:
        IllegalCaseError: the line is no JSON object; the violation is named `NO_CASE`.
    """
    try:
        case = json.loads(line, parse_constant=_no_number)
    except (ValueError, RecursionError) as error:
        raise no_case(number, f"is not JSON ({error}), got {line.strip()[:70]!r}") from None
    if not isinstance(case, dict):
        raise no_case(number, f"is no JSON object, got {line.strip()[:70]!r}")
    return case


def _no_number(word: str) -> NoReturn:
    """NaN and Infinity: Python reads them, JSON has no such values, and no key of a case takes one."""
    raise ValueError(f"{word} is no number")


def no_case(number: int, problem: str) -> IllegalCaseError:
    """For a line that holds no case."""
    return IllegalCaseError([Violation(NO_CASE, 1.0, f"line {number} {problem}")])


@cache
def known_keys() -> frozenset[str]:
    """Keys of a case under their long names: knobs, shapes, the run's settings, the world, machines (which rules do not ask)."""
    named = {
        *knobs(),
        *ModelSpec.model_fields,
        *RunSettings.model_fields,
        "also_fp16",
        "no_overlap_p2p_communication",
        "padded_vocab_size",
    }
    return frozenset(named | _WORLD | _MACHINES | _PASSED_OVER)


def _spelled_out(case: Mapping[str, Any]) -> dict[str, Any]:
    """What is given, under the long names.

    Raises:
        IllegalCaseError: a key is not known, or its two names say different things.
    """
    given: dict[str, Any] = {}
    spelling: dict[str, str] = {}
    problems = []
    for key, value in case.items():
        name = SHORT_NAMES.get(key, key)
        if name not in known_keys():
            problems.append(Violation("unknown_key", 1.0, f"{key!r} is no key of a case{_nearest(key, value)}"))
        elif value is not None and given.setdefault(name, value) != value:
            problems.append(Violation("one_value", 1.0, f"{spelling[name]}={given[name]!r} and {key}={value!r} differ; keep one"))
        spelling.setdefault(name, key)
    if problems:
        raise IllegalCaseError(problems)
    return given


def _nearest(key: str, value: Any) -> str:
    """What may have been meant by a key that is not known."""
    if isinstance(value, Mapping):
        return "; what is in it stands beside the other keys"
    near = difflib.get_close_matches(key, [*known_keys(), *SHORT_NAMES], n=1, cutoff=0.5)
    return f"; did you mean {near[0]!r}?" if near else "; the keys are Megatron's argument names, with _ for -"


def _config_fields(given: Mapping[str, Any]) -> dict[str, Any]:
    """The knobs in a case."""
    fields = {key: _listed(value) for key, value in given.items() if key in knobs()}
    fields["precision"], _, low = str(given.get("precision", "bf16")).partition("+")
    if low:
        if low not in LOW_PRECISIONS:
            known = " or ".join(f"{fields['precision']}+{name}" for name in LOW_PRECISIONS)
            raise IllegalCaseError([Violation("value_of_precision", 1.0, f"precision={given['precision']!r}: give {known}")])
        knob, number_format = LOW_PRECISIONS[low]
        fields.setdefault(knob, number_format)
    if given.get("also_fp16") and fields["precision"] == "bf16":
        raise IllegalCaseError([Violation("one_precision", 1.0, "bf16 and fp16 exclude each other; keep one")])
    if given.get("no_overlap_p2p_communication"):
        fields["overlap_p2p_comm"] = False
    if isinstance(fields.get("cp_comm_type"), str):
        fields["cp_comm_type"] = (fields["cp_comm_type"],)
    return fields


def _workload(given: Mapping[str, Any], config: TrialConfig, megatron: str) -> Workload:
    """The workload of a case; without a global batch it is one micro-batch per replica, as in Megatron."""
    world = given.get("world_size")
    replicas = max(config.data_parallel_size(world), 1) if isinstance(world, int) else 1
    batch = given.get("global_batch_size", config.micro_batch_size * replicas)
    fields = {
        "model": _model_fields(given),
        "world_size": world,
        "global_batch_size": batch,
        "seq_length": given.get("seq_length"),
        "megatron": megatron,
        "device": given.get("device", "cpu" if str(given.get("gpu")).lower() == "cpu" else "cuda"),
        "settings": {
            "env": given.get("env", DEFAULT_ENV),
            "gpu_arch_major": arch_major(str(given.get("gpu"))),
            **{k: _listed(v) for k, v in given.items() if k in _SETTINGS},
        },
    }
    return Workload.model_validate(fields)


_SETTINGS = set(RunSettings.model_fields) - {"env"}


def _model_fields(given: Mapping[str, Any]) -> dict[str, Any]:
    """The shapes of a case. No experts are spelled 0 or left out; a list of layers may be an expression."""
    fields = {key: _listed(value) for key, value in given.items() if key in ModelSpec.model_fields}
    if not fields.get("num_experts"):
        fields.pop("num_experts", None)
    if "padded_vocab_size" in given:
        fields |= {"vocab_size": given["padded_vocab_size"], "make_vocab_size_divisible_by": 1}
    if isinstance(fields.get("moe_layer_freq"), str):
        fields["moe_layer_freq"] = layer_pattern(fields["moe_layer_freq"])
    if fields.get("multi_latent_attention"):
        grouped = "--group-query-attention" in given.get("extra", ())
        fields["num_query_groups"] = fields.get("num_query_groups", 1) if grouped else None
    return fields


def _with_extra(given: dict[str, Any]) -> dict[str, Any]:
    """A case with its extra command line arguments read into the keys that they stand for."""
    extra = given.get("extra", [])
    if not isinstance(extra, list | tuple) or not all(isinstance(word, str) for word in extra):
        raise ValueError(f"extra={extra!r} is no list of command line arguments, each of them text")
    extra = [str(item) for item in extra]
    if not extra:
        return given
    found = knobs_from_argv(extra)
    if found.pop("precision") == "fp16":
        found["also_fp16"] = True
    for flag, values in arguments(extra):
        name = _FLAGS.get(flag)
        if flag == "--disable-bias-linear":
            found["add_bias_linear"] = False
        elif name is not None:
            found[name] = True if not values else values if len(values) > 1 else values[0]
    return {**given, **found}


def _listed(value: Any) -> Any:
    """Lists as tuples, as the types hold them."""
    return tuple(value) if isinstance(value, list) else value


def _violation(error: Any) -> Violation:
    """A validation error as a violation: named by our own rule where we raised it, else by the field."""
    name = ".".join(str(part) for part in error["loc"])
    if "ctx" in error and error["type"].islower() and "_over_" in error["type"]:
        return Violation(error["type"], 1.0, error["msg"])
    what = f"{name} is needed" if error["type"] == "missing" else f"{name}={error.get('input')!r}: {error['msg']}"
    return Violation("value_of_" + name.rpartition(".")[2], 1.0, what)
