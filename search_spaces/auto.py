"""What is worth trying for a model on a pool: values that can be legal, generated from its shapes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from search_spaces.model import Workload

LAYER_COUNTS = 8
LARGEST_MICRO_BATCH = 8
LARGEST_CONTEXT = 16
SHORTEST_CONTEXT_TOKENS = 2048


def auto_knob(workload: Workload, name: str) -> list[Any]:
    """Values of one knob that are worth trying.

    Raises:
        ValueError: the knob is not part of auto and has to be chosen by hand.
    """
    if name in _AUTO:
        return _AUTO[name](workload)
    raise ValueError(f"{name} has no auto; list its values (auto knows: {', '.join((*_AUTO, *_AUTO_GROUPS))})")


def auto_group(workload: Workload, name: str) -> list[dict[str, Any]]:
    """Combinations of a group's knobs that are worth trying.

    Raises:
        ValueError: the group is not part of auto.
    """
    if name in _AUTO_GROUPS:
        return _AUTO_GROUPS[name](workload)
    raise ValueError(f"{name} has no auto; list its items (auto knows: {', '.join((*_AUTO, *_AUTO_GROUPS))})")


def divisors(number: int, most: int) -> list[int]:
    """Divisors of a number up to a bound."""
    return [n for n in range(1, min(number, most) + 1) if number % n == 0]


def _tensor(workload: Workload) -> list[int]:
    """TP within a node, dividing heads, feed-forward width and world."""
    node = workload.gpus_per_node or 8
    sizes = divisors(workload.world_size, node)
    return [n for n in sizes if workload.model.num_attention_heads % n == 0 and node % n == 0]


def _stages(workload: Workload) -> list[int]:
    """PP up to the number of layers, powers of two and divisors of the layers, dividing the world."""
    layers = workload.model.num_layers
    return [n for n in divisors(workload.world_size, layers) if n & (n - 1) == 0 or layers % n == 0]


def _pipelines(workload: Workload) -> list[dict[str, Any]]:
    """Every PP with its ways to split the layers, and the virtual stages that each split allows."""
    found = []
    for stages in _stages(workload):
        for split, per_stage in _splits(workload, stages):
            chunks = [None, *(n for n in range(2, per_stage + 1) if per_stage % n == 0)] if stages > 1 else [None]
            found += [
                {"pipeline_model_parallel_size": stages, "num_virtual_stages_per_pipeline_rank": chunk, **split} for chunk in chunks
            ]
    return found


def _splits(workload: Workload, stages: int) -> list[tuple[dict[str, Any], int]]:
    """Ways to split the layers over stages, each with the number that virtual stages must divide."""
    layers = workload.model.num_layers
    found: list[tuple[dict[str, Any], int]] = []
    for embedding, loss in ((False, False), (True, True), (True, False), (False, True)):
        counted = layers + embedding + loss
        if counted % stages == 0 and (stages > 1 or not (embedding or loss)):
            split = {"account_for_embedding_in_pipeline_split": embedding, "account_for_loss_in_pipeline_split": loss}
            found.append((split, counted // stages))
    if not found and stages > 1:
        found = _uneven(layers, stages)
    return found


def _uneven(layers: int, stages: int) -> list[tuple[dict[str, Any], int]]:
    """Uneven splits with as equal middle stages as possible and lighter ends."""
    found = []
    for middle in (-(-layers // stages), layers // stages):
        ends = layers - middle * (stages - 2)
        if ends >= 2:
            first = -(-ends // 2)
            split = {"decoder_first_pipeline_num_layers": first, "decoder_last_pipeline_num_layers": ends - first}
            found.append((split, 1))
    return found


def _context(workload: Workload) -> list[int]:
    """CP that leaves every rank enough tokens; none on CPU."""
    if workload.device == "cpu":
        return [1]
    most = max(1, min(LARGEST_CONTEXT, workload.seq_length // SHORTEST_CONTEXT_TOKENS))
    return [n for n in divisors(workload.world_size, most) if n == 1 or workload.seq_length % (2 * n) == 0]


def _expert(workload: Workload) -> list[int]:
    """EP that divides experts and world."""
    experts = workload.model.num_experts or 1
    return [n for n in divisors(workload.world_size, experts) if experts % n == 0]


def _expert_tensor(workload: Workload) -> list[int | None]:
    """ETP 1, and TP as Megatron's default; none for dense models."""
    if not workload.model.is_moe:
        return [None]
    return [1] if workload.device == "cpu" else [1, None]


def _micro_batch(workload: Workload) -> list[int]:
    """Small micro-batches that divide the global batch."""
    return divisors(workload.global_batch_size, LARGEST_MICRO_BATCH)


def _sequence(workload: Workload) -> list[bool]:
    """SP on and off; models with experts need it on."""
    return [True] if workload.model.is_moe else [False, True]


def _recompute(workload: Workload) -> list[dict[str, Any]]:
    """No recompute, selective, full of every layer, and full of some layers of a stage."""
    counts = sorted({max(1, workload.model.num_layers * step // LAYER_COUNTS) for step in range(1, LAYER_COUNTS + 1)})
    if workload.model.num_layers > LAYER_COUNTS:
        counts = _spread(workload.model.num_layers)
    blocks = [{"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": n} for n in counts]
    uniform = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    return [{}, {"recompute_granularity": "selective"}, uniform, *blocks]


def _spread(layers: int) -> list[int]:
    """At most LAYER_COUNTS numbers from 1 to `layers`, evenly spread on a log scale."""
    ratio = layers ** (1 / (LAYER_COUNTS - 1))
    return sorted({round(ratio**step) for step in range(LAYER_COUNTS)})


def _optimizer(workload: Workload) -> list[dict[str, Any]]:
    """The distributed optimiser and its overlaps, in the combinations that Megatron accepts."""
    names = ("use_distributed_optimizer", "overlap_grad_reduce", "overlap_param_gather")
    legal = ((False, False, False), (False, True, False), (True, False, False), (True, True, False), (True, True, True))
    return [dict(zip(names, values, strict=True)) for values in legal]


def _switch(workload: Workload) -> list[bool]:
    """Off and on."""
    return [False, True]


_AUTO: dict[str, Callable[[Workload], list[Any]]] = {
    "tensor_model_parallel_size": _tensor,
    "pipeline_model_parallel_size": _stages,
    "context_parallel_size": _context,
    "expert_model_parallel_size": _expert,
    "expert_tensor_parallel_size": _expert_tensor,
    "micro_batch_size": _micro_batch,
    "sequence_parallel": _sequence,
    "use_distributed_optimizer": _switch,
    "overlap_grad_reduce": _switch,
    "overlap_param_gather": _switch,
}
_AUTO_GROUPS: dict[str, Callable[[Workload], list[dict[str, Any]]]] = {
    "pipeline": _pipelines,
    "recompute": _recompute,
    "optimizer": _optimizer,
}
