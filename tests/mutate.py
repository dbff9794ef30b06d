"""Breaks one rule at a time and shows whether a test notices: `make mutate`, or `python tests/mutate.py [WORD ...]` for some.

Each mutation names the rule that it breaks, the text that it replaces, and the tests that must go red. It is made in a copy of the
repository. A mutation whose text is gone fails as well: the list is kept with the code.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TIMEOUT_S = 300


@dataclass(frozen=True)
class Mutation:
    """One broken rule."""

    rule: str
    file: str
    before: str
    after: str
    tests: str


MUTATIONS = (
    Mutation(
        "a study that has just been created tells nothing, and stops no other",
        "autotune/earlier.py",
        'known.get("fingerprint", {}).get("workload")',
        'known["fingerprint"]["workload"]',
        "tests/autotune/test_earlier.py",
    ),
    Mutation(
        "no cap of a twin lies close to what a candidate draws",
        "benchmarks/twin_worlds.py",
        "min(axis=1) >= CLOSE",
        "min(axis=1) >= 0.0",
        "tests/autotune/test_twins.py",
    ),
    Mutation(
        "no limit on power lies above the highest one",
        "autotune/outlook.py",
        "if name in _LIMITS and numbers:",
        "if name in () and numbers:",
        "tests/autotune/test_residual_sampler.py",
    ),
    Mutation(
        "where no risk is left, the least risky candidate goes first",
        "autotune/acquisition.py",
        "least = max(LEAST_RISK, float(crosses.min()))",
        "least = LEAST_RISK",
        "tests/autotune/test_acquisition.py",
    ),
    Mutation(
        "where predictions say nothing of memory, measured peaks do",
        "autotune/feasibility.py",
        "return trusted * by_load + (1.0 - trusted)",
        "return by_load + 0.0 * (1.0 - trusted)",
        "tests/autotune/test_feasibility.py",
    ),
    Mutation(
        "the error that few steps leave in a median is no spread between runs",
        "autotune/run_spread.py",
        "for median, _ in runs) - errors)",
        "for median, _ in runs) - 0.0 * errors)",
        "tests/autotune/test_run_spread.py",
    ),
    Mutation(
        "a resumed study predicts as it did before",
        "autotune/pool_study.py",
        "self._first_predictions()  # after",
        "None  # after",
        "tests/autotune/test_residual_sampler.py",
    ),
    Mutation(
        "a resumed study starts with the earlier trials that it began with",
        "autotune/earlier.py",
        "if name in attributes:",
        "if name == 0:",
        "tests/autotune/test_earlier.py",
    ),
    Mutation(
        "a constant factor between studies says nothing",
        "autotune/transfer.py",
        "return residuals - np.median(residuals[known]),",
        "return residuals,",
        "tests/autotune/test_earlier.py",
    ),
    Mutation(
        "whether other studies say anything is told by a study's own trials",
        "autotune/residual_model.py",
        "UNALIKE = 0.3",
        "UNALIKE = 1e-30",
        "tests/autotune/test_earlier.py",
    ),
    Mutation(
        "a trial that lacks a term of a front is told as FAIL",
        "autotune/telling.py",
        "if len(values) != len(study.directions):",
        "if record.value is None:",
        "tests/autotune/test_pareto.py",
    ),
    Mutation(
        "no trial of a front is raced",
        "autotune/ledger.py",
        "not self._spec.measurement.racing or self._spec.pareto",
        "not self._spec.measurement.racing",
        "tests/autotune/test_pareto.py",
    ),
    Mutation(
        "a recipe points at nothing that is predicted not to fit",
        "search_spaces/recipes.py",
        'predictions.fits != "does_not_fit"',
        'predictions.fits != ""',
        "tests/search_spaces/test_recipes.py",
    ),
    Mutation(
        "a recipe of a resumed study is not tried twice",
        "autotune/starts.py",
        " and why not in tried",
        "",
        "tests/autotune/test_starts.py",
    ),
    Mutation(
        "ties go to the lower power",
        "autotune/confirm.py",
        "winner = min(tied, key=_mean_power_w) if",
        "winner = leader if",
        "tests/autotune/test_confirm.py",
    ),
    Mutation(
        "what crosses a limit when confirmed never wins",
        "autotune/confirm.py",
        "return any(run.outcome is not Outcome.COMPLETED or objective.violations(run.metrics) for run in self.runs)",
        "return any(run.outcome is not Outcome.COMPLETED for run in self.runs)",
        "tests/autotune/test_confirm.py",
    ),
    Mutation(
        "a trial that lacks a term is infeasible",
        "autotune/objective.py",
        "for name in lacking] + crossed",
        "for name in ()] + crossed",
        "tests/autotune/test_objective.py",
    ),
    Mutation(
        "a guard refuses what it cannot keep",
        "autotune/guards.py",
        "enforced = np.where(asked > 0, asked, gpu.power_limit_w[1]) / gpu.dies_per_package",
        "enforced = np.where(asked > 0, asked, 1.0) / gpu.dies_per_package",
        "tests/autotune/test_guards.py",
    ),
    Mutation(
        "a rival that may still win runs on",
        "autotune/racing.py",
        "return other_runs(steady_interval(values), spread).low > beaten_s",
        "return steady_interval(values).median > beaten_s",
        "tests/autotune/test_racing.py",
    ),
    Mutation(
        "the requested limit comes back, not what a trial requested",
        "autotune/power_limits.py",
        "watts = older.watts if older else gpu.requested_power_limit_w()",
        "watts = gpu.requested_power_limit_w()",
        "tests/autotune/test_power_limits.py",
    ),
    Mutation(
        "the restore record is on disk before the limit changes",
        "autotune/power_limits.py",
        "            self._write_record(gpu)\n",
        "",
        "tests/autotune/test_power_limits.py tests/autotune/test_gpu_guard.py",
    ),
    Mutation(
        "records of a living agent are left alone",
        "autotune/power_limits.py",
        "if not is_alive(record.owner)",
        "if True",
        "tests/autotune/test_power_limits.py",
    ),
    Mutation(
        "a contaminated trial is repeated once",
        "autotune/attempts.py",
        "            self._retries.append((record.config, record.phase))",
        "            pass",
        "tests/autotune/test_contamination.py",
    ),
    Mutation(
        "an OOM beside foreign memory is not the configuration's",
        "autotune/judge.py",
        "if lost and result.outcome in",
        "if False and result.outcome in",
        "tests/autotune/test_contamination.py",
    ),
    Mutation(
        "the interval counts correlated steps for less",
        "autotune/steady_state.py",
        "effective = max(1, int(count / correlation_steps))",
        "effective = count",
        "tests/autotune/test_steady_state.py",
    ),
    Mutation(
        "a beaten trial is ended and told as raced out",
        "autotune/racing.py",
        "raced_out=True",
        "raced_out=False",
        "tests/autotune/test_trial.py",
    ),
    Mutation(
        "a replayed race is confirmed with the runs that did not explore",
        "benchmarks/racing_replay.py",
        "self._left[proposal.config].pop(0)",
        "self._left[proposal.config][0]",
        "tests/autotune/test_racing_replay.py",
    ),
    Mutation(
        "what racing saves is judged over all trials",
        "benchmarks/racing_replay.py",
        'figures["saved_share"] >= LEAST_SAVED',
        "True",
        "tests/autotune/test_racing_replay.py",
    ),
    Mutation(
        "the script for one GPU counts only trials that showed a result",
        "tests/gpu/one_gpu.py",
        ' and trial["outcome"] != "LOST"',
        "",
        "tests/gpu/test_one_gpu.py",
    ),
    Mutation(
        "the script for one GPU says where power is missing",
        "tests/gpu/one_gpu.py",
        "if telemetry else []",
        "if False else []",
        "tests/gpu/test_one_gpu.py",
    ),
    Mutation(
        "two runs differ by both of their spreads",
        "autotune/run_spread.py",
        "2.0 * spread.reach**2",
        "spread.reach**2",
        "tests/autotune/test_run_spread.py",
    ),
    Mutation(
        "what breaks before a trial is measured is a result",
        "autotune/trial.py",
        "verdict.time_s >= self.enough_s",
        "True",
        "tests/autotune/test_trial.py",
    ),
    Mutation(
        "the voltage stays at its floor below the knee",
        "search_spaces/clock_power.py",
        "np.maximum(1.0, 1.0 + self.rise * (np.asarray(clock) / self.knee - 1.0))",
        "(1.0 + self.rise * (np.asarray(clock) / self.knee - 1.0))",
        "tests/search_spaces/test_power.py",
    ),
    Mutation(
        "a failed trial is a constraint violation",
        "autotune/ledger.py",
        "return max(1.0, amount) if math.isfinite(amount) else 1.0",
        "return -1.0",
        "tests/autotune/test_pool_study.py",
    ),
    Mutation(
        "a proposed candidate is never proposed again",
        "autotune/candidates.py",
        "            self._open[row] = False",
        "            pass",
        "tests/autotune/test_sampler.py tests/autotune/test_candidates.py",
    ),
    Mutation(
        "running trials count as measured",
        "autotune/acquisition.py",
        "if not seen.running:",
        "if True:",
        "tests/autotune/test_residual_sampler.py",
    ),
    Mutation(
        "what contradicts the predictions takes their say away",
        "autotune/residual_model.py",
        "process.log_marginal_likelihood_value_ if len(rows) else 0.0",
        "0.0",
        "tests/autotune/test_residual_model.py",
    ),
    Mutation(
        "what a warm start costs is not held against the candidate",
        "autotune/residual_model.py",
        "np.broadcast_to(warmer_c, len(rows))",
        "np.broadcast_to(0.0, len(rows))",
        "tests/autotune/test_residual_model.py",
    ),
    Mutation(
        "larger than a measured OOM under the same recompute is ranked down",
        "autotune/feasibility.py",
        "found[self.larger_than(out_of_memory)] *= 1.0 - float(weights[0].sum()) * (1.0 - LARGER_THAN_OOM)",
        "pass",
        "tests/autotune/test_feasibility.py",
    ),
    Mutation(
        "crossings of a limit use up what may be risked",
        "autotune/acquisition.py",
        "RISK * (launched + 1 - FREE) - crossings",
        "RISK * (launched + 1 - FREE)",
        "tests/autotune/test_acquisition.py",
    ),
    Mutation(
        "what runs has taken its risk already",
        "autotune/acquisition.py",
        "seen.risk(view.limits) - risked",
        "seen.risk(view.limits)",
        "tests/autotune/test_acquisition.py",
    ),
    Mutation(
        "a failed trial saves risk as any other launch",
        "autotune/acquisition.py",
        "launched = len(self.rows) + len(self.failed)",
        "launched = len(self.rows)",
        "tests/autotune/test_acquisition.py",
    ),
    Mutation(
        "risk is saved for what is worth it",
        "autotune/acquisition.py",
        "(may & (improvement >= WORTH_IT * improvement.max()))",
        "may",
        "tests/autotune/test_acquisition.py",
    ),
    Mutation(
        "choices beyond those tried go on as these began",
        "autotune/residual_model.py",
        "_TREND = 2.0",
        "_TREND = 0.001",
        "tests/autotune/test_residual_model.py",
    ),
    Mutation(
        "what follows from the knobs is no choice of its own",
        "autotune/residual_model.py",
        "choices = stretch + 1, width - self.following",
        "choices = stretch + 1, width",
        "tests/autotune/test_residual_model.py",
    ),
    Mutation(
        "a trial with a NaN loss has not completed",
        "autotune/judge.py",
        'if "loss_last" not in metrics',
        "if False",
        "tests/autotune/test_pool_study.py tests/autotune/test_cases_ray.py",
    ),
    Mutation(
        "a lost trial is FAIL, not a result",
        "autotune/ledger.py",
        "        if record.outcome is Outcome.LOST:\n            return record",
        "        if False:\n            return record",
        "tests/autotune/test_pool_study.py",
    ),
    Mutation(
        "the search goes on while a trial is running",
        "autotune/searcher.py",
        "waiting = self.in_flight or any(",
        "waiting = any(",
        "tests/autotune/test_searcher.py",
    ),
    Mutation(
        "the median's interval covers 95 %",
        "autotune/steady_state.py",
        "_coverage(effective, rank + 1) >= confidence",
        "_coverage(effective, rank + 1) >= confidence / 2",
        "tests/autotune/test_steady_state.py",
    ),
    Mutation(
        "throughput is per GPU",
        "autotune/metrics.py",
        "/ workload.world_size",
        "/ 1",
        "tests/autotune/test_metrics.py",
    ),
    Mutation(
        "metrics are finite",
        "autotune/metrics.py",
        "if math.isfinite(value)}",
        "if True}",
        "tests/autotune/test_metrics.py tests/autotune/test_pool_study.py",
    ),
    Mutation(
        "a network disk is used only after its lock test",
        "autotune/storage.py",
        "    if not report.ok:",
        "    if False:",
        "tests/autotune/test_storage.py",
    ),
    Mutation(
        "an unknown field of a study file is an error",
        "autotune/spec_parts.py",
        'model_config = ConfigDict(frozen=True, extra="forbid")',
        'model_config = ConfigDict(frozen=True, extra="ignore")',
        "tests/autotune/test_spec.py",
    ),
    Mutation(
        "predictions follow measured trials",
        "autotune/pool_study.py",
        "        self._ledger.add(record)\n        self.refit.learn(record)\n",
        "        self._ledger.add(record)\n",
        "tests/autotune/test_refit.py",
    ),
    Mutation(
        "a study's own calibration is not its prior",
        "search_spaces/calibration_store.py",
        "if name != but_of",
        "if name",
        "tests/autotune/test_refit.py tests/search_spaces/test_calibration.py",
    ),
    Mutation(
        "what a power domain carries is watts at the wall",
        "search_spaces/wall_power.py",
        "boards_w / self.psu_efficiency + nodes * self.overhead_w",
        "boards_w",
        "tests/autotune/test_power_domains.py",
    ),
    Mutation(
        "0 W at the wall is no reading",
        "autotune/telemetry/wall.py",
        "if not 0.0 < watts <= _MOST_W:",
        "if not 0.0 <= watts <= _MOST_W:",
        "tests/telemetry/test_wall.py -k reading",
    ),
    Mutation(
        "a meter tells nothing of a window that it does not cover",
        "autotune/wall_metrics.py",
        "times[-1] < window.end_s - _EDGE_PERIODS * period_s",
        "times[-1] < window.start_s",
        "tests/autotune/test_wall_metrics.py tests/autotune/test_sync.py",
    ),
    Mutation(
        "a limit at the wall is judged on the meter, not on the estimate",
        "autotune/wall_metrics.py",
        "for one in (measured, measured + ESTIMATED) if one in metrics",
        "for one in (measured + ESTIMATED, measured) if one in metrics",
        "tests/autotune/test_wall_metrics.py tests/autotune/test_objective.py",
    ),
    Mutation(
        "only what keeps every power domain under its limit is planned",
        "autotune/plan_power.py",
        "np.all(np.asarray(spare_w) >= 0, axis=0)",
        "np.any(np.asarray(spare_w) >= 0, axis=0)",
        "tests/autotune/test_plan_power.py",
    ),
    Mutation(
        "a study has one driver",
        "autotune/state_folder.py",
        "fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)",
        "pass",
        "tests/autotune/test_state_folder.py",
    ),
    Mutation(
        "of drivers that start at once one goes on",
        "autotune/one_driver.py",
        "if trial.number < before]",
        "if trial.number < before and before == math.inf or trial.number in self._first_look]",
        "tests/autotune/test_one_driver.py -k start_at_once",
    ),
    Mutation(
        "a driver elsewhere that says that it lives is not taken for dead",
        "autotune/one_driver.py",
        "if seen_s != first_seen_s:",
        "if False:",
        "tests/autotune/test_one_driver.py",
    ),
    Mutation(
        "infinite metrics never reach MLflow",
        "autotune/tracking/upload.py",
        "return number if math.isfinite(number) else None",
        "return number",
        "tests/autotune/test_tracking_upload.py tests/autotune/test_tracking.py",
    ),
    Mutation(
        "a NaN loss ends a trial as NAN",
        "launchers/outcome.py",
        "if evidence.last_loss is not None and not math.isfinite(evidence.last_loss):",
        "if False:",
        "tests/launchers/test_outcome.py",
    ),
    Mutation(
        "HUNG is judged only after the first step",
        "launchers/process.py",
        "if self.request.has_reporting_rank and not self.num_steps:",
        "if False:",
        "tests/launchers/test_process.py",
    ),
    Mutation(
        "out of memory on a GPU is recognised",
        "launchers/log_causes.py",
        "(CUDA|HIP) (error: )?out of memory",
        "(CUDA|HIP) (error: )?ran out",
        "tests/launchers/test_outcome.py",
    ),
    Mutation(
        "what a rank has detached comes back to the supervisor",
        "launchers/process_tree.py",
        "_prctl(_PR_SET_CHILD_SUBREAPER, 1)",
        "_prctl(_PR_SET_CHILD_SUBREAPER, 0)",
        "tests/launchers/test_supervise.py",
    ),
    Mutation(
        "nothing of the agent's Python reaches the ranks",
        "launchers/rank_environment.py",
        '_AGENT_ONLY_PREFIXES = ("PYTHON", "RAY_")',
        '_AGENT_ONLY_PREFIXES = ("RAY_",)',
        "tests/launchers/test_process.py -k environment",
    ),
    Mutation(
        "both halves of SwiGLU's first matrix are sharded",
        "launchers/megatron_core/weights.py",
        "blocks = whole.chunk(self.stride, self.dim)",
        "blocks = whole.chunk(1, self.dim)",
        "tests/launchers/test_megatron_core_parity.py",
    ),
    Mutation(
        "experts have a mesh of their own",
        "search_spaces/columns.py",
        "return self.etp * self.ep * self.pp",
        "return self.etp * self.ep * self.pp * self.cp",
        "tests/search_spaces/test_legality.py",
    ),
    Mutation(
        "sequence parallelism at TP=1 is another spelling",
        "search_spaces/normalise.py",
        'c.replace("sequence_parallel", c.tp == 1, False)',
        'c.replace("sequence_parallel", c.tp == 0, False)',
        "tests/search_spaces/test_space.py tests/search_spaces/test_legality.py",
    ),
    Mutation(
        "memory declares every knob that it depends on",
        "search_spaces/memory/sizes.py",
        '    "recompute_modules",\n',
        "",
        "tests/search_spaces/test_memory.py",
    ),
    Mutation(
        "layers that do not divide are on some stage",
        "search_spaces/pipeline_stages.py",
        "units // len(others) + int(place < units % len(others))",
        "units // len(others)",
        "tests/search_spaces/test_pipeline_stages.py",
    ),
    Mutation(
        "a private Ray's daemons end with the driver",
        "autotune/session_guard.py",
        "                os.kill(pid, signal.SIGKILL)",
        "                os.kill(pid, 0)",
        "tests/faults/test_kills.py",
    ),
    Mutation(
        "telemetry: the other die's 0 W is not added",
        "autotune/power_curves.py",
        "speaker, fine, counter = max(curves",
        "speaker, fine, counter = min(curves",
        "tests/telemetry/test_cases_amd.py tests/autotune/test_power_metrics.py",
    ),
    Mutation(
        "telemetry: all ones are no watts",
        "autotune/telemetry/counters.py",
        " or value == _ALL_ONES_16",
        "",
        "tests/telemetry/test_cases_amd.py",
    ),
    Mutation(
        "telemetry: a reason that a board cannot tell is no zero",
        "autotune/throttle_metrics.py",
        'or (has_counters and "reason_bits" not in series.columns)',
        "or False",
        "tests/telemetry/test_cases_amd.py",
    ),
    Mutation(
        "telemetry: no sum over some of the packages",
        "autotune/telemetry_summary.py",
        "if known and len(known) == len(packages) and not mig:",
        "if known and not mig:",
        "tests/telemetry/test_cases_nvidia.py",
    ),
    Mutation(
        "telemetry: MIG's shared power belongs to no trial",
        "autotune/power_curves.py",
        "        if not one.info.mig:\n",
        "        if True:\n",
        "tests/telemetry/test_cases_nvidia.py",
    ),
    Mutation(
        "telemetry: a counter that falls is no energy",
        "autotune/telemetry/counters.py",
        "_WRAP // 2 <= before < _WRAP and ",
        "",
        "tests/telemetry/test_cases_amd.py tests/telemetry/test_cases_nvidia.py",
    ),
    Mutation(
        "telemetry: HIP's number is not AMD SMI's",
        "autotune/telemetry/visible.py",
        "        return name in info.aliases",
        "        return name == str(info.index)",
        "tests/telemetry/test_cases_amd.py",
    ),
    Mutation(
        "telemetry: bits of an idle GPU are no throttling",
        "autotune/throttle_metrics.py",
        " & ~_idle(series, times)\n    steps",
        "\n    steps",
        "tests/autotune/test_power_metrics.py",
    ),
    Mutation(
        "heat: steps on cold GPUs do not count",
        "autotune/measured.py",
        "result.settled.steps if result.settled is not None else 0)",
        "0)",
        "tests/autotune/test_settling.py",
    ),
    Mutation(
        "heat: the GPU that changes fastest decides",
        "autotune/settling.py",
        "fastest = max(",
        "fastest = min(",
        "tests/autotune/test_settling.py",
    ),
    Mutation(
        "power domains: a confirming trial runs alone",
        "autotune/searcher.py",
        "return bool(running)",
        "return False",
        "tests/autotune/test_searcher.py",
    ),
    Mutation(
        "power domains: one that waits is not overtaken",
        "autotune/searcher.py",
        "return Phase.CONFIRM in running or not around.isdisjoint(self._held)",
        "return Phase.CONFIRM in running",
        "tests/autotune/test_searcher.py",
    ),
    Mutation(
        "telemetry: a hole in the readings is not bridged",
        "autotune/power_curves.py",
        "holes = steps > MAX_GAP_S",
        "holes = steps > 1e9",
        "tests/autotune/test_power_metrics.py",
    ),
    Mutation(
        "telemetry: a hidden partner's die joins nobody",
        "autotune/telemetry/amd.py",
        "if waiting is not None and waiting.tells_power:",
        "if waiting is not None:",
        "tests/telemetry/test_cases_amd.py",
    ),
    Mutation(
        "telemetry: context GPUs are not charged",
        "autotune/telemetry_summary.py",
        "if one.charged and one.info.is_board",
        "if one.info.is_board",
        "tests/autotune/test_power_metrics.py",
    ),
)


def main(words: list[str]) -> int:
    """Try them; exit code 1 where a test did not notice."""
    chosen = [mutation for mutation in MUTATIONS if not words or any(word in mutation.rule for word in words)]
    unnoticed = []
    with tempfile.TemporaryDirectory() as scratch:
        copy = Path(scratch) / "copy"
        ignored = shutil.ignore_patterns(".git", ".venv", ".autotune", "__pycache__", ".*_cache")
        shutil.copytree(ROOT, copy, ignore=ignored)
        for mutation in chosen:
            begin_s = time.monotonic()
            problem = try_mutation(mutation, copy)
            print(f"{problem or 'noticed':32} {time.monotonic() - begin_s:5.0f} s  {mutation.rule}", flush=True)
            unnoticed += [mutation] if problem else []
    print(f"{len(chosen) - len(unnoticed)} of {len(chosen)} broken rules were noticed")
    return int(bool(unnoticed))


def try_mutation(mutation: Mutation, copy: Path) -> str:
    """Why the mutation was not noticed; empty where a test went red."""
    file = copy / mutation.file
    source = file.read_text(encoding="utf-8")
    if source.count(mutation.before) < 1:
        return "ITS TEXT IS GONE"
    file.write_text(source.replace(mutation.before, mutation.after, 1), encoding="utf-8")
    try:
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-m", "not acceptance and not gpu", "-p", "no:cacheprovider"]
        ended = subprocess.run([*command, *mutation.tests.split()], cwd=copy, capture_output=True, timeout=TIMEOUT_S, check=False)
        return "" if ended.returncode == 1 else f"NO TEST NOTICED (exit code {ended.returncode})"
    except subprocess.TimeoutExpired:
        return "THE TESTS DID NOT END"
    finally:
        file.write_text(source, encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
