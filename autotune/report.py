"""What a person reads at the end of a study and of `best`, `status` and `check`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, astuple
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from autotune.comparison import comparison
from autotune.confirm import Decision
from autotune.doctor.finding import Finding, Status
from autotune.memory_growth import growth_words
from autotune.pareto_text import front_json, front_lines
from autotune.racing import SAVED
from autotune.records import Phase, TrialRecord, counted, short, spelled
from autotune.results import PoolResults, run_spread_of, speedup
from autotune.settling import UNSETTLED
from autotune.wall_metrics import wall_words
from launchers.outcome import Outcome
from search_spaces.config import TrialConfig, knobs


def throughput(record: TrialRecord) -> str:
    """Tokens/s per GPU with its interval, or the outcome where it was not measured."""
    metrics = record.metrics
    if record.outcome is not Outcome.COMPLETED:
        return record.outcome.value
    low, high = metrics["tokens_per_s_per_gpu_low"], metrics["tokens_per_s_per_gpu_high"]
    disturbed = " disturbed" if record.contaminated else ""
    return f"{metrics['tokens_per_s_per_gpu']:,.0f} [{low:,.0f}, {high:,.0f}]{disturbed}"


def remark(record: TrialRecord) -> str:
    """In one line why a trial failed, which limits it crosses, or that it confirms one that ran before; else empty."""
    if record.outcome is not Outcome.COMPLETED:
        return record.detail.splitlines()[0] if record.detail else ""
    over = f"over a limit: {'; '.join(one.message for one in record.violations)}" if record.violations else ""
    return "; ".join(filter(None, ("confirming run" if record.phase is Phase.CONFIRM else "", over)))


def final_report(results: Sequence[PoolResults], warmup_steps: int) -> RenderableType:
    """Winner against baseline for each pool and node count, what was refused and what failed, and which is best."""
    parts: list[RenderableType] = [_pool_report(result, warmup_steps) for result in results]
    return Group(*parts, *comparison(results))


def _pool_report(result: PoolResults, warmup_steps: int) -> RenderableType:
    table = Table(title=f"{result.study}   ended: {result.end_reason or 'not yet'}", title_justify="left", title_style="bold")
    for heading in ("", "trial", "tokens/s per GPU [95 %]", "step s", "configuration"):
        table.add_column(heading)
    winner = _winner(result)
    for name, record in (("baseline", result.baseline), (winner, result.best)):
        if record is not None:
            row = (name, str(record.number), throughput(record), f"{record.metrics['step_time_s']:.3f}", short(record.config))
            table.add_row(*row, style="bold" if name == winner else "")
    failures = [failure_table(result)] if result.best is None and result.records else []
    doubts = (*_contaminated(result), *_unsettled(result), *_growing(result))
    warnings = [Text(warning, style="yellow") for warning in (*doubts, *result.notes)]
    earlier = [result.earlier] if result.earlier else []
    left = [f"Remaining budget: {result.forecast.words()}."] if result.forecast else []
    told = [Text(line) for line in (*left, *front_lines(result), *result.explanation, *_at_the_wall(result), *earlier)]
    return Group(table, Text(_verdict(result, warmup_steps)), *told, *warnings, *failures, Text(_counts(result), style="dim"))


def _winner(result: PoolResults) -> str:
    """What the best is called."""
    return "knee" if result.front else "winner"


def _contaminated(result: PoolResults) -> list[str]:
    """Which trials somebody disturbed, with the last reason."""
    found = [record for record in result.records if record.contaminated]
    if not found:
        return []
    both = ((f"the {_winner(result)}", result.best), ("the baseline", result.baseline))
    shown = [name for name, record in reversed(both) if record in found]
    among = f", {' and '.join(shown)} among them" if shown else ""
    were = "was" if len(found) == 1 else "were"
    return [f"{counted(len(found), 'trial')} {were} disturbed{among}; trial {found[-1].number}: {found[-1].contaminated}."]


def _at_the_wall(result: PoolResults) -> list[str]:
    """What the nodes of winner and baseline drew at the wall, and whether a meter said so."""
    both = ((_winner(result), result.best), ("baseline", result.baseline))
    named = [(name, record) for name, record in both if record is not None]
    words = [f"{name} {words}" for name, record in named if (words := wall_words(record.metrics, record.environment))]
    return [f"At the wall, all nodes together: {', '.join(words)}."] if words else []


def _unsettled(result: PoolResults) -> list[str]:
    """Which confirming runs were measured before their GPUs were warm, with the last reason."""
    measured = [record for record in result.records if record.outcome is Outcome.COMPLETED]
    heat = [(record.number, record.environment.get("telemetry.heat", "")) for record in measured]
    found = [(number, why) for number, why in heat if why.startswith(UNSETTLED)]
    if not found:
        return []
    number, why = found[-1]
    measured_before = "was measured before its" if len(found) == 1 else "were measured before their"
    runs = counted(len(found), "confirming run")
    return [f"{runs} {measured_before} GPUs were warm; trial {number}: temperatures {why}."]


def _growing(result: PoolResults) -> list[str]:
    """Whether the winner's memory still grew."""
    words = growth_words(result.best.metrics) if result.best is not None else ""
    return [f"The {_winner(result)} is at risk in a long run: its {words}."] if words else []


