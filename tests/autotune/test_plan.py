"""`autotune plan`: ranking and verdicts against the models themselves, cases, figures, and what is not imported."""

import json
import re
import subprocess
import sys

import numpy as np
import pytest
import yaml
from typer.testing import CliRunner

from autotune import cli
from autotune.detect import gpu_type
from autotune.errors import SpecError
from autotune.machines import find_gpu, machines_of
from autotune.plan import model_study, plan_one, plan_pool
from autotune.plan_cases import check_jsonl, run_jsonl
from autotune.probes import Gpu
from search_spaces import memory, power, step_time
from search_spaces.case import SHORT_NAMES, known_keys, read_case
from search_spaces.clock_power import shipped_power
from search_spaces.coefficients import shipped
from search_spaces.columns import Columns
from search_spaces.gpus import gpu, links_of
from search_spaces.step_time import PARTS

from .study_cases import POOL, study_data, study_spec

DENSE = {"num_layers": 24, "hidden_size": 4096, "num_attention_heads": 32, "ffn_hidden_size": 14336, "vocab_size": 128000}
MOE = {**DENSE, "num_experts": 8, "moe_router_topk": 2, "moe_ffn_hidden_size": 2048}
SEARCH = {
    "tensor_model_parallel_size": [1, 2, 4, 8],
    "pipeline_model_parallel_size": [1, 2, 4],
    "micro_batch_size": [1, 2, 4, 8],
    "use_distributed_optimizer": [False, True],
    "recompute": ["none", "selective", "full"],
    "sequence_parallel": [True],
}
NODES = {"name": "nodes", "gpu": "h100", "nodes": 2, "gpus_per_node": 8}
HF = {
    "model_type": "llama",
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "vocab_size": 128256,
}
CASE = {"num_layers": 24, "hidden_size": 4096, "num_attention_heads": 32, "vocab_size": 128000, "ffn_hidden_size": 14336}
CASE |= {"world_size": 16, "gbs": 64, "seq_length": 4096, "tp": 2, "pp": 2, "sp": True, "use_distributed_optimizer": True}
ANSWER = {"memory_gib", "memory_gib_by_stage", "memory_by_component", "fits", "step_time_s", "time_by_part_s"}
ANSWER |= {"mean_power_w", "peak_power_w"}


def spec_of(model, **fields):
    search = {**SEARCH, "expert_model_parallel_size": [1, 4, 8]} if "num_experts" in model else SEARCH
    data = {"model": model, "pools": [NODES], "global_batch_size": 128, "seq_length": 4096, "search": search}
    return study_spec(**{**data, **fields})


@pytest.fixture(scope="module", params=[DENSE, MOE], ids=["dense", "moe"])
def planned(request):
    spec = spec_of(request.param)
    return spec, plan_pool(spec, spec.pools[0])


def run(*arguments, text=None):
    return CliRunner().invoke(cli.app, ["plan", *map(str, arguments)], input=text, env={"COLUMNS": "200"})


def alone(workload, config):
    """The three models on one configuration, without the plan."""
    device, columns = gpu("h100"), Columns.of(workload, config)
    times = step_time.estimate(columns, device, links_of(device, 8), shipped(device.name), "real")
    watts = power.estimate(times, columns, shipped_power(device))
    return memory.estimate(columns), times, watts


def test_ranking_is_by_speed_times_the_chance_of_fitting(planned):
    _, plan = planned
    speed, verdict = plan.predictions.tokens_per_s_per_gpu[plan.ranking], plan.predictions.fits[plan.ranking]
    small = plan.predictions.memory.device_gib[plan.ranking] < 0.5 * gpu("h100").memory_gib
    assert plan.ok
    assert (np.diff(speed[small]) <= 1e-3 * speed[small][:-1]).all()
    slowest_before = np.minimum.accumulate(np.where(small, speed, np.inf))
    risky = verdict == "at_risk"
    assert (speed[risky] > slowest_before[risky]).any()
    for place in np.flatnonzero(risky):
        assert (speed[place] >= speed[place + 1 :][small[place + 1 :]]).all()
    assert set(plan.ranking) == set(np.flatnonzero(plan.predictions.fits != "does_not_fit"))
    assert sum(plan.verdicts.values()) == len(plan.table)
    assert len(plan.ranking) == plan.verdicts["fits"] + plan.verdicts.get("at_risk", 0)


