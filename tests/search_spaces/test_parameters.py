"""One count of parameters: a model's, a rank's in memory, and those that a step's end moves and updates are the same."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from search_spaces.columns import Columns
from search_spaces.config import TrialConfig
from search_spaces.model import ModelSpec, Workload
from search_spaces.parameters import attention_weights, count_parameters, feed_forward_weights, rank_parameters
from search_spaces.space import SearchSpace
from search_spaces.step_ends import held_parameters

SHAPES: dict[str, Any] = {"num_layers": 6, "hidden_size": 512, "num_attention_heads": 8, "vocab_size": 1024}
EXPERTS = {"num_experts": 8, "moe_router_topk": 2, "moe_ffn_hidden_size": 256, "moe_shared_expert_intermediate_size": 512}
LATENT = {"multi_latent_attention": True, "q_lora_rank": 128, "kv_lora_rank": 64, "qk_head_dim": 64, "qk_pos_emb_head_dim": 32}
MODELS = {
    "dense": {"num_query_groups": 2, "swiglu": True, "untie_embeddings_and_output_weights": True},
    "biased": {"add_bias_linear": True, "qk_layernorm": True, "position_embedding_type": "learned_absolute"},
    "experts": {**EXPERTS, "moe_shared_expert_gate": True, "untie_embeddings_and_output_weights": True},
    "latent": {**EXPERTS, **LATENT, "v_head_dim": 64, "swiglu": True, "qk_layernorm": True},
}


def workload(name: str, world_size: int = 8) -> Workload:
    positions = {"max_position_embeddings": 128} if name == "biased" else {}
    model = ModelSpec.model_validate({**SHAPES, **MODELS[name], **positions})
    return Workload(model=model, world_size=world_size, global_batch_size=32, seq_length=128)


@pytest.mark.parametrize("name", MODELS)
def test_the_layers_of_one_rank_alone_are_the_whole_model(name: str) -> None:
    trained = workload(name)
    model, held = trained.model, held_parameters(Columns.of(trained, TrialConfig()))
    moe = sum(model.moe_layers)
    layers = (model.num_layers - moe) * sum(held["dense"]) + moe * sum(held["moe"])
    ends = sum(held["embedding"]) + sum(held["head"])
    tied = 0 if model.untie_embeddings_and_output_weights else model.vocab_size * model.hidden_size  # the head holds it again
    assert (layers + ends - tied).item() == count_parameters(model).total


@pytest.mark.parametrize("name", MODELS)
def test_a_step_s_end_counts_what_memory_counts_row_by_row(name: str) -> None:
    search = {"tensor_model_parallel_size": [1, 2, 4], "expert_model_parallel_size": [1, 2, 4], "micro_batch_size": [1, 2]}
    table = SearchSpace(workload(name), search).table().columns
    held, counted = held_parameters(table), rank_parameters(table)
    pairs = {
        "dense": (counted.dense_layer, 0),
        "moe": (counted.moe_layer, counted.experts),
        "embedding": (counted.embedding, 0),
        "head": (counted.output + counted.final_norm, 0),
        "mtp": (counted.mtp_layer, counted.mtp_experts),
    }
    for kind, numbers in pairs.items():
        for mine, other in zip(held[kind], numbers, strict=True):
            assert np.array_equal(*np.broadcast_arrays(mine, other)), kind


@pytest.mark.parametrize("name", ["dense", "latent"])
def test_the_weights_whose_gradients_are_added_up_are_the_model_s_without_norms(name: str) -> None:
    model = workload(name).model.model_copy(update={"qk_layernorm": False})
    count, moe = count_parameters(model), sum(model.moe_layers)
    assert model.num_layers * attention_weights(model) == count.attention
    assert (model.num_layers - moe) * feed_forward_weights(model, model.ffn_size) == count.dense
    assert moe * (model.num_experts or 0) * feed_forward_weights(model, model.expert_ffn_size) == count.experts
    latent = 2 if name == "latent" else 1
    assert attention_weights(model, 2, latent) * 2 == attention_weights(model)
    assert feed_forward_weights(model, model.ffn_size, 4) * 4 == feed_forward_weights(model, model.ffn_size)
