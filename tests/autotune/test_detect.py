"""Pools from what the vendors' tools say: recorded answers, none installed, cut by MIG, two types in one machine."""

import pytest

from autotune.detect import CPU_POOL, detect_machine, gpu_type, usable_gpus
from autotune.errors import SpecError
from autotune.probes import Gpu, GpuList

NONE = GpuList()


def _nvidia(*names: str, mig: bool = False) -> GpuList:
    return GpuList(tuple(Gpu("nvidia", name, 80.0, "550.54.15", 70.0, mig) for name in names))


def test_laptop_without_gpus_is_four_ranks_on_its_cpu():
    assert detect_machine(NONE, NONE) == [CPU_POOL]
    assert (CPU_POOL.name, CPU_POOL.gpu, CPU_POOL.world_size) == ("laptop", "cpu", 4)


def test_one_type_is_one_pool():
    (pool,) = detect_machine(_nvidia(*["NVIDIA H100 80GB HBM3"] * 8), NONE)
    assert (pool.name, pool.gpu, pool.gpus_per_node) == ("local-h100-80gb-hbm3", "H100-80GB-HBM3", 8)


def test_each_type_is_a_pool_of_its_own():
    pools = detect_machine(_nvidia("NVIDIA A40", "NVIDIA H200", "NVIDIA A40"), GpuList((Gpu("amd", "AMD Instinct MI300X"),)))
    assert [(pool.gpu, pool.gpus_per_node) for pool in pools] == [("A40", 2), ("H200", 1), ("MI300X", 1)]


def test_gpus_cut_by_mig_take_no_part():
    assert detect_machine(_nvidia("NVIDIA H200", mig=True), NONE) == [CPU_POOL]


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("NVIDIA A100-SXM4-80GB", "A100-SXM4-80GB"),
        ("Tesla V100-SXM2-32GB", "V100-SXM2-32GB"),
        ("NVIDIA GeForce RTX 4090", "RTX-4090"),
        ("AMD Instinct MI250X / MI250", "MI250X-MI250"),
        ("AMD", "nvidia-GPU"),
        ("NVIDIA " + "X" * 90, "X" * 48),
    ],
)
def test_type_is_the_product_without_its_vendor(name, kind):
    assert gpu_type(Gpu("nvidia", name)) == kind


def test_usable_gpus_follow_the_study_then_the_environment_then_the_tools():
    listed = GpuList((Gpu("nvidia", "H100"), Gpu("nvidia", "H100", mig=True), Gpu("nvidia", "H100")))
    assert usable_gpus([2, "GPU-ab"], "0,1", listed) == ("2", "GPU-ab")
    assert usable_gpus(None, "3, MIG-GPU-1/2/3,GPU-cd", listed) == ("3", "GPU-cd")
    for none in ("", "-1", "NoDevFiles", "none", "1,1"):
        assert usable_gpus(None, none, listed) == ()
    assert usable_gpus(None, None, listed, GpuList()) == ("0", "2")


def test_mig_instances_alone_are_refused_with_the_reason():
    for wanted, visible in (["MIG-aaaa"], None), (None, "MIG-aaaa/1/0"):
        with pytest.raises(SpecError, match="MIG instance cannot run"):
            usable_gpus(wanted, visible)