def test_rows_agree_with_the_models_asked_alone(planned):
    spec, plan = planned
    for row in np.linspace(0, len(plan.table) - 1, 12).astype(int):
        found = plan.predictions.row(row)
        held, times, watts = alone(plan.table.workload, plan.table.config(row))
        assert found.fits == held.verdict(gpu("h100").memory_gib)[0]
        assert found.memory_gib == pytest.approx(held.memory_gib[0])
        assert found.memory_by_component == pytest.approx(held.by_component(0))
        assert sum(found.memory_by_component.values()) == pytest.approx(found.device_gib)
        assert max(found.memory_gib_by_stage) == pytest.approx(found.memory_gib)
        assert found.step_time_s == pytest.approx(float(times.step_time_s[0]))
        assert sum(found.time_by_part_s.values()) == pytest.approx(found.step_time_s)
        assert found.mean_power_w == pytest.approx(float(watts.mean_w[0]))
        assert found.peak_power_w == pytest.approx(float(watts.peak_w[0]))
        assert found.tokens_per_s_per_gpu == pytest.approx(128 * 4096 / found.step_time_s / 16)
        one = plan_one(spec, spec.pools[0], plan.table.config(row)).prediction
        assert (one.fits, one.step_time_s) == (found.fits, pytest.approx(found.step_time_s))


def test_what_does_not_fit_is_counted_by_its_deciding_component(planned):
    _, plan = planned
    rows = np.flatnonzero(plan.predictions.fits == "does_not_fit")
    names = [plan.predictions.memory.decides(row)[0] for row in rows]
    assert plan.too_large == {name: names.count(name) for name in plan.too_large}
    assert sum(plan.too_large.values()) == len(rows) > 0


def test_nothing_beats_the_frontier_in_both(planned):
    _, plan = planned
    speed, watts = plan.predictions.tokens_per_s_per_gpu, plan.predictions.peak_power_w
    front = plan.frontier()
    assert speed[front[0]] == speed[plan.ranking].max()
    for row in front:
        assert not ((speed[plan.ranking] >= speed[row]) & (watts[plan.ranking] < watts[row])).any()


def test_a_power_limit_adds_its_seconds_as_a_part():
    spec = spec_of(DENSE)
    free = plan_one(spec, spec.pools[0], spec.baseline).prediction
    held = plan_one(spec, spec.pools[0], spec.baseline.model_copy(update={"gpu_power_limit_w": 300})).prediction
    assert free.time_by_part_s["power_limit"] == 0
    assert held.time_by_part_s["power_limit"] > 0
    assert held.step_time_s == pytest.approx(free.step_time_s + held.time_by_part_s["power_limit"])
    assert held.mean_power_w < free.mean_power_w


def test_no_legal_candidate_and_nothing_that_fits_are_no_success(tmp_path):
    none = spec_of(DENSE, search={"tensor_model_parallel_size": [3]})
    assert not plan_pool(none, none.pools[0]).ok
    small = spec_of({**DENSE, "num_layers": 200}, search={"micro_batch_size": [8]})
    assert plan_pool(small, small.pools[0]).verdicts == {"does_not_fit": 1}
    for spec in (none, small):
        study = tmp_path / "study.yaml"
        study.write_text(yaml.safe_dump(spec.model_dump(mode="json", exclude_defaults=True)))
        assert run(study).exit_code == 1


