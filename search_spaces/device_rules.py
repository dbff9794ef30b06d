"""What a configuration asks of a kind of GPU that it does not have: a limit outside of its range, arithmetic that it lacks.

These are not Megatron's rules (`search_spaces.legality`): Megatron would start such a training, and the driver would refuse the
limit or torch emulate the arithmetic.
"""

from __future__ import annotations

from collections.abc import Mapping

from search_spaces.columns import Columns
from search_spaces.config import TrialConfig
from search_spaces.gpus import GpuSpec
from search_spaces.model import Workload
from search_spaces.rules.base import Finding, Violation, finding
from search_spaces.software import FLASH_ATTENTION_ARCH

CONTEXT_ATTENTION = "context_parallel_attention"


def limit_ranges(gpu: GpuSpec) -> dict[str, tuple[float, float, str]]:
    """The knobs that set a limit on the device: lowest and highest value that it takes, and their unit. None on a CPU."""
    if gpu.vendor == "cpu":
        return {}
    return {
        "gpu_power_limit_w": (*gpu.power_limit_w, "W"),
        "sm_clock_limit_mhz": (gpu.clock_mhz.low, gpu.clock_mhz.boost, "MHz"),
    }


def lacks_bf16(gpu: GpuSpec) -> bool:
    """Whether the device has fp16 but no bf16, whose speed there no figure states."""
    return "fp16" in gpu.peak_tflops and "bf16" not in gpu.peak_tflops


def limit_findings(gpu: GpuSpec, columns: Columns) -> dict[str, Finding]:
    """Limits outside of what the device takes, by the rule's name."""
    return {
        f"{knob}_range": finding(
            (columns.number(knob) != 0) & ((columns.number(knob) < low) | (columns.number(knob) > high)),
            f"{knob}={{asked}} is outside of the {low:g} to {high:g} {unit} that {gpu.name} takes",
            asked=columns.number(knob),
        )
        for knob, (low, high, unit) in limit_ranges(gpu).items()
    }


def arithmetic_findings(gpu: GpuSpec, columns: Columns) -> dict[str, Finding]:
    """Number formats and attention kernels that the device does not have, by the rule's name.

    A device without bf16 has torch emulate it: every product is computed in fp32 (pytorch/pytorch issue 124996, pull request
    148322), at a speed that no datasheet states. Transformer Engine refuses FP8 and NVFP4 on devices without
    them, and context parallelism
    where it has neither flash nor fused attention: these need compute capability 8.0, which came with bf16 (its
    pytorch/attention/dot_product_attention/utils.py, get_attention_backend).
    """
    found = {}
    if gpu.arch_major < FLASH_ATTENTION_ARCH:
        text = f"{gpu.name} has neither flash nor fused attention; give attention_backend=auto"
        found["attention_kernel"] = finding(columns.equals("attention_backend", "flash", "fused"), text)
    if lacks_bf16(gpu):
        text = f"{gpu.name} has no bf16: torch emulates it in fp32, slower and at a speed that is not known; give precision=fp16"
        found["bf16_arithmetic"] = finding(columns.equals("precision", "bf16"), text)
        text = f"{gpu.name} has neither flash nor fused attention, which context parallelism needs; give context_parallel_size=1"
        found[CONTEXT_ATTENTION] = finding(columns.cp > 1, text)
    if gpu.vendor != "cpu" and "fp8" not in gpu.peak_tflops:
        text = f"{gpu.name} has no FP8, and Transformer Engine refuses it there; give fp8_format=none"
        found["fp8_arithmetic"] = finding(columns.given("fp8_format"), text)
    if gpu.vendor != "cpu" and (gpu.vendor != "nvidia" or "fp4" not in gpu.peak_tflops):
        text = f"{gpu.name} has no NVFP4, and Transformer Engine refuses it there; give fp4_format=none"
        found["fp4_arithmetic"] = finding(columns.given("fp4_format"), text)
    return found


def device_violations(gpu: GpuSpec, workload: Workload, config: TrialConfig) -> list[Violation]:
    """What one configuration asks for in vain."""
    columns = Columns.of(workload, config)
    return violations({**limit_findings(gpu, columns), **arithmetic_findings(gpu, columns)})


def violations(findings: Mapping[str, Finding]) -> list[Violation]:
    """What is broken in the only row of a table of one row."""
    return [violation for name, found in findings.items() if (violation := found.violation(name))]
