"""`autotune init`: writes a first study file, with a comment on every choice, for the pools of this machine.

The file is a text with values filled in rather than a dump of `StudySpec`: its comments are what a person needs most.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import yaml

from autotune.errors import SpecError
from search_spaces.device_rules import lacks_bf16
from search_spaces.gpus import gpu
from search_spaces.hardware import PoolSpec

_HEAD = """\
# A first study. `autotune check {file}` counts what is legal, without a trial; `autotune tune {file}` finds the fastest.
# Names of shapes and knobs are Megatron's own.
name: {name}

# {model_comment}
model:
{model}

# Machines that look alike. Each pool is a study of its own; the report compares them.
pools:
{pools}

# Part of what is learned, so it stays the same in every trial. It must be divisible by micro-batch size x data parallel size.
global_batch_size: {global_batch_size}
seq_length: {seq_length}

# What you run today; every trial is compared with it. Knobs left out here and below keep Megatron's defaults.
baseline:
{baseline}

# Choices per knob, small to large. Illegal combinations are left out by rule, so list what you would like to try.
search:
{search}

# The study ends at whichever comes first.
budget:
  trials: {trials}
  wall_time_s: {wall_time_s}
"""
_POOL = """\
  - name: {name}
    gpu: {gpu}  # {gpu_comment}
    nodes: 1
    gpus_per_node: {gpus_per_node}{count_comment}
"""

_CPU_COMMENT = "Small enough for a CPU; put in your own shapes."
_GPU_COMMENT = "1.5 billion parameters, 27 GB for each copy of them with its gradients and optimiser; put in your own shapes."
_CPU_MODEL = {
    "num_layers": 4,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_query_groups": 4,
    "ffn_hidden_size": 256,
    "vocab_size": 512,
}
_GPU_MODEL = {
    "num_layers": 16,
    "hidden_size": 2048,
    "num_attention_heads": 32,
    "num_query_groups": 8,
    "ffn_hidden_size": 8192,
    "vocab_size": 128256,
}


def write_study(path: Path, pools: Sequence[PoolSpec], *, force: bool = False) -> Path:
    """Writes a commented study file for `pools`.

    Args:
        path: File to write; folders above it are made.
        pools: At least one pool; see `autotune.detect.detect_machine`.
        force: Whether a file that is there may be replaced.

    Returns:
        The path.

    Raises:
        SpecError: `path` is a folder, or exists and `force` is not set.
    """
    if path.is_dir():
        raise SpecError("path", str(path), "is a folder", "give the name of a file, e.g. study.yaml")
    text = study_text(re.sub(r"[^A-Za-z0-9_.-]+", "-", path.stem).strip("-.") or "study", path.name, pools)
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with path.open("w" if force else "x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError as error:
        raise SpecError("path", str(path), "exists already", "choose another name, or --force to replace it") from error
    return path


def study_text(name: str, file: str, pools: Sequence[PoolSpec]) -> str:
    """The study file's text.

    Args:
        name: The study's name.
        file: The file's name, for the commands in its first comment.
        pools: At least one pool.
    """
    cpu = all(pool.device == "cpu" for pool in pools)
    ranks = max(pool.world_size for pool in pools)
    return _HEAD.format(
        file=file,
        name=yaml.safe_dump(name).splitlines()[0],
        model_comment=_CPU_COMMENT if cpu else _GPU_COMMENT,
        model=_block(_CPU_MODEL if cpu else _GPU_MODEL),
        pools="".join(_pool(pool) for pool in pools).rstrip(),
        global_batch_size=16 if cpu else 16 * ranks,
        seq_length=64 if cpu else 4096,
        baseline=_block({"tensor_model_parallel_size": 1, "micro_batch_size": 1, "precision": _precision(pools)}),
        search=_block(_choices(ranks, cpu)),
        trials=12 if cpu else 40,
        wall_time_s=240 if cpu else 3600,
    )


def _precision(pools: Sequence[PoolSpec]) -> str:
    """fp32 on a CPU, else bf16, or fp16 where one of the devices has no bf16, as `autotune plan --model` does."""
    if all(pool.device == "cpu" for pool in pools):
        return "fp32"
    return "fp16" if any(_lacks_bf16(pool.gpu) for pool in pools) else "bf16"


def _lacks_bf16(name: str) -> bool:
    try:
        return lacks_bf16(gpu(name))
    except KeyError:  # nothing is known of it
        return False


def _pool(pool: PoolSpec) -> str:
    if pool.device == "cpu":
        comments = "ranks on the CPU, over gloo", "  # ranks; four are enough for every kind of parallelism"
    else:
        comments = "as the vendor's tool names it", ""
    return _POOL.format(
        name=pool.name, gpu=pool.gpu, gpus_per_node=pool.gpus_per_node, gpu_comment=comments[0], count_comment=comments[1]
    )


def _choices(ranks: int, cpu: bool) -> dict[str, list[object]]:
    parallel: list[object] = [size for size in range(1, 9) if ranks % size == 0]
    choices: dict[str, list[object]] = {
        "tensor_model_parallel_size": parallel,
        "pipeline_model_parallel_size": parallel,
        "num_virtual_stages_per_pipeline_rank": [None, 2],
        "micro_batch_size": [1, 2, 4],
        "sequence_parallel": [False, True],
        "recompute_granularity": [None, "selective"],
        "use_distributed_optimizer": [False, True],
    }
    if not cpu:
        choices |= {"overlap_grad_reduce": [False, True], "overlap_param_gather": [False, True]}
    return choices


def _block(values: Mapping[str, object]) -> str:
    """YAML lines, two spaces in, lists on one line."""
    lines = (
        f"  {key}: {yaml.safe_dump(value, default_flow_style=True, width=200).splitlines()[0]}" for key, value in values.items()
    )
    return "\n".join(lines)
