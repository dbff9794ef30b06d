"""Seconds of collectives: small ones as measured, and whether products hide the exchange of tensor parallel ranks."""

from __future__ import annotations

import pytest

from search_spaces.coefficients import Coefficients
from search_spaces.columns import Columns
from search_spaces.communication import Group
from search_spaces.config import TrialConfig
from search_spaces.gpus import gpu, links_of
from search_spaces.kernels import Machine
from search_spaces.model import ModelSpec, RunSettings, Workload
from search_spaces.step_time import estimate

MIB = 2.0**20
MEASURED_US = {
    ("a100", 2): {1: 45, 4: 60, 16: 129, 64: 404},
    ("a100", 4): {1: 53, 4: 76, 16: 178, 64: 541},
    ("a100", 8): {1: 92, 4: 94, 16: 231, 64: 580},
    ("h200", 8): {4: 69, 16: 134, 64: 339},
    ("b200", 8): {4: 96, 16: 115, 64: 293},
}
"""Microseconds of an all-reduce by MiB: A100 from vTrain (trace/a100), H200 and B200 from ml-engineering ("Network")."""


@pytest.mark.parametrize("name, ranks", MEASURED_US)
def test_small_all_reduces_take_as_long_as_measured(name, ranks):
    device = gpu(name)
    group = Group.of(Machine(device, links_of(device, 8), Coefficients(inside=0.75)), float(ranks), 1.0)
    predicted = [float(group.reduce(size * MIB)) * 1e6 for size in MEASURED_US[name, ranks]]
    assert predicted == pytest.approx(list(MEASURED_US[name, ranks].values()), rel=0.3)
    assert Group.of(group.machine, 1.0, 1.0).reduce(MIB) == 0


def exchange(settings: RunSettings | None = None, **knobs) -> float:
    """Seconds of the tensor parallel exchange of a step."""
    return part("tp_comm", settings, **knobs)


def part(name: str, settings: RunSettings | None = None, **knobs) -> float:
    """Seconds of a part of a step."""
    model = ModelSpec(num_layers=24, hidden_size=4096, num_attention_heads=32, vocab_size=51200)
    workload = Workload(model=model, world_size=8, global_batch_size=16, seq_length=4096, settings=settings or RunSettings())
    device = gpu("a100")
    config = TrialConfig(tensor_model_parallel_size=8, **knobs)
    return float(estimate(Columns.of(workload, config), device, links_of(device, 8), Coefficients()).parts[name][0])


def test_products_hide_no_exchange_that_several_queues_let_run_after_them():
    one, many = ((("CUDA_DEVICE_MAX_CONNECTIONS", count),) for count in ("1", "8"))
    assert exchange(environment=one) == exchange() < exchange(environment=many)
    assert exchange(RunSettings(env={})) == exchange(environment=many)
    assert exchange(RunSettings(gpu_arch_major=10), environment=many) == exchange()


def test_launches_that_block_hide_no_host_time():
    blocking = (("CUDA_LAUNCH_BLOCKING", "1"),)
    assert part("launch", environment=blocking) > 3 * part("launch") > 0
    assert part("gemm", environment=blocking) == part("gemm")
