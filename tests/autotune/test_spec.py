"""A bad study file gives exit code 2 and one message: the messages below were written by hand before the code."""

import json
import subprocess
import sys

import pytest
import yaml
from typer.testing import CliRunner

from autotune.cli import app
from autotune.errors import SpecError
from autotune.metric_names import FAMILIES
from autotune.spec import StudySpec, load_study, override, study_file
from search_spaces.config import TrialConfig
from search_spaces.presets import NAMES
from tests.conftest import ROOT

from .study_cases import MODEL, POOL, study_data, study_spec

TP = "tensor_model_parallel_size"
TYPO = "tensor_model_paralel_size"
ABOUT_TP = f"{TP}: ranks that share each layer's matrices (TP); give a list of choices, e.g. [1, 2, 4]"
WRITE_ONE = "`autotune init` writes a study to start from"
FILE = "<file>"


def without(field):
    data = study_data()
    del data[field]
    return data


OWN_GPU = {
    "vendor": "nvidia",
    "memory_gib": 96,
    "memory_bandwidth_gb_s": 4000,
    "peak_tflops": {"fp32": 60, "bf16": 900},
    "multiprocessors": 120,
    "tdp_w": 500,
    "idle_w": 60,
    "power_limit_w": [200, 500],
    "clock_mhz": {"low": 300, "base": 1500, "boost": 1900},
    "link": "nvlink4",
    "host_link": "pcie5",
}
OWN_LINK = {"bandwidth_gb_s": 40, "latency_us": 9}


def own(gpu=None, link=None):
    """A study with a GPU and a link of its own, some of their fields replaced."""
    return study_data(hardware={"gpus": {"mine": {**OWN_GPU, **(gpu or {})}}, "links": {"my-ib": {**OWN_LINK, **(link or {})}}})


def powered(*domains):
    """A study with power domains, given as (name, nodes)."""
    return study_data(power_domains=[{"name": name, "nodes": nodes, "limit_w": 40000} for name, nodes in domains])


