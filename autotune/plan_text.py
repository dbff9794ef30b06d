"""What a person and a script read of `autotune plan`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from autotune.plan import Planned, PlannedOne, PoolPlan
from autotune.plan_cases import prediction_json
from autotune.plan_power_text import power_choice_json, power_parts
from autotune.records import short
from search_spaces.gpus import power_unit
from search_spaces.prediction import CALIBRATING_TRIALS, Machines, Prediction

_VERDICTS = {"fits": "fits", "at_risk": "at risk", "does_not_fit": "does not fit"}
_STYLES = {"fits": "green", "at_risk": "yellow", "does_not_fit": "red"}
_LEFT = ("", "limited by", "memory")
_LEAST_SHARE = 0.01
_LEAST_REST = 1e-3


@dataclass(frozen=True, slots=True)
class PlansAnswer:
    """The best candidates of every pool, and what was ruled out.

    Attributes:
        plans: One per pool.
        top: How many of the best to show.
        by_power: Whether node counts and per-GPU power limits are compared.
    """

    plans: tuple[PoolPlan, ...]
    top: int
    by_power: bool = False

    @property
    def ok(self) -> bool:
        """Whether something may fit on every pool at one of its node counts, and under the power domains' limits somewhere."""
        fits = {plan.pool for plan in self.plans if plan.ok}
        powered = not self.by_power or any(plan.choices for plan in self.plans)
        return powered and all(plan.pool in fits for plan in self.plans)

    def to_json(self) -> list[dict[str, Any]]:
        """One entry per pool."""
        return [_plan_json(plan, self.top) for plan in self.plans]

    def for_person(self) -> RenderableType:
        """The best configurations, what they spend, and what was ruled out."""
        parts = [part for plan in self.plans for part in _plan_parts(plan, plan.best(self.top))]
        if self.by_power:
            parts += power_parts(self.plans)
        return Group(*parts, Text(band(self.plans), style="dim"))


@dataclass(frozen=True, slots=True)
class OnesAnswer:
    """One configuration on every pool."""

    ones: tuple[PlannedOne, ...]

    @property
    def ok(self) -> bool:
        """Whether it is legal and may fit on every pool."""
        return all(one.ok for one in self.ones)

    def to_json(self) -> dict[str, Any]:
        """Prediction or violations, by pool, and by node count where a pool has several."""
        return {one.title: _one_json(one) for one in self.ones}

    def for_person(self) -> RenderableType:
        """The prediction in full, or every reason why not."""
        return Group(*(_one(one) for one in self.ones))


def band(plans: Sequence[PoolPlan]) -> str:
    """How far the numbers may be off."""
    by_pool = {plan.pool: plan.predictions.machines for plan in plans}
    return " ".join(
        (
            "All numbers are predicted, none is measured.",
            *(_step_time_band(pool, machines) for pool, machines in by_pool.items()),
            "Memory: expected, `at most` is an upper bound and `at least` what it leaves free; below 0 a configuration is at risk.",
            "Watts: no measured band.",
        )
    )


def _step_time_band(pool: str, machines: Machines) -> str:
    """How far off a pool's step times were, and where."""
    known = f"calibrated with {machines.trials} trials, " if machines.trials else ""
    if machines.own_error is not None:
        where = "in trials of this pool, predicted before each ran"
    elif machines.trials >= CALIBRATING_TRIALS:
        where = f"on published measurements after {CALIBRATING_TRIALS} trials of a pool"
    else:
        where = "on published measurements without any trial of a pool"
    return f"Step time of {pool}: {known}{machines.step_time_error:.0%} mean error {where}."


def _plan_json(plan: PoolPlan, top: int) -> dict[str, Any]:
    return {
        "pool": plan.pool,
        "gpu": plan.gpu,
        "nodes": plan.nodes,
        "world_size": plan.table.workload.world_size,
        "candidates": len(plan.table),
        "refused_by_rule": plan.table.refused,
        "verdicts": plan.verdicts,
        "does_not_fit_by_component": plan.too_large,
        "origin": "predicted",
        "calibrated_with_trials": plan.predictions.machines.trials,
        "lacking": list(plan.lacking),
        "cautions": list(plan.cautions),
        "smallest": _smallest_json(plan),
        "power_choices": [power_choice_json(choice) for choice in plan.choices],
        "best": [
            {"config": best.config.changed(), "argv": best.config.argv(), **prediction_json(best.prediction)}
            for best in plan.best(top)
        ],
    }


def _smallest_json(plan: PoolPlan) -> dict[str, Any] | None:
    """The candidate that needs the least memory, where none fits."""
    if plan.best(1) or plan.smallest is None:
        return None
    return {"config": plan.smallest.config.changed(), **prediction_json(plan.smallest.prediction)}


def _one_json(one: PlannedOne) -> dict[str, Any]:
    if one.prediction is None:
        return {"legal": False, "violations": [asdict(violation) for violation in one.violations]}
    return {"legal": True, "config": one.config.changed(), **prediction_json(one.prediction)}


