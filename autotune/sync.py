"""`autotune sync`: a site's log of watts at the wall comes to the trials that it covers, and the trials' times go to the site."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import optuna

from autotune.attached import Attached, attach
from autotune.errors import SpecError
from autotune.power_domains import domain_limits
from autotune.power_log import PowerLog, read_power_log
from autotune.records import TrialRecord
from autotune.results import EXPLANATION, PoolResults, results_of, study_name
from autotune.simulation import is_simulated
from autotune.spec import StudySpec, pool_key
from autotune.state_folder import StateFolder
from autotune.steady_state import steady_window
from autotune.storage import open_storage
from autotune.tracking.again import write_again
from autotune.wall_metrics import DOMAIN, SOURCE, scope_metrics, wall_curve, wall_metrics
from launchers.outcome import Outcome
from search_spaces.hardware import PoolSpec

INTERVAL_COLUMNS = ("trial", "pool", "nodes", "start_utc", "end_utc", "steady_start_utc", "steady_end_utc")
_NAME_OF_NODE = re.compile(r"node(\d+)\.(hostname|address)")


@dataclass(frozen=True, slots=True)
class Synced:
    """What a log did to one pool's study.

    Attributes:
        study: Optuna study name.
        changed: Numbers of the trials to which it was attached now.
        unchanged: Of those that had the same already.
        not_covered: Of launched trials whose steady window it does not cover, or that have none.
        runs: MLflow runs that carry it; 0 where MLflow does not have the study.
        winner: The trial that is the best now, where another one was before; what explained that one is dropped.
    """

    study: str
    changed: tuple[int, ...]
    unchanged: tuple[int, ...]
    not_covered: tuple[int, ...]
    runs: int
    winner: int | None


def sync_log(spec: StudySpec, folder: StateFolder, path: Path) -> list[Synced]:
    """Attach a log to all launched trials that it covers, in Optuna's storage, in MLflow and in the folder's best configurations.

    Everything is worked out before anything is written. A second time changes nothing.

    Args:
        spec: The study.
        folder: Where its state is; a driver may be running.
        path: The log, see `autotune.power_log`.

    Raises:
        SpecError: the log is wrong, names none of the study's nodes and domains, or the study is simulated.
        TrackingError: MLflow cannot be reached; Optuna's storage has everything then.
    """
    _check_real(spec)
    log = read_power_log(path)
    opened = [(study, results_of(study, spec, pool)) for pool, study in _studies(spec, folder)]
    facts = [
        {record.number: _facts(record, shown.pool, spec, log, path.name) for record in _launched(shown)} for _, shown in opened
    ]
    if not any(what for found in facts for what in found.values()):
        _check_names(spec, [record for _, shown in opened for record in shown.records], log, path)
    return [_keep(spec, folder, study, shown, found) for (study, shown), found in zip(opened, facts, strict=True)]


def _check_real(spec: StudySpec) -> None:
    if is_simulated(spec):
        raise SpecError("study", spec.name, "is simulated", "its trials ran in virtual time, and no wall gave them a watt")


def _studies(spec: StudySpec, folder: StateFolder) -> Iterator[tuple[PoolSpec, optuna.Study]]:
    """The studies of all pools that were opened."""
    storage = open_storage(spec.storage, folder.path)
    known = set(optuna.get_all_study_names(storage))
    for pool in spec.studied_pools:
        if (name := study_name(spec, pool)) in known:
            yield pool, optuna.load_study(study_name=name, storage=storage)


def _launched(shown: PoolResults) -> list[TrialRecord]:
    return [record for record in shown.records if record.outcome is not Outcome.REFUSED]


def names_of_nodes(record: TrialRecord) -> dict[int, list[str]]:
    """Host name and address of a trial's nodes, by node rank."""
    found: dict[int, list[str]] = {}
    for name, value in sorted(record.environment.items(), reverse=True):  # the host name first
        if match := _NAME_OF_NODE.fullmatch(name):
            found.setdefault(int(match[1]), []).append(value)
    return dict(sorted(found.items()))


