"""How often our verdict on a random configuration is Megatron's own.

    python benchmarks/legality_agreement.py --megatron 0.16 --cases 1000 [--megatron-lm CHECKOUT]
    python benchmarks/legality_agreement.py --megatron 0.19 --cases 1000 --python PYTHON312 --oracle megatron_oracle.py

0.16 is asked in this interpreter (`megatron_016_oracle.py`), 0.19 by the given oracle script under the given Python 3.12.
Prints a table, writes JSON, and lists every false accept and false refusal that is not one of `EXCEPTIONS`. After the random
cases come those aimed at single rules (`legality_aimed.py`); `--cases 0` asks these alone. The exit code is 1 where a verdict
differs or a rule that the oracle can be asked has fewer than `--per-rule` illegal cases.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.legality_cases import Case, broken, sample  # noqa: E402  the repository is no package
from search_spaces.legality import RULES  # noqa: E402

EXCEPTIONS: dict[str, str] = {
    "every_stage_has_layers": "transformer_block.py get_num_layers_to_build returns a negative number of layers and none is built",
    "interleaving_needs_middle_stages": "transformer_layer.py get_transformer_layer_offset divides by 0 middle stages on every"
    " rank but the first; the 0.19 oracle builds all stages as rank 0",
    "uniform_recompute_layers": "recompute.py: the loop over layers advances by 0 and never ends",
    "uniform_recompute_over_chunks": "0.16 transformer_block.py _get_layer: IndexError in the first forward pass",
    "precision_aware_optimizer": "optimizer_config.py OptimizerConfig.__post_init__ asserts it; the 0.19 oracle does not build one",
}


BEFORE_RULES = {"one_precision", "hidden_size_over_heads", "heads_over_query_groups"}
"""Refusals before any rule is asked: a case with these cannot be written as a workload and a configuration."""

NO_SCRIPT = "a check of Megatron-LM's launch script, which the wheel of 0.16 lacks: give --megatron-lm"


NO_KERNELS = (
    "RNG tracker does not support cudagraphs!",
    "CPU Offloading is enabled when TE is not present",
    "einops is not installed",
    "Cannot re-initialize CUDA in forked subprocess",
    "Torch not compiled with CUDA enabled",
)
"""What an oracle says where it lacks a package, not where Megatron has a rule: no verdict."""


ONLY_WHEN_BUILT = {
    "experts_need_sequence_parallel",
    "shared_expert_bias",
    "shared_expert_over_tensor_ranks",
    "expert_ffn_over_expert_tensor_ranks",
    "ffn_over_tensor_ranks",
    "expert_layer_pattern",
    "heads_over_query_groups",
    "flex_dispatcher_ranks",
}
"""Rules that Megatron enforces when it builds a model, which the 0.19 oracle leaves out for latent attention and FP8."""


UNASKED: dict[str, dict[str, str]] = {
    "0.16": {
        "recompute_gated_norm": "a rule of 0.19",
        "fsdp_optimizer": "a rule of 0.19",
        "graph_modules_of_iteration": "the kind full_iteration came with 0.19, and graph_kind refuses it before",
        "graph_nan_check": "the kind full_iteration came with 0.19, and graph_kind refuses it before",
    },
    "0.19": {
        "uniform_recompute_over_chunks": "a rule of 0.16",
        "graph_kind": "a rule of 0.16",
        "graph_experts_inference_padding": "a rule of 0.16",
        "ramp_up": "a rule of 0.16",
    },
}
"""Rules that no case of a version can break by itself."""


ONLY_OURS = {
    "device": "what a launcher can run on CPU",
    "expert_tensor_ranks_on_cpu": "what gloo can gather",
}
"""Rules that are not Megatron's."""