# Name: (content of the file, message, hint); <file> stands for the file's path.
BAD = {
    "true for a whole number": (
        study_data(budget={"trials": True}),
        "budget.trials: must be a number, not true or false (got True)",
        "trials: Launched trials per pool and node count, the baseline included; confirming runs come on top.",
    ),
    "true for watts": (
        study_data(power_domains=[{"name": "row", "nodes": ["laptop"], "limit_w": True}]),
        "power_domains[0].limit_w: must be a number, not true or false (got True)",
        "limit_w: Watts that it may give at most.",
    ),
    "true in a list": (
        study_data(pools=[{**POOL, "nodes": True}]),
        "pools[0].nodes: must be a number, not true or false (got True)",
        "nodes: Node count of a trial; a list is several, each planned and tuned by itself and then compared.",
    ),
    "true as a choice": (study_data(search={TP: [True]}), f"search.{TP}: cannot be True (got [True])", ABOUT_TP),
    "a guard without end": (
        study_data(gpu_power_guard_w=float("inf")),
        "gpu_power_guard_w: must be a finite number (got inf)",
        "gpu_power_guard_w: Watts that no GPU may draw over a second, in any launch; see `autotune.guards`.",
    ),
    "a price without end": (
        study_data(pools=[{**POOL, "usd_per_gpu_hour": float("inf")}]),
        "pools[0].usd_per_gpu_hour: must be a finite number (got inf)",
        "usd_per_gpu_hour: Price of a GPU (a rank on CPU) for an hour; reports and the money budget use it.",
    ),
    "an objective of nothing": (
        study_data(objective={"tokens_per_s_per_gpu": 0}),
        "objective: weighs nothing (got {'tokens_per_s_per_gpu': 0.0})",
        "give a positive weight where more is better, else a negative one",
    ),
    "a limit that is a number": (
        study_data(limits={"gpu_mean_power_w": 500}),
        "limits.gpu_mean_power_w: must be a mapping (got 500)",
        "limits: Bounds on metrics of the answer, e.g. `gpu_mean_power_w: {max: 560}`; they may be crossed while exploring.",
    ),
    "wrong type": (
        study_data(global_batch_size="many"),
        "global_batch_size: must be a whole number (got 'many')",
        "global_batch_size: Sequences per optimiser step. A workload, never a knob.",
    ),
    "unknown knob": (
        study_data(search={TYPO: [1, 2]}),
        f"search.{TYPO}: is not a knob (got [1, 2])",
        f"did you mean '{TP}'?",
    ),
    "unknown field": (
        study_data(bugdet={"trials": 3}),
        "bugdet: is not a known field (got {'trials': 3})",
        "did you mean 'budget'?",
    ),
    "zero GPUs": (
        study_data(pools=[{**POOL, "gpus_per_node": 0}]),
        "pools[0].gpus_per_node: must be greater than 0 (got 0)",
        'gpus_per_node: GPUs of each node; on a "cpu" pool the number of ranks.',
    ),
    "heads do not divide": (
        study_data(model={**MODEL, "num_attention_heads": 7}),
        "model: hidden_size=64 is not divisible by num_attention_heads=7",
        "change one of them, or give kv_channels",
    ),
    "empty choices": (study_data(search={TP: []}), f"search.{TP}: has no choices (got [])", ABOUT_TP),
    "negative budget": (
        study_data(budget={"trials": -3}),
        "budget.trials: must be greater than 0 (got -3)",
        "trials: Launched trials per pool and node count, the baseline included; confirming runs come on top.",
    ),
    "missing model": (
        without("model"),
        "model: is missing",
        "add `model:` to the study file; `autotune init` writes a complete one",
    ),
    "missing below a field": (
        study_data(model={name: size for name, size in MODEL.items() if name != "hidden_size"}),
        "model.hidden_size: is missing",
        "add `hidden_size:` below `model`; `autotune init` writes a complete one",
    ),
    "duplicate pool": (
        study_data(pools=[POOL, POOL]),
        "pools: two pools have the same name (got 'laptop')",
        "every pool needs a name of its own",
    ),
    "bad URL": (
        study_data(storage="postgres//host/db"),
        "storage: is not a URL that can be used here; known: sqlite://, postgresql://, mysql://, journal:// "
        "(got 'postgres//host/db')",
        "storage: Optuna storage URL; none = a journal file in the state folder.",
    ),
    "not YAML": (
        "name: [a\nb: }",
        f"study file: is not YAML: expected ',' or ']', but got ':' in line 2, column 2 (got '{FILE}')",
        WRITE_ONE,
    ),
    "baseline knob": (study_data(baseline={TYPO: 2}), f"baseline.{TYPO}: is not a knob (got 2)", f"did you mean '{TP}'?"),
    "steps within warm-up": (
        study_data(measurement={"steps": 2, "warmup_steps": 2}),
        "measurement.steps: leaves nothing to measure after warmup_steps=2 (got 2)",
        "give at least 8 steps: six tell an interval",
    ),
    "slash in the name": (
        study_data(name="a/b"),
        "name: cannot be a name (got 'a/b')",
        "letters a to z, digits, `.`, `_` and `-`, at most 63 of them, the first a letter or digit",
    ),
    "empty file": ("", f"study file: is empty (got '{FILE}')", WRITE_ONE),
    "a text": ("hello", f"study file: is not a mapping of fields to values (got '{FILE}')", WRITE_ONE),
    "numbers as fields": ("1: 2", f"study file: is not a mapping of fields to values (got '{FILE}')", WRITE_ONE),
    "binary file": (bytes(range(256)), f"study file: is not a text file (got '{FILE}')", WRITE_ONE),
    "zero bytes": (
        b"name: a\0",
        f"study file: is not YAML: unacceptable character #x0000: special characters are not allowed (got '{FILE}')",
        WRITE_ONE,
    ),
    "value of a choice": (study_data(search={TP: [1, "two"]}), f"search.{TP}: cannot be 'two' (got [1, 'two'])", ABOUT_TP),
    "ends of a range": (
        study_data(search={TP: {"range": [1, "x"]}}),
        f"search.{TP}: the ends of a range must be whole numbers (got {{'range': [1, 'x']}})",
        ABOUT_TP,
    ),
    "search is a list": (
        study_data(search=[TP]),
        f"search: must be a mapping of knobs to choices, auto, or a preset ({', '.join(NAMES)}) (got ['{TP}'])",
        "search: Knob -> choices; or `auto`, or a preset's name.",
    ),
    "knob twice": (
        study_data(search={"recompute": ["none"], "recompute_method": ["block"]}),
        "search: chosen more than once, by itself and in a group: recompute_method",
        "choose every knob once, by itself or in its group",
    ),
    "no pools": (
        study_data(pools=[]),
        "pools: is empty (got [])",
        "pools: Where trials run; one Optuna study for each node count of each.",
    ),
    "unknown launcher": (
        study_data(launcher="nope"),
        "launcher: cannot be loaded: No module named 'nope' (got 'nope')",
        "`megatron_core`, or `package.module:Class` of your own",
    ),
    "two faults": (
        study_data(seed=-1, seq_length="long"),
        "seq_length: must be a whole number; also wrong: seed (got 'long')",
        "seq_length: Tokens per sequence.",
    ),
    "a long value": (
        study_data(seed="x" * 5000),
        "seed: must be a whole number (got 'xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx...xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx')",
        "seed: Seed of the sampler, the weights and the batches.",
    ),
    "negative memory of an own GPU": (
        own({"memory_gib": -1}),
        "hardware.gpus.mine.memory_gib: must be greater than 0 (got -1)",
        "memory_gib: Device memory.",
    ),
    "field of an own GPU": (
        own({"memory_gb": 96}),
        "hardware.gpus.mine.memory_gb: is not a known field (got 96)",
        "did you mean 'memory_gib'?",
    ),
    "precision of an own GPU": (
        own({"peak_tflops": {"fp32": 60, "bf32": 90}}),
        "hardware.gpus.mine.peak_tflops.bf32: must be 'fp32', 'tf32', 'fp16', 'bf16', 'fp8' or 'fp4' (got 'bf32')",
        WRITE_ONE,
    ),
    "link of an own GPU": (
        own({"link": "nvlnk4"}),
        "hardware.gpus.mine.link: is not a known link (got 'nvlnk4')",
        "did you mean 'nvlink4'?; or describe it under hardware.links",
    ),
    "vendor of an own GPU": (
        own({"vendor": "cpu"}),
        "hardware.gpus.mine.vendor: ranks on a CPU are the entry `cpu`, and no other (got 'cpu')",
        "name the entry `cpu`, or give the vendor that makes the device: nvidia or amd",
    ),
    "idle above TDP": (
        own({"idle_w": 600}),
        "hardware.gpus.mine: idle_w=600.0 < tdp_w=500.0 and a rising power_limit_w are needed, got 200.0-500.0",
        WRITE_ONE,
    ),
    "text for an own link": (
        study_data(hardware={"links": {"my-ib": "400 Gb/s"}}),
        "hardware.links.my-ib: must be a mapping (got '400 Gb/s')",
        WRITE_ONE,
    ),
    "network of a pool": (
        study_data(pools=[POOL, {**POOL, "name": "b", "network": "ib_400g"}]),
        "pools[1].network: is not a known link (got 'ib_400g')",
        "did you mean 'ib-400'?; or describe it under hardware.links",
    ),
    "node counts": (
        study_data(pools=[{**POOL, "nodes": [4, 4]}]),
        "pools[0]: nodes=[4, 4] are no node counts",
        "give a whole number or a list of different ones, e.g. [4, 6, 8]",
    ),
    "PSU efficiency": (
        study_data(pools=[{**POOL, "psu_efficiency": 94}]),
        "pools[0].psu_efficiency: must be less than or equal to 1 (got 94)",
        "psu_efficiency: Watts that the power supplies give over those they take; none = the usual one.",
    ),
    "unknown pool in a power domain": (
        powered(("rack", ["lapto"])),
        "power_domains[0].nodes: is neither a pool nor a power domain (got 'lapto')",
        "did you mean 'laptop'?",
    ),
    "power domain named as a pool": (
        powered(("laptop", 4)),
        "power_domains[0].name: is the name of another domain or pool (got 'laptop')",
        "every domain and every pool needs a name of its own",
    ),
    "pool in two power domains": (
        powered(("a", ["laptop"]), ("b", ["laptop"])),
        "power_domains[1].nodes: is in more than one place (got 'laptop')",
        "name it once, in the domain right above it",
    ),
    "no time to settle": (
        study_data(confirm={"soak": {"timeout_s": 30}}),
        "confirm.soak.timeout_s: is shorter than window_s=60, so that nothing could settle (got 30.0)",
        "give several windows, or 0 to measure without warming up",
    ),
    "power domain in itself": (
        powered(("a", ["b", "laptop"]), ("b", ["a"])),
        "power_domains[0].nodes: is inside itself (got 'a')",
        "list only what is below a domain",
    ),
    "power domain of more nodes than there are": (
        study_data(
            pools=[{**POOL, "nodes": [2, 4]}, {**POOL, "name": "b"}],
            power_domains=[{"name": "rack", "nodes": 6, "limit_w": 1}],
        ),
        "power_domains[0].nodes: is more than the 5 nodes of all pools (got 6)",
        "give at most 5, or the names of the pools that it feeds, e.g. [laptop]",
    ),
    "metric of the objective": (
        study_data(objective={"tokens_per_s_per_gpu": 1, "joule_per_token": -1}),
        "objective.joule_per_token: is not a metric of a trial (got -1.0)",
        "did you mean 'joules_per_token' or 'host_joules_per_token' or 'pool_wall_joules_per_token'?",
    ),
    "metric of a limit": (
        study_data(limits={"gpu_peak_power": {"max": 600}}),
        "limits.gpu_peak_power: is not a metric of a trial (got 'at most 600')",
        "did you mean 'gpu_peak_power_w_1s' or 'gpu_peak_power_w_60s' or 'gpu_peak_power_w_10s'?",
    ),
    "part of a metric's name": (
        study_data(limits={"slope": {"max": 1}}),
        "limits.slope: is not a metric of a trial (got 'at most 1')",
        "did you mean 'temperature_slope_c_per_min'?",
    ),
    "metric like no other": (
        study_data(objective={"beauty": 1}),
        "objective.beauty: is not a metric of a trial (got 1.0)",
        f"known: {', '.join(FAMILIES)}",
    ),
    "metric of a power domain that is not there": (
        {**powered(("rack", ["laptop"])), "limits": {"domain_rick_energy_j": {"max": 1}}},
        "limits.domain_rick_energy_j: is not a metric of a trial (got 'at most 1')",
        "did you mean 'domain_rack_energy_j' or 'domain_rack_mean_power_w' or 'domain_rack_peak_power_w_1s'?",
    ),
    "money without a price": (
        study_data(budget={"usd": 10}, pools=[{**POOL, "usd_per_gpu_hour": 1}, {**POOL, "name": "b"}]),
        "budget.usd: cannot be kept: pool b has no price (got 10.0)",
        "give the pool b its `usd_per_gpu_hour`, or bound `gpu_hours`",
    ),
    "energy without a GPU": (
        study_data(budget={"energy_kwh": 2}),
        "budget.energy_kwh: cannot be kept: pool laptop has no GPU that measures it (got 2.0)",
        "bound `gpu_hours` or `wall_time_s` instead",
    ),
    "field twice": (
        "name: a\nseq_length: 1\nseed: 1\nseq_length: 2\n",
        "seq_length: is given twice, in line 2 and again in line 4 of <file>",
        "keep one of them",
    ),
    "field of a pool twice": (
        "pools:\n  - {name: a}\n  - name: b\n    nodes: 2\n    nodes: 2\n",
        "pools[1].nodes: is given twice, in line 4 and again in line 5 of <file>",
        "keep one of them",
    ),
    "field twice in one line": (
        "{name: a, 'name': b}\n",
        "name: is given twice, in line 1 and again in line 1 of <file>",
        "keep one of them",
    ),
    "field of a pool": (
        study_data(pools=[POOL, {**POOL, "name": "b", "node": 2}]),
        "pools[1].node: is not a known field (got 2)",
        "did you mean 'nodes'?",
    ),
}


