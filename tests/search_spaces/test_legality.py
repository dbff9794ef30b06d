"""The rules on cases taken from Megatron itself, and the explanation of a verdict."""

from __future__ import annotations

import csv
import json
from inspect import isfunction
from pathlib import Path
from typing import Any, get_type_hints

import pytest

from search_spaces.case import SHORT_NAMES, IllegalCaseError, read_case
from search_spaces.check import explain, run_jsonl
from search_spaces.config import TrialConfig
from search_spaces.legality import RULES, Finding, check
from search_spaces.model import ModelSpec, Workload
from search_spaces.normalise import normalise
from search_spaces.rules import experts, graphs, mesh, optimizer, pipeline, precision, recompute, run, shapes

MODEL = ModelSpec(num_layers=8, hidden_size=128, num_attention_heads=8, vocab_size=1024)
WORKLOAD = Workload(model=MODEL, world_size=8, global_batch_size=32, seq_length=128)
BASE: dict[str, Any] = {
    "num_layers": 32,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "vocab_size": 32000,
    "seq_length": 4096,
    "world_size": 8,
    "gbs": 64,
}


def names(config: TrialConfig, workload: Workload = WORKLOAD) -> set[str]:
    """Names of the broken rules."""
    return {violation.name for violation in check(workload, config)}


def test_published_configurations(shared: Path) -> None:
    rows = list(csv.DictReader((shared / "data" / "published" / "charllm_configs.csv").open()))
    assert len(rows) == 200
    wrong = []
    for row in rows:
        found = {violation.name for violation in check(*read_case(published_case(row)))}
        expected = {"batch_over_replicas"} if "GBS < MBS*DP" in row["note"] else REFUSED_BY_MEGATRON.get(shape(row), set())
        if found != expected:
            wrong.append((row["file"], row["note"], found))
    assert not wrong


REFUSED_BY_MEGATRON = {
    ("llama3-70b", "1", "32", "False"): {"layers_over_stages"},
    ("mixtral-8x7b", "2", "1", "False"): {"experts_need_sequence_parallel"},
}
"""Published configurations that Megatron refuses although their note does not say so: 80 layers on 32 stages without a split
(arguments.py validate_args), and experts with tensor parallelism without sequence parallelism (moe_layer.py MoELayer.forward)."""


def shape(row: dict[str, str]) -> tuple[str, str, str, str]:
    """What decides whether a published configuration is one of `REFUSED_BY_MEGATRON`."""
    return row["model"], row["tp"], row["pp"], row["sp"]


def published_case(row: dict[str, str]) -> dict[str, Any]:
    """A row of the table of published configurations as a case."""

    def number(name: str) -> int | None:
        return int(float(row[name])) if row[name] else None

    experts = number("experts")
    return {
        "num_layers": number("num_layers"),
        "hidden_size": number("hidden"),
        "num_attention_heads": number("heads"),
        "num_query_groups": number("kv_groups"),
        "ffn_hidden_size": number("ffn"),
        "vocab_size": 50257,
        "seq_length": number("seq"),
        "num_experts": experts,
        "moe_router_topk": number("topk"),
        "moe_token_dispatcher_type": row["moe_dispatcher"] or None,
        "moe_grouped_gemm": row["moe_grouped_gemm"] == "True",
        "world_size": number("world_size"),
        "tp": number("tp"),
        "pp": number("pp"),
        "vpp": number("vpp"),
        "ep": number("ep"),
        "cp": number("cp"),
        "sp": row["sp"] == "True",
        "mbs": number("mbs"),
        "gbs": number("gbs"),
        "recompute_granularity": row["act_ckpt_granularity"] or None,
        "recompute_method": row["act_ckpt_method"] or None,
        "recompute_num_layers": number("act_ckpt_num_layers"),
        "use_distributed_optimizer": row["distributed_optimizer"] == "True",
    }