def test_cases_as_json_lines():
    lines = [CASE | {"gpu": "h100", "gpus_per_node": 8}, CASE | {"gpu": "h100", "tp": 3}, CASE | {"gpu": "h100", "tp": -1}]
    fits, refused, broken = map(json.loads, run("--jsonl", text="\n\n".join(map(json.dumps, lines))).stdout.splitlines())
    assert set(fits) > ANSWER
    assert fits["legal"] is True
    assert set(fits["time_by_part_s"]) == {*PARTS, "power_limit"}
    held, times, watts = alone(*read_case(CASE))
    assert fits["memory_gib"] == pytest.approx(held.memory_gib[0])
    assert fits["memory_gib_by_stage"] == pytest.approx(held.by_stage(0))
    assert fits["step_time_s"] == pytest.approx(float(times.step_time_s[0]))
    assert fits["peak_power_w"] == pytest.approx(float(watts.peak_w[0]))
    assert set(refused) == set(broken) == {"legal", "violations"}
    assert "world_over_attention_mesh" in {violation["name"] for violation in refused["violations"]}


def test_links_of_a_case():
    def seconds(links):
        (line,) = run_jsonl([json.dumps(CASE | {"gpu": "h100", "gpus_per_node": 8, "links": links})])
        return json.loads(line)["step_time_s"]

    assert seconds(None) == seconds("ib-400") < seconds("ib-100")
    assert seconds({"between": "ib-100"}) == seconds("ib-100")
    assert seconds({"inside": {"bandwidth_gb_s": 5, "latency_us": 10}}) > seconds({"inside": "pcie5"}) > seconds(None)


NO_CASES = [
    ("{", "is not JSON"),
    ("not json", "is not JSON"),
    ("[1, 2]", "no JSON object"),
    ("5", "no JSON object"),
    (json.dumps(CASE | {"num_layers": float("nan")}), "NaN is no number"),
    ("[" * 100_000, "is not JSON"),
]


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        *NO_CASES,
        ("{}", "no JSON object with a `gpu`"),
        ('{"gpu": "h2000"}', "did you mean h200"),
        (json.dumps(CASE | {"gpu": "h100", "links": "ib-300"}), "did you mean 'ib-"),
        (json.dumps(CASE | {"gpu": "h100", "links": [1]}), "links: is not a known link"),
        (json.dumps(CASE | {"gpu": "h100", "gpus_per_node": "x"}), "gpus_per_node: must be a whole number"),
        (json.dumps(CASE | {"gpu": "h100", "gpus_per_node": 10**20}), "gpus_per_node: must be a whole number from 1 to 1,000"),
        (json.dumps(CASE | {"gpu": "h100", "links": {"middle": "ib-400"}}), "links: is no place of a link (got 'middle')"),
    ],
)
def test_lines_that_are_no_cases_are_answered_and_named_at_the_end(line, problem):
    found = run("--jsonl", text="\n".join((json.dumps(CASE | {"gpu": "h100"}), line, json.dumps(CASE | {"gpu": "h200"}))))
    assert found.exit_code == 2
    good, bad, also_good = map(json.loads, found.stdout.splitlines()[:3])
    assert good["legal"] and also_good["legal"]
    assert [violation["name"] for violation in bad["violations"]] == ["no_case"]
    assert problem in bad["violations"][0]["message"]
    assert "line 2" in found.output.splitlines()[3]


@pytest.mark.parametrize(("line", "problem"), NO_CASES)
def test_check_answers_lines_that_are_no_cases(line, problem):
    found = CliRunner().invoke(cli.app, ["check", "--jsonl"], input=f"{line}\n{json.dumps(CASE)}")
    assert found.exit_code == 2
    bad, good = map(json.loads, found.stdout.splitlines()[:2])
    assert problem in bad["violations"][0]["message"]
    assert good["legal"]


