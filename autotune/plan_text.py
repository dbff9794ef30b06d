"""What a person and a script read of `autotune plan`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from autotune.plan import Planned, PlannedOne, PoolPlan
from autotune.plan_cases import prediction_json
from autotune.records import short
from search_spaces.prediction import Prediction

_VERDICTS = {"fits": "fits", "at_risk": "at risk", "does_not_fit": "does not fit"}
_LEAST_SHARE = 0.01


def plans_json(plans: Sequence[PoolPlan], top: int) -> list[dict[str, Any]]:
    """One entry per pool: counts, what ruled candidates out, and the best."""
    return [
        {
            "pool": plan.pool,
            "gpu": plan.gpu,
            "world_size": plan.table.workload.world_size,
            "candidates": len(plan.table),
            "refused_by_rule": plan.table.refused,
            "verdicts": plan.verdicts,
            "does_not_fit_by_component": plan.too_large,
            "origin": "predicted",
            "best": [
                {"config": best.config.changed(), "argv": best.config.argv(), **prediction_json(best.prediction)}
                for best in plan.best(top)
            ],
        }
        for plan in plans
    ]


def ones_json(ones: Sequence[PlannedOne]) -> dict[str, Any]:
    """One configuration's prediction or violations, by pool."""
    found: dict[str, Any] = {}
    for one in ones:
        if one.prediction is None:
            violations = [{"name": v.name, "amount": v.amount, "message": v.message} for v in one.violations]
            found[one.pool] = {"legal": False, "violations": violations}
        else:
            found[one.pool] = {"legal": True, "config": one.config.changed(), **prediction_json(one.prediction)}
    return found


def plans_text(plans: Sequence[PoolPlan], top: int) -> RenderableType:
    """The best configurations of every pool, what they spend, and what was ruled out."""
    return Group(*(part for plan in plans for part in _plan_parts(plan, plan.best(top))), Text(band(plans), style="dim"))


def ones_text(ones: Sequence[PlannedOne]) -> RenderableType:
    """One configuration in full, or every reason why not."""
    return Group(*(_one(one) for one in ones))


def band(plans: Sequence[PoolPlan]) -> str:
    """How far the numbers may be off."""
    errors = {plan.predictions.machines.step_time_error for plan in plans} or {0.0}
    return (
        f"All numbers are predicted, none is measured. Step time: {max(errors):.0%} mean error on published measurements before any trial "
        "of these machines; rankings are better than the seconds. Memory: `at most` is an upper bound; watts have no measured band."
    )


def _plan_parts(plan: PoolPlan, best: Sequence[Planned]) -> list[RenderableType]:
    head = f"{plan.pool}: {plan.table.workload.world_size:,} x {plan.gpu}, {plan.predictions.machines.gpu.memory_gib:g} GiB each"
    parts: list[RenderableType] = [Text(head, style="bold"), _ruled_out(plan)]
    if not best:
        return [*parts, Text("Nothing is predicted to fit." if len(plan.table) else "No candidate is legal.", style="red")]
    table = Table(box=None, pad_edge=False)
    for heading in ("", "tokens/s per GPU", "step s", "limited by", "GiB (at most)", "free GiB", "watts (peak)", "configuration"):
        table.add_column(heading, justify="left" if heading in ("", "limited by", "configuration") else "right")
    for rank, planned in enumerate(best, start=1):
        table.add_row(str(rank), *_cells(planned.prediction), short(planned.config), style="bold" if rank == 1 else "")
    return [*parts, table, _parts_text("step time of 1", best[0].prediction), _memory_text("memory of 1", best[0].prediction)]


def _cells(found: Prediction) -> tuple[str, ...]:
    share = found.time_by_part_s[found.slowest_part] / found.step_time_s
    return (
        f"{found.tokens_per_s_per_gpu:,.0f}",
        f"{found.step_time_s:.3f}",
        f"{found.slowest_part} {share:.0%}",
        f"{found.device_gib:.1f} ({found.upper_gib:.1f})" + ("" if found.fits == "fits" else f" {_VERDICTS[found.fits]}"),
        f"{found.headroom_gib:.1f}",
        f"{found.mean_power_w:.0f} ({found.peak_power_w:.0f})",
    )


def _ruled_out(plan: PoolPlan) -> Text:
    rules = ", ".join(f"{name} {count:,}" for name, count in Counter(plan.table.refused).most_common(5)) or "none"
    verdicts = ", ".join(f"{plan.verdicts[name]:,} {words}" for name, words in _VERDICTS.items() if plan.verdicts.get(name))
    text = f"{len(plan.table):,} legal candidates: {verdicts or 'none'}. Refused by rule: {rules}."
    if plan.too_large:
        text += f" Largest where it does not fit: {', '.join(f'{name} {count:,}' for name, count in plan.too_large.items())}."
    return Text(text)


def _parts_text(title: str, found: Prediction) -> Text:
    return Text(f"{title}: {_shares(found.time_by_part_s, 's')}")


def _memory_text(title: str, found: Prediction) -> Text:
    fullest = max(range(len(found.memory_gib_by_stage)), key=lambda stage: found.memory_gib_by_stage[stage])
    return Text(f"{title}, stage {fullest + 1} of {len(found.memory_gib_by_stage)}: {_shares(found.memory_by_component, 'GiB')}")


def _shares(parts: dict[str, float], unit: str) -> str:
    """Named amounts, largest first; those under 1 % of the sum together."""
    total = sum(parts.values())
    shown = {name: part for name, part in parts.items() if part >= _LEAST_SHARE * total}
    rest = total - sum(shown.values())
    words = [f"{name} {shown[name]:.3g}" for name in sorted(shown, key=lambda name: -shown[name])]
    return ", ".join([*words, f"other {rest:.2g}"] if rest > 0 else words) + f" {unit}"


def _one(one: PlannedOne) -> Text:
    if one.prediction is None:
        text = Text.assemble((f"{one.pool}: ", "bold"), ("not legal", "red"))
        for violation in one.violations:
            text.append(f"\n  {violation.name}: {violation.message}")
        return text
    found = one.prediction
    style = {"fits": "green", "at_risk": "yellow"}.get(found.fits, "red")
    text = Text.assemble((f"{one.pool}: ", "bold"), (_VERDICTS[found.fits], style), f"   {short(one.config)}")
    memory = (
        f"{found.device_gib:.1f} GiB, at most {found.upper_gib:.1f}, of {found.capacity_gib:g}; largest: {found.largest_component}"
    )
    text.append(f"\n  {memory}\n  ").append(_memory_text("memory", found))
    speed = f"{found.tokens_per_s_per_gpu:,.0f} tokens/s per GPU, {found.step_time_s:.3f} s a step (predicted, {found.step_time_error:.0%} mean error)"
    text.append(f"\n  {speed}; limited by {found.slowest_part}\n  ").append(_parts_text("step time", found))
    return text.append(f"\n  {found.mean_power_w:.0f} W mean, {found.peak_power_w:.0f} W peak per GPU")
