"""Seconds of one proposal of the residual sampler over a large table with many past trials.

    python benchmarks/proposal_time.py [--candidates 200000] [--trials 200] [--running 8] [--proposals 20] [--json FILE]

The table is everything worth trying for a 70 B model on 32 nodes; the trials' seconds are the prediction's times a hidden error of
every part of the step. A proposal is what the study waits for: reading the trials, conditioning the model, choosing the row.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

import numpy as np
import optuna

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from autotune.candidates import Candidates, candidate_table  # noqa: E402  the repository is no package
from autotune.machines import machines_of  # noqa: E402
from autotune.outlook import Expects  # noqa: E402
from autotune.records import RECORD_ATTRIBUTE, Phase, TrialRecord, record_to_json  # noqa: E402
from autotune.residual_sampler import ResidualSampler  # noqa: E402
from autotune.sampler import CandidateSampler  # noqa: E402
from autotune.spec import StudySpec  # noqa: E402
from launchers.outcome import Outcome  # noqa: E402
from search_spaces.prediction import predict  # noqa: E402

MODEL = {
    "num_layers": 80,
    "hidden_size": 8192,
    "ffn_hidden_size": 28672,
    "num_attention_heads": 64,
    "num_query_groups": 8,
    "vocab_size": 128256,
}
POOL = {"name": "pool", "gpu": "h100-sxm", "nodes": 32, "gpus_per_node": 8}
SEARCH = {
    "tensor_model_parallel_size": [1, 2, 4, 8],
    "pipeline_model_parallel_size": [1, 2, 4, 8, 16],
    "num_virtual_stages_per_pipeline_rank": ["none", 2, 5, 10],
    "context_parallel_size": [1, 2, 4, 8],
    "micro_batch_size": [1, 2, 4, 8],
    "sequence_parallel": [False, True],
    "recompute": ["none", "selective", "selective:core_attn,mlp", "selective:layernorm", "full", "full:block:1", "full:block:2"],
    "use_distributed_optimizer": [False, True],
    "overlap_grad_reduce": [False, True],
    "overlap_param_gather": [False, True],
    "gpu_power_limit_w": ["none", 400, 450, 500, 550, 600, 650],
}
PROMISED_S = 0.3


def study_of(most: int) -> tuple[optuna.Study, Candidates, ResidualSampler]:
    """A study over the table, of which `most` candidates can be run."""
    shapes = {"model": MODEL, "pools": [POOL], "global_batch_size": 1024, "seq_length": 8192}
    spec = StudySpec.model_validate({"name": "speed", **shapes, "search": SEARCH})
    table = candidate_table(spec, spec.pools[0])
    allowed = np.zeros(len(table), dtype=bool)
    allowed[np.random.default_rng(0).permutation(len(table))[:most]] = True
    candidates = Candidates(table, spec.baseline, allowed)
    found = predict(table.columns, machines_of(spec.pools[0]))
    inner = ResidualSampler(candidates, lambda: found, seed=0, expects=Expects(spec.objective, spec.limits))
    study = optuna.create_study(sampler=CandidateSampler(inner, candidates, 1), direction="maximize")
    return study, candidates, inner


def ask(study: optuna.Study, candidates: Candidates) -> tuple[optuna.Trial, float]:
    """A proposal, and its seconds."""
    started = time.perf_counter()
    trial = study.ask()
    for name, distribution in candidates.distributions.items():
        trial.suggest_int(name, 0, distribution.high)
    seconds = time.perf_counter() - started
    candidates.mark_seen(candidates.config(trial.params))
    return trial, seconds


def end(study: optuna.Study, candidates: Candidates, trial: optuna.Trial, tokens_per_s: float, *, oom: bool) -> None:
    """Tell a trial, as a study does."""
    outcome, metrics = (Outcome.OOM, {}) if oom else (Outcome.COMPLETED, {"tokens_per_s_per_gpu": tokens_per_s})
    config = candidates.config(trial.params)
    value = float(np.log(tokens_per_s))
    record = TrialRecord(study.study_name, trial.number, Phase.EXPLORE, config, (), outcome, value=value, metrics=metrics)
    trial.set_user_attr(RECORD_ATTRIBUTE, record_to_json(record))
    trial.set_constraint("infeasible", 1.0 if oom else -1.0)
    study.tell(trial, value)


def measure(candidates_count: int, trials: int, running: int, proposals: int) -> tuple[float, list[float]]:
    """Seconds of the first proposal, predictions included, and of others after `trials` ended ones beside `running` open ones."""
    study, candidates, inner = study_of(candidates_count)
    _, first_s = ask(study, candidates)
    errors = np.random.default_rng(1).normal(0.0, 0.25, size=inner.outlook().features.parts)
    for number, row in enumerate(np.random.default_rng(2).choice(candidates.open_rows(), trials + running - 1, replace=False)):
        study.enqueue_trial(candidates.params_of_row(int(row)))
        trial, _ = ask(study, candidates)
        if number < trials:
            view = inner.outlook()
            score = view.score[row] - view.features.matrix[row, : len(errors)] @ errors
            end(study, candidates, trial, float(np.exp(score)), oom=number % 8 == 0)
    return first_s, [ask(study, candidates)[1] for _ in range(proposals)]


def main() -> int:
    """Measure; exit code 1 where the median proposal takes longer than promised."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--candidates", type=int, default=200_000)
    parser.add_argument("--trials", type=int, default=200)
    parser.add_argument("--running", type=int, default=8)
    parser.add_argument("--proposals", type=int, default=20)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    first_s, seconds = measure(options.candidates, options.trials, options.running, options.proposals)
    found = {
        "candidates": options.candidates,
        "trials": options.trials,
        "running": options.running,
        "first_proposal_s": first_s,
        "median_s": float(np.median(seconds)),
        "most_s": max(seconds),
        "promised_s": PROMISED_S,
    }
    print("  ".join(f"{name} {value:g}" for name, value in found.items()))
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return int(found["median_s"] > PROMISED_S)


if __name__ == "__main__":
    sys.exit(main())
