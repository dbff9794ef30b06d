"""The verb `sync`: watts at the wall from a site's log, and the trials' times for the site. Apart, so that `cli` stays short."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Protocol

import typer

from autotune.errors import SpecError
from autotune.state_folder import DEFAULT_ROOT, find_study

if TYPE_CHECKING:
    from autotune.sync import Synced

_PDU_HELP = (
    "CSV of watts at the wall, to attach to the trials that it covers. Columns in any order: time (or timestamp, time_utc; ISO-8601"
    " with zone, or Unix seconds), node (or host, hostname) or domain (a power domain of the study), watts (or power_w)"
)
_INTERVALS_HELP = "Write trial, pool, nodes and times (UTC) of every launched trial to this CSV file; - = standard output"


class Friendly(Protocol):
    """Wraps a command so that our errors are shown as one message."""

    def __call__(self, command: Callable[..., None], /) -> Callable[..., None]:
        """The wrapped command."""
        ...


def register_sync(app: typer.Typer, friendly: Friendly, show: Callable[[str], None]) -> None:
    """Add the verb to the program."""

    def sync(
        study: Annotated[str, typer.Argument(help="Study file, state folder, or name of a study", show_default=False)],
        pdu: Annotated[Path | None, typer.Option(help=_PDU_HELP)] = None,
        intervals: Annotated[str | None, typer.Option(help=_INTERVALS_HELP)] = None,
        root: Annotated[
            Path, typer.Option("--state", help="Folder that holds the studies' state folders", envvar="AUTOTUNE_STATE")
        ] = DEFAULT_ROOT,
        as_json: Annotated[bool, typer.Option("--json", help="With --pdu: print JSON, for scripts")] = False,
    ) -> None:
        """Attach a log of measured wall power to a study's trials, or write the trials' times for one; during a study or after."""
        from autotune.sync import intervals_csv, sync_log

        if (pdu is None) == (intervals is None):
            hint = "`autotune sync STUDY --pdu log.csv` attaches a log, `autotune sync STUDY --intervals -` shows the trials' times"
            raise SpecError("sync", None, "give one of --pdu and --intervals", hint)
        folder = find_study(study, root)
        spec = folder.read_spec()
        if pdu is not None:
            synced = sync_log(spec, folder, pdu)
            if as_json:
                sys.stdout.write(json.dumps([asdict(one) for one in synced], indent=2) + "\n")
            else:
                show("\n".join(map(_words, synced)))
        elif intervals is not None:
            text = intervals_csv(spec, folder)
            if intervals == "-":
                sys.stdout.write(text)
            else:
                _write(intervals, text)
                show(f"wrote {intervals}: {len(text.splitlines()) - 1} launched trials")

    app.command()(friendly(sync))


def _write(path: str, text: str) -> None:
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise SpecError("--intervals", path, f"cannot be written: {(error.strerror or 'error').lower()}") from None


def _words(synced: Synced) -> str:
    found = (
        f"{synced.study}: {len(synced.changed)} trials got their watts at the wall, {len(synced.unchanged)} had the same already"
    )
    runs = f"; {synced.runs} runs in MLflow carry them" if synced.changed or synced.unchanged else ""
    lacking = len(synced.not_covered)
    winner = "" if synced.winner is None else f"\nThe winner is trial {synced.winner} now; `autotune resume` explains it."
    return f"{found}, {lacking} are not covered" + (f" ({_few(synced.not_covered)})" if lacking else "") + runs + winner


def _few(numbers: tuple[int, ...], most: int = 8) -> str:
    """The first of them."""
    shown = ", ".join(str(number) for number in numbers[:most])
    return f"{shown}, ..." if len(numbers) > most else shown
