"""What is worth trying for a model on a pool: values that can be legal, generated from its shapes."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from search_spaces.model import Workload
from search_spaces.whole import divisors

LAYER_COUNTS = 8
LARGEST_MICRO_BATCH = 8
LARGEST_CONTEXT = 16
SHORTEST_CONTEXT_TOKENS = 1024


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


def _divisors(number: int, most: int) -> list[int]:
    """Divisors of a number up to a bound."""
    return [n for n in divisors(number) if n <= most]


def _tensor(workload: Workload) -> list[int]:
    """TP within a node, dividing heads, feed-forward width and world."""
    node = workload.gpus_per_node or 8
    sizes = _divisors(workload.world_size, node)
    return [n for n in sizes if workload.model.num_attention_heads % n == 0 and node % n == 0]


def _stages(workload: Workload) -> list[int]:
    """PP up to the number of layers, powers of two and divisors of the layers, dividing the world."""
    layers = workload.model.num_layers
    return [n for n in _divisors(workload.world_size, layers) if n & (n - 1) == 0 or layers % n == 0]


def _pipelines(workload: Workload) -> list[dict[str, Any]]:
    """Every PP with its ways to split the layers, and the virtual stages that each split allows."""
    found = []
    for stages in _stages(workload):
        for split, share in _splits(workload.model.num_layers, stages):
            chunks = [None, *divisors(share)[1:]] if stages > 1 else [None]
            found += [
                {"pipeline_model_parallel_size": stages, "num_virtual_stages_per_pipeline_rank": chunk, **split} for chunk in chunks
            ]
    return found


def _splits(layers: int, stages: int) -> list[tuple[dict[str, Any], int]]:
    """Ways to split the layers over stages, each with the number that virtual stages must divide."""
    if layers % stages == 0:
        return [({}, layers // stages)]
    found: list[tuple[dict[str, Any], int]] = []
    for embedding, loss in ((True, True), (True, False), (False, True)):
        counted = layers + embedding + loss
        if counted % stages == 0 and counted // stages > 1:
            split = {"account_for_embedding_in_pipeline_split": embedding, "account_for_loss_in_pipeline_split": loss}
            found.append((split, counted // stages))
    return found + _uneven(layers, stages)


def _uneven(layers: int, stages: int) -> list[tuple[dict[str, Any], int]]:
    """Uneven splits with nearly equal middle stages and the rest on both ends, the heavier end first or last."""
    found = []
    for middle in sorted({-(-layers // stages), layers // stages}):
        ends = layers - middle * (stages - 2)
        for first in sorted({ends // 2, -(-ends // 2)}):
            if 1 <= first < ends <= 4 * middle:
                split = {"decoder_first_pipeline_num_layers": first, "decoder_last_pipeline_num_layers": ends - first}
                share = math.gcd(first, ends - first, middle) if stages > 2 else math.gcd(first, ends - first)
                found.append((split, share))
    return found


def _context(workload: Workload) -> list[int]:
    """CP that leaves every rank enough tokens; none on CPU."""
    if workload.device == "cpu":
        return [1]
    most = max(1, min(LARGEST_CONTEXT, workload.seq_length // SHORTEST_CONTEXT_TOKENS))
    return [n for n in _divisors(workload.world_size, most) if n == 1 or workload.seq_length % (2 * n) == 0]


def _expert(workload: Workload) -> list[int]:
    """EP that divides experts and world."""
    experts = workload.model.num_experts or 1
    return [n for n in _divisors(workload.world_size, experts) if experts % n == 0]


def _expert_tensor(workload: Workload) -> list[int | None]:
    """ETP 1, and TP as Megatron's default; none for dense models."""
    if not workload.model.is_moe:
        return [None]
    return [1] if workload.device == "cpu" else [1, None]


def _micro_batch(workload: Workload) -> list[int]:
    """Powers of two that divide the global batch."""
    return [n for n in _divisors(workload.global_batch_size, LARGEST_MICRO_BATCH) if n & (n - 1) == 0]


def _sequence(workload: Workload) -> list[bool]:
    """SP on and off; models with experts need it on."""
    return [True] if workload.model.is_moe else [False, True]


def _recompute(workload: Workload) -> list[dict[str, Any]]:
    """No recompute, selective, and full recompute in units (uniform) or of some layers of a stage (block)."""
    full = [
        {"recompute_granularity": "full", "recompute_method": method, "recompute_num_layers": layers}
        for method in ("uniform", "block")
        for layers in _spread(workload.model.num_layers)
    ]
    return [{}, {"recompute_granularity": "selective"}, *full]


def _spread(layers: int) -> list[int]:
    """At most LAYER_COUNTS numbers from 1 to `layers`: all of them, or evenly spread on a log scale."""
    if layers <= LAYER_COUNTS:
        return list(range(1, layers + 1))
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


def _fsdp(workload: Workload) -> list[dict[str, Any]]:
    """Without FSDP, and Megatron-FSDP sharding gradients, or parameters as well."""
    common = {"use_megatron_fsdp": True, "ckpt_format": "fsdp_dtensor"}
    return [{}, *({**common, "data_parallel_sharding_strategy": strategy} for strategy in ("optim_grads", "optim_grads_params"))]


def _cuda_graphs(workload: Workload) -> list[dict[str, Any]]:
    """Without graphs, and graphs of attention alone, or of what every layer of the model allows."""
    modules = ("attn", "moe_router") if workload.model.is_moe else ("attn", "mlp")
    graphs = [{"cuda_graph_impl": "transformer_engine", "cuda_graph_modules": chosen} for chosen in (("attn",), modules)]
    return [{}, *graphs]


def _optimizer_offload(workload: Workload) -> list[dict[str, Any]]:
    """Optimiser state on the GPU, half of it, and all of it in host memory."""
    common = {"optimizer_cpu_offload": True, "use_precision_aware_optimizer": True}
    return [{}, *({**common, "optimizer_offload_fraction": fraction} for fraction in (0.5, 1.0))]


def _activation_offload(workload: Workload) -> list[dict[str, Any]]:
    """Activations of no layers, a quarter and half of them in host memory."""
    layers = workload.model.num_layers
    return [{"cpu_offloading_num_layers": count} for count in sorted({0, layers // 4, layers // 2})]


def _expert_overlap(workload: Workload) -> list[dict[str, Any]]:
    """The experts' all-to-all as it is, overlapped, and overlapped with delayed weight gradients."""
    plain = {"moe_token_dispatcher_type": "alltoall"}
    overlapped = {**plain, "overlap_moe_expert_parallel_comm": True}
    return [plain, overlapped, {**overlapped, "delay_wgrad_compute": True}]


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
    "tp_comm_overlap": _switch,
}
_AUTO_GROUPS: dict[str, Callable[[Workload], list[dict[str, Any]]]] = {
    "pipeline": _pipelines,
    "recompute": _recompute,
    "optimizer": _optimizer,
    "fsdp": _fsdp,
    "cuda_graphs": _cuda_graphs,
    "optimizer_offload": _optimizer_offload,
    "activation_offload": _activation_offload,
    "expert_overlap": _expert_overlap,
}
