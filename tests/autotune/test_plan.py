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
from autotune.plan_cases import run_jsonl
from autotune.probes import Gpu
from search_spaces import memory, power, step_time
from search_spaces.case import read_case
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


def test_ranking_is_by_speed_among_what_fits(planned):
    _, plan = planned
    speed = plan.predictions.tokens_per_s_per_gpu
    assert plan.ok
    assert (np.diff(speed[plan.ranking]) <= 0).all()
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
    assert front[0] == plan.ranking[0]
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


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("{", "is not JSON"),
        ("{}", "no JSON object with a `gpu`"),
        ('{"gpu": "h2000"}', "did you mean h200"),
        (json.dumps(CASE | {"gpu": "h100", "links": "ib-300"}), "did you mean 'ib-"),
    ],
)
def test_lines_that_are_no_cases(line, problem):
    found = run("--jsonl", text=line)
    assert found.exit_code == 2
    assert problem in found.output


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
    with pytest.raises(SpecError, match="--model"):
        model_study(tmp_path / "none.json", "h200", 8, None, 64, 4096)
    with pytest.raises(SpecError, match="multiple"):
        model_study(tmp_path / "config.json", "h200", 12, 8, 64, 4096)


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


def test_a_cpu_study_needs_neither_torch_nor_ray():
    program = (
        "import sys; from typer.testing import CliRunner; from autotune import cli; "
        "found = CliRunner().invoke(cli.app, ['plan', 'quickstart']); "
        "print(found.exit_code, 'predicted' in found.output, [m for m in ('torch', 'ray', 'mlflow') if m in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert found.stdout.strip() == "0 True []"