def main() -> int:
    """Draw, ask, compare, report; 1 where a verdict differs or a rule was asked too seldom."""
    options = _options()
    seed = random.SystemRandom().randrange(2**32) if options.seed is None else options.seed
    print(f"seed {seed}", flush=True)
    cases = list(sample(options.cases, options.megatron, seed, options.per_rule))
    random.Random(seed).shuffle(cases)
    print(f"{len(cases)} cases", flush=True)
    asked = [(case, answer) for case, answer in zip(cases, _ask(cases, options), strict=True) if answer is not None]
    cases, answers = [case for case, _ in asked], [answer for _, answer in asked]
    report = compare(cases, answers, options.megatron, asked_arguments=options.megatron == "0.19" or bool(options.megatron_lm))
    report |= {"seed": seed, "megatron": options.megatron, "per_rule": options.per_rule}
    options.json.write_text(json.dumps(report, indent=1, default=str))
    print_report(report)
    return int(bool(report["wrong"] or lacking(report)))


def compare(cases: list[Case], answers: list[dict[str, Any]], megatron: str, asked_arguments: bool) -> dict[str, Any]:
    """Agreement of our verdicts with the oracle's.

    Args:
        cases: What was asked.
        answers: The oracle's verdicts.
        megatron: Version of the rules.
        asked_arguments: Whether the oracle ran `validate_args`; else refusals by its rules alone are counted apart.
    """
    counts: Counter[str] = Counter()
    per_rule: Counter[str] = Counter()
    alone: Counter[str] = Counter()
    unknown: Counter[str] = Counter()
    wrong: list[dict[str, Any]] = []
    arguments = {rule.__name__ for rule in RULES if _only_arguments(rule.__doc__ or "")} | {
        "one_precision",
        "hidden_size_over_heads",
    }
    only_arguments = set() if asked_arguments else arguments
    for case, answer in zip(cases, answers, strict=True):
        names = set(broken(case, megatron))
        if any(text in str(answer.get("msg") or answer.get("message")) for text in NO_KERNELS):
            answer["verdict"] = "unknown"
        kind = _kind(names, answer["verdict"], only_arguments | _not_judged(case, megatron))
        counts[kind] += 1
        counts["megatron " + answer["verdict"]] += 1
        if answer["verdict"] not in ("valid", "invalid"):
            unknown[str(answer.get("message") or answer.get("msg"))[:120]] += 1
        if answer["verdict"] == "invalid":
            per_rule.update(names)
            alone.update(names if len(names) == 1 else ())
        if kind.startswith("false"):
            where = {key: answer.get(key) for key in ("stage", "exc", "msg", "message", "where")}
            wrong.append({"kind": kind, "rules": sorted(names), "oracle": where, "case": case})
    rules = [*(rule.__name__ for rule in RULES if rule.__name__ not in ONLY_OURS), *sorted(BEFORE_RULES)]
    return {
        "counts": dict(counts),
        "illegal_per_rule": {rule: per_rule[rule] for rule in rules},
        "illegal_by_this_rule_alone": {rule: alone[rule] for rule in rules},
        "not_asked": {**UNASKED[megatron], **EXCEPTIONS, **dict.fromkeys(sorted(only_arguments), NO_SCRIPT)},
        "unknown": dict(unknown),
        "wrong": wrong,
    }


def _not_judged(case: Case, megatron: str) -> set[str]:
    """Rules that the 0.19 oracle does not come to: it builds nothing with latent attention or FP8, and aligns nothing in FP4."""
    if megatron != "0.19":
        return set()
    unbuilt = case.get("multi_latent_attention") or "+fp8" in str(case.get("precision"))
    four_bit = "--fp4-format" in case.get("extra", ())
    return (ONLY_WHEN_BUILT if unbuilt else set()) | ({"low_precision_tokens", "low_precision_width"} if four_bit else set())


def lacking(report: dict[str, Any]) -> dict[str, int]:
    """Rules with fewer illegal cases than wanted that the oracle could have been asked."""
    found: dict[str, int] = report["illegal_per_rule"]
    return {rule: count for rule, count in found.items() if count < report["per_rule"] and rule not in report["not_asked"]}


def _kind(names: set[str], verdict: str, not_asked: set[str]) -> str:
    """How one verdict compares."""
    if verdict not in ("valid", "invalid"):
        return "not asked"
    if (not names) == (verdict == "valid"):
        return "agree"
    if not names:
        return "false accept"
    if names <= set(EXCEPTIONS):
        return "named exception"
    ambiguous = "one_virtual_spelling" in names & not_asked
    if names - not_asked - set(EXCEPTIONS) and not ambiguous:
        return "false refusal"
    return "not asked"


