"""What pools this machine is: one for each type of GPU in it, or four ranks on its CPU."""

from __future__ import annotations

import re
from collections import Counter

from autotune.probes import Gpu, GpuList, amd_gpus, nvidia_gpus
from search_spaces.hardware import PoolSpec

CPU_POOL = PoolSpec(name="laptop", gpu="cpu", gpus_per_node=4)
_VENDOR_WORDS = re.compile(r"\b(NVIDIA|Tesla|GeForce|Quadro|AMD|Instinct|Radeon)\b", re.IGNORECASE)


def detect_machine(nvidia: GpuList | None = None, amd: GpuList | None = None) -> list[PoolSpec]:
    """The pools of this machine, ready for a study file. Asks the vendors' tools, each within a time limit.

    Args:
        nvidia: NVIDIA GPUs; none asks `nvidia-smi`.
        amd: AMD GPUs; none asks `amd-smi` or `rocm-smi`.

    Returns:
        One pool for each type of GPU, GPUs cut by MIG left out; the CPU pool "laptop" where no GPU is found.
    """
    found = (*(nvidia or nvidia_gpus()).gpus, *(amd or amd_gpus()).gpus)
    counts = Counter(gpu_type(gpu) for gpu in found if not gpu.mig)
    pools = [PoolSpec(name=f"local-{kind.lower()}", gpu=kind, gpus_per_node=count) for kind, count in counts.items()]
    return pools or [CPU_POOL]


def gpu_type(gpu: Gpu) -> str:
    """A product's name without its vendor, words joined: "NVIDIA H100 80GB HBM3" is "H100-80GB-HBM3"."""
    words = re.findall(r"[A-Za-z0-9]+", _VENDOR_WORDS.sub(" ", gpu.name))
    return "-".join(words)[:48].rstrip("-") or f"{gpu.vendor}-GPU"