def test_G021_where_nothing_can_be_run_the_answer_says_what_is_in_the_way(tmp_path):
    """Positions that end before the sequence does; and Llama-3-405B, 18 bytes a parameter, on 8 GPUs."""

    def said(config, *more):
        (tmp_path / "config.json").write_text(json.dumps(config))
        machines = ("--gpu", "h200", "--gpus", "8", "--global-batch-size", "8", "--seq-length", "4096")
        found = run("--model", tmp_path / "config.json", *machines, *more)
        assert found.exit_code == 1
        return found.stdout

    gpt2 = {"model_type": "gpt2", "n_embd": 768, "n_head": 12, "n_layer": 12, "n_positions": 1024, "vocab_size": 50257}
    assert "No candidate is legal. position_table: max_position_embeddings=1024" in said(gpt2)
    wide = {"model_type": "llama", "hidden_size": 16384, "intermediate_size": 53248, "num_attention_heads": 128}
    wide |= {"num_hidden_layers": 126, "num_key_value_heads": 8, "vocab_size": 128256}
    (plan,) = json.loads(said(wide, "--json"))
    smallest = plan["smallest"]
    assert smallest["fits"] == "does_not_fit"
    assert smallest["device_gib"] > 405.8e9 * 18 / 8 / 2**30
    assert f"The smallest needs {smallest['device_gib']:.1f} GiB of 141" in said(wide)


@pytest.mark.parametrize("verb", ["plan", "check"])
@pytest.mark.parametrize("key", ["context_parallel_size", "num_layers", "hidden_size", "seq_length", "world_size"])
def test_a_number_that_no_machine_holds_is_refused_by_name(verb, key):
    lines = (json.dumps(CASE | {"gpu": "h100", key: 10**20}), json.dumps(CASE | {"gpu": "h100"}))
    found = CliRunner().invoke(cli.app, [verb, "--jsonl"], input="\n".join(lines))
    bad, good = map(json.loads, found.stdout.splitlines()[:2])
    assert [violation["name"] for violation in bad["violations"]] == [f"value_of_{key}"]
    assert good["legal"]


@pytest.mark.parametrize(
    ("change", "name", "words"),
    [
        ({"tensor_model_parallel_sise": 2}, "unknown_key", "did you mean 'tensor_model_parallel_size'"),
        ({"gpu_power_limit_w": 5}, "gpu_power_limit_w_range", "200 to 700 W"),
        ({"sm_clock_limit_mhz": 90_000}, "sm_clock_limit_mhz_range", "345 to 1980 MHz"),
        ({"gpu": "v100"}, "bf16_arithmetic", "precision=fp16"),
        ({"gpu": "a100", "fp8_format": "hybrid"}, "fp8_arithmetic", "no FP8"),
        ({"precision": "bf16+nvfp4"}, "fp4_arithmetic", "has no NVFP4"),
        ({"gpu": "mi355x", "fp4_format": "e2m1"}, "fp4_arithmetic", "has no NVFP4"),
        ({"precision": "bf16+int8"}, "value_of_precision", "bf16+fp8 or bf16+fp4 or bf16+nvfp4"),
        ({"gpu": "v100", "precision": "fp16", "attention_backend": "fused"}, "attention_kernel", "give attention_backend=auto"),
        ({"gpu": "v100", "precision": "fp16", "moe_grouped_gemm": True, "num_experts": 8}, "grouped_gemm_device", "but it is 7"),
        ({"gpu": "v100", "precision": "fp16", "cp": 2}, "context_parallel_attention", "give context_parallel_size=1"),
        ({"gpu": "cpu", "device": "cuda"}, "one_device", "gpu=cpu and device=cuda differ"),
        ({"device": "cpu"}, "one_device", "gpu=h100-sxm-80gb and device=cpu differ"),
        ({"moe_router_force_load_balancing": "no"}, "value_of_moe_router_force_load_balancing", "must be true or false"),
        ({"extra": [5, None]}, "spelling", "each of them text"),
    ],
)
def test_what_a_case_asks_for_in_vain(change, name, words):
    (line,) = run_jsonl([json.dumps(CASE | {"gpu": "h100"} | change)])
    (violation,) = json.loads(line)["violations"]
    assert violation["name"] == name
    assert words in violation["message"]


def test_a_key_that_is_null_is_as_if_not_given():
    case = CASE | {"gpu": "h100"}
    nothing = dict.fromkeys(known_keys() - {SHORT_NAMES.get(key, key) for key in case})
    given, without = map(json.loads, run_jsonl(map(json.dumps, (nothing | case, case))))
    assert given == without
    assert given["legal"]


