"""The verb `doctor`. Its own module so that `cli` stays short."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Protocol

import typer
from rich.console import Console

from autotune.state_folder import DEFAULT_ROOT


class Friendly(Protocol):
    """Wraps a command so that our errors are shown as one message."""

    def __call__(self, command: Callable[..., None], /) -> Callable[..., None]:
        """The wrapped command."""
        ...


def register_doctor(app: typer.Typer, friendly: Friendly, console: Console) -> None:
    """Add the verb to the program."""

    def doctor(
        root: Annotated[
            Path, typer.Option("--state", help="Folder that holds the studies' state folders", envvar="AUTOTUNE_STATE")
        ] = DEFAULT_ROOT,
        python: Annotated[str | None, typer.Option(help="Interpreter of the ranks; none = this one")] = None,
        storage: Annotated[str | None, typer.Option(help="Optuna storage URL to reach")] = None,
        tracking_uri: Annotated[str | None, typer.Option(help="MLflow tracking URI to reach")] = None,
        telemetry: Annotated[bool, typer.Option("--telemetry", help="Show what can be measured, by device and field")] = False,
        watch: Annotated[bool, typer.Option("--watch", help="Show power, clocks, heat and throttling live until Ctrl-C")] = False,
        as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for scripts")] = False,
    ) -> None:
        """Check this machine: versions, drivers, Ray, GPUs, file system, MLflow and storage; each problem with a fix."""
        if watch:
            _watch(console)
        elif telemetry:
            _telemetry(console, as_json)
        else:
            _examine(console, root, python, storage, tracking_uri, as_json)

    app.command()(friendly(doctor))


def warn_of_disks(console: Console, state: Path) -> None:
    """Say before a study that it may run out of space: logs and readings go to one disk, Ray's files to the other."""
    from autotune.doctor.finding import Status
    from autotune.doctor.machine import read_disks

    for finding in read_disks(state):
        if finding.status is not Status.OK:
            console.print(f"[yellow]warning:[/] {finding.name}: {finding.detail}; {finding.fix}", soft_wrap=True)


def _watch(console: Console) -> None:
    from autotune.doctor.telemetry import watch

    with contextlib.suppress(KeyboardInterrupt):
        watch(console)


def _telemetry(console: Console, as_json: bool) -> None:
    from autotune.doctor.telemetry import examine_telemetry

    report = examine_telemetry()
    if as_json:
        sys.stdout.write(json.dumps(report.to_json(), indent=2) + "\n")
    else:
        console.print(report.for_person(), soft_wrap=True)


def _examine(
    console: Console, root: Path, python: str | None, storage: str | None, tracking_uri: str | None, as_json: bool
) -> None:
    from autotune.doctor import examine
    from autotune.doctor.finding import Status
    from autotune.report import findings_table

    findings = examine(root, python=python, tracking_uri=tracking_uri, storage=storage)
    if as_json:
        sys.stdout.write(json.dumps([finding.to_dict() for finding in findings], indent=2) + "\n")
    else:
        console.print(findings_table(findings))
    if any(finding.status is Status.FAIL for finding in findings):
        raise typer.Exit(1)