def _facts(record: TrialRecord, pool: PoolSpec, spec: StudySpec, log: PowerLog, file: str) -> Attached | None:
    """What the log tells of a trial; None where it does not cover its steady window."""
    window = steady_window(record.steps, spec.measurement.warmup_steps)
    if window is None or window.length_s <= 0:
        return None
    source = f"log {file}"
    nodes = {rank: log.of_node(names) for rank, names in names_of_nodes(record).items()}
    metrics, marks = wall_metrics(nodes, window, source)
    for domain in domain_limits(spec.power_domains, pool):
        readings = log.domains.get(domain.name.lower())
        if readings is not None and (curve := wall_curve(readings, window)) is not None:
            metrics |= scope_metrics(f"{DOMAIN}{domain.name}_", [curve], window)
            marks[SOURCE] = source
    return Attached(file, metrics, marks) if metrics else None


def _check_names(spec: StudySpec, records: Sequence[TrialRecord], log: PowerLog, path: Path) -> None:
    """A log that covers nothing may be of another time; one that names nothing of the study is another's.

    Raises:
        SpecError: it is another's.
    """
    nodes = {name for record in records for names in names_of_nodes(record).values() for name in names}
    known_domains = {domain.name.lower() for domain in spec.power_domains} & set(log.domains)
    if known_domains or any(len(log.of_node([name])[0]) for name in nodes):
        return
    here = ", ".join([*sorted(nodes), *(domain.name for domain in spec.power_domains)]) or "none yet"
    raise SpecError("--pdu", path, "names none of this study's nodes and power domains", f"they are: {here}")


def _keep(
    spec: StudySpec, folder: StateFolder, study: optuna.Study, before: PoolResults, facts: dict[int, Attached | None]
) -> Synced:
    """Keep what the log tells, and bring what shows a study's trials up to that; a running driver writes its best by itself."""
    changed = tuple(number for number, what in facts.items() if what is not None and attach(study, number, what))
    unchanged = tuple(number for number, what in facts.items() if what is not None and number not in changed)
    after = results_of(study, spec, before.pool)
    best = after.best
    winner = best.number if best is not None and (before.best is None or before.best.number != best.number) else None
    if winner is not None:
        study.set_user_attr(EXPLANATION, [])
    if changed and best is not None and folder.driver() is None:
        folder.write_best(pool_key(spec, after.pool), best)
    attached = [record for record in after.records if record.number in (*changed, *unchanged)]
    runs = write_again(spec.tracking_uri, folder.path, spec.name, attached)
    not_covered = tuple(number for number, what in facts.items() if what is None)
    return Synced(study.study_name, changed, unchanged, not_covered, runs, winner)


def intervals_csv(spec: StudySpec, folder: StateFolder) -> str:
    """When and where every launched trial ran, a line each below a header.

    Times are UTC. A trial's watts are taken from its steady window; where it has none these two cells are empty. Nodes are
    separated by spaces.

    Raises:
        SpecError: the study is simulated.
    """
    _check_real(spec)
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(INTERVAL_COLUMNS)
    for pool, study in _studies(spec, folder):
        writer.writerows(_interval(record, pool, spec) for record in _launched(results_of(study, spec, pool)))
    return text.getvalue()


def _interval(record: TrialRecord, pool: PoolSpec, spec: StudySpec) -> tuple[str, ...]:
    window = steady_window(record.steps, spec.measurement.warmup_steps)
    steady = (_utc(window.start_s), _utc(window.end_s)) if window is not None else ("", "")
    nodes = " ".join(names[0] for names in names_of_nodes(record).values())
    return str(record.number), pool_key(spec, pool), nodes, _utc(record.started_s), _utc(record.ended_s), *steady


def _utc(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