def study_file(tmp_path, **fields):
    path = tmp_path / "study.yaml"
    path.write_text(yaml.safe_dump(spec_of(DENSE).model_dump(mode="json", exclude_defaults=True) | fields))
    return path


@pytest.mark.parametrize(
    ("fields", "field", "hint"),
    [
        ({"baseline": {"gpu_power_limit_w": 50}}, "baseline.gpu_power_limit_w", "take 200 to 700 W"),
        ({"search": {"gpu_power_limit_w": ["none", 400, 4500]}}, "search.gpu_power_limit_w", "take 200 to 700 W"),
        ({"search": {"sm_clock_limit_mhz": {"range": [100, 200]}}}, "search.sm_clock_limit_mhz", "take 345 to 1980 MHz"),
    ],
)
@pytest.mark.parametrize("verb", ["plan", "check", "tune"])
def test_a_limit_that_the_device_does_not_take_is_refused_by_every_verb(tmp_path, verb, fields, field, hint):
    found = CliRunner().invoke(
        cli.app, [verb, str(study_file(tmp_path, **fields)), "--state", str(tmp_path)][: 4 if verb != "check" else 2]
    )
    assert found.exit_code == 2
    assert field in found.output
    assert hint in found.output


@pytest.mark.parametrize("verb", ["plan", "check"])
@pytest.mark.parametrize(
    ("setting", "problem"),
    [
        ("gpu_power_limit_w=4500", "--set gpu_power_limit_w: is outside"),
        ("sm_clock_limit_mhz=90000", "take 345 to 1980 MHz"),
        ("micro_batch_size=four", "micro_batch_size: must be a whole number (got 'four')"),
        ("precision=fp12", "must be 'fp32', 'bf16' or 'fp16'"),
        ("recompute_modules=[a", "is not a value in YAML"),
    ],
)
def test_a_setting_that_cannot_be_is_named_with_what_is_wanted(tmp_path, verb, setting, problem):
    found = CliRunner().invoke(cli.app, [verb, str(study_file(tmp_path)), "--set", setting])
    assert found.exit_code == 2
    assert problem in found.output
    assert "class" not in found.output


def test_a_limit_is_not_judged_where_the_range_is_not_known_or_is_ones_own(tmp_path):
    wide = {**OWN_H100, "power_limit_w": [40, 5000]}
    own = spec_of(DENSE, hardware={"gpus": {"h100": wide}}, baseline={"gpu_power_limit_w": 4500})
    assert own.baseline.gpu_power_limit_w == 4500
    assert spec_of(DENSE, pools=[{**NODES, "gpu": "h20"}], baseline={"gpu_power_limit_w": 4500}).baseline.gpu_power_limit_w == 4500


OWN_H100 = gpu("h100").model_dump(mode="json", exclude={"name", "source"})


def test_a_device_without_bf16_is_planned_in_fp16_or_says_so(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(HF))
    assert model_study(tmp_path / "config.json", "v100", 8, None, 64, 4096).baseline.precision == "fp16"
    assert model_study(tmp_path / "config.json", "a100", 8, None, 64, 4096).baseline.precision == "bf16"
    both = spec_of(
        DENSE, pools=[{**NODES, "gpu": "v100"}], search={"precision": ["bf16", "fp16"], "tensor_model_parallel_size": [8]}
    )
    plan = plan_pool(both, both.pools[0])
    assert [best.config.precision for best in plan.best(9)] == ["fp16"]
    assert sum(plan.verdicts.values()) == 1
    one = plan_one(both, both.pools[0], both.baseline)
    assert [violation.name for violation in one.violations] == ["bf16_arithmetic"]
    shown = run(study_file(tmp_path, pools=[{**NODES, "gpu": "v100"}]))
    assert shown.exit_code == 1
    assert "has no bf16" in shown.output


