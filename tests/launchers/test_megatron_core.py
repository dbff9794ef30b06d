"""The launcher: what it refuses, the command line that a person can type, and how a trial ends that stops being finite."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from launchers import megatron_core
from launchers.base import StepRecord, free_port
from launchers.megatron_core.job import Job
from launchers.megatron_core.launcher import MASTER_PORT, MegatronCoreLauncher
from search_spaces.config import TrialConfig
from search_spaces.model import ModelSpec, Workload
from tests.launchers.megatron_harness import WarmTrials

LAUNCHER = MegatronCoreLauncher()
MODEL = ModelSpec(num_layers=2, hidden_size=32, num_attention_heads=2, vocab_size=256)
MOE = MODEL.model_copy(update={"num_experts": 4})
BIASED = MODEL.model_copy(update={"add_bias_linear": True})
TRIAL = Path(megatron_core.__file__).parent / "trial.py"


def _workload(model: ModelSpec = MODEL, world_size: int = 2, device: str = "cpu") -> Workload:
    return Workload(model=model, world_size=world_size, global_batch_size=4, seq_length=16, device=device)


def _messages(workload: Workload, **knobs: Any) -> str:
    return " ".join(violation.message for violation in LAUNCHER.refusals(workload, TrialConfig(**knobs)))


@pytest.mark.parametrize(
    ("model", "knobs", "reason"),
    [
        (MODEL, {"context_parallel_size": 2}, "Transformer Engine"),
        (MOE, {"recompute_granularity": "selective", "recompute_modules": ("moe_act",)}, "Transformer Engine"),
        (BIASED, {"recompute_granularity": "selective", "recompute_modules": ("core_attn", "mlp")}, "add_bias_linear"),
    ],
)
def test_refused_on_cpu_with_the_reason(model: ModelSpec, knobs: dict[str, Any], reason: str) -> None:
    violations = LAUNCHER.refusals(_workload(model), TrialConfig(**knobs))
    assert [violation.amount > 0 for violation in violations] == [True]
    assert reason in violations[0].message


@pytest.mark.parametrize(
    ("model", "knobs", "device"),
    [
        (MODEL, {"context_parallel_size": 2}, "cuda"),
        (MOE, {"recompute_granularity": "selective", "recompute_modules": ("moe_act",)}, "cuda"),
        (BIASED, {"recompute_granularity": "selective", "recompute_modules": ("core_attn",)}, "cpu"),
        (MODEL, {"precision": "fp16", "tensor_model_parallel_size": 2, "sequence_parallel": True}, "cpu"),
        (MOE, {"expert_tensor_parallel_size": 2, "tensor_model_parallel_size": 2, "sequence_parallel": True}, "cpu"),
    ],
)
def test_not_refused(model: ModelSpec, knobs: dict[str, Any], device: str) -> None:
    assert LAUNCHER.refusals(_workload(model, device=device), TrialConfig(**knobs)) == []


def test_what_tensors_free_on_cpu_is_not_asked_for_again_in_every_step() -> None:
    program = (
        "import resource, torch; from launchers.megatron_core import cpu; cpu.install('127.0.0.1')\n"
        "faults = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_minflt\n"
        "step = lambda: [torch.ones(1 << 20) for _ in range(20)]\n"
        "_ = [bool(step()) for _ in range(3)], (before := faults()), [bool(step()) for _ in range(3)]; print(faults() - before)"
    )
    shown = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert int(shown.stdout.split()[-1]) < 1000, "each step touches 20,000 pages"


def test_job_is_plain_json_with_derived_shapes() -> None:
    workload = _workload(ModelSpec(num_layers=2, hidden_size=96, num_attention_heads=4, vocab_size=500))
    job = json.loads(json.dumps(LAUNCHER.job(workload, TrialConfig(tensor_model_parallel_size=2), steps=3, seed=7)))
    assert Job.from_dict(job).to_dict() == job
    assert (job["model"]["ffn_hidden_size"], job["model"]["num_query_groups"], job["padded_vocab_size"]) == (256, 4, 512)
    assert job["knobs"]["tensor_model_parallel_size"] == 2


def test_torchrun_command_needs_only_torch_and_megatron(tmp_path: Path) -> None:
    config = TrialConfig(tensor_model_parallel_size=2, sequence_parallel=True, precision="fp32")
    command = LAUNCHER.command(_workload(), config, tmp_path / "trial", steps=2, seed=1)
    assert command.argv[0] == "torchrun"
    bin_folder = Path(sys.executable).parent
    # Whatever the program must not need is made impossible to import.
    blocked = tmp_path / "blocked"
    for name in ("pydantic", "ray", "search_spaces", "autotune"):
        (blocked / name).mkdir(parents=True)
        (blocked / name / "__init__.py").write_text(f"raise ImportError('{name} is not for ranks')")
    env = {**os.environ, **command.env, "PYTHONPATH": str(blocked), "PYTHONWARNINGS": "ignore"}
    argv = [str(bin_folder / command.argv[0]), *command.argv[1:]]
    done = subprocess.run(argv, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=170, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    events = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    records = [StepRecord(**{name: value for name, value in event.items() if name != "event"}) for event in events]
    assert [record.iteration for record in records] == [1, 2]
    assert all(record.loss > 0 and record.tokens == 64 for record in records)


@pytest.mark.acceptance
def test_the_command_of_several_nodes_runs_when_each_of_them_runs_it(tmp_path: Path) -> None:
    workload = _workload().model_copy(update={"gpus_per_node": 1})
    config = TrialConfig(tensor_model_parallel_size=2, sequence_parallel=True, precision="fp32")
    command = LAUNCHER.command(workload, config, tmp_path / "trial", steps=2, seed=1)
    assert "--nnodes=2" in command.argv and "--nproc-per-node=1" in command.argv
    line = " ".join(command.argv).replace(f":{MASTER_PORT}", f":{free_port('127.0.0.1')}")
    bin_folder = Path(sys.executable).parent
    here = {**os.environ, **command.env, "PATH": f"{bin_folder}:{os.environ['PATH']}", "MASTER_ADDR": "127.0.0.1"}
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    nodes = [subprocess.Popen(["bash", "-c", f"exec {line}"], env={**here, "NODE_RANK": rank}, **pipes) for rank in ("0", "1")]
    try:
        shown = [node.communicate(timeout=170) for node in nodes]
    finally:
        for node in nodes:
            node.kill()
    assert [node.returncode for node in nodes] == [0, 0], shown
    steps = [[line for line in out.splitlines() if line.startswith("{")] for out, _ in shown]
    assert [len(lines) for lines in steps] == [0, 2], "the last rank, which reports, is on the node of the highest NODE_RANK"


def test_run_by_path_exposes_nothing_beside_the_package(tmp_path: Path) -> None:
    code = (
        "import runpy, sys; sys.path.insert(0, sys.argv[2]); runpy.run_path(sys.argv[1], run_name='by_path');"
        "import importlib.util as u; import launchers.megatron_core.job;"
        "assert not any(map(u.find_spec, ('weights', 'loop', 'trial')))"
    )
    argv = [sys.executable, "-W", "ignore", "-c", code, str(TRIAL), str(TRIAL.parent)]
    done = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


def test_loss_that_is_not_finite_is_reported_and_ends_the_run(trials: WarmTrials) -> None:
    job = LAUNCHER.job(_workload(), TrialConfig(precision="fp32"), steps=5, seed=1)
    losses = trials.run({**job, "learning_rate": 1e30}).losses
    assert math.isfinite(losses[0])
    assert not math.isfinite(losses[-1])
    assert 1 < len(losses) < 5
