"""What holds for every accepted configuration: both meshes multiply to the world size, stages have layers, arguments read back."""

from __future__ import annotations

import random

import pytest

from benchmarks.legality_cases import legal
from search_spaces.case import read_case
from search_spaces.config import TrialConfig
from search_spaces.layout import parse_layout
from search_spaces.model import Workload
from search_spaces.normalise import normalise


@pytest.mark.parametrize("megatron", ["0.16", "0.19"])
def test_accepted_random_configurations(megatron: str) -> None:
    hold(megatron, 60)


@pytest.mark.acceptance
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("megatron", ["0.16", "0.19"])
def test_many_accepted_random_configurations(megatron: str) -> None:
    hold(megatron, 2000)


def hold(megatron: str, count: int) -> None:
    """The properties of `count` legal configurations drawn from a new seed, which a failure shows."""
    seed = random.SystemRandom().randrange(2**32)
    rng = random.Random(seed)
    for _ in range(count):
        case = legal(rng, megatron)
        workload, config = read_case(case, megatron)
        once = normalise(workload, config)
        assert attention_ranks(once) * once.data_parallel_size(workload.world_size) == workload.world_size, (seed, case)
        assert workload.world_size % expert_ranks(once) == 0, (seed, case)
        assert min(layers_per_chunk(workload, once)) >= 1 or leaves_stages_empty(once), (seed, case)
        assert sum(layers_per_chunk(workload, once)) == workload.model.num_layers, (seed, case)
        for spelling in (config, once):
            without_machine = spelling.model_copy(update={"environment": ()})
            assert TrialConfig.from_argv(spelling.argv()) == without_machine, (seed, case)


def leaves_stages_empty(config: TrialConfig) -> bool:
    """Whether somebody asked for stages without transformer layers: a layout may say so, a counted embedding or loss is a layer."""
    counted = config.account_for_embedding_in_pipeline_split or config.account_for_loss_in_pipeline_split
    return config.pipeline_model_parallel_layout is not None or counted


def attention_ranks(config: TrialConfig) -> int:
    """Ranks of one replica of the attention layers."""
    return config.tensor_model_parallel_size * config.pipeline_model_parallel_size * config.context_parallel_size


def expert_ranks(config: TrialConfig) -> int:
    """Ranks of one replica of the experts; without their own tensor parallel size they have the attention's."""
    tensor = config.expert_tensor_parallel_size or config.tensor_model_parallel_size
    return tensor * config.expert_model_parallel_size * config.pipeline_model_parallel_size


def layers_per_chunk(workload: Workload, config: TrialConfig) -> list[int]:
    """Transformer layers of every model chunk, worked out apart from the product's rules."""
    layers, stages = workload.model.num_layers, config.pipeline_model_parallel_size
    if config.pipeline_model_parallel_layout:
        return [stage.count("t") for stage in parse_layout(config.pipeline_model_parallel_layout).stages]
    chunks = config.num_virtual_stages_per_pipeline_rank or 1
    first, last = config.decoder_first_pipeline_num_layers, config.decoder_last_pipeline_num_layers
    if first is None and last is None:
        embedding, loss = config.account_for_embedding_in_pipeline_split, config.account_for_loss_in_pipeline_split
        counts = [(layers + embedding + loss) // (stages * chunks)] * (stages * chunks)
        counts[0] -= embedding
        counts[-1] -= loss
        return counts
    middle_stages = stages - (first is not None) - (last is not None)
    middle = (layers - (first or 0) - (last or 0)) // max(middle_stages, 1)
    ends = [[first] if first is not None else [], [middle] * middle_stages, [last] if last is not None else []]
    return [count // chunks for part in ends for count in part for _ in range(chunks)]
