"""What our rules call legal really trains on CPU: random configurations of small models through the warm trial program.

    python benchmarks/legal_trains.py [--cases 200] [--seed N] [--output legal_trains.json]

Draws random knobs for small dense and mixture-of-experts models on 1, 2, 4 and 8 ranks, keeps what the rules of the installed
Megatron and the launcher accept, and runs two steps of each. A case passes if Megatron accepts it and both losses are finite. Draws
go on until every feature has been seen often enough.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
from collections import Counter
from pathlib import Path

from rich.console import Console
from rich.progress import track
from rich.table import Table

from launchers.base import Rendezvous, free_port
from launchers.megatron_core.launcher import MegatronCoreLauncher
from launchers.outcome import Outcome
from launchers.process import LaunchRequest, Limits, Supervised, TrialEnd, run_trial
from search_spaces.config import TrialConfig
from search_spaces.hardware import RankEnvironment
from search_spaces.legality import check
from search_spaces.model import ModelSpec, Workload, installed_megatron
from search_spaces.normalise import normalise

SEEN_AT_LEAST = 15
LIMITS = Limits(startup_s=120, step_s=120, trial_s=240)
_SMALL = {"num_layers": 8, "hidden_size": 64, "num_attention_heads": 8, "vocab_size": 512, "ffn_hidden_size": 128}
MODELS = (
    ModelSpec(**_SMALL),
    ModelSpec(**_SMALL | {"num_layers": 6}, num_query_groups=4, normalization="LayerNorm", swiglu=False),
    ModelSpec(**_SMALL, num_experts=4, moe_router_topk=2, moe_ffn_hidden_size=64),
    ModelSpec(**_SMALL | {"num_layers": 6}, num_experts=8, moe_router_topk=1, moe_ffn_hidden_size=64, num_query_groups=2),
)


def draw(rng: random.Random) -> tuple[Workload, TrialConfig]:
    """A random workload and configuration, legal or not."""
    model, world_size = rng.choice(MODELS), rng.choice((1, 2, 4, 4, 8))
    sizes = [size for size in (1, 2, 4, 8) if size <= world_size]
    granularity = rng.choice((None, "full", "selective"))
    knobs = {
        "tensor_model_parallel_size": rng.choice(sizes),
        "pipeline_model_parallel_size": rng.choice(sizes),
        "num_virtual_stages_per_pipeline_rank": rng.choice((None, None, 2)),
        "expert_model_parallel_size": rng.choice(sizes) if model.num_experts else 1,
        "expert_tensor_parallel_size": rng.choice((None, None, 1, 2)) if model.num_experts else None,
        "micro_batch_size": rng.choice((1, 2, 4)),
        "sequence_parallel": rng.random() < 0.6,
        "use_distributed_optimizer": rng.random() < 0.5,
        "precision": rng.choice(("fp32", "bf16")),
        "recompute_granularity": granularity,
        "recompute_method": rng.choice(("uniform", "block")) if granularity == "full" else None,
        "recompute_num_layers": rng.choice((1, 2)) if granularity == "full" else None,
        "recompute_modules": rng.choice((None, ("mlp",), ("layernorm",), ("core_attn", "mlp")))
        if granularity == "selective"
        else None,
        "decoder_first_pipeline_num_layers": rng.choice((None, None, 1, 2)),
        "decoder_last_pipeline_num_layers": rng.choice((None, None, 1, 2)),
    }
    workload = Workload(
        model=model, world_size=world_size, global_batch_size=16, seq_length=32, device="cpu", megatron=installed_megatron()
    )
    return workload, normalise(workload, TrialConfig(**knobs))


def features(config: TrialConfig) -> set[str]:
    """What a case covers."""
    seen = {
        "SP": config.sequence_parallel,
        "VPP": config.num_virtual_stages_per_pipeline_rank is not None,
        "EP": config.expert_model_parallel_size > 1,
        "uneven stages": (config.decoder_first_pipeline_num_layers or config.decoder_last_pipeline_num_layers) is not None,
        "recompute full uniform": config.recompute_method == "uniform",
        "recompute full block": config.recompute_method == "block",
        "recompute selective": config.recompute_granularity == "selective",
    }
    return {name for name, holds in seen.items() if holds}


FEATURES = (
    "SP",
    "VPP",
    "EP",
    "uneven stages",
    "recompute full uniform",
    "recompute full block",
    "recompute selective",
)


def legal_cases(count: int, rng: random.Random) -> list[tuple[Workload, TrialConfig]]:
    """Different legal cases, at least `count`, and more until every feature has been drawn often enough."""
    launcher, cases, seen = MegatronCoreLauncher(), {}, Counter()
    while len(cases) < count or any(seen[name] < SEEN_AT_LEAST for name in FEATURES):
        workload, config = draw(rng)
        if (workload, config) in cases or check(workload, config) or launcher.refusals(workload, config):
            continue
        rare = any(seen[name] < SEEN_AT_LEAST for name in features(config))
        if len(cases) < count or rare:
            cases[workload, config] = None
            seen.update(features(config))
    return list(cases)


def run_case(tree: Supervised, number: int, case: tuple[Workload, TrialConfig], folder: Path) -> TrialEnd:
    """Two steps of one case."""
    workload, config = case
    launcher = MegatronCoreLauncher()
    request = LaunchRequest(
        trial=str(number),
        program=launcher.program,
        job=launcher.job(workload, config, steps=2, seed=number),
        rendezvous=Rendezvous("127.0.0.1", free_port("127.0.0.1"), workload.world_size, 0, workload.world_size),
        ranks=tuple(range(workload.world_size)),
        log_folder=folder / str(number),
    )
    *steps, end = run_trial(tree, request, LIMITS)
    if isinstance(end, TrialEnd) and end.outcome is Outcome.COMPLETED and len(steps) != 2:
        raise AssertionError(f"case {number} completed with {len(steps)} steps")
    return end


def main() -> int:
    """Print the table, write JSON; exit code 1 where a case failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=200)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**31))
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    cases = legal_cases(options.cases, random.Random(options.seed))
    failures = []
    with tempfile.TemporaryDirectory() as scratch:
        tree = Supervised(RankEnvironment(env={"CUDA_VISIBLE_DEVICES": ""}), preload=MegatronCoreLauncher.preload)
        for number, case in enumerate(track(cases, f"seed {options.seed}", console=Console(stderr=True))):
            end = run_case(tree, number, case, Path(scratch))
            if end.outcome is not Outcome.COMPLETED:
                failures.append(
                    {
                        "world_size": case[0].world_size,
                        "config": case[1].changed(),
                        "model": case[0].model.model_dump(exclude_defaults=True),
                        "outcome": end.outcome.value,
                        "detail": end.detail,
                    }
                )
        tree.close()
    seen = Counter(name for _, config in cases for name in features(config))
    ranks = Counter(workload.world_size for workload, _ in cases)
    table = Table("cases", "failed", *FEATURES, *(f"{size} ranks" for size in sorted(ranks)))
    table.add_row(
        str(len(cases)), str(len(failures)), *(str(seen[name]) for name in FEATURES), *(str(ranks[size]) for size in sorted(ranks))
    )
    Console(width=160).print(table)
    for failure in failures:
        Console(width=160).print(failure)
    if options.output:
        result = {"seed": options.seed, "cases": len(cases), "features": seen, "ranks": ranks, "failures": failures}
        options.output.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return int(bool(failures))


if __name__ == "__main__":
    sys.exit(main())
