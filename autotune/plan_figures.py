"""The figures of `autotune plan --output plan.html`, in one file that needs no network."""

from __future__ import annotations

import html
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import plotly.graph_objects as go
from plotly.colors import qualitative

from autotune.errors import SpecError
from autotune.plan import Planned, PoolPlan
from autotune.plan_power_text import limit_unit, power_figure
from autotune.plan_text import band
from autotune.records import short
from search_spaces.gpus import power_unit
from search_spaces.prediction import Prediction

MOST_POINTS = 2000
_HEIGHT = 460
_MOST_TICKS = 16


def write_html(path: Path, plans: Sequence[PoolPlan], top: int) -> None:
    """Write the figures of every pool (step time by part, memory per stage, throughput against peak power), and of power limits.

    Raises:
        SpecError: the file cannot be written.
    """
    body, first = "", True
    if any(plan.choices for plan in plans):
        figure = power_figure(plans)
        title = "Tokens/s in total against the power limit, power domains obeyed (predicted)"
        body += _styled(figure, title, f"W per {limit_unit(plans)}", "tokens/s").to_html(full_html=False, include_plotlyjs=True)
        first = False
    for plan in plans:
        body += f"<h2>{html.escape(plan.pool)}: {plan.table.workload.world_size:,} x {html.escape(plan.gpu)}</h2>"
        best = plan.best(top)
        if not best:
            body += "<p>Nothing is predicted to fit.</p>"
        for figure in (time_figure(best), memory_figure(plan, best), frontier_figure(plan)) if best else ():
            body += figure.to_html(full_html=False, include_plotlyjs=first)
            first = False
    head = '<!doctype html><html><head><meta charset="utf-8"><title>autotune plan</title></head>'
    page = f"{head}<body><p>{html.escape(band(plans))}</p>"
    try:
        path.write_text(f"{page}{body}</body></html>\n", encoding="utf-8")
    except OSError as error:
        raise SpecError("--output", path, f"cannot be written: {(error.strerror or 'error').lower()}", "give a file name") from None


def time_figure(best: Sequence[Planned]) -> go.Figure:
    """Seconds by part of the best, a bar each."""
    figure = go.Figure()
    for part in best[0].prediction.time_by_part_s:
        seconds = [planned.prediction.time_by_part_s[part] for planned in best]
        if any(seconds):
            figure.add_bar(name=part, y=_names(best), x=seconds, orientation="h")
    return _styled(figure, "Step time by part (predicted)", "seconds", "").update_layout(
        barmode="stack", legend_traceorder="normal", yaxis_autorange="reversed", height=_HEIGHT + 12 * len(best)
    )


def memory_figure(plan: PoolPlan, best: Sequence[Planned]) -> go.Figure:
    """Allocated GiB of every pipeline stage of the best, and the GPU's memory."""
    figure = go.Figure()
    for name, planned in zip(_names(best), best, strict=True):
        stages = planned.prediction.memory_gib_by_stage
        figure.add_bar(name=name, x=[stage + 1 for stage in range(len(stages))], y=stages)
    most = max(len(planned.prediction.memory_gib_by_stage) for planned in best)
    figure.update_xaxes(dtick=-(-most // _MOST_TICKS))
    figure.add_hline(y=plan.predictions.machines.gpu.memory_gib, line_dash="dash", annotation_text="GPU memory")
    return _styled(figure, "Memory per pipeline stage, allocated by torch (predicted)", "stage", "GiB").update_layout(
        barmode="group"
    )


def frontier_figure(plan: PoolPlan) -> go.Figure:
    """Tokens/s against peak watts of what fits, and the configurations that no other beats in both."""
    dies = plan.predictions.machines.gpu.dies_per_package
    speed, watts = plan.predictions.tokens_per_s_per_gpu, plan.predictions.peak_power_w * dies
    some = plan.ranking[np.unique(np.linspace(0, len(plan.ranking) - 1, min(len(plan.ranking), MOST_POINTS)).astype(np.intp))]
    front = plan.frontier()
    figure = go.Figure()
    figure.add_scattergl(name=f"{len(some):,} of {len(plan.ranking):,} that fit", x=watts[some], y=speed[some], mode="markers")
    figure.data[0].marker = {"size": 4, "opacity": 0.4}
    hover = [html.escape(short(plan.table.config(int(row)))) for row in front]
    figure.add_scatter(name="frontier", x=watts[front], y=speed[front], mode="lines+markers", text=hover)
    return _styled(figure, "Throughput against peak power (predicted)", f"peak watts per {power_unit(dies)}", "tokens/s per GPU")


def _names(best: Sequence[Planned]) -> list[str]:
    return [f"{rank} {_wrapped(planned)}" for rank, planned in enumerate(best, start=1)]


def _wrapped(planned: Planned) -> str:
    """The configuration in lines short enough for an axis."""
    lines = [""]
    for word in short(planned.config).split():
        lines = [*lines[:-1], f"{lines[-1]} {word}"] if len(lines[-1]) < 60 else [*lines, word]
    return html.escape("\n".join(lines).strip()).replace("\n", "<br>") + _mark(planned.prediction)


def _mark(found: Prediction) -> str:
    return "" if found.fits == "fits" else " (at risk)"


def _styled(figure: go.Figure, title: str, x_title: str, y_title: str) -> go.Figure:
    return figure.update_layout(
        title=title, xaxis_title=x_title, yaxis_title=y_title, template="plotly_white", colorway=qualitative.Dark24, height=_HEIGHT
    )