def _only_arguments(doc: str) -> bool:
    """Whether a rule comes from the launch script's checks alone."""
    files = {word.strip("(),.;:") for word in doc.split() if ".py" in word}
    return not files or all("arguments.py" in name for name in files)


def _ask(cases: list[Case], options: argparse.Namespace) -> list[dict[str, Any] | None]:
    """The oracle's verdicts in the order of the cases, from several oracles at once; None where time ran out."""
    command = [options.python, str(options.oracle)]
    if options.megatron == "0.16":
        command = [sys.executable, str(ROOT / "benchmarks" / "megatron_016_oracle.py")]
        command += ["--megatron-lm", str(options.megatron_lm)] if options.megatron_lm else []
    return ask_all(command, cases, options.workers, options.seconds)


def ask_all(command: list[str], cases: list[Case], workers: int, seconds: float | None = None) -> list[dict[str, Any] | None]:
    """Verdicts from several oracle processes that answer line by line; None for cases that time did not allow."""
    deadline = None if seconds is None else time.monotonic() + seconds
    answers: list[dict[str, Any] | None] = [None] * len(cases)
    todo = iter(enumerate(cases))
    lock = threading.Lock()

    def work(_: int) -> None:
        env = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
            "PYTHONWARNINGS": "ignore",
        }
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        with subprocess.Popen(command, text=True, env=env, **pipes) as oracle:  # type: ignore[call-overload]
            while deadline is None or time.monotonic() < deadline:
                with lock:
                    position, case = next(todo, (None, None))
                if position is None:
                    break
                oracle.stdin.write(json.dumps(case) + "\n")
                oracle.stdin.flush()
                answers[position] = _answer(oracle.stdout)
            oracle.stdin.close()

    with ThreadPoolExecutor(workers) as pool:
        list(pool.map(work, range(workers)))
    return answers


def _answer(lines: Iterable[str]) -> dict[str, Any]:
    """The next verdict among whatever else an oracle prints."""
    for line in lines:
        if line.startswith("{"):
            return dict(json.loads(line))
    raise RuntimeError("the oracle ended without an answer")


def print_report(report: dict[str, Any]) -> None:
    """The table for a person."""
    for name, count in sorted(report["counts"].items()):
        print(f"{count:8d}  {name}")
    print(f"{'illegal':>8} {'alone':>6}  rule")
    for rule, count in report["illegal_per_rule"].items():
        reason = report["not_asked"].get(rule, "") if count < report["per_rule"] else ""
        print(f"{count:8d} {report['illegal_by_this_rule_alone'][rule]:6d}  {rule}{': ' if reason else ''}{reason}")
    print("asked too seldom:", json.dumps(lacking(report)))
    print("not answered by the oracle:", json.dumps(report["unknown"]))
    for item in report["wrong"]:
        print(json.dumps(item, default=str))


def _options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megatron", choices=("0.16", "0.19"), default="0.16")
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--per-rule", type=int, default=30)
    parser.add_argument("--seed", type=int)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--seconds", type=float, help="stop asking after this long")
    parser.add_argument(
        "--python",
        default=os.environ.get("AUTOTUNE_MEGATRON_019_PYTHON"),
        help="Python 3.12 with megatron-core[training] 0.19; none = AUTOTUNE_MEGATRON_019_PYTHON",
    )
    parser.add_argument(
        "--oracle",
        type=Path,
        default=os.environ.get("AUTOTUNE_MEGATRON_019_ORACLE"),
        help="script that asks Megatron 0.19; none = AUTOTUNE_MEGATRON_019_ORACLE",
    )
    parser.add_argument(
        "--megatron-lm",
        type=Path,
        default=os.environ.get("AUTOTUNE_MEGATRON_LM"),
        help="checkout of Megatron-LM core_v0.16.1, to ask its validate_args as well; none = AUTOTUNE_MEGATRON_LM",
    )
    parser.add_argument("--json", type=Path, default=Path("legality_agreement.json"))
    options = parser.parse_args()
    if options.megatron == "0.19" and not (options.python and options.oracle):
        parser.error("Megatron 0.19 needs --python and --oracle")
    return options


if __name__ == "__main__":
    sys.exit(main())