def failure_table(result: PoolResults) -> Table:
    """How often trials ended in which way, with the last reason of each."""
    table = Table(box=None, pad_edge=False)
    for heading in ("outcome", "trials", "the last one"):
        table.add_column(heading)
    for outcome, count in result.outcomes.most_common():
        last = [record for record in result.records if record.outcome is outcome][-1]
        table.add_row(outcome.value, str(count), f"trial {last.number}: {remark(last)}")
    return table


def _verdict(result: PoolResults, warmup_steps: int) -> str:
    if result.best is None:
        return nothing_best(result)
    if result.front:
        return "No configuration of the front is beaten by another one in every term."
    if result.baseline is None:
        return _no_baseline(result)
    if result.best.config == result.baseline.config:
        return "Nothing beat the baseline."
    return _faster(result, result.best, result.baseline, warmup_steps) + _learning(result.best.config, result.baseline.config)


def _no_baseline(result: PoolResults) -> str:
    """Why the winner is compared with nothing."""
    tried = [record for record in result.records if record.phase is Phase.BASELINE]
    how = f"{tried[-1].outcome.value}: {(tried[-1].detail.splitlines() or [''])[0]}" if tried else "it was not tried"
    return f"The baseline did not complete ({how}), so there is nothing to compare the winner with."


def nothing_best(result: PoolResults) -> str:
    """Why a study has no winner: nothing completed, or which limits the nearest trial crosses, and by how much."""
    if result.nearest is None:
        return "No feasible configuration: not one trial completed."
    broken = "; ".join(violation.message for violation in result.nearest.violations)
    nearest = f"trial {result.nearest.number} ({short(result.nearest.config)})"
    return f"No configuration keeps the limits. The nearest is {nearest}: {broken}."


def _faster(result: PoolResults, winner: TrialRecord, baseline: TrialRecord, warmup_steps: int) -> str:
    """By how much the winner is faster, and how sure that is."""
    decision = result.decision
    if decision is None or decision.over_baseline is None:
        spread = run_spread_of(result.records)
        ratio, low, high = speedup(winner, baseline, warmup_steps, spread)
        text = f"The winner is {ratio:.2f} times as fast as the baseline [{low:.2f}, {high:.2f}] (95 %, one run of each"
        return f"{text}; run-to-run spread {spread.relative:.1%})."
    ratio, low, high = (math.exp(value) for value in astuple(decision.over_baseline))
    text = f"The winner is {ratio:.2f} times as fast as the baseline [{low:.2f}, {high:.2f}] (95 %, runs in turns)."
    return text + _second(decision, baseline)


def _second(decision: Decision, baseline: TrialRecord) -> str:
    """How the winner compares with the next best that was confirmed; nothing where that is the baseline, and slower."""
    if decision.runner_up is None or decision.margin is None:
        return ""
    gap = f"{decision.margin.difference:+.1%} [{decision.margin.low:+.1%}, {decision.margin.high:+.1%}] in score"
    if decision.margin.decided and decision.runner_up.config == baseline.config:
        return ""  # nothing else was confirmed, and how far ahead of it the winner is was said
    if decision.margin.decided:
        return f" Against the next best, {short(decision.runner_up.config)}: {gap}."
    why = "it draws less power" if decision.by_power else "its mean is higher"
    return f" It is not told apart from {short(decision.runner_up.config)} ({gap}); {why}."