def test_context_parallelism_is_not_planned_without_its_attention():
    search = {"context_parallel_size": [1, 2], "tensor_model_parallel_size": [8]}
    asked = {"search": search, "baseline": {"precision": "fp16", "sequence_parallel": True}}
    for name, sizes in (("v100", {1}), ("a100", {1, 2}), ("mi250x", {1, 2})):
        spec = spec_of(DENSE, pools=[{**NODES, "gpu": name}], **asked)
        plan = plan_pool(spec, spec.pools[0])
        assert sum(plan.verdicts.values()) == len(sizes)
        assert any("which context parallelism needs" in words for words in plan.lacking) == (name == "v100")


@pytest.mark.parametrize(("gpu", "like_unfused"), [("v100", True), ("a100", False)])
def test_a_gpu_without_fused_attention_is_planned_without(gpu, like_unfused):
    cases = [CASE | {"gpu": gpu, "precision": "fp16"} | more for more in ({}, {"attention_backend": "unfused"})]
    chosen, unfused = map(json.loads, run_jsonl(map(json.dumps, cases)))
    assert (chosen["memory_gib"] == unfused["memory_gib"]) == (chosen["step_time_s"] == unfused["step_time_s"]) == like_unfused


def test_a_model_without_a_study(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(HF))
    page = tmp_path / "plan.html"
    options = ["--gpu", "h200", "--gpus", "8", "--gpus-per-node", "8", "--global-batch-size", "64", "--seq-length", "4096"]
    found = run("--model", tmp_path / "config.json", *options, "--top", "3", "--json", "--output", page)
    assert found.exit_code == 0, found.output
    (pool,) = json.loads(found.stdout)
    assert pool["gpu"] == "h200-sxm-141gb"
    assert pool["world_size"] == 8
    assert len(pool["best"]) == 3
    assert all(best["origin"] == "predicted" and best["config"] for best in pool["best"])
    text = page.read_text()
    titles = ("Step time by part", "Memory per pipeline stage", "Throughput against peak power")
    assert all(title in text for title in titles)
    assert text.count("Plotly.newPlot(") >= 3
    assert len(text) > 1_000_000
    assert not re.search(r"<script[^>]*\ssrc=", text)


def test_options_that_do_not_go_together(tmp_path):
    assert run().exit_code == 2
    assert run("quickstart", "--model", tmp_path / "config.json").exit_code == 2
    (tmp_path / "config.json").write_text(json.dumps(HF))
    missing = run("--model", tmp_path / "config.json", "--gpu", "h200")
    assert (missing.exit_code, "--gpus: is needed" in missing.output) == (2, True)
    for option, value in (("--gpu", "b200"), ("--gpus", 512), ("--seq-length", 100), ("--gpus-per-node", 4)):
        both = run("quickstart", option, value)
        assert (both.exit_code, f"{option}: does not go together with a study file" in both.output) == (2, True)
    assert run("quickstart", "--jsonl", text="").exit_code == 2
    with pytest.raises(SpecError, match="--model"):
        model_study(tmp_path / "none.json", "h200", 8, None, 64, 4096)
    with pytest.raises(SpecError, match="multiple"):
        model_study(tmp_path / "config.json", "h200", 12, 8, 64, 4096)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (json.dumps(HF | {"num_hidden_layers": -3}), "num_layers: must be greater than 0 (got -3)"),
        (json.dumps(HF | {"num_hidden_layers": "x"}), "num_layers: must be a whole number (got 'x')"),
        (json.dumps({"model_type": "llama"}), "lacks intermediate_size"),
        ("name: study", "is not JSON: expecting value in line 1"),
        ("[1]", "no JSON object"),
        (None, "cannot be read: no such file"),
    ],
)
def test_a_model_that_cannot_be_read_is_named_with_field_and_value(tmp_path, text, problem):
    path = tmp_path / "config.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(SpecError) as error:
        model_study(path, "h200", 8, None, 64, 4096)
    assert problem in str(error.value)
    assert str(path) in str(error.value)


