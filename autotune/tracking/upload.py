"""What one MLflow run shall hold, as plain values. Pure: no MLflow, no network; the writer and the spool share it."""

from __future__ import annotations

import hashlib
import json
import math
import numbers
import posixpath
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from autotune.records import TrialRecord, short
from autotune.tracking.charts import chart_points
from autotune.tracking.points import Point
from launchers.outcome import Outcome

PREFIX = "autotune."
"""Of all our tags, so that no study's key can collide with MLflow's own (`mlflow.runName` renames the run)."""

MAX_PARAM_CHARS = 6000
MAX_DETAIL_CHARS = 2000
MAX_KEY_CHARS = 250
MAX_POINTS = 200
MAX_ENTITIES = 900
"""Params, metric points and tags of one call; MLflow's own limit is 1000, a hosted server's may be lower."""
_STEP_METRICS, _CHARTS = 4, 4
SAMPLES = "telemetry.parquet"
MAX_SUMMARY_KEYS = 199
"""Metric keys at one step: hosted servers refuse far larger steps, and nobody reads them as charts."""

RUN_STATUS: Mapping[Outcome, str] = {
    Outcome.COMPLETED: "FINISHED",
    Outcome.STOPPED: "FINISHED",
    Outcome.LOST: "KILLED",
    **{
        outcome: "FAILED"
        for outcome in (
            Outcome.REFUSED,
            Outcome.OOM,
            Outcome.HUNG,
            Outcome.TIMEOUT,
            Outcome.NAN,
            Outcome.CRASHED,
            Outcome.OVER_GUARD,
        )
    },
}
"""MLflow's status by outcome, of which `autotune.outcome` is the exact one.

FINISHED: measured, also where it was beaten and stopped. KILLED: the infrastructure's fault. FAILED: the configuration's
fault, a refused one's too: a result, but a filter on FINISHED shows what can run."""


@dataclass(frozen=True, slots=True)
class RunUpload:
    """All of one run.

    Attributes:
        study: Optuna study name.
        number: Optuna's trial number; None for the study's parent run.
        name: Name that people see.
        status: MLflow's run status at the end.
        start_ms: Unix time of its start, in milliseconds.
        end_ms: Unix time of its end, in milliseconds.
        params: Text by clean key.
        tags: Text by clean key, own prefix included.
        points: Finite metric values.
        texts: Artifact name to content.
        files: Artifact name to a local file; of those below logs/ only the end is uploaded.
    """

    study: str
    number: int | None
    name: str
    status: str
    start_ms: int
    end_ms: int
    params: Mapping[str, str] = field(default_factory=dict)
    tags: Mapping[str, str] = field(default_factory=dict)
    points: tuple[Point, ...] = ()
    texts: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)

    def to_json(self) -> str:
        """One line for the spool."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, line: str) -> RunUpload:
        """The upload that `to_json` wrote."""
        values = json.loads(line)
        values["points"] = tuple(Point(**point) for point in values["points"])
        return cls(**values)


def study_key(study: str) -> str:
    """A study's name as a tag value that any filter string can hold."""
    return hashlib.sha256(study.encode()).hexdigest()[:24]


def clean_key(name: str) -> str:
    """`name` as MLflow accepts it: `gpu[0]` becomes `gpu/0`, other forbidden characters `_`."""
    text = re.sub(r"\[([^\[\]]*)\]", r"/\1", name)
    text = re.sub(r"[^\w\-. :/]", "_", text)
    parts = [part for part in text.split("/") if part.strip(". ")]
    return posixpath.normpath("/".join(parts) or "_")[:MAX_KEY_CHARS].rstrip("/")


def clean_keys(names: Iterable[str]) -> dict[str, str]:
    """Clean key by name; two names never share one, since MLflow would mix their values."""
    taken: dict[str, str] = {}
    for name in names:
        key, suffix = clean_key(name), 2
        while key in taken.values():
            key, suffix = f"{clean_key(name)[: MAX_KEY_CHARS - 4]}_{suffix}", suffix + 1
        taken[name] = key
    return taken


def finite(value: object) -> float | None:
    """`value` as a finite number; None for text, None, booleans, NaN and infinities, none of which MLflow ranks rightly."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return None
    number = float(value)
    return number if math.isfinite(number) else None


def evenly(count: int, limit: int) -> list[int]:
    """At most `limit` of `count` indices at even distances, the first and the last included."""
    if count <= limit:
        return list(range(count))
    if limit < 2:  # noqa: PLR2004
        return [count - 1]
    return sorted({round(index * (count - 1) / (limit - 1)) for index in range(limit)})


def as_text(value: object) -> str:
    """A parameter's text, cut by us: servers differ in where and whether they cut."""
    plain = value if isinstance(value, str) else json.dumps(value, default=str)
    return plain[:MAX_PARAM_CHARS]


def fixed_arguments(argv: Sequence[str]) -> dict[str, str]:
    """Megatron's flags as parameters: `--num-layers 4` becomes `num_layers: 4`, a bare flag `true`."""
    found: dict[str, list[str]] = {}
    flag = ""
    for word in argv:
        if word.startswith("--"):
            name, _, value = word[2:].partition("=")
            flag = name.replace("-", "_")
            found[flag] = [value] if value else []
        elif flag:
            found[flag].append(word)
    return {name: " ".join(words) or "true" for name, words in found.items()}


def parameters(values: Mapping[str, object]) -> dict[str, str]:
    """`values` under clean keys and cut."""
    keys = clean_keys(values)
    return {keys[name]: as_text(value) for name, value in values.items()}


