"""What a person and a script read of node counts and per-GPU power limits, as text, JSON and a figure."""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from autotune.plan import PoolPlan
from autotune.plan_power import PowerChoice
from autotune.records import short
from search_spaces.gpus import power_unit
from search_spaces.power import PEAK_BAND

if TYPE_CHECKING:
    import plotly.graph_objects as go

_LEFT = ("pool", "least to spare", "configuration")
_BY = {"mean": "a step's mean", "peak": "peaks"}
_SPARE = (
    "kW at the wall: a step's mean, in parentheses with every GPU at its power limit. What a domain has to spare is worked out "
    "from a step's mean where its window_s holds a step, else from all boards' peaks at once, which pass a limit by up to "
    f"{PEAK_BAND:.0%}."
)


def power_choice_json(choice: PowerChoice) -> dict[str, Any]:
    """A choice as plain values."""
    return {**asdict(choice), "config": choice.config.changed(), "origin": "predicted"}


def limit_unit(plans: Sequence[PoolPlan]) -> str:
    """What the power limits are of: GPUs, or boards where some pool's GPUs share one."""
    units = {power_unit(plan.predictions.machines.gpu.dies_per_package) for plan in plans}
    return units.pop() if len(units) == 1 else "GPU or board"


def power_parts(plans: Sequence[PoolPlan]) -> list[RenderableType]:
    """The best limit at every node count of every pool, and which of them gives most."""
    best = max((plan for plan in plans if plan.choices), key=lambda plan: plan.choices[0].tokens_per_s, default=None)
    table = Table(box=None, pad_edge=False)
    for heading in (
        "pool",
        "nodes",
        f"W per {limit_unit(plans)}",
        "tokens/s in total",
        "kW at the wall (GPUs at limit)",
        "least to spare",
        "configuration",
    ):
        table.add_column(heading, justify="left" if heading in _LEFT else "right")
    for plan in plans:
        table.add_row(plan.pool, str(plan.nodes), *_cells(plan), style="bold" if plan is best else "")
    title = Text("Node counts and power limits", style="bold")
    return [title, table, Text(_SPARE, style="dim"), Text(_answer(best), style="bold" if best else "red")]


def power_figure(plans: Sequence[PoolPlan]) -> go.Figure:
    """Tokens/s in total against the limit per GPU, a line for each pool and node count."""
    import plotly.graph_objects as go

    figure = go.Figure()
    for plan in plans:
        choices = sorted(plan.choices, key=lambda choice: choice.limit_w)
        hover = [f"{choice.wall_w / 1e3:.1f} kW at the wall<br>{html.escape(_words(choice))}" for choice in choices]
        figure.add_scatter(
            name=html.escape(f"{plan.pool}, {plan.nodes} nodes"),
            x=[choice.limit_w for choice in choices],
            y=[choice.tokens_per_s for choice in choices],
            mode="lines+markers",
            text=hover,
        )
    return figure


def _answer(best: PoolPlan | None) -> str:
    if best is None:
        return "No node count and per-GPU power limit keeps every power domain under its limit."
    choice = best.choices[0]
    return (
        f"Most tokens/s in total: {best.pool} on {choice.nodes} nodes at {choice.limit_w} W per {limit_unit([best])}, "
        f"{choice.tokens_per_s:,.0f} tokens/s and {choice.wall_w / 1e3:.1f} kW at the wall."
    )


def _cells(plan: PoolPlan) -> tuple[str, ...]:
    if not plan.choices:
        return ("", "", "", "", "nothing fits its memory" if not plan.ok else "no limit keeps the power domains under theirs")
    choice = plan.choices[0]
    return (
        str(choice.limit_w),
        f"{choice.tokens_per_s:,.0f}",
        f"{choice.wall_w / 1e3:.1f} ({choice.wall_at_limits_w / 1e3:.1f})",
        f"{choice.domain}: {choice.margin_w:,.0f} W by {_BY[choice.margin_by]}" if choice.margin_w is not None else "",
        _words(choice),
    )


def _words(choice: PowerChoice) -> str:
    """The configuration without the limit, which has a column."""
    return short(choice.config.model_copy(update={"gpu_power_limit_w": None}))
