"""Published tables as search spaces: the measured configurations of one workload on one pool are all there is to choose from."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from autotune.candidates import candidate_table
from autotune.refit import calibration_key
from autotune.spec import StudySpec
from benchmarks.timed_rows import TimedRow, read
from search_spaces.candidates import CandidateTable
from search_spaces.coefficients import shipped
from search_spaces.columns import Columns
from search_spaces.config import TrialConfig
from search_spaces.prediction import Machines, Predictions, Routing, predict

SMALLEST = 11
SOURCES = ("vtrain", "bigscience-bloom")


@dataclass(frozen=True)
class Space:
    """One table to search.

    Attributes:
        name: Source, model, GPUs and global batch.
        spec: A study over the knobs in which the rows differ; its baseline is no row, and Megatron refuses it.
        published: A row's configuration: knobs in which no row differs are as the source ran them, legal for Megatron or not.
        seconds: Measured step time by configuration; the geometric mean where one was measured several times.
        machines: The machines, with coefficients fitted without any row of the source.
        routing: Whether the experts' load was balanced by force.
        table: The legal candidates, of which only those in `seconds` can be run.
        left_out: Measured rows that are no legal candidates.
        misled: Whether the predictions are made wrong on purpose.
    """

    name: str
    spec: StudySpec
    published: TrialConfig
    seconds: Mapping[TrialConfig, float]
    machines: Machines
    routing: Routing
    table: CandidateTable = field(repr=False)
    left_out: int
    misled: bool = False

    @property
    def best_s(self) -> float:
        """The fastest measured step."""
        return min(self.seconds.values())

    def predict(self, columns: Columns) -> Predictions:
        """Of any configurations of any workload, as the source would have run them."""
        searched = {name: columns.column(name) for name in self.table.knobs}
        found = predict(Columns(columns.workload, searched, self.published), self.machines, self.routing)
        return mislead(found) if self.misled else found

    def predictions(self) -> Predictions:
        """Of every row of the table."""
        return self.predict(self.table.columns)

    def by_prediction(self) -> list[TrialConfig]:
        """The measured configurations, fastest predicted first."""
        seconds = self.predictions().step_time_s
        return sorted(self.seconds, key=lambda config: float(seconds[self.table.find(config)]))

    def by_rule(self) -> list[TrialConfig]:
        """The measured configurations by the rule "fewest TP x PP, then the largest micro-batch"."""
        return sorted(self.seconds, key=_rule)


def spaces(folder: Path) -> list[Space]:
    """Every table of the folder with enough different configurations, in the order of its files."""
    groups: dict[Any, list[TimedRow]] = {}
    for row in read(folder):
        if row.source in SOURCES:
            groups.setdefault((row.source, row.group), []).append(row)
    found = (space_of(rows) for rows in groups.values() if len({row.measured.config for row in rows}) >= SMALLEST)
    return list(_named_apart(space for space in found if len(space.seconds) >= SMALLEST))


def _named_apart(found: Iterable[Space]) -> Iterator[Space]:
    """The spaces, those that differ only in what their names do not say (heads, sequence length, GPU) numbered."""
    named: Counter[str] = Counter()
    for space in found:
        named[space.name] += 1
        name = space.name if named[space.name] == 1 else f"{space.name}-{named[space.name]}"
        yield replace(space, name=name, spec=space.spec.model_copy(update={"name": name}))


def space_of(rows: Sequence[TimedRow]) -> Space:
    """The space of rows of one workload."""
    first, spec = rows[0], _spec(rows)
    table = candidate_table(spec, spec.pools[0])
    logs: dict[TrialConfig, list[float]] = {}
    left_out = 0
    for row in rows:
        place = table.find(TrialConfig(**{name: getattr(row.measured.config, name) for name in table.knobs}))
        if place is None:
            left_out += 1
        else:
            logs.setdefault(table.config(place), []).append(np.log(row.measured.step_time_s))
    machines = Machines(first.gpu, first.links, shipped(first.gpu.name, without=first.source))
    seconds = {config: float(np.exp(np.mean(values))) for config, values in logs.items()}
    return Space(spec.name, spec, first.measured.config, seconds, machines, first.measured.routing, table, left_out)


def mislead(found: Predictions) -> Predictions:
    """Predictions with communication three times as long, and recomputation that saves its time in place of costing it."""
    factors = {name: 3.0 for name in found.times.parts if name.endswith("_comm")} | {"recompute": -1.0}
    parts = {name: part * factors.get(name, 1.0) for name, part in found.times.parts.items()}
    seconds = np.maximum(sum(parts.values()), 0.05 * found.step_time_s)
    times = replace(found.times, parts=parts, step_time_s=seconds)
    return replace(found, times=times, power=replace(found.power, step_time_s=seconds))


def neighbours(space: Space, others: Sequence[Space], *, same_model: bool) -> list[Space]:
    """The other spaces of the same machines, and of the same model or of another one, in turn from this one on."""
    place = next(place for place, other in enumerate(others) if other.name == space.name)
    in_turn = (*others[place + 1 :], *others[:place])
    key = calibration_key(space.spec.pools[0])
    alike = (other for other in in_turn if calibration_key(other.spec.pools[0]) == key)
    return [other for other in alike if (other.spec.model == space.spec.model) is same_model]


def _spec(rows: Sequence[TimedRow]) -> StudySpec:
    first = rows[0]
    workload = first.measured.workload
    per_node = max(count for count in range(1, first.links.domain + 1) if workload.world_size % count == 0)
    search = dict(_search([row.measured.config for row in rows]))
    # What a user runs today is in no table: a baseline that Megatron refuses tells a sampler nothing.
    baseline = TrialConfig(micro_batch_size=workload.global_batch_size + 1)
    model = f"h{workload.model.hidden_size}-L{workload.model.num_layers}"
    return StudySpec(
        name=f"{first.source}-{model}-g{workload.world_size}-b{workload.global_batch_size}",
        model=first.model,
        pools=({"name": "table", "gpu": first.gpu.name, "nodes": workload.world_size // per_node, "gpus_per_node": per_node},),
        global_batch_size=workload.global_batch_size,
        seq_length=workload.seq_length,
        baseline=baseline,
        recipes=False,  # some are of the replayed sources
        search=search,
        measurement={"steps": 4, "warmup_steps": 1},
        confirm={"top": 0},
    )


def _search(configs: Sequence[TrialConfig]) -> Iterator[tuple[str, list[Any]]]:
    """The knobs in which configurations differ, and always the micro-batch."""
    for name in TrialConfig.model_fields:
        values = list(dict.fromkeys(getattr(config, name) for config in configs))
        if len(values) > 1 or name == "micro_batch_size":
            yield name, values


def _rule(config: TrialConfig) -> tuple[int, int]:
    return config.tensor_model_parallel_size * config.pipeline_model_parallel_size, -config.micro_batch_size