def summary(values: Mapping[str, Any], *, step: int, time_ms: int) -> tuple[list[Point], dict[str, str]]:
    """The finite ones of `values` as points at one step, and tags that name what is missing or was left out."""
    keys = clean_keys(values)
    numbers_by_name = {name: finite(value) for name, value in values.items()}
    points = [Point(keys[name], value, step, time_ms) for name, value in numbers_by_name.items() if value is not None]
    missing = [name for name, value in numbers_by_name.items() if value is None]
    tags = {PREFIX + "metric_missing": ",".join(missing)[:MAX_DETAIL_CHARS]} if missing else {}
    if len(points) > MAX_SUMMARY_KEYS:
        tags[PREFIX + "metrics_left_out"] = str(len(points) - MAX_SUMMARY_KEYS)
    return points[:MAX_SUMMARY_KEYS], tags


def step_points(record: TrialRecord, limit: int) -> tuple[list[Point], list[str]]:
    """Points of every step metric, at most `limit` of each, and the names of those that had a value MLflow cannot hold."""
    series: dict[str, list[Point]] = {}
    missing: set[str] = set()
    for step in record.steps:
        for name in ("step_s", "loss", "grad_norm", "peak_memory_gib"):
            raw = getattr(step, name)
            value = finite(raw)
            if value is not None:
                series.setdefault(name, []).append(Point(f"step/{name}", value, step.iteration, int(step.time_s * 1000)))
            elif raw is not None:
                missing.add(f"step/{name}")
    return [points[index] for points in series.values() for index in evenly(len(points), limit)], sorted(missing)


def trial_upload(record: TrialRecord) -> RunUpload:
    """All that MLflow shall hold of one trial."""
    knobs = record.config.model_dump(mode="json")
    last_step = record.steps[-1].iteration if record.steps else 0
    end_ms = int(record.ended_s * 1000)
    params = parameters({**fixed_arguments(record.argv), **knobs})
    points, tags = summary(
        {**_knob_numbers(knobs), **record.metrics, **({} if record.value is None else {"value": record.value})},
        step=last_step,
        time_ms=end_ms,
    )
    tags = {**_trial_tags(record), **tags}
    samples = record.log_folder / SAMPLES if record.log_folder else None
    series = _STEP_METRICS + (_CHARTS if samples and samples.is_file() else 0)
    limit = max(2, min(MAX_POINTS, (MAX_ENTITIES - len(points) - len(params) - len(tags)) // series))
    steps, missing = step_points(record, limit)
    charts = chart_points(samples, record.started_s, limit) if samples else []
    if missing:
        tags[PREFIX + "metric_missing"] = ",".join([*filter(None, [tags.get(PREFIX + "metric_missing", "")]), *missing])
    return RunUpload(
        study=record.study,
        number=record.number,
        name=f"{record.number:04d} {short(record.config)}",
        status=RUN_STATUS[record.outcome],
        start_ms=int(record.started_s * 1000),
        end_ms=end_ms,
        params=params,
        tags=tags,
        points=(*points, *steps, *charts),
        texts=_trial_texts(record, knobs),
        files=_log_files(record),
    )


def _knob_numbers(knobs: Mapping[str, Any]) -> dict[str, float]:
    """Numeric knobs as metrics: MLflow compares parameters as text, and people ask for `tp >= 4`. Switches stay parameters."""
    numbers = {name: value for name, value in knobs.items() if isinstance(value, int | float) and not isinstance(value, bool)}
    return {f"knob/{name}": float(value) for name, value in numbers.items()}


def _trial_tags(record: TrialRecord) -> dict[str, str]:
    tags = {
        "role": "trial",
        "key": study_key(record.study),
        "study": record.study,
        "number": str(record.number),
        "phase": str(record.phase),
        "outcome": str(record.outcome),
        "detail": record.detail[-MAX_DETAIL_CHARS:],
        "violations": ",".join(violation.name for violation in record.violations)[:MAX_DETAIL_CHARS],
        "contaminated": record.contaminated[:MAX_DETAIL_CHARS],
        "why": record.why[:MAX_DETAIL_CHARS],
    }
    named = {PREFIX + name: text for name, text in tags.items() if text}
    keys = clean_keys(f"{PREFIX}env.{name}" for name in record.environment)
    return named | {keys[f"{PREFIX}env.{name}"]: str(text)[:MAX_KEY_CHARS] for name, text in record.environment.items()}


def _trial_texts(record: TrialRecord, knobs: Mapping[str, Any]) -> dict[str, str]:
    violations = [asdict(violation) for violation in record.violations]
    return {
        "config.json": json.dumps(knobs, indent=2),
        "argv.txt": "\n".join(record.argv) + "\n",
        "environment.json": json.dumps(dict(record.environment), indent=2),
        "violations.json": json.dumps(violations, indent=2),
        "metrics.json": json.dumps(dict(record.metrics), indent=2, default=str),
    }


def _log_files(record: TrialRecord) -> dict[str, str]:
    """The plain files of the trial's log folder; artifact names come from file names, never from the configuration's text."""
    if record.log_folder is None or not record.log_folder.is_dir():
        return {}
    files = sorted(path for path in record.log_folder.iterdir() if path.is_file() and not path.is_symlink())
    keys = clean_keys(path.name for path in files)
    names = {path: f"logs/{keys[path.name].replace('/', '_')}" for path in files}
    return {SAMPLES if path.name == SAMPLES else name: str(path) for path, name in names.items()}
