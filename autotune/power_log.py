"""A site's own log of watts at the wall, as CSV: of nodes (PDU outlets, feeds of a chassis) or of power domains.

One header line, then one reading a line: a time, the name of a node or of a power domain, watts. Columns may be in any order, and
others between them are not read.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

import numpy as np

from autotune.errors import NOTHING, SpecError
from autotune.wall_metrics import Readings

COLUMNS: Mapping[str, tuple[str, ...]] = {
    "time": ("time", "timestamp", "time_utc"),
    "node": ("node", "host", "hostname"),
    "domain": ("domain", "power_domain"),
    "watts": ("watts", "power_w"),
}
"""What each column may be called, in any case."""
HEADER_HELP = "columns: " + "; ".join(" or ".join(names) for names in COLUMNS.values()) + " (a node or a domain)"

_LATEST_S = 1e11
_ADD_UP = "give one value for each name and time: add up the feeds of a node, and leave out lines that are repeated"


@dataclass(frozen=True, slots=True)
class PowerLog:
    """Readings by name, in lower case.

    Attributes:
        nodes: Of nodes.
        domains: Of power domains.
    """

    nodes: Mapping[str, Readings] = field(default_factory=dict)
    domains: Mapping[str, Readings] = field(default_factory=dict)

    def of_node(self, names: Sequence[str]) -> Readings:
        """The readings of a node that has these names; empty ones where it is not in the log.

        A name without a domain part means the host of that name in any domain.
        """
        wanted = [name.lower() for name in names if name]
        exact = [name for name in wanted if name in self.nodes]
        near = [known for known in self.nodes if any(_same_host(known, name) for name in wanted)]
        found = (exact or near)[:1]
        return self.nodes[found[0]] if found else (np.empty(0), np.empty(0))


def _same_host(one: str, other: str) -> bool:
    """Whether one is the other without its domain part; the first part of an address is no name."""
    short, whole = sorted((one, other), key=len)
    return "." not in short and not short.isdigit() and whole.partition(".")[0] == short


def read_power_log(path: Path) -> PowerLog:
    """Read a log.

    Raises:
        SpecError: the file cannot be read, a column is missing, or a line is wrong; with its number, the field and the value.
    """
    found: dict[tuple[str, str], dict[float, float]] = {}
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            for line, (kind, name, time_s, watts) in _rows(path.name, file.readlines()):
                readings = found.setdefault((kind, name), {})
                if time_s in readings:
                    raise SpecError(f"{path.name} line {line}, {kind}", name, "has another value for the same time", _ADD_UP)
                readings[time_s] = watts
    except UnicodeDecodeError:
        raise SpecError("--pdu", path, "is not a text file", HEADER_HELP) from None
    except OSError as error:
        raise SpecError("--pdu", path, f"cannot be read: {(error.strerror or 'error').lower()}", HEADER_HELP) from None
    kinds: dict[str, dict[str, Readings]] = {"node": {}, "domain": {}}
    for (kind, name), readings in found.items():
        kinds[kind][name] = _sorted({time_s: watts for time_s, watts in readings.items() if watts > 0})
    return PowerLog(kinds["node"], kinds["domain"])


def _sorted(readings: Mapping[float, float]) -> Readings:
    """As arrays. A reading of 0 W is none: nothing that runs a trial draws nothing."""
    times = np.array(sorted(readings), dtype=float)
    return times, np.array([readings[time_s] for time_s in times], dtype=float)


Row = tuple[str, str, float, float]


def _rows(file: str, lines: Sequence[str]) -> Iterator[tuple[int, Row]]:
    """Every line but the header and empty ones, with its number."""
    if not any(line.strip() for line in lines):
        raise SpecError("--pdu", file, "is empty", HEADER_HELP)
    delimiter = next((mark for mark in ",;\t" if mark in lines[0]), ",")
    reader = csv.reader(lines, delimiter=delimiter)
    try:
        places = _places(file, next(reader))
        for cells in reader:
            if any(cell.strip() for cell in cells):
                yield reader.line_num, _row(f"{file} line {reader.line_num}", places, cells)
    except csv.Error as error:
        raise SpecError(f"{file} line {reader.line_num}", NOTHING, f"is not CSV: {error}", HEADER_HELP) from None


def _places(file: str, header: Sequence[str]) -> dict[str, int]:
    """Where each column is."""
    heads = [cell.strip().lower() for cell in header]
    found = {name: [place for place, head in enumerate(heads) if head in names] for name, names in COLUMNS.items()}
    for name, places in found.items():
        if len(places) > 1:
            raise SpecError(f"{file} line 1", header[places[1]], f"is a second column for the {name}", HEADER_HELP)
    missing = [name for name in ("time", "watts") if not found[name]]
    if missing or not (found["node"] or found["domain"]):
        name = missing[0] if missing else "node or domain"
        raise SpecError(f"{file} line 1", ",".join(header), f"has no column for the {name}", HEADER_HELP)
    return {name: places[0] for name, places in found.items() if places}


def _row(where: str, places: Mapping[str, int], cells: Sequence[str]) -> Row:
    values = {name: cells[place].strip() if place < len(cells) else "" for name, place in places.items()}
    named = {kind: values[kind] for kind in ("node", "domain") if values.get(kind)}
    if len(named) != 1:
        problem = "is missing" if not named else "is given as well as a node: a reading belongs to one of them"
        raise SpecError(f"{where}, {'domain' if named else 'node'}", named.get("domain", NOTHING), problem, HEADER_HELP)
    ((kind, name),) = named.items()
    return kind, name.lower(), _unix_s(f"{where}, time", values["time"]), _watts(f"{where}, watts", values["watts"])


def _watts(field: str, text: str) -> float:
    try:
        watts = float(text)
    except ValueError:
        watts = math.nan
    if not math.isfinite(watts) or watts < 0:
        hint = "watts as a plain number, e.g. 412.5; leave a line out where the meter told nothing"
        raise SpecError(field, text, "is not a number of watts", hint)
    return watts


def _unix_s(field: str, text: str) -> float:
    hint = "ISO-8601 with its zone, e.g. 2026-03-01T12:00:00Z or 2026-03-01T13:00:00+01:00, or Unix seconds"
    try:
        seconds = float(text)
    except ValueError:
        pass
    else:
        if not 0 <= seconds < _LATEST_S:  # not a number included
            raise SpecError(field, text, "is no Unix time in seconds", hint)
        return seconds
    try:
        time = datetime.fromisoformat(text)
    except ValueError:
        raise SpecError(field, text, "is not a time", hint) from None
    if time.tzinfo is None:
        raise SpecError(field, text, "has no time zone", hint)
    return time.timestamp()
