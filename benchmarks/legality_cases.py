"""Random cases for comparing verdicts: plausible ones, legal ones, and neighbours of legal ones."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator

from benchmarks.legality_aimed import AIMS, aimed
from benchmarks.legality_fields import FIELDS
from benchmarks.legality_options import CONNECTIONS, OPTIONS, Case, divisors, use_experts
from search_spaces.case import IllegalCaseError, read_case
from search_spaces.legality import check

MODELS: dict[str, Case] = {
    "llama3-8b": dict(num_layers=32, hidden_size=4096, num_attention_heads=32, num_query_groups=8, ffn_hidden_size=14336),
    "llama3-70b": dict(num_layers=80, hidden_size=8192, num_attention_heads=64, num_query_groups=8, ffn_hidden_size=28672),
    "llama3-405b": dict(num_layers=126, hidden_size=16384, num_attention_heads=128, num_query_groups=8, ffn_hidden_size=53248),
    "qwen2-7b": dict(num_layers=28, hidden_size=3584, num_attention_heads=28, num_query_groups=4, ffn_hidden_size=18944),
    "gpt-13b": dict(
        num_layers=40, hidden_size=5120, num_attention_heads=40, num_query_groups=40, ffn_hidden_size=20480, add_bias_linear=True
    ),
    "smollm": dict(num_layers=30, hidden_size=576, num_attention_heads=9, num_query_groups=3, ffn_hidden_size=1536),
    "mixtral-like": dict(
        num_layers=16,
        hidden_size=4096,
        num_attention_heads=32,
        num_query_groups=8,
        ffn_hidden_size=14336,
        num_experts=8,
        moe_router_topk=2,
    ),
    "qwen3-like": dict(
        num_layers=12,
        hidden_size=2048,
        num_attention_heads=32,
        num_query_groups=4,
        kv_channels=128,
        ffn_hidden_size=6144,
        num_experts=32,
        moe_router_topk=8,
        moe_ffn_hidden_size=768,
    ),
    "deepseek-like": dict(
        num_layers=9,
        hidden_size=2048,
        num_attention_heads=16,
        ffn_hidden_size=10944,
        num_experts=32,
        moe_router_topk=6,
        moe_ffn_hidden_size=1408,
        moe_shared_expert_intermediate_size=2816,
        moe_layer_freq="[0]*1+[1]*8",
        multi_latent_attention=True,
    ),
    "qwen2-moe-like": dict(
        num_layers=8,
        hidden_size=2048,
        num_attention_heads=16,
        num_query_groups=16,
        ffn_hidden_size=5632,
        num_experts=20,
        moe_router_topk=4,
        moe_ffn_hidden_size=1408,
        moe_shared_expert_intermediate_size=5632,
    ),
}
# Experts are built one by one by the oracles: the MoE models have fewer layers and experts than their originals.
WORLDS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 256, 384, 512, 1024, 2048, 4096)


def draw(rng: random.Random) -> Case:
    """A plausible case: a known model on some world, with a few options; legal about one time in eight."""
    case: Case = dict(MODELS[rng.choice(list(MODELS))])
    world = rng.choice(WORLDS)
    case |= dict(
        vocab_size=rng.choice((1024, 50257, 128256)), seq_length=rng.choice((512, 2048, 4096, 8192, 6144)), world_size=world
    )
    tensor = rng.choice(divisors(world, 8))
    stages = rng.choice(divisors(world // tensor, 16))
    context = rng.choice(divisors(world // tensor // stages, 4)) if rng.random() < 0.4 else 1
    case |= dict(tp=tensor, pp=stages, cp=context, ep=1, etp=None, vpp=None, sp=tensor > 1 and rng.random() < 0.6)
    case |= dict(mbs=rng.choice((1, 1, 2, 4)), precision="bf16", env={CONNECTIONS: "1"}, gpu_arch_major=9)
    replicas = max(1, world // (tensor * stages * context))
    case["gbs"] = case["mbs"] * replicas * rng.choice((1, stages, 2 * stages, 4 * stages, 8 * stages, 3))
    for option, share in OPTIONS:
        if rng.random() < share:
            option(case, rng)
    if case.get("num_experts"):
        use_experts(case, rng)
    return case


def legal(rng: random.Random, megatron: str) -> Case:
    """A case that the rules accept."""
    while True:
        case = draw(rng)
        if not broken(case, megatron):
            return case


def neighbour(case: Case, rng: random.Random) -> Case:
    """The case with one field changed."""
    name = rng.choice(list(FIELDS))
    values = FIELDS[name]
    value = rng.choice(values(case, rng) if callable(values) else values)
    return {**case, name: value}


def broken(case: Case, megatron: str) -> list[str]:
    """Names of the rules that refuse a case."""
    try:
        return [violation.name for violation in check(*read_case(case, megatron))]
    except IllegalCaseError as error:
        return [violation.name for violation in error.violations]


def sample(count: int, megatron: str, seed: int, per_rule: int) -> Iterator[Case]:
    """Cases: a quarter plausible, a quarter legal by the rules, half one field from a legal one; then those aimed at single rules.

    Args:
        count: Cases in all, before the aimed ones; 0 for these alone.
        megatron: Version whose rules decide what is legal.
        seed: Seed of the draw.
        per_rule: Cases wanted for every rule that it alone refuses.
    """
    rng = random.Random(seed)
    alone: Counter[str] = Counter()
    near: list[Case] = []
    for position in range(count):
        if position % 4 == 0:
            case = draw(rng)
        elif position % 4 == 1:
            case = legal(rng, megatron)
            near = [*near[-_NEAR:], case]
        else:
            case = neighbour(rng.choice(near), rng)
        names = broken(case, megatron)
        alone.update(names if len(names) == 1 else ())
        yield case
    if per_rule:
        yield from _aimed(near, megatron, rng, alone, per_rule)


_NEAR = 300
"""Legal cases that neighbours are drawn from."""
_AIMED_WORLD = 256
"""The largest world of an aimed case: rules are the same on larger ones, where the fake process group costs an oracle seconds."""


def _aimed(near: list[Case], megatron: str, rng: random.Random, alone: Counter[str], per_rule: int) -> Iterator[Case]:
    """What every rule still lacks, each case one field from a legal one, and now and then that legal one too."""
    near = [case for case in near if case["world_size"] <= _AIMED_WORLD]
    while len(near) < _NEAR:
        near += [case for case in [legal(rng, megatron)] if case["world_size"] <= _AIMED_WORLD]
    for rule in AIMS:
        lacking = per_rule - alone[rule]
        for number, (case, bad) in enumerate(aimed(rule, lacking, near, lambda case: broken(case, megatron), rng)):
            if number % 10 == 0:
                yield case
            yield bad