def _learning(winner: TrialConfig, baseline: TrialConfig) -> str:
    """Which of the winner's knobs change what is learned; empty where none does."""
    changed = [name for name, knob in knobs().items() if knob.changes_learning and getattr(winner, name) != getattr(baseline, name)]
    words = ", ".join(f"{name} {spelled(getattr(winner, name))} (baseline: {spelled(getattr(baseline, name))})" for name in changed)
    return f" It changes what is learned: {words}." if words else ""


def _counts(result: PoolResults) -> str:
    ended = ", ".join(f"{count} {outcome.value}" for outcome, count in result.outcomes.most_common())
    rules = ", ".join(f"{name} {count}" for name, count in result.refusals.most_common(5))
    raced = [record.metrics[SAVED] for record in result.records if SAVED in record.metrics]
    saved = f" Racing ended {len(raced)} of them early and saved {sum(raced):,.0f} s." if raced else ""
    return f"Trials: {ended or 'none'}.{saved} Spent: {result.spent.words()}." + (f" Refused by rule: {rules}." if rules else "")


def results_json(results: Sequence[PoolResults], *, trials: bool = False) -> list[dict[str, Any]]:
    """The same for scripts, one entry per pool and node count; with `trials` each ended trial too, but the refused ones."""
    return [
        {
            "study": result.study,
            "pool": result.pool.name,
            "nodes": result.pool.nodes,
            "end_reason": result.end_reason,
            "notes": list(result.notes),
            "running": result.running,
            "outcomes": {outcome.value: count for outcome, count in result.outcomes.items()},
            "refusals": dict(result.refusals),
            "baseline": _record_json(result.baseline),
            "best": _record_json(result.best),
            "best_tokens_per_s": result.best_tokens_per_s,
            "explanation": list(result.explanation),
            "earlier": result.earlier,
            "front": front_json(result),
            "hypervolume": result.hypervolume,
            "spent": asdict(result.spent),
            "forecast": asdict(result.forecast) if result.forecast else None,
        }
        | ({"trials": [_trial_json(record) for record in result.records if not _refused(record)]} if trials else {})
        for result in results
    ]


def _record_json(record: TrialRecord | None) -> dict[str, Any] | None:
    if record is None:
        return None
    config = record.config.changed()
    return {"trial": record.number, "config": config, "argv": list(record.argv), "metrics": dict(record.metrics)}


def _refused(record: TrialRecord) -> bool:
    return record.outcome is Outcome.REFUSED


def _trial_json(record: TrialRecord) -> dict[str, Any]:
    how = {"phase": record.phase.value, "outcome": record.outcome.value, "detail": record.detail}
    return {**(_record_json(record) or {}), **how, "contaminated": record.contaminated, "why": record.why}


def trial_table(records: Sequence[TrialRecord], running: Sequence[tuple[str, str, str]] = ()) -> Table:
    """Trials as rows; `running` holds (study, trial, configuration). On a narrow terminal the last two columns are cut."""
    table = Table(box=None, pad_edge=False)
    for heading in ("study", "trial", "tokens/s per GPU [95 %]"):
        table.add_column(heading, no_wrap=True)
    table.add_column("configuration")
    table.add_column("why")
    for record in records:
        told = record.study, str(record.number), throughput(record), _one_line(short(record.config)), _one_line(remark(record))
        table.add_row(*told, style="dim" if record.outcome is not Outcome.COMPLETED else "")
    for study, number, config in running:
        table.add_row(study, number, "running", _one_line(config), "", style="cyan")
    return table


def _one_line(text: str) -> Text:
    return Text(text, no_wrap=True, overflow="ellipsis")


_STYLES = {Status.OK: "green", Status.WARN: "yellow", Status.FAIL: "bold red"}


def findings_table(findings: Sequence[Finding]) -> Table:
    """Findings for a person, each problem with its fix."""
    table = Table(box=None, pad_edge=False, show_header=False)
    for finding in findings:
        table.add_row(Text(finding.status, style=_STYLES[finding.status]), finding.name, finding.detail)
        if finding.fix:
            table.add_row("", "", Text(f"fix: {finding.fix}", style="yellow"))
    return table