def test_unknown_gpu_and_network(tmp_path):
    study = tmp_path / "study.yaml"
    study.write_text(yaml.safe_dump(study_data(pools=[{**POOL, "gpu": "h20"}])))
    found = run(study)
    assert found.exit_code == 2
    assert "did you mean h200" in found.output
    with pytest.raises(SpecError, match="--network"):
        machines_of(spec_of(DENSE).pools[0], network="ib-401")


@pytest.mark.parametrize(
    ("product", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "h100-sxm-80gb"),
        ("NVIDIA H100 PCIe", "h100-pcie-80gb"),
        ("NVIDIA H200", "h200-sxm-141gb"),
        ("NVIDIA A100-SXM4-80GB", "a100-sxm4-80gb"),
        ("NVIDIA A100 80GB PCIe", "a100-pcie-80gb"),
        ("Tesla V100-SXM2-32GB", "v100-sxm2-32gb"),
        ("NVIDIA A40", "a40"),
        ("NVIDIA B200", "b200-sxm-180gb"),
        ("AMD Instinct MI300X OAM", "mi300x"),
    ],
)
def test_gpus_as_a_first_study_names_them_are_known(product, name):
    vendor = "amd" if "AMD" in product else "nvidia"
    assert find_gpu(gpu_type(Gpu(vendor, product)), "pools").name == name


def test_one_configuration_of_a_study():
    found = run("quickstart", "--set", "micro_batch_size=4", "--json")
    assert found.exit_code == 0
    assert json.loads(found.stdout)["laptop"]["fits"] == "fits"
    illegal = run("quickstart", "--set", "tensor_model_parallel_size=3")
    assert (illegal.exit_code, "heads_over_tensor_ranks" in illegal.output) == (1, True)


@pytest.mark.parametrize(
    ("option", "value"), [("--gpus", 10**8), ("--global-batch-size", 10**12), ("--seq-length", 10**12), ("--gpus-per-node", 2000)]
)
def test_an_option_beyond_every_machine_is_named(tmp_path, option, value):
    (tmp_path / "config.json").write_text(json.dumps(HF))
    given = {"--gpu": "h100", "--gpus": 2000, "--global-batch-size": 64, "--seq-length": 4096} | {option: value}
    found = run("--model", tmp_path, *(word for pair in given.items() for word in pair))
    assert found.exit_code == 2
    assert f"error: {option}: must be less than or equal to" in found.output
    assert f"(got {value})" in found.output


def test_figures_are_not_promised_for_one_configuration(tmp_path):
    found = run("quickstart", "--set", "micro_batch_size=4", "--output", tmp_path / "plan.html")
    assert found.exit_code == 2
    assert "--output: does not go together with --set" in found.output


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"peak_tflops": {"fp32": 67, "bf16": float("inf")}}, "peak_tflops.bf16: must be less than or equal to"),
        ({"memory_bandwidth_gb_s": 1e-300}, "memory_bandwidth_gb_s: must be at least 1e-06"),
        ({"clock_mhz": {"low": 2000, "base": 1500, "boost": 1980}}, "low <= base <= boost is needed"),
        ({"tdp_w": 1000, "power_limit_w": [200, 700]}, "a power_limit_w around tdp_w"),
        ({"tdp_w": 150, "power_limit_w": [200, 700]}, "a power_limit_w around tdp_w"),
    ],
)
def test_figures_that_no_machine_has_are_refused(tmp_path, change, words):
    found = run(study_file(tmp_path, hardware={"gpus": {"h100": {**OWN_H100, **change}}}))
    assert found.exit_code == 2
    assert words in found.output.replace("\n", " ")


GRAPHS = {"cuda_graph_impl": ["none", "local"], "tensor_model_parallel_size": [8], "use_distributed_optimizer": [True]}


