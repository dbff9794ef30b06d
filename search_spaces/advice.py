"""What is legal but seldom good, or fails outside Megatron's own code. Advice is shown, never a reason to refuse."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from search_spaces.config import TrialConfig
from search_spaces.model import Workload

Advice = Callable[[Workload, TrialConfig], str | None]


def advise(workload: Workload, config: TrialConfig) -> list[str]:
    """One sentence for everything about a configuration that a person may want to think about."""
    return list(_spoken(workload, config))


def _spoken(workload: Workload, config: TrialConfig) -> Iterator[str]:
    """The advice that applies."""
    for advice in ADVICE:
        sentence = advice(workload, config)
        if sentence is not None:
            yield sentence


def tensor_ranks_leave_the_node(workload: Workload, config: TrialConfig) -> str | None:
    """Tensor parallel communication is on the path of every layer: it wants the links inside a node."""
    node, ranks = workload.gpus_per_node, config.tensor_model_parallel_size
    if node is None or ranks <= node:
        return None
    return f"tensor_model_parallel_size={ranks} spans nodes of {node} GPUs: every layer waits for the network"


def experts_leave_the_node(workload: Workload, config: TrialConfig) -> str | None:
    """The experts' all-to-all is cheaper inside a node."""
    ranks = config.expert_model_parallel_size * (config.expert_tensor_parallel_size or config.tensor_model_parallel_size)
    node = workload.gpus_per_node
    if node is None or ranks <= node or config.expert_model_parallel_size == 1:
        return None
    return f"expert x expert tensor parallel = {ranks} ranks span nodes of {node} GPUs: tokens cross the network"


def context_exchange_needs_heads(workload: Workload, config: TrialConfig) -> str | None:
    """Transformer Engine's all-to-all context parallelism gives every context rank whole heads; Megatron does not check it."""
    kinds = config.cp_comm_type or ()
    heads, groups = workload.model.num_attention_heads, workload.model.query_groups
    ranks = config.context_parallel_size * config.tensor_model_parallel_size
    if config.context_parallel_size == 1 or "a2a" not in kinds or (heads % ranks == 0 and groups % ranks == 0):
        return None
    return f"cp_comm_type=a2a wants heads={heads} and query groups={groups} to divide by tensor x context = {ranks}"


def low_precision_needs_hardware(workload: Workload, config: TrialConfig) -> str | None:
    """FP8 needs Hopper, block scales of 32 and FP4 Blackwell; Transformer Engine says so in the first step."""
    arch = workload.settings.gpu_arch_major
    if config.fp4_format is not None:
        asked, needed = f"fp4_format={config.fp4_format}", 10
    elif config.fp8_format is not None:
        asked, needed = f"fp8_recipe={config.fp8_recipe}", 10 if config.fp8_recipe == "mxfp8" else 9
    else:
        return None
    return None if arch >= needed else f"{asked} needs compute capability {needed}, the GPUs have {arch}"


def mostly_bubble(workload: Workload, config: TrialConfig) -> str | None:
    """Fewer micro-batches than stages leave most of a pipeline idle."""
    replicas = max(config.data_parallel_size(workload.world_size), 1)
    batches = workload.global_batch_size // (config.micro_batch_size * replicas)
    if batches >= config.pipeline_model_parallel_size:
        return None
    return f"{batches} micro-batches on {config.pipeline_model_parallel_size} stages: most of the pipeline is idle"


ADVICE: tuple[Advice, ...] = (
    tensor_ranks_leave_the_node,
    experts_leave_the_node,
    context_exchange_needs_heads,
    low_precision_needs_hardware,
    mostly_bubble,
)
