"""How long the table of all legal candidates takes, how much memory, and how that grows with the space.

    python benchmarks/legality_space.py [--json legality_space.json]

Each size runs in a process of its own, so that its peak memory is its own.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from search_spaces.model import ModelSpec, Workload  # noqa: E402  the repository is no package
from search_spaces.space import SearchSpace  # noqa: E402  the repository is no package

LLAMA_405B = ModelSpec(
    num_layers=126,
    hidden_size=16384,
    num_attention_heads=128,
    num_query_groups=8,
    ffn_hidden_size=53248,
    vocab_size=128256,
)
DEEPSEEK_V3 = ModelSpec(
    num_layers=61,
    hidden_size=7168,
    num_attention_heads=128,
    ffn_hidden_size=18432,
    vocab_size=129280,
    num_experts=256,
    moe_router_topk=8,
    moe_ffn_hidden_size=2048,
    moe_shared_expert_intermediate_size=2048,
    moe_layer_freq=(0,) * 3 + (1,) * 58,
    moe_router_score_function="sigmoid",
    moe_router_num_groups=8,
    moe_router_group_topk=4,
    multi_latent_attention=True,
    q_lora_rank=1536,
)
WORKLOADS = {
    "Llama-3.1-405B on 16,384 GPUs": Workload(
        model=LLAMA_405B, world_size=16384, global_batch_size=2048, seq_length=8192, gpus_per_node=8
    ),
    "DeepSeek-V3 on 2,048 GPUs": Workload(
        model=DEEPSEEK_V3, world_size=2048, global_batch_size=15360, seq_length=4096, gpus_per_node=8
    ),
}


def measure(name: str, extra: dict[str, Any]) -> dict[str, Any]:
    """Rows, seconds and peak memory of one table, with further knobs beside `auto`."""
    from search_spaces.choices import AUTO_SPACE  # noqa: PLC0415  only the child needs it

    space = SearchSpace(WORKLOADS[name], dict.fromkeys(AUTO_SPACE, "auto") | extra)
    started, worked = time.perf_counter(), time.process_time()
    table = space.table()
    matrix = table.index_matrix
    seconds, cpu = time.perf_counter() - started, time.process_time() - worked
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    return {
        "workload": name,
        "combinations": space.size,
        "rows": len(matrix),
        "seconds": round(seconds, 3),
        "cpu_seconds": round(cpu, 3),
        "peak_gib": round(peak, 3),
        "microseconds_per_combination": round(1e6 * cpu / space.size, 3),
    }


def growing() -> list[dict[str, Any]]:
    """Further knobs that multiply the space by 1, about 10 and about 100."""
    return [
        {},
        {"environment": [(("NCCL_NCHANNELS_PER_NET_PEER", str(n)),) for n in range(10)]},
        {
            "environment": [(("NCCL_NCHANNELS_PER_NET_PEER", str(n)),) for n in range(10)],
            "gpu_power_limit_w": [300 + 40 * n for n in range(10)],
        },
    ]


def main() -> None:
    """Measure every size and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, default=Path("legality_space.json"))
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        name, extra = json.loads(options.child)
        print(json.dumps(measure(name, {key: [_tuples(item) for item in values] for key, values in extra.items()})))
        return
    found = []
    for name in WORKLOADS:
        for extra in growing() if name.startswith("Llama") else growing()[:1]:
            command = [sys.executable, __file__, "--child", json.dumps([name, extra])]
            found.append(json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout))
            print(found[-1], flush=True)
    options.json.write_text(json.dumps(found, indent=1))


def _tuples(item: Any) -> Any:
    """Lists as tuples, as a knob holds them."""
    return tuple(_tuples(part) for part in item) if isinstance(item, list) else item


if __name__ == "__main__":
    main()