@pytest.mark.parametrize("version", ["0.16", "0.19"])
def test_versions_differ_where_megatron_does(version: str) -> None:
    whole = {**BASE, "cuda_graph_impl": "full_iteration", "precision": "fp16"}
    found = {violation.name for violation in check(*read_case(whole, version))}
    assert found == ({"graph_kind"} if version == "0.16" else set())


def test_every_rule_has_a_name_of_its_own_and_names_its_source() -> None:
    ours = {"device", "expert_tensor_ranks_on_cpu"}
    assert len({rule.__name__ for rule in RULES}) == len(RULES)
    assert not [rule.__name__ for rule in RULES if ".py" not in (rule.__doc__ or "") and rule.__name__ not in ours]


def test_G010_a_rule_that_is_written_is_asked() -> None:
    """One that is left out of its module's list looks like a working rule."""
    modules = (experts, graphs, mesh, optimizer, pipeline, precision, recompute, run, shapes)
    written = {
        found.__name__
        for module in modules
        for found in vars(module).values()
        if isfunction(found) and found.__module__ == module.__name__ and get_type_hints(found).get("return") is Finding
        if not found.__name__.startswith("_")
    }
    assert written == {rule.__name__ for rule in RULES}


def test_G022_common_beliefs_are_not_rules() -> None:
    legal = [
        {"num_query_groups": 2, "tp": 8, "sp": True},
        {"world_size": 16, "cp": 4, "num_experts": 8, "ep": 8},
        {"cp": 8, "num_experts": 8, "ep": 4, "etp": 1, "gbs": 64},
        {"cp": 3, "world_size": 6, "seq_length": 6144, "gbs": 6},
        {"pp": 4, "vpp": 2, "microbatch_group_size_per_vp_stage": 5, "gbs": 20},
        {"pp": 4, "gbs": 6, "tp": 2},
        {"tp": 1, "sp": True},
        {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 7},
        {"use_megatron_fsdp": True, "pp": 2, "ckpt_format": "fsdp_dtensor", "env": {}},
        {"world_size": 4, "tp": 4, "pp": 1, "num_experts": 8, "ep": 4, "etp": 1, "sp": True},
    ]
    for change in legal:
        assert check(*read_case({**BASE, **change})) == [], change


def test_all_reasons_are_reported_with_values_and_nearest() -> None:
    violations = check(WORKLOAD, TrialConfig(tensor_model_parallel_size=3, micro_batch_size=3))
    assert {"world_over_attention_mesh", "heads_over_tensor_ranks"} <= {violation.name for violation in violations}
    heads = next(violation for violation in violations if violation.name == "heads_over_tensor_ranks")
    assert "num_attention_heads=8" in heads.message and "2 or 4" in heads.message
    assert heads.amount > 0


@pytest.mark.parametrize(
    ("changed", "knob"),
    [
        ({"tensor_model_parallel_size": 3}, "tensor_model_parallel_size"),
        ({"micro_batch_size": 5}, "micro_batch_size"),
        ({"recompute_granularity": "full", "recompute_num_layers": 1}, "recompute_method"),
        ({"overlap_param_gather": True, "use_distributed_optimizer": True}, "overlap_param_gather"),
        ({"pipeline_model_parallel_size": 2, "num_virtual_stages_per_pipeline_rank": 3}, "num_virtual_stages_per_pipeline_rank"),
    ],
)
def test_nearest_legal_change(changed: dict[str, Any], knob: str) -> None:
    verdict = explain(WORKLOAD, TrialConfig(**changed))
    assert not verdict.legal and verdict.nearest is not None
    assert check(WORKLOAD, verdict.nearest) == []
    assert list(verdict.change) == [knob]


def test_legal_needs_no_change() -> None:
    verdict = explain(WORKLOAD, TrialConfig())
    assert verdict.legal and verdict.nearest is None and verdict.change == {}


def test_advice_is_no_refusal() -> None:
    wide = WORKLOAD.model_copy(update={"world_size": 8, "gpus_per_node": 4})
    verdict = explain(wide, TrialConfig(tensor_model_parallel_size=8))
    assert verdict.legal and "spans nodes of 4 GPUs" in verdict.advice[0]


