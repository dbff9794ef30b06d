"""What nodes measure of themselves becomes a prior only where nobody fitted one on published measurements."""

import pytest

from search_spaces.calibration import LIMITS
from search_spaces.coefficients import Coefficients, shipped
from search_spaces.gpus import gpu, links_of
from search_spaces.node_figures import NodeFigures

RANK = {
    "gemm_flops_per_s": 3e10,
    "memory_bytes_per_s": 4e9,
    "inside_bytes_per_s": 1e9,
    "inside_latency_s": 160e-6,
    "between_bytes_per_s": None,
    "between_latency_s": None,
}


def figures(**fields):
    return NodeFigures.of_ranks([{**RANK, **fields}])


def test_medians_of_what_the_ranks_could_measure():
    found = NodeFigures.of_ranks([{**RANK, "gemm_flops_per_s": value} for value in (1.0, 5.0, 3.0, "fast", None, -1.0, True)])
    assert found.gemm_flops_per_s == 3.0
    assert found.between_bytes_per_s is None


def test_a_cpu_is_what_it_measured():
    device = gpu("cpu")
    own = figures().seed(device, links_of(device, 4), shipped("cpu"))
    assert own.gemm == pytest.approx(3e10 / device.peak("fp32"))
    assert own.memory == pytest.approx(4e9 / (device.memory_bandwidth_gb_s * 1e9))
    assert own.inside == pytest.approx(1e9 / links_of(device, 4).inside.bytes_per_s)
    assert own.latency == pytest.approx(160e-6 / links_of(device, 4).inside.latency_s)
    assert own.model_copy(
        update={name: getattr(shipped("cpu"), name) for name in ("gemm", "memory", "inside", "latency")}
    ) == shipped("cpu")


def test_a_fitted_gpu_keeps_its_kernels_and_takes_the_network():
    device, links = gpu("h100"), links_of(gpu("h100"), 8, network="ib-400")
    own = figures(between_bytes_per_s=0.5 * links.between.bytes_per_s).seed(device, links, shipped(device.name))
    assert own == shipped(device.name).model_copy(update={"between": pytest.approx(0.5)})


def test_a_gpu_of_the_users_own_is_measured_within_what_is_possible():
    device = gpu("h100").model_copy(update={"name": "mine"})
    links = links_of(device, 8)
    own = figures(gemm_flops_per_s=1e18, memory_bytes_per_s=0.7 * 3350e9).seed(device, links, Coefficients())
    assert own.gemm == LIMITS["gemm"][1]
    assert own.memory == pytest.approx(0.7)
    assert own.attention == Coefficients().attention
