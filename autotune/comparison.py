"""The studies of one study file side by side: which pool, and how many of its nodes, train fastest in total."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from autotune.records import short
from autotune.refit import PREFIX
from autotune.results import PoolResults
from autotune.spec import node_words
from autotune.wall_metrics import POOL, is_measured, judged_on

_METRIC = "tokens_per_s_per_gpu"


def fastest(results: Sequence[PoolResults]) -> PoolResults | None:
    """The study whose best configuration gives the most tokens/s in total; None where none has any."""
    found = max(results, key=lambda result: result.best_tokens_per_s, default=None)
    return found if found is not None and found.best is not None else None


def comparison(results: Sequence[PoolResults]) -> list[RenderableType]:
    """The best of every study, and which of them gives most; nothing where there is only one, or none has a best."""
    best = fastest(results)
    if best is None or len(results) < 2:  # noqa: PLR2004
        return []
    table = Table(box=None, pad_edge=False)
    for heading in ("pool", "nodes", "tokens/s in total [95 %]", "predicted", "kW at the wall", "configuration"):
        table.add_column(heading, justify="right" if heading in ("nodes", "predicted") else "left")
    for result in results:
        table.add_row(result.pool.name, str(result.pool.nodes), *_cells(result), style="bold" if result is best else "")
    return [table, Text(_answer(best, results), style="bold")]


def _cells(result: PoolResults) -> tuple[str, ...]:
    if result.best is None:
        return "", "", "", "no feasible configuration"
    metrics, ranks = result.best.metrics, result.pool.world_size
    low, high = _interval(result)
    predicted = metrics.get(f"{PREFIX}{_METRIC}")
    return (
        f"{result.best_tokens_per_s:,.0f} [{low:,.0f}, {high:,.0f}]",
        f"{predicted * ranks:,.0f}" if predicted is not None else "",
        _wall(metrics),
        short(result.best.config),
    )


def _wall(metrics: Mapping[str, float]) -> str:
    name = judged_on(f"{POOL}mean_power_w", metrics)
    known = metrics.get(name)
    return f"{known / 1e3:.1f} {'measured' if is_measured(name) else 'estimated'}" if known is not None else ""


def _answer(best: PoolResults, results: Sequence[PoolResults]) -> str:
    low, _ = _interval(best)
    near = [other for other in results if other is not best and other.best is not None and _interval(other)[1] >= low]
    named = any(result.pool.nodes > 1 for result in results)
    text = f"Most tokens/s in total: pool {_words(best, named)}, {best.best_tokens_per_s:,.0f} tokens/s"
    return text + (f"; not told apart from {', '.join(_words(other, named) for other in near)}" if near else "")


def _words(result: PoolResults, with_nodes: bool) -> str:
    return f"{result.pool.name} on {node_words(result.pool)}" if with_nodes else result.pool.name


def _interval(result: PoolResults) -> tuple[float, float]:
    """Tokens/s in total between which 95 % of other runs of a study's best are."""
    metrics = result.best.metrics if result.best is not None else {}
    low, high = (metrics.get(f"{_METRIC}_{end}", 0.0) * result.pool.world_size for end in ("low", "high"))
    return low, high