def _plan_parts(plan: PoolPlan, best: Sequence[Planned]) -> list[RenderableType]:
    """Counts, a row of numbers for each of the best, then what each spends."""
    gpu = plan.predictions.machines.gpu
    head = f"{plan.pool}: {plan.table.workload.world_size:,} x {plan.gpu}, {gpu.memory_gib:g} GiB each"
    parts: list[RenderableType] = [Text(head, style="bold"), _ruled_out(plan)]
    parts += [Text(words, style="yellow") for words in (*plan.lacking, *plan.cautions)]
    if not best:
        return [*parts, Text(_why_nothing(plan), style="red")]
    table, details = Table(box=None, pad_edge=False), Text()
    for heading in (
        "",
        "tokens/s per GPU",
        "step s",
        "limited by",
        "GiB (at most)",
        "free GiB (at least)",
        "watts (peak)" if gpu.dies_per_package == 1 else f"watts per {power_unit(gpu.dies_per_package)} (peak)",
        "memory",
    ):
        table.add_column(heading, justify="left" if heading in _LEFT else "right")
    for rank, planned in enumerate(best, start=1):
        table.add_row(str(rank), *_cells(planned.prediction), style="bold" if rank == 1 else "")
        details.append(f"{rank}: {short(planned.config)}\n", style="bold").append(_spends(planned.prediction, "   "))
    return [*parts, table, details]


def _why_nothing(plan: PoolPlan) -> str:
    """The rule that refused most and what it says of an example, or how far the smallest candidate is from fitting."""
    if len(plan.table) and not plan.verdicts:
        return "Nothing is predicted."
    if plan.smallest is None:
        broken = {violation.name: violation.message for _, violations in plan.table.sample for violation in violations}
        said = next((f" {rule}: {broken[rule]}" for rule, _ in Counter(plan.table.refused).most_common() if rule in broken), "")
        return f"No candidate is legal.{said}"
    found = plan.smallest.prediction
    needs = f"{_gib(found.device_gib)} GiB of {found.capacity_gib:g}"
    config = short(plan.smallest.config)
    return f"Nothing is predicted to fit. The smallest needs {needs}: {config}. More GPUs or another GPU would help."


def _cells(found: Prediction) -> tuple[str, ...]:
    share = found.time_by_part_s[found.slowest_part] / found.step_time_s
    return (
        f"{found.tokens_per_s_per_gpu:,.0f}",
        f"{found.step_time_s:.3f}",
        f"{found.slowest_part} {share:.0%}",
        f"{_gib(found.device_gib)} ({_gib(found.upper_gib)})",
        f"{_gib(found.headroom_gib)} ({_gib(found.capacity_gib - found.upper_gib)})",
        f"{found.mean_power_w:.0f} ({found.peak_power_w:.0f})",
        _VERDICTS[found.fits],
    )


def _ruled_out(plan: PoolPlan) -> Text:
    rules = ", ".join(f"{name} {count:,}" for name, count in Counter(plan.table.refused).most_common(5)) or "none"
    verdicts = ", ".join(f"{plan.verdicts[name]:,} {words}" for name, words in _VERDICTS.items() if plan.verdicts.get(name))
    text = f"{len(plan.table):,} legal candidates: {verdicts or 'none'}. Refused by rule: {rules}."
    if plan.too_large:
        text += f" Largest component where it does not fit: {', '.join(f'{k} {count:,}' for k, count in plan.too_large.items())}."
    return Text(text)


def _spends(found: Prediction, indent: str) -> str:
    """Seconds by part, and GiB by component on the fullest stage."""
    stages = found.memory_gib_by_stage
    fullest = max(range(len(stages)), key=lambda stage: stages[stage]) + 1
    time = f"{indent}step time: {_shares(found.time_by_part_s, 's')}\n"
    return f"{time}{indent}memory of stage {fullest} of {len(stages)}: {_shares(found.memory_by_component, 'GiB')}\n"


def _shares(parts: dict[str, float], unit: str) -> str:
    """Named amounts, largest first; those under 1 % of the sum together."""
    total = sum(parts.values())
    shown = {name: part for name, part in parts.items() if part >= _LEAST_SHARE * total}
    rest = total - sum(shown.values())
    words = [f"{name} {shown[name]:.3g}" for name in sorted(shown, key=lambda name: -shown[name])]
    return ", ".join([*words, f"other {rest:.2g}"] if rest > _LEAST_REST * total else words) + f" {unit}"


def _gib(amount: float) -> str:
    return f"{amount:.1f}" if abs(amount) >= 1 else f"{amount:.2g}"


def _one(one: PlannedOne) -> Text:
    """One configuration on one pool."""
    text = Text(f"{one.title}: ", style="bold")
    if one.prediction is None:
        text.append("not legal", style="red")
        for violation in one.violations:
            text.append(f"\n  {violation.name}: {violation.message}", style="not bold")
        return text
    found = one.prediction
    text.append(_VERDICTS[found.fits], style=_STYLES[found.fits]).append(f"   {short(one.config)}\n")
    lines = (
        f"  {found.tokens_per_s_per_gpu:,.0f} tokens/s per GPU, {found.step_time_s:.3f} s a step, limited by {found.slowest_part};"
        f" predicted, {found.step_time_error:.0%} mean error\n"
        f"  {_gib(found.device_gib)} GiB expected, at most {_gib(found.upper_gib)}, of {found.capacity_gib:g}\n"
        f"{_spends(found, '  ')}"
        f"  {found.mean_power_w:.0f} W mean, {found.peak_power_w:.0f} W peak per {power_unit(found.gpus_per_board)}"
    )
    return text.append(lines, style="not bold")
