"""Random legal configurations of small models on CPU ranks: what the rules accept there has to train.

    python benchmarks/legal_trains.py --cases 200 > legal_cpu.jsonl

Writes one object a line: {"ranks", "model", "seq_length", "global_batch_size", "knobs", "argv"}. At least a fifth of the cases uses
each of sequence parallelism, virtual stages, expert parallelism, uneven stages, selective and full recompute, where ranks allow.
A launcher that runs them for two steps says whether Megatron accepts them; see the acceptance tests.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from search_spaces.candidates import CandidateTable  # noqa: E402  the repository is no package
from search_spaces.config import TrialConfig  # noqa: E402  the repository is no package
from search_spaces.model import ModelSpec, Workload  # noqa: E402  the repository is no package
from search_spaces.space import SearchSpace  # noqa: E402  the repository is no package

DENSE = ModelSpec(num_layers=8, hidden_size=64, num_attention_heads=8, num_query_groups=4, vocab_size=512)
MOE = ModelSpec(
    num_layers=8, hidden_size=64, num_attention_heads=8, vocab_size=512, num_experts=8, moe_router_topk=2, moe_ffn_hidden_size=64
)
RANKS = (1, 2, 4, 8)
FEATURES: dict[str, Callable[[TrialConfig], bool]] = {
    "sequence_parallel": lambda config: config.sequence_parallel,
    "virtual_stages": lambda config: config.num_virtual_stages_per_pipeline_rank is not None,
    "expert_parallel": lambda config: config.expert_model_parallel_size > 1,
    "uneven_stages": lambda config: config.decoder_first_pipeline_num_layers is not None,
    "selective_recompute": lambda config: config.recompute_granularity == "selective",
    "full_recompute": lambda config: config.recompute_granularity == "full",
}
LEAST_PER_FEATURE = 15


def space(model: ModelSpec, ranks: int, megatron: str) -> CandidateTable:
    """All legal candidates of a small model on some CPU ranks."""
    workload = Workload(
        model=model,
        world_size=ranks,
        global_batch_size=16,
        seq_length=64,
        device="cpu",
        megatron=megatron,  # type: ignore[arg-type]
    )
    choices: dict[str, Any] = {
        "tensor_model_parallel_size": [1, 2, 4],
        "pipeline_model_parallel_size": [1, 2, 4],
        "num_virtual_stages_per_pipeline_rank": ["none", 2],
        "decoder_first_pipeline_num_layers": ["none", 2, 5, 6],
        "micro_batch_size": [1, 2],
        "sequence_parallel": [False, True],
        "recompute": ["none", "selective", "full:uniform:1", "full:uniform:2", "full:block:1"],
        "optimizer": "auto",
    }
    if model.is_moe:
        choices |= {"expert_model_parallel_size": [1, 2, 4, 8], "expert_tensor_parallel_size": [1]}
        choices |= {"moe_token_dispatcher_type": ["alltoall", "allgather"]}
    return SearchSpace(workload, choices).table()


def sample(count: int, megatron: str, seed: int) -> Iterator[tuple[Workload, TrialConfig]]:
    """Random legal candidates, first those that show a feature which is still rare."""
    rng = random.Random(seed)
    tables = [space(model, ranks, megatron) for model in (DENSE, MOE) for ranks in RANKS]
    seen: set[tuple[int, int]] = set()
    shown: Counter[str] = Counter()
    while len(seen) < count:
        place = rng.randrange(len(tables))
        row = rng.randrange(len(tables[place]))
        config = tables[place].config(row)
        features = [name for name, has in FEATURES.items() if has(config)]
        lacking = [name for name in FEATURES if shown[name] < LEAST_PER_FEATURE]
        if (place, row) in seen or (lacking and not set(lacking) & set(features) and rng.random() < 0.5):
            continue
        seen.add((place, row))
        shown.update(features)
        yield tables[place].workload, config


def main() -> None:
    """Print the sample."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=200)
    parser.add_argument("--megatron", choices=("0.16", "0.19"), default="0.16")
    parser.add_argument("--seed", type=int)
    options = parser.parse_args()
    seed = random.SystemRandom().randrange(2**32) if options.seed is None else options.seed
    print(f"seed {seed}", file=sys.stderr)
    shown: Counter[str] = Counter()
    for workload, config in sample(options.cases, options.megatron, seed):
        shown.update(name for name, has in FEATURES.items() if has(config))
        line = {
            "ranks": workload.world_size,
            "model": workload.model.model_dump(exclude_defaults=True),
            "seq_length": workload.seq_length,
            "global_batch_size": workload.global_batch_size,
            "knobs": config.changed(),
            "argv": [*workload.model.argv(), *config.argv()],
        }
        print(json.dumps(line))
    print(dict(shown), file=sys.stderr)


if __name__ == "__main__":
    main()