@pytest.mark.parametrize(
    ("fields", "knob"),
    [
        ({}, "cuda_graph_impl=local"),
        ({}, "delay_wgrad_compute=true"),
        ({"model": {**DENSE, "multi_latent_attention": True}}, "micro_batch_size=2"),
        ({"model": {**DENSE, "mtp_num_layers": 1}}, "micro_batch_size=2"),
        ({"model": {**DENSE, "add_bias_linear": True}}, "recompute_modules=[mlp]"),
        ({}, "num_distributed_optimizer_instances=2"),
        ({}, "tensor_model_parallel_size=3"),
        ({}, "micro_batch_size=2"),
        ({"pools": [POOL]}, "attention_backend=flash"),
    ],
)
def test_one_configuration_has_the_verdict_and_reasons_of_check(tmp_path, fields, knob):
    study = study_file(tmp_path, **fields)
    settings = ("--set", "tensor_model_parallel_size=2", "--set", "use_distributed_optimizer=true", "--set", knob, "--json")
    planned, checked = (CliRunner().invoke(cli.app, [verb, str(study), *settings]) for verb in ("plan", "check"))
    (plan,), (verdict,) = (json.loads(found.stdout).values() for found in (planned, checked))
    assert plan["legal"] == verdict["legal"]
    assert plan.get("violations", []) == verdict["violations"]
    assert checked.exit_code == (not verdict["legal"])
    assert planned.exit_code == (not verdict["legal"] or plan["fits"] == "does_not_fit")


def test_what_the_launcher_refuses_of_the_shown_is_told(tmp_path):
    shown = run(study_file(tmp_path, search=GRAPHS, baseline={}), "--json")
    (plan,) = json.loads(shown.stdout)
    assert [best["config"].get("cuda_graph_impl") for best in plan["best"]].count("local") == 1
    told = "1 of the 2 shown are refused by the megatron_core launcher: cuda_graph_impl=local is not set by"
    assert any(words.startswith(told) for words in plan["cautions"])
    without = run(study_file(tmp_path, search={**GRAPHS, "cuda_graph_impl": ["none"]}, baseline={}), "--json")
    assert json.loads(without.stdout)[0]["cautions"] == []


@pytest.mark.parametrize(("pool", "setting", "words"), [("v100", "precision=bf16", "bf16"), ("a100", "fp8_format=hybrid", "FP8")])
def test_check_says_of_one_configuration_what_the_gpu_lacks(tmp_path, pool, setting, words):
    study = study_file(tmp_path, pools=[{**NODES, "gpu": pool}], baseline={"precision": "fp16"})
    found = CliRunner().invoke(cli.app, ["check", str(study), "--set", setting, "--json"])
    (verdict,) = json.loads(found.stdout).values()
    assert any(f"has no {words}" in advice for advice in verdict["advice"])


def test_cases_on_a_cpu_are_judged_by_the_rules_for_one():
    line = json.dumps(CASE | {"gpu": "cpu", "attention_backend": "flash"})
    planned, checked = (json.loads(next(iter(verdicts_of([line])))) for verdicts_of in (run_jsonl, check_jsonl))
    assert planned == checked
    assert not checked["legal"]


def test_a_cpu_study_needs_neither_torch_nor_ray():
    program = (
        "import sys; from typer.testing import CliRunner; from autotune import cli; "
        "found = CliRunner().invoke(cli.app, ['plan', 'quickstart']); "
        "print(found.exit_code, 'predicted' in found.output, [m for m in ('torch', 'ray', 'mlflow') if m in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert found.stdout.strip() == "0 True []"


@pytest.mark.parametrize(
    "settings", [["fp4_format=e2m1", "fp8_format=hybrid"], ["overlap_param_gather=true", "use_distributed_optimizer=false"]]
)
def test_the_nearest_legal_change_can_be_set_as_it_is_printed(tmp_path, settings):
    study = study_file(tmp_path, pools=[{**NODES, "gpu": "b200"}])
    given = [word for setting in settings for word in ("--set", setting)]
    refused = CliRunner().invoke(cli.app, ["check", str(study), *given])
    nearest = re.search(r"nearest legal: (.*)", refused.stdout)[1].split()
    assert not any(value in word for word in nearest for value in ("None", "(", "True", "False"))
    mended = CliRunner().invoke(
        cli.app, ["check", str(study), *given, *(word for setting in nearest for word in ("--set", setting))]
    )
    assert (refused.exit_code, mended.exit_code) == (1, 0), mended.output