def written(tmp_path, content):
    path = tmp_path / "study.yaml"
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        path.write_text(content if isinstance(content, str) else yaml.safe_dump(content, sort_keys=False))
    return path


@pytest.mark.parametrize("verb", ["check", "tune"])
@pytest.mark.parametrize("name", BAD)
def test_bad_study_file_gives_exit_code_2_and_one_message(tmp_path, monkeypatch, name, verb):
    monkeypatch.chdir(tmp_path)
    content, message, hint = BAD[name]
    path = written(tmp_path, content)
    result = CliRunner().invoke(app, [verb, str(path)])
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr == f"error: {message}\nhint: {hint}\n".replace(FILE, str(path))
    assert not (tmp_path / ".autotune").exists()


@pytest.mark.parametrize("name", ["metric of the objective", "metric of a limit", "money without a price", "field twice"])
def test_plan_refuses_the_same(tmp_path, name):
    content, message, hint = BAD[name]
    path = written(tmp_path, content)
    result = CliRunner().invoke(app, ["plan", str(path)])
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == f"error: {message}\nhint: {hint}\n".replace(FILE, str(path))


@pytest.mark.parametrize("options", [(), ("--set", f"{TP}=1")])
def test_check_refuses_the_gpu_that_plan_refuses(tmp_path, options):
    path = written(tmp_path, study_data(pools=[{**POOL, "gpu": "h222"}]))
    answers = [CliRunner().invoke(app, [verb, str(path), *more]) for verb, more in (("plan", ()), ("check", options))]
    assert [answer.exit_code for answer in answers] == [2, 2]
    assert answers[0].stderr == answers[1].stderr
    assert answers[1].stderr.startswith("error: pools.laptop.gpu: is not a known GPU (got 'h222')\nhint: did you mean h200")


