"""Every layout trains the same model: its losses over five optimiser steps are those of one rank with the same global batch.

MoE: no token is dropped and there is no auxiliary loss, which Megatron computes per micro-batch and rank; with either, losses would
rightly depend on the layout. The vocabulary is padded to the same size for every tensor parallel size used here; Megatron's softmax
counts padding rows, so that a different padding is a different model.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from launchers.megatron_core.launcher import MegatronCoreLauncher
from search_spaces.config import TrialConfig
from search_spaces.model import ModelSpec, Workload
from tests.launchers.megatron_harness import WarmTrials

STEPS = 5
TOLERANCE = {"fp32": 1e-5, "bf16": 2e-2}

DENSE = ModelSpec(num_layers=4, hidden_size=64, num_attention_heads=8, num_query_groups=4, ffn_hidden_size=160, vocab_size=500)
CLASSIC = ModelSpec(
    num_layers=4,
    hidden_size=64,
    num_attention_heads=4,
    vocab_size=500,
    swiglu=False,
    normalization="LayerNorm",
    add_bias_linear=True,
    untie_embeddings_and_output_weights=False,
    position_embedding_type="learned_absolute",
)
MOE = DENSE.model_copy(update={"num_experts": 4, "moe_ffn_hidden_size": 64})
FULL_UNIFORM = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
FULL_BLOCK = {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 1}


@dataclass(frozen=True)
class Case:
    name: str
    world_size: int
    knobs: dict[str, Any] = field(default_factory=dict)
    model: ModelSpec = DENSE
    precision: str = "fp32"

    def __str__(self) -> str:
        return f"{self.name}-{self.precision}"


def _mesh(tp: int = 1, pp: int = 1, vpp: int | None = None, ep: int = 1, etp: int | None = None, **knobs: Any) -> dict[str, Any]:
    return {
        "tensor_model_parallel_size": tp,
        "pipeline_model_parallel_size": pp,
        "num_virtual_stages_per_pipeline_rank": vpp,
        "expert_model_parallel_size": ep,
        "expert_tensor_parallel_size": etp,
        "sequence_parallel": False,
        **knobs,
    }


SP = {"sequence_parallel": True}
DISTOPT = {"use_distributed_optimizer": True}
OVERLAP = {**DISTOPT, "overlap_grad_reduce": True, "overlap_param_gather": True}

SMALL = [
    Case("tp2-sp", 2, _mesh(tp=2, **SP)),
    Case("pp2-vpp2", 2, _mesh(pp=2, vpp=2)),
    Case("dp2-distopt-recompute-uniform", 2, {**DISTOPT, **FULL_UNIFORM}),
    Case("tp4-bf16", 4, _mesh(tp=4), precision="bf16"),
    Case("ep2-dp2", 2, _mesh(ep=2), MOE),
    Case("pp4-recompute-selective", 4, _mesh(pp=4, recompute_granularity="selective")),
    Case("classic-tp2-pp2", 4, _mesh(tp=2, pp=2), CLASSIC),
    Case("tp2-pp2-sp-vpp2-recompute-block", 4, _mesh(tp=2, pp=2, vpp=2, **SP, **FULL_BLOCK)),
    Case("pp2-dp2-ep2-distopt", 4, _mesh(pp=2, ep=2, **DISTOPT), MOE),
]

FULL = [
    Case("tp2", 2, _mesh(tp=2)),
    Case("tp4", 4, _mesh(tp=4)),
    Case("tp4-sp", 4, _mesh(tp=4, **SP)),
    Case("pp2", 2, _mesh(pp=2)),
    Case("pp4", 4, _mesh(pp=4)),
    Case("dp2", 2),
    Case("dp4", 4),
    Case("dp4-distopt", 4, DISTOPT),
    Case("dp2-overlap-reduce", 2, {"overlap_grad_reduce": True}),
    Case("dp4-overlap-all", 4, OVERLAP),
    Case("pp2-vpp2-dp2-overlap-all", 4, _mesh(pp=2, vpp=2, **OVERLAP)),
    Case("mbs2", 1, {"micro_batch_size": 2}),
    Case("dp2-mbs2", 2, {"micro_batch_size": 2}),
    Case("recompute-uniform-2", 1, {**FULL_UNIFORM, "recompute_num_layers": 2}),
    Case("recompute-block", 1, FULL_BLOCK),
    Case("recompute-selective-modules", 1, {"recompute_granularity": "selective", "recompute_modules": ("layernorm", "mlp")}),
    Case("recompute-selective-tp2-sp", 2, _mesh(tp=2, **SP, recompute_granularity="selective", recompute_modules=("mlp",))),
    Case("tp2-dp2-sp-distopt", 4, _mesh(tp=2, **SP, **DISTOPT)),
    Case("tp2-pp2-sp-vpp2-recompute-uniform", 4, _mesh(tp=2, pp=2, vpp=2, **SP, **FULL_UNIFORM)),
    Case("classic-tp2-sp-dp2", 4, _mesh(tp=2, **SP, **DISTOPT), CLASSIC),
    Case("classic-pp4", 4, _mesh(pp=4), CLASSIC),
    Case("classic-pp2-vpp2-dp2", 4, _mesh(pp=2, vpp=2, **DISTOPT), CLASSIC),
    Case("moe-dp2", 2, {}, MOE),
    Case("moe-ep4", 4, _mesh(ep=4), MOE),
    Case("moe-ep2-dp4", 4, _mesh(ep=2, **DISTOPT), MOE),
    Case("moe-tp2-sp-etp1", 2, _mesh(tp=2, etp=1, **SP), MOE),
    Case("moe-tp2-sp-etp2", 2, _mesh(tp=2, **SP), MOE),
    Case("moe-tp2-sp-etp2-ep2", 4, _mesh(tp=2, ep=2, **SP), MOE),
    Case("moe-tp2-sp-etp1-ep4", 4, _mesh(tp=2, ep=4, etp=1, **SP), MOE),
    Case("moe-pp2-vpp2-ep2-recompute", 4, _mesh(pp=2, vpp=2, ep=2, **FULL_UNIFORM), MOE),
    Case("moe-recompute-selective", 2, _mesh(ep=2, recompute_granularity="selective", recompute_modules=("moe", "layernorm")), MOE),
    Case("tp2-pp2-sp-vpp2", 4, _mesh(tp=2, pp=2, vpp=2, **SP), precision="bf16"),
    Case("dp4-distopt", 4, DISTOPT, precision="bf16"),
    Case("dp2-overlap-all", 2, OVERLAP, precision="bf16"),
    Case("moe-pp2-ep2-distopt", 4, _mesh(pp=2, ep=2, **DISTOPT), MOE, "bf16"),
    Case("moe-tp2-sp-etp2-ep2", 4, _mesh(tp=2, ep=2, **SP, **DISTOPT), MOE, "bf16"),
    Case("classic-tp2-pp2-recompute-selective", 4, _mesh(tp=2, pp=2, recompute_granularity="selective"), CLASSIC, "bf16"),
    Case("tp2-pp2-dp2-sp-distopt", 8, _mesh(tp=2, pp=2, **SP, **DISTOPT)),
]


def _check(trials: WarmTrials, case: Case) -> None:
    launcher = MegatronCoreLauncher()
    workload = Workload(model=case.model, world_size=case.world_size, global_batch_size=4, seq_length=32, device="cpu")
    config = TrialConfig(precision=case.precision, **case.knobs)
    assert launcher.refusals(workload, config) == []
    expected = trials.reference(workload, config, steps=STEPS, seed=1).losses
    assert expected[-1] <= 0.95 * expected[0], f"the loss did not fall by 5 %: {expected}"
    run = trials.run(launcher.job(workload, config, steps=STEPS, seed=1))
    assert run.losses == pytest.approx(expected, rel=TOLERANCE[case.precision])
    assert len(run.losses) == STEPS
    assert all(step["grad_norm"] > 0 and step["peak_memory_gib"] > 0.05 for step in run.steps)


@pytest.mark.parametrize("case", SMALL, ids=str)
def test_losses_equal_one_rank(trials: WarmTrials, case: Case) -> None:
    _check(trials, case)


@pytest.mark.acceptance
@pytest.mark.parametrize("case", FULL, ids=str)
def test_losses_equal_one_rank_full_matrix(trials: WarmTrials, case: Case) -> None:
    _check(trials, case)
