"""Devices and links: complete, plausible, and open to a user's own."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from search_spaces.gpus import GpuSpec, OwnHardware, gpu, gpu_names, link, links_of


@pytest.mark.parametrize("name", gpu_names())
def test_every_device_is_complete(name):
    device = gpu(name)
    assert device.source
    assert links_of(device, 8).host.source
    assert device.power_limit_w[0] <= device.tdp_w <= device.power_limit_w[1]
    assert device.clock_mhz.low < device.clock_mhz.base < device.clock_mhz.boost
    assert device.peak("fp32") <= device.peak("bf16") or device.vendor == "cpu"


@pytest.mark.parametrize(
    ("name", "bf16", "bandwidth", "tdp"),
    [
        ("a100", 312, 2039, 400),
        ("h100", 989.4, 3350, 700),
        ("h200", 989.4, 4800, 700),
        ("b200", 2250, 7700, 1000),
        ("gb300", 2500, 8000, 1400),
        ("mi300x", 1307.4, 5300, 750),
        ("mi355x", 2516.6, 8000, 1400),
        ("a40", 149.7, 696, 300),
    ],
)
def test_datasheet_figures_are_dense(name, bf16, bandwidth, tdp):
    device = gpu(name)
    assert device.peak("bf16") == pytest.approx(bf16 * 1e12)
    assert device.memory_bandwidth_gb_s == bandwidth
    assert device.tdp_w == tdp


@pytest.mark.parametrize(
    ("name", "device"),
    [
        ("H100-80GB", "h100-sxm-80gb"),
        ("H100 80GB", "h100-sxm-80gb"),
        ("h100_80gb_hbm3", "h100-sxm-80gb"),
        ("V100-32GB", "v100-sxm2-32gb"),
        ("A100-SXM", "a100-sxm4-80gb"),
        ("B200-SXM", "b200-sxm-180gb"),
        ("MI355X-288GB", "mi355x"),
    ],
)
def test_a_board_has_its_usual_names(name, device):
    assert gpu(name).name == device


@pytest.mark.parametrize("name", ["H100-96GB", "A800-80GB", "V100-16GB", "H20", ""])
def test_another_board_is_not_taken_for_a_known_one(name):
    with pytest.raises(KeyError, match="unknown gpu"):
        gpu(name)


def test_mi250_has_two_devices_in_a_package():
    assert gpu("mi250").dies_per_package == 2
    assert gpu("mi250").memory_gib == 64


def test_a_precision_that_a_device_lacks_runs_wider():
    assert gpu("a100").peak("fp8") == gpu("a100").peak("bf16")
    assert gpu("v100").peak("bf16") == gpu("v100").peak("fp16")


def test_own_gpu_and_link_come_first():
    entry = gpu("h100").model_dump(exclude={"name"}) | {"memory_gib": 96, "link": "mine", "source": "my machine"}
    own = OwnHardware.model_validate({"gpus": {"my-h100": entry}, "links": {"mine": {"bandwidth_gb_s": 10, "latency_us": 1}}})
    device = gpu("my-h100", own.gpus)
    assert device.memory_gib == 96
    assert links_of(device, 4, network="mine", own=own.links).between.bytes_per_s == 10e9


def test_unknown_names_are_refused():
    with pytest.raises(KeyError, match="unknown gpu"):
        gpu("h1000")
    with pytest.raises(KeyError, match="unknown link"):
        link("nvlink9")


def test_contradicting_figures_are_refused():
    with pytest.raises(ValidationError, match="idle_w"):
        GpuSpec.model_validate(gpu("a100").model_dump() | {"idle_w": 500})


def test_rack_domain_is_larger_than_the_node():
    assert links_of(gpu("gb200"), 4).domain == 72
    assert links_of(gpu("h100"), 8).domain == 8
