"""Random legal mixes on 4 ranks: each trains two steps, in fp32 with the losses of one rank."""

from __future__ import annotations

import random
from typing import Any

import pytest

from launchers.megatron_core.launcher import MegatronCoreLauncher
from search_spaces.config import TrialConfig
from search_spaces.legality import check
from search_spaces.model import ModelSpec, Workload
from tests.launchers.megatron_harness import WarmTrials

MIXES = 40
WORLD_SIZE = 4
TOLERANCE = {"fp32": 1e-5, "bf16": 2e-2, "fp16": 2e-2}
SELECTIVE = [None, ("core_attn",), ("layernorm",), ("mlp",), ("core_attn", "layernorm", "mlp")]


def _model(draw: random.Random) -> ModelSpec:
    moe = draw.random() < 0.5
    return ModelSpec(
        num_layers=8,
        hidden_size=32,
        num_attention_heads=4,
        num_query_groups=draw.choice([None, 4, 4]),
        vocab_size=draw.choice([500, 512]),
        ffn_hidden_size=64,
        swiglu=draw.random() < 0.6,
        normalization=draw.choice(["LayerNorm", "RMSNorm"]),
        add_bias_linear=not moe and draw.random() < 0.4,
        untie_embeddings_and_output_weights=draw.random() < 0.6,
        position_embedding_type=draw.choice(["rope", "learned_absolute"]),
        num_experts=4 if moe else None,
        moe_router_topk=draw.choice([1, 2]),
        moe_ffn_hidden_size=48 if moe else None,
    )


def _recompute(draw: random.Random, moe: bool) -> dict[str, Any]:
    granularity = draw.choice([None, "full", "selective"])
    if granularity == "full":
        method = draw.choice(["uniform", "block"])
        return {"recompute_granularity": "full", "recompute_method": method, "recompute_num_layers": draw.choice([1, 2])}
    if granularity == "selective":
        modules = draw.choice([*SELECTIVE, ("moe",), ("moe", "layernorm")] if moe else SELECTIVE)
        return {"recompute_granularity": "selective", "recompute_modules": modules}
    return {}


def _knobs(draw: random.Random, model: ModelSpec) -> dict[str, Any] | None:
    """Knobs of a legal mix, or None where the draw was not legal."""
    tp, pp = draw.choice([(1, 1), (2, 1), (4, 1), (1, 2), (1, 4), (2, 2), (2, 2)])
    ep = draw.choice([1, 2, 4]) if model.num_experts else 1
    etp = draw.choice([None, 1, tp]) if model.num_experts else None
    dp, micro_batch_size = WORLD_SIZE // (tp * pp), draw.choice([1, 2])
    micro_batches = 8 // (dp * micro_batch_size)
    vpp = draw.choice([None, 2]) if pp > 1 and micro_batches % pp == 0 else None
    sequence_parallel = tp > 1 and (bool(model.num_experts) or draw.random() < 0.5)
    distributed, overlap = draw.random() < 0.5, draw.random() < 0.5
    if WORLD_SIZE % (pp * ep * (etp or tp)):
        return None
    return {
        "tensor_model_parallel_size": tp,
        "pipeline_model_parallel_size": pp,
        "num_virtual_stages_per_pipeline_rank": vpp,
        "expert_model_parallel_size": ep,
        "expert_tensor_parallel_size": etp,
        "micro_batch_size": micro_batch_size,
        "sequence_parallel": sequence_parallel,
        "use_distributed_optimizer": distributed,
        "overlap_grad_reduce": overlap,
        "overlap_param_gather": overlap and distributed,
        "precision": draw.choice(["fp32", "fp32", "fp32", "bf16", "bf16", "fp16"]),
        **_recompute(draw, bool(model.num_experts)),
    }


def _mix(seed: int) -> tuple[Workload, TrialConfig]:
    draw = random.Random(seed)
    while True:
        model = _model(draw)
        knobs = _knobs(draw, model)
        workload = Workload(model=model, world_size=WORLD_SIZE, global_batch_size=8, seq_length=16, device="cpu")
        if knobs and not _refused(workload, TrialConfig(**knobs)):
            return workload, TrialConfig(**knobs)


def _refused(workload: Workload, config: TrialConfig) -> bool:
    return bool(check(workload, config) or MegatronCoreLauncher().refusals(workload, config))


@pytest.mark.acceptance
@pytest.mark.timeout(600)
def test_random_legal_mixes_train_as_one_rank_does(trials: WarmTrials) -> None:
    launcher = MegatronCoreLauncher()
    failures = []
    for seed in range(MIXES):
        workload, config = _mix(seed)
        job = launcher.job(workload, config, steps=2, seed=seed)
        run, expected = trials.run(job), trials.reference(workload, config, steps=2, seed=seed).losses
        losses = [step["loss"] for step in run.steps]
        if run.errors or losses != pytest.approx(expected, rel=TOLERANCE[config.precision]):
            failures.append(f"seed {seed}: {config.changed()} {workload.model}: {losses} is not {expected} {run.errors[:1]}")
    assert not failures, "\n\n".join(failures)