@pytest.mark.parametrize(
    ("knobs", "seq_length", "broken"),
    [
        ({"fp4_format": "e2m1"}, 4096 + 16, set()),
        ({"fp4_format": "e2m1", "first_last_layers_bf16": True}, 4096, set()),
        ({"fp4_format": "e2m1"}, 4096 + 8, {"low_precision_tokens"}),
        ({"fp8_format": "hybrid"}, 4096 + 8, set()),
        ({"fp4_format": "e2m1", "fp8_format": "hybrid"}, 4096, {"fp4_excludes_fp8"}),
        ({"fp4_format": "e2m1", "fp8_param_gather": True, "use_distributed_optimizer": True}, 4096, {"fp8_parameters_need_fp8"}),
    ],
)
def test_NVFP4(knobs: dict[str, Any], seq_length: int, broken: set[str]) -> None:
    assert names(TrialConfig(**knobs), WORKLOAD.model_copy(update={"seq_length": seq_length})) == broken


def test_NVFP4_needs_blackwell() -> None:
    verdict = explain(WORKLOAD, TrialConfig(fp4_format="e2m1"))
    assert verdict.legal and verdict.advice == ["fp4_format=e2m1 needs compute capability 10, the GPUs have 9"]


def test_cpu_says_what_is_missing() -> None:
    cpu = WORKLOAD.model_copy(update={"device": "cpu"})
    (violation,) = check(cpu, TrialConfig(context_parallel_size=2))
    assert violation.name == "device" and "Transformer Engine" in violation.message


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"sequence_parallel": True}, {}),
        ({"num_virtual_stages_per_pipeline_rank": 1}, {}),
        ({"pipeline_model_parallel_size": 2, "num_layers_per_virtual_pipeline_stage": 2},)
        + ({"pipeline_model_parallel_size": 2, "num_virtual_stages_per_pipeline_rank": 2},),
        ({"recompute_granularity": "selective", "recompute_modules": ("core_attn",)}, {"recompute_granularity": "selective"}),
        ({"fp8_recipe": "mxfp8"}, {}),
        ({"fp4_format": "e2m1", "fp8_recipe": "mxfp8"}, {"fp4_format": "e2m1"}),
        ({"first_last_layers_bf16": True}, {}),
        ({"tensor_model_parallel_size": 2, "expert_tensor_parallel_size": 2}, {"tensor_model_parallel_size": 2}),
        ({"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 99},)
        + ({"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 8},),
    ],
)
def test_two_spellings_of_one_run(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert normalise(WORKLOAD, TrialConfig(**one)) == normalise(WORKLOAD, TrialConfig(**other))


@pytest.mark.parametrize("virtual", [1, 2])
def test_two_spellings_at_once_are_refused(virtual: int) -> None:
    both = TrialConfig(
        pipeline_model_parallel_size=2, num_virtual_stages_per_pipeline_rank=virtual, num_layers_per_virtual_pipeline_stage=2
    )
    assert "one_virtual_spelling" in names(both)


def test_normalising_twice_changes_nothing() -> None:
    once = normalise(WORKLOAD, TrialConfig(pipeline_model_parallel_size=4, num_layers_per_virtual_pipeline_stage=2))
    assert normalise(WORKLOAD, once) == once


def test_bad_cases_are_violations_not_errors() -> None:
    with pytest.raises(IllegalCaseError, match="tensor_model_parallel_size"):
        read_case({**BASE, "tp": 0})


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"world_size": None}, "value_of_world_size"),
        ({"hidden_size": None}, "value_of_hidden_size"),
        ({"hidden_size": 4097}, "hidden_size_over_heads"),
        ({"num_experts": 8, "moe_layer_freq": "[0"}, "spelling"),
        ({"extra": ["--tensor-model-parallel-size"]}, "spelling"),
        ({"also_fp16": True}, "one_precision"),
        ({"recompute_granularity": "half"}, "value_of_recompute_granularity"),
        ({"optimizer": "adamw"}, "value_of_optimizer"),
        ({"lr_decay_style": "wsd"}, "value_of_lr_decay_style"),
        ({"lr_decay_style": "WSD"}, "wsd_decay_over_steps"),
    ],
)
def test_every_line_gets_a_verdict(change: dict[str, Any], name: str) -> None:
    (line,) = run_jsonl([json.dumps({**BASE, **change}), "", "\n"])
    assert [violation["name"] for violation in json.loads(line)["violations"]] == [name]


