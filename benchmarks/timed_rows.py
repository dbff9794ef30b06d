"""Published step times as tables that the cost model can be asked about: rows of one workload on one pool together."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from benchmarks.published import PublishedRow, read_throughput
from benchmarks.published_golden import GPT_2_VOCABULARY
from benchmarks.published_method import whole
from search_spaces.calibration import Measured
from search_spaces.config import TrialConfig
from search_spaces.gpus import GpuSpec, Links, LinkSpec, gpu, links_of
from search_spaces.model import ModelSpec, RunSettings, Workload

WORKLOAD = {"global_batch_size", "seq_length", "micro_batch_size"}
OLD_KERNELS = ("bigscience-bloom", "sc21-table1", "vtrain")
IN_ORDER = RunSettings(env={"CUDA_DEVICE_MAX_CONNECTIONS": None})
"""Megatron-LM before September 2021 and the Megatron-DeepSpeed made of it: no exchange of TP ranks beside a product, as where the
device has several queues; overlap came with `async_tensor_model_parallel_allreduce` (commit 3f65246911).
"""
MAY_HANG = 320
"""Ranks from which BigScience's runs hung unless launches block (chronicles-prequel.md, "dealing with JZ hanging ...")."""
WORDS = 128  # Megatron's default of make_vocab_size_divisible_by
# InternEvo's configurations set overlap_sync_grad (configs/7B_sft.py); llm-foundry trains with flash attention 2
OVERLAPPED, FLASH_2 = ("internevo",), ("llm-foundry",)
HALF_GRADIENTS = (*OLD_KERNELS, "internevo")  # fp16 or bf16 gradients; BLOOM's bf16 optimizer says that it accumulates in fp32
GPU_NAMES = {"B200-SXM": "b200", "B300-SXM": "b300", "GB300": "gb300", "GB200": "gb200", "H100-SXM-96GB-HBM2e (500 W limit)": ""}
TWO_PER_PORT = {
    "two-per-hdr": LinkSpec(bandwidth_gb_s=25, latency_us=8, devices_per_port=2, source="four HDR ports for eight GPUs"),
    "two-per-roce-100": LinkSpec(bandwidth_gb_s=12.5, latency_us=12, devices_per_port=2, source="4 x 100 Gb/s RoCE per node"),
}
NETWORKS = {"bigscience-bloom": "omnipath-100x4", "vtrain": "two-per-hdr", "internevo": "two-per-roce-100"}


