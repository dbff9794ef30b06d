"""What megatron-core itself builds and saves, on CPU under torch's fake process group: the oracle of the memory model.

Adapts torch and Megatron in this process for good, so only programs of their own import it; the tests start one and read JSON.

    python -m tests.search_spaces.megatron_oracle < CASES.json > ANSWERS.json

CASES.json holds {"parameters": [case, ...], "activations": [case, ...]}, or one of them; ANSWERS.json an answer for each case.
"""

from __future__ import annotations

import json
import logging
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_decoder_block_spec,
    get_gpt_decoder_layer_specs,
    get_gpt_mtp_block_spec,
)
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from torch.testing._internal.distributed.fake_pg import FakeStore

from launchers.megatron_core import build, cpu
from launchers.megatron_core.job import Job
from launchers.megatron_core.launcher import MegatronCoreLauncher
from search_spaces.case import read_case
from search_spaces.normalise import normalise


def main() -> None:
    """Answer the cases of every question on standard input."""
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    cpu.install("127.0.0.1")
    multi_latent_attention.HAVE_TE = False  # True although Transformer Engine's names are None
    answers = {"parameters": parameters, "activations": activations}
    asked = json.load(sys.stdin)
    json.dump({question: [answers[question](case) for case in cases] for question, cases in asked.items()}, sys.stdout)


def parameters(case: dict[str, Any]) -> list[list[int]]:
    """Parameters outside and inside the experts of every pipeline stage (first tensor parallel rank of each)."""
    job = _job(case)
    per_stage = job.world_size // job.knobs["pipeline_model_parallel_size"]
    found = []
    for stage in range(job.knobs["pipeline_model_parallel_size"]):
        with _ranks(job, stage * per_stage), torch.device("meta"):
            named = [item for chunk in _chunks(job) for item in chunk.named_parameters()]
        experts = sum(parameter.numel() for name, parameter in named if ".experts." in name)
        found.append([sum(parameter.numel() for _, parameter in named) - experts, experts])
    return found


def activations(case: dict[str, Any]) -> dict[str, int]:
    """Bytes that one forward pass of the only stage saves for the backward pass, each storage once, without parameters."""
    job = _job(case)
    with _ranks(job, 0):
        (model,) = _chunks(job)
        model = model.to(build._DTYPES[job.knobs["precision"]])
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.normal_(0, 0.02)
        known = {tensor.untyped_storage()._cdata for tensor in (*model.parameters(), *model.buffers())}
        saved: dict[int, Any] = {}
        shapes: dict[int, Any] = {}

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if storage._cdata not in known:
                saved.setdefault(storage._cdata, storage)  # kept, so that its identity is not used again
                shapes.setdefault(storage._cdata, (tuple(tensor.shape), str(tensor.dtype)))
            return tensor

        size = (job.micro_batch_size, job.seq_length // job.knobs["context_parallel_size"])
        tokens = torch.randint(0, job.model["vocab_size"], size)
        positions = torch.arange(size[1]).expand(size[0], -1).contiguous()
        mask = torch.triu(torch.ones(1, 1, size[1], size[1], dtype=torch.bool), 1)
        known |= {tensor.untyped_storage()._cdata for tensor in (tokens, positions, mask)}
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            model(tokens, positions, mask, labels=tokens)
        # Outputs that will be recomputed have been emptied by now.
        sizes = {key: storage.nbytes() for key, storage in saved.items()}
        answer: dict[str, Any] = {"bytes": sum(sizes.values())}
        if case.get("show"):
            answer["shapes"] = sorted((sizes[key], str(shapes[key])) for key in sizes)
        return answer


def _job(case: dict[str, Any]) -> Job:
    given = {key: value for key, value in case.items() if key != "show"}
    workload, config = read_case({**given, "device": "cpu"}, "0.16")
    return Job.from_dict(MegatronCoreLauncher().job(workload, normalise(workload, config), steps=1, seed=1))


@contextmanager
def _ranks(job: Job, rank: int) -> Iterator[None]:
    """Process groups of all ranks as `rank` sees them; nothing is ever sent."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=job.world_size)
    parallel_state.create_group = cpu._shared_groups()
    try:
        build.initialise_groups(job)
        yield
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


class Attention(DotProductAttention):
    """The local attention with value heads of another size than key heads, which multi-latent attention asks for."""

    def __init__(self, *args: Any, k_channels: int | None = None, v_channels: int | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if v_channels is not None:
            self.hidden_size_per_partition = v_channels * self.num_attention_heads_per_partition


def _config(job: Job) -> TransformerConfig:
    if not job.model["multi_latent_attention"]:
        config = build.transformer_config(job)
    else:
        plain, build.TransformerConfig = build.TransformerConfig, MLATransformerConfig
        config = build.transformer_config(job)
        build.TransformerConfig = plain
        config.q_lora_rank = job.model["q_lora_rank"]  # values of none are passed over, and Megatron's default is a rank
    return config


def _chunks(job: Job) -> list[GPTModel]:
    layout = job.knobs.get("pipeline_model_parallel_layout")
    if layout:
        parsed = PipelineParallelLayerLayout.from_str(layout, job.knobs["pipeline_model_parallel_size"])
        chunks = parsed.virtual_pipeline_model_parallel_size
        chunks = chunks if chunks > 1 else None
        job = Job.from_dict({**job.to_dict(), "knobs": {**job.knobs, "num_virtual_stages_per_pipeline_rank": chunks}})
        parallel_state.set_virtual_pipeline_model_parallel_world_size(chunks)
    config = _config(job)
    return [_chunk(job, config, stage) for stage in range(job.model_chunks)]


def _chunk(job: Job, config: TransformerConfig, index: int) -> GPTModel:
    stage = index if job.model_chunks > 1 else None
    spec = _layer_spec(config, stage)
    mtp = None
    if config.mtp_num_layers:
        last = (
            spec if spec.layer_specs else _with_norms(get_gpt_decoder_layer_specs(config, False, config.normalization)[-1], config)
        )
        mtp = get_gpt_mtp_block_spec(config, last, use_transformer_engine=False, vp_stage=stage)
        for layer in mtp.layer_specs if mtp else ():
            build._use_own_norm(layer.submodules, "enorm", "hnorm", "layer_norm")
    return GPTModel(
        config,
        spec,
        vocab_size=job.padded_vocab_size,
        max_sequence_length=job.model["max_position_embeddings"] or job.seq_length,
        pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=stage),
        post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage),
        share_embeddings_and_output_weights=not job.model["untie_embeddings_and_output_weights"],
        position_embedding_type=job.model["position_embedding_type"],
        mtp_block_spec=mtp,
        vp_stage=stage,
    )


def _layer_spec(config: TransformerConfig, stage: int | None) -> TransformerBlockSubmodules:
    """As `build._layer_spec`, for multi-latent attention too."""
    block = get_gpt_decoder_block_spec(config, False, normalization=config.normalization, vp_stage=stage)
    build._without_transformer_engine()
    layers = [_with_norms(layer, config) for layer in block.layer_specs]
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=build.Norm)


def _with_norms(layer: Any, config: TransformerConfig) -> Any:
    """A layer's specification with the norms and the attention that run on a CPU."""
    norms = ("q_layernorm", "kv_layernorm") if config.multi_latent_attention else ("q_layernorm", "k_layernorm")
    build._use_own_norm(layer.submodules, "input_layernorm", "pre_mlp_layernorm")
    attention = layer.submodules.self_attention.submodules
    build._use_own_norm(attention, *norms)
    attention.core_attention = Attention
    return layer


if __name__ == "__main__":
    main()