@pytest.mark.parametrize("change", [{"lr_decay_style": "cosine"}, {"lr_decay_style": "WSD", "lr_wsd_decay_iters": 2}])
def test_the_decay_of_the_learning_rate_as_megatron_takes_it(change: dict[str, Any]) -> None:
    """optimizer_param_scheduler.py, OptimizerParamScheduler."""
    (line,) = run_jsonl([json.dumps({**BASE, **change})])
    assert json.loads(line)["legal"], line


@pytest.mark.parametrize(("line", "words"), [("not json", "is not JSON"), ("[1, 2]", "no JSON object"), ("5", "no JSON object")])
def test_a_line_that_is_no_case_has_a_verdict(line: str, words: str) -> None:
    good, bad = map(json.loads, run_jsonl([json.dumps(BASE), line]))
    assert good["legal"]
    assert [violation["name"] for violation in bad["violations"]] == ["no_case"]
    assert words in bad["violations"][0]["message"]


@pytest.mark.parametrize(
    ("key", "nearest"),
    [
        ("tensor_model_parallel_sise", "tensor_model_parallel_size"),
        ("global_batchsize", "global_batch_size"),
        ("wrld_size", "world_size"),
    ],
)
def test_a_key_that_is_not_known_is_refused_with_the_nearest(key: str, nearest: str) -> None:
    with pytest.raises(IllegalCaseError, match=f"{key!r} is no key of a case; did you mean {nearest!r}") as error:
        read_case({**BASE, key: 2})
    assert [violation.name for violation in error.value.violations] == ["unknown_key"]


@pytest.mark.parametrize("short", SHORT_NAMES)
def test_every_key_has_its_long_and_its_short_name(short: str) -> None:
    name = SHORT_NAMES[short]
    rest = {key: value for key, value in BASE.items() if SHORT_NAMES.get(key, key) != name}
    value = BASE.get(short, True if short == "sp" else 1)
    assert read_case({**rest, short: value}) == read_case({**rest, name: value})
    with pytest.raises(IllegalCaseError, match="differ; keep one"):
        read_case({**rest, short: value, name: 3})


def test_case_layers_are_not_executed() -> None:
    with pytest.raises(ValueError, match="numbers"):
        read_case({**BASE, "num_experts": 8, "moe_layer_freq": "__import__('os').getcwd()"})


@pytest.mark.parametrize(
    ("extra", "broken"),
    [
        (["--qk-layernorm", "--swiglu"], []),
        (["--disable-bias-linear", "--lr-decay-style", "cosine"], []),
        (["--lr-warmup-iters", "200", "--train-iters", "100"], ["warmup_within_decay"]),
        (["--fp16"], ["one_precision"]),
        (["--optimizer", "none-such"], ["value_of_optimizer"]),
    ],
)
def test_extra_arguments_are_read_whatever_they_are_of(extra: list[str], broken: list[str]) -> None:
    (line,) = run_jsonl([json.dumps({**BASE, "extra": extra})])
    assert [violation["name"] for violation in json.loads(line)["violations"]] == broken


def test_keys_that_only_an_oracle_reads_are_passed_over_and_a_missing_one_is_named() -> None:
    _, config = read_case({**BASE, "skip_model_build": True})
    assert config == read_case(BASE)[1]
    assert read_case({**BASE, "padded_vocab_size": 131073})[0].model.padded_vocab_size(1) == 131073
    with pytest.raises(IllegalCaseError, match="hidden_size is needed"):
        read_case({key: value for key, value in BASE.items() if key != "hidden_size"})