def test_what_can_be_told_is_not_refused(tmp_path):
    """A key that an alias brings is none given twice; GPUs of a CPU pool, and a launcher of one's own, may tell energy."""
    aliased = "measurement:\n  <<: {steps: 9, warmup_steps: 3}\n  steps: 12\n"
    data = study_data()
    del data["measurement"]
    path = written(tmp_path, yaml.safe_dump(data) + aliased)
    assert (load_study(path).measurement.steps, load_study(path).measurement.warmup_steps) == (12, 3)
    energy = {"energy_kwh": 2.0}
    assert study_spec(budget=energy, pools=[{**POOL, "telemetry": {"vendors": ["nvidia"]}}]).budget.energy_kwh == 2.0
    assert study_spec(budget=energy, pools=[{**POOL, "gpu": "h200"}]).budget.energy_kwh == 2.0
    assert study_spec(budget=energy, launcher="own:Launcher").budget.energy_kwh == 2.0
    domains = [{"name": "rack", "nodes": 5, "limit_w": 1}]
    pools = [{**POOL, "nodes": [2, 4]}, {**POOL, "name": "b"}]
    limits = {"domain_rack_energy_j": {"max": 1}, "pool_wall_mean_power_w_estimated": {"max": 1}, "throttle_s_other": {"max": 1}}
    assert set(study_spec(pools=pools, power_domains=domains, limits=limits).limits) == set(limits)