@dataclass(frozen=True, slots=True)
class TimedRow:
    """One measured step.

    Attributes:
        id: The row's name.
        source: What is held out together.
        gpu: The device.
        links: How the devices are joined.
        measured: Workload, configuration and seconds.
        software: Version or state of the software that the source tells apart; empty where it does not.
        stated: Whether the source states all that was set (quality A), so that nothing of the configuration is guessed.
    """

    id: str
    source: str
    gpu: GpuSpec
    links: Links
    measured: Measured
    software: str = ""
    stated: bool = True

    @property
    def pool(self) -> tuple[str, bool, str]:
        """What is calibrated together: GPU, one domain or several, software."""
        return self.gpu.name, self.measured.workload.world_size <= self.links.domain, self.software

    @property
    def model(self) -> ModelSpec:
        """The model with Megatron's default padding: one for all rows, however many words their ranks had."""
        model = self.measured.workload.model
        padded = {"vocab_size": -(-model.vocab_size // WORDS) * WORDS, "make_vocab_size_divisible_by": WORDS}
        return model.model_copy(update=padded)

    @property
    def group(self) -> tuple[Any, ...]:
        """What a ranking is over: model, GPU, count, global batch, sequence length."""
        w = self.measured.workload
        return self.gpu.name, self.model, w.world_size, w.global_batch_size, w.seq_length


def read(folder: Path) -> list[TimedRow]:
    """All rows with seconds or tokens/s whose split, batch and precision can be expressed."""
    rows, _ = read_throughput(folder / "throughput.csv")
    raw = {row["id"]: row for row in _csv(folder / "throughput.csv")}
    timed = [_timed(row, raw[row.id]) for row in rows if row.status == "ok"]
    return [row for row in timed if row is not None] + [_vtrain(row, i) for i, row in enumerate(_csv(folder / "vtrain_a100.csv"))]


def _csv(path: Path) -> list[Mapping[str, str]]:
    if not path.is_file():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def _timed(row: PublishedRow, raw: Mapping[str, str]) -> TimedRow | None:
    seconds = row.step_time_s or _from_flops(row, raw)
    name = _board(row.gpu)
    if (
        seconds is None
        or row.quality not in "AB"
        or name is None
        or WORKLOAD & set(row.assumed)
        or "lora" in raw["workload"].lower()
    ):
        return None
    changes = _software(row, raw)
    if re.search("EP (a2a )?overlap on|tuned recipe", raw["notes"]):
        changes["overlap_moe_expert_parallel_comm"] = True
    if "CUDA graph full_iteration" in raw["notes"]:
        changes["cuda_graph_impl"] = "full_iteration"
    elif re.search(r"CUDA graph (transformer_engine|router)", raw["notes"]):
        changes["cuda_graph_impl"] = "transformer_engine"
    if row.source_group in ("megatron-bridge-perf", "nemo-launcher") and row.config.sequence_parallel:
        changes["tp_comm_overlap"] = True  # NeMo's and Megatron-Bridge's performance recipes switch it on wherever TP > 1
    routing: Literal["balanced", "real"] = "balanced" if row.facts.forced_balance or not row.workload.model.is_moe else "real"
    workload = row.workload.model_copy(update={"settings": _settings(row)})
    measured = Measured(workload, row.config.model_copy(update=changes), seconds, routing)
    links = links_of_source(gpu(name), row.source_group, row.gpus_per_node)
    return TimedRow(row.id, row.source_group, gpu(name), links, measured, software_of(raw), row.quality == "A")


def _board(text: str) -> str | None:
    """The name in hardware.yaml of a board as a table names it; None for one that is not there."""
    try:
        return gpu(GPU_NAMES.get(text, text.partition(" (")[0])).name
    except KeyError:
        return None


def _settings(row: PublishedRow) -> RunSettings:
    """The environment that follows from the software of a source."""
    if row.source_group not in OLD_KERNELS:
        return row.workload.settings
    blocks = row.source_group == "bigscience-bloom" and row.workload.world_size >= MAY_HANG
    return RunSettings(env={**(IN_ORDER.env or {}), "CUDA_LAUNCH_BLOCKING": "1" if blocks else None})


def software_of(raw: Mapping[str, str]) -> str:
    """What a source says of the software's version or state (NeMo's release; BigScience's tuning and optimiser)."""
    stated = re.findall(
        r"NeMo \d\d\.\d\d(?:\.\d\d)?|after PCIe/NUMA tuning|BF16 optimizer|different branch", raw["source"] + raw["notes"]
    )
    return ", ".join(dict.fromkeys(stated))


def _software(row: PublishedRow, raw: Mapping[str, str]) -> dict[str, Any]:
    """Knobs that follow from the software of a source."""
    changes: dict[str, Any] = {}
    if row.source_group in OLD_KERNELS:
        changes["attention_backend"] = "unfused"
    if row.source_group in FLASH_2:
        changes["attention_backend"] = "flash"
    if row.source_group in OVERLAPPED:
        changes["overlap_grad_reduce"] = True
    copies = re.search(r"ZeRO-1 group=(\d+)", raw["optimizer_sharding"])
    if copies:
        ranks = row.workload.world_size // (row.config.tensor_model_parallel_size * row.config.pipeline_model_parallel_size)
        changes["num_distributed_optimizer_instances"] = max(ranks // int(copies.group(1)), 1)
    half = row.source_group in HALF_GRADIENTS and "fp32 gradient accumulation" not in raw["notes"]
    if half or not row.facts.grad_reduce_in_fp32:
        changes["main_grads_dtype"] = "bf16"
    return changes


def links_of_source(device: GpuSpec, source: str, gpus_per_node: int) -> Links:
    """How a source's devices are joined."""
    return links_of(device, gpus_per_node, NETWORKS.get(source), own=TWO_PER_PORT)


def _from_flops(row: PublishedRow, raw: Mapping[str, str]) -> float | None:
    """Seconds of the SC21 table, whose TFLOP/s follow a stated formula: 96 B s l h^2 (1 + s / 6h + V / 16lh)."""
    if row.source_group != "sc21-table1" or not raw["hw_tflops_per_gpu"]:
        return None
    m, w = row.workload.model, row.workload
    extra = 1 + w.seq_length / (6 * m.hidden_size) + m.vocab_size / (16 * m.num_layers * m.hidden_size)
    work = 96 * w.tokens_per_step * m.num_layers * m.hidden_size**2 * extra
    return float(work / (float(raw["hw_tflops_per_gpu"]) * 1e12 * w.world_size))


def _vtrain(raw: Mapping[str, str], position: int) -> TimedRow:
    """A row of vTrain.

    Its profiler gives each rank words // TP of GPT-2's and pads nothing (src/model/gpt_modeling.py), and runs apex' Adam on the
    16-bit weights themselves (src/trainer.py).
    """
    tensor_parallel = whole(raw, "tp", 1)
    model = ModelSpec(
        num_layers=whole(raw, "layers", 1),
        hidden_size=whole(raw, "hidden", 1),
        num_attention_heads=whole(raw, "heads", 1),
        vocab_size=GPT_2_VOCABULARY // tensor_parallel * tensor_parallel,
        make_vocab_size_divisible_by=1,
        swiglu=False,
        normalization="LayerNorm",
        add_bias_linear=True,
        untie_embeddings_and_output_weights=False,
        position_embedding_type="learned_absolute",
        max_position_embeddings=whole(raw, "seq_len", 1),
    )
    workload = Workload(
        model=model,
        world_size=whole(raw, "n_gpus", 1),
        global_batch_size=whole(raw, "global_batch", 1),
        seq_length=whole(raw, "seq_len", 1),
        settings=IN_ORDER.model_copy(update={"separate_main_params": False}),
    )
    config = TrialConfig(
        tensor_model_parallel_size=tensor_parallel,
        pipeline_model_parallel_size=whole(raw, "pp", 1),
        micro_batch_size=whole(raw, "micro_batch", 1),
        precision="fp16",
        attention_backend="unfused",
        main_grads_dtype="bf16",
        **_vtrain_recompute(raw),
    )
    device = gpu("a100-sxm4-80gb")
    measured = Measured(workload, config, float(raw["iteration_time_ms"]) / 1000, "balanced")
    return TimedRow(f"vtrain-{raw['set']}-{position}", "vtrain", device, links_of_source(device, "vtrain", 8), measured)


def _vtrain_recompute(raw: Mapping[str, str]) -> dict[str, Any]:
    """The multi-node set trains with every layer recomputed; the single-node set keeps all activations."""
    if raw["set"] != "multi":
        return {}
    return {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


def by_source(rows: Iterable[TimedRow]) -> dict[str, list[TimedRow]]:
    """Rows by what is held out together."""
    found: dict[str, list[TimedRow]] = {}
    for row in rows:
        found.setdefault(row.source, []).append(row)
    return found


__all__ = ["LinkSpec", "TimedRow", "by_source", "read"]