@pytest.mark.parametrize(
    ("name", "message"),
    [("folder", "cannot be read: is a directory"), ("nothing.yaml", "cannot be read: no such file or directory")],
)
def test_what_is_no_file_is_named(tmp_path, name, message):
    (tmp_path / "folder").mkdir()
    result = CliRunner().invoke(app, ["check", str(tmp_path / name)])
    assert result.exit_code == 2
    assert result.stderr.splitlines() == [
        f"error: study file: {message} (got '{tmp_path / name}')",
        f"hint: give the path of a YAML study file; {WRITE_ONE}",
    ]


@pytest.mark.parametrize(("verb", "name"), [("check", "unknown knob"), ("tune", "not YAML")])
def test_as_a_process_there_is_no_traceback(tmp_path, verb, name):
    content, message, hint = BAD[name]
    path = written(tmp_path, content)
    command = [sys.executable, "-m", "autotune.cli", verb, str(path)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env={"PYTHONPATH": str(ROOT)})
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr == f"error: {message}\nhint: {hint}\n".replace(FILE, str(path))


def test_every_knob_typo_finds_its_knob():
    for knob in TrialConfig.model_fields:
        typo = knob[:-2] + knob[-1]
        with pytest.raises(SpecError) as caught:
            override(study_spec(), {"baseline": {typo: 1}})
        assert caught.value.hint == f"did you mean '{knob}'?"


def test_command_line_wins_and_keeps_the_rest_of_a_part(tmp_path):
    path = written(tmp_path, study_data(budget={"trials": 5, "wall_time_s": 60}))
    spec = load_study(path, {"budget": {"trials": 7}, "storage": None})
    assert (spec.budget.trials, spec.budget.wall_time_s, spec.storage) == (7, 60.0, None)


def test_override_checks_the_new_value():
    with pytest.raises(SpecError, match=r"budget.trials: must be greater than 0 \(got 0\)"):
        override(study_spec(), {"budget": {"trials": 0}})


def test_several_node_counts_are_checked_one_by_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = written(tmp_path, study_data(pools=[{**POOL, "nodes": [1, 2]}]))
    counted = CliRunner().invoke(app, ["check", str(path), "--json"])
    assert [(pool["pool"], pool["world_size"]) for pool in json.loads(counted.stdout)] == [
        ("laptop, 1 node", 4),
        ("laptop, 2 nodes", 8),
    ]


@pytest.mark.parametrize(("gpu", "major"), [("v100", 7), ("a40", 8), ("h200", 9), ("GB300", 10), ("mine", 8), ("unheard-of", 9)])
def test_a_pools_rules_are_for_its_gpus_compute_capability(gpu, major):
    hardware = {"gpus": {"mine": {**OWN_GPU, "arch_major": 8, "source": "here"}}}
    spec = study_spec(hardware=hardware, pools=[{**POOL, "gpu": gpu}])
    assert spec.workload(spec.pools[0]).settings.gpu_arch_major == major


def test_a_spec_survives_being_written_and_read():
    spec = study_spec(
        pools=[{**POOL, "nodes": [4, 6], "network": "my-ib"}],
        hardware=own()["hardware"],
        power_domains=[{"name": "rack", "nodes": ["laptop"], "limit_w": 9000}, {"name": "room", "nodes": ["rack"], "limit_w": 1e4}],
        baseline={"recompute_modules": ["core_attn", "mlp"], "environment": [["A", "1"]]},
        search={TP: [1, 2], "recompute": ["none", "full"]},
    )
    assert StudySpec.model_validate(yaml.safe_load(yaml.safe_dump(spec.model_dump(mode="json", exclude_defaults=True)))) == spec


def test_shipped_studies_are_found_by_name_and_load(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert load_study(study_file("quickstart")).name == "quickstart"
    (tmp_path / "quickstart").write_text("mine")
    assert study_file("quickstart").read_text() == "mine"


def test_choices_may_be_those_of_a_preset():
    preset = yaml.safe_load((ROOT / "search_spaces" / "presets" / "dense.yaml").read_text())
    assert study_spec(search="dense").search == preset
    assert str(study_file("dense")) == "dense", "choices alone are no study"


def test_a_model_may_be_a_hugging_face_config_beside_the_study(tmp_path):
    config = {"model_type": "mistral", "hidden_size": 5120, "intermediate_size": 14336, "num_attention_heads": 32, "head_dim": 128}
    config |= {"num_hidden_layers": 40, "num_key_value_heads": 8, "vocab_size": 131072, "tie_word_embeddings": False}
    (tmp_path / "größe 1").mkdir()
    (tmp_path / "größe 1" / "config.json").write_text(json.dumps(config))
    pools = [{"name": "p", "gpu": "h200", "gpus_per_node": 8}]
    study = {"name": "a", "pools": pools, "global_batch_size": 8, "seq_length": 128, "search": "auto"}
    file = tmp_path / "study.yaml"
    file.write_text(yaml.safe_dump(study | {"model": "größe 1/config.json"}), encoding="utf-8")
    assert load_study(file).model.parameters == 12_247_782_400
    file.write_text(yaml.safe_dump(study | {"model": "no.json"}))
    with pytest.raises(SpecError, match="model: cannot be read: no such file"):
        load_study(file)
