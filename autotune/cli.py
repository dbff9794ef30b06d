"""The command line: few verbs, thin calls. Knobs are fields of the study file, never options."""

from __future__ import annotations

import functools
import importlib.metadata
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, ParamSpec, TypeVar

import typer
from rich.text import Text

from autotune.doctor.command import register_doctor, warn_of_disks
from autotune.errors import AutotuneError, SpecError
from autotune.plan_command import register_plan
from autotune.state_folder import DEFAULT_ROOT, StateFolder, find_study
from autotune.sync_command import register_sync
from autotune.terminal import terminal

app = typer.Typer(
    name="autotune",
    help="Finds the fastest Megatron configuration for a model on your GPUs, by short real training runs.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
console = terminal()
_errors = terminal(stderr=True)

StudyFile = Annotated[str, typer.Argument(help="Study file (`autotune init` writes one), or `quickstart`", show_default=False)]
StudyName = Annotated[str, typer.Argument(help="Study file, state folder, or name of a study", show_default=False)]
Root = Annotated[Path, typer.Option("--state", help="Folder that holds the studies' state folders", envvar="AUTOTUNE_STATE")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for scripts")]
Address = Annotated[str | None, typer.Option(help="Ray cluster to join; without it a private Ray is started")]

P = ParamSpec("P")
R = TypeVar("R")


def _friendly(command: Callable[P, R]) -> Callable[P, R]:
    """Show our errors as one message with a hint: exit code 2 for the person's input, 1 for anything else."""

    @functools.wraps(command)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return command(*args, **kwargs)
        except AutotuneError as error:
            message = Text.assemble(("error: ", "bold red"), str(error))
            if error.hint:
                message.append(f"\nhint: {error.hint}", style="yellow")
            _errors.print(message, soft_wrap=True)
            raise typer.Exit(2 if isinstance(error, SpecError) else 1) from None

    return wrapped


def _print_json(value: Any) -> None:
    sys.stdout.write(json.dumps(value, indent=2) + "\n")


def _version(asked: bool) -> None:
    if asked:
        sys.stdout.write(f"autotune {importlib.metadata.version('megatron-autotune')}\n")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version")] = False,
) -> None:
    """Options of the program itself."""


@app.command()
@_friendly
def init(
    path: Annotated[Path, typer.Argument(help="Study file to write")] = Path("study.yaml"),
    force: Annotated[bool, typer.Option(help="Replace a file that is there")] = False,
) -> None:
    """Look at this machine and write a first, commented study file."""
    from autotune.detect import detect_machine
    from autotune.first_study import write_study

    pools = detect_machine()
    write_study(path, pools, force=force)
    seen = ", ".join(f"{pool.name} ({pool.gpus_per_node} x {pool.gpu})" for pool in pools)
    console.print(f"wrote {path} for {seen}; next: [bold]autotune check {path}[/bold], then [bold]autotune tune {path}[/bold]")


@app.command()
@_friendly
def check(
    study: Annotated[str | None, typer.Argument(help="Study file, or `quickstart`; not with --jsonl", show_default=False)] = None,
    settings: Annotated[list[str] | None, typer.Option("--set", help="knob=value of one configuration, on the baseline")] = None,
    argv: Annotated[str | None, typer.Option(help="One configuration as Megatron-LM arguments, in one string")] = None,
    jsonl: Annotated[bool, typer.Option("--jsonl", help="Read a case a line from standard input, write a verdict a line")] = False,
    megatron: Annotated[str | None, typer.Option(help="Rules of 0.16 or 0.19; none = the installed, 0.19 for --jsonl")] = None,
    as_json: AsJson = False,
) -> None:
    """Count a study's legal candidates and the refusals by rule, or explain one configuration, before any trial."""
    from autotune import check as checks
    from autotune.spec import load_study, study_file

    version = checks.rules_of(megatron)
    if jsonl:
        from autotune.plan_cases import check_jsonl

        sys.stdout.writelines(line + "\n" for line in check_jsonl(sys.stdin, version or "0.19"))
        return
    if study is None:
        hint = "`autotune check study.yaml`, or --jsonl with cases on standard input"
        raise SpecError("STUDY", None, "no study file given", hint)
    spec = load_study(study_file(study))
    one = checks.configuration(spec, settings or [], argv) if settings or argv is not None else None
    checked = checks.check_one(spec, one, version) if one else checks.check_study(spec, version)
    if as_json:
        _print_json(checked.to_json())
    else:
        console.print(checked.for_person(), soft_wrap=True)
    if not checked.ok:
        raise typer.Exit(1)


@app.command()
@_friendly
def tune(
    study: StudyFile,
    root: Root = DEFAULT_ROOT,
    address: Address = None,
    trials: Annotated[int | None, typer.Option(help="Launched trials per pool and node count, not the study file's")] = None,
    storage: Annotated[str | None, typer.Option(help="Optuna storage URL")] = None,
    tracking_uri: Annotated[str | None, typer.Option(help="MLflow tracking URI")] = None,
    detach: Annotated[bool, typer.Option("--detach", help="Go on when this terminal closes")] = False,
    simulate: Annotated[bool, typer.Option("--simulate", help="Rehearse on a twin of the pools: nothing is measured")] = False,
    print_command: Annotated[bool, typer.Option("--print-command", help="Show trial 1's exact command and stop")] = False,
    as_json: AsJson = False,
) -> None:
    """Run a study: real trials until the budget is spent, then the winner against the baseline. Ctrl-C ends it cleanly (130)."""
    from autotune.baseline import check_baseline
    from autotune.simulation import simulated
    from autotune.spec import load_study, study_file

    spec = load_study(study_file(study), {"storage": storage, "tracking_uri": tracking_uri, "budget": _budget(trials)})
    spec = simulated(spec) if simulate else spec
    check_baseline(spec)
    folder = StateFolder(root / spec.name)
    if print_command:
        from autotune.export import first_command

        sys.stdout.write(first_command(spec, folder) + "\n")
    elif detach:
        from autotune.study import prepare_study

        prepare_study(spec, folder, address)
        pid, log = folder.detach(address)
        console.print(f"running as process {pid}, log in {log}; [bold]autotune status {spec.name}[/bold] shows it")
    else:
        _run(spec, folder, address, as_json)


@app.command()
@_friendly
def resume(
    study: StudyName,
    root: Root = DEFAULT_ROOT,
    address: Address = None,
    trials: Annotated[int | None, typer.Option(help="New budget of launched trials per pool and node count")] = None,
    as_json: AsJson = False,
) -> None:
    """Go on with a study whose driver was stopped or killed."""
    from autotune.spec import override

    folder = find_study(study, root)
    _run(override(folder.read_spec(), {"budget": _budget(trials)}), folder, address, as_json)


def _budget(trials: int | None) -> dict[str, int] | None:
    return None if trials is None else {"trials": trials}


def _run(spec: Any, folder: StateFolder, address: str | None, as_json: bool) -> None:
    from autotune.pool_study import STOPPED_BY_USER
    from autotune.progress import Progress
    from autotune.report import final_report, results_json
    from autotune.stop_signals import EXIT_CODE
    from autotune.study import run_study

    warn_of_disks(_errors, folder.path)
    with Progress(_errors if as_json else console, spec) as progress:
        results = run_study(spec, folder, progress, address=address)
    if as_json:
        _print_json(results_json(results))
    else:
        console.print(final_report(results, spec.measurement.warmup_steps))
        won = f"   winner's arguments: [bold]autotune export {spec.name}[/bold]" if any(result.best for result in results) else ""
        console.print(f"MLflow: [bold]autotune ui {spec.name}[/bold]{won}")
    if any(result.end_reason == STOPPED_BY_USER for result in results):
        raise typer.Exit(EXIT_CODE)
    if not any(result.best for result in results):
        raise typer.Exit(1)


@app.command()
@_friendly
def status(study: StudyName, root: Root = DEFAULT_ROOT, as_json: AsJson = False) -> None:
    """Show whether a study is running, its trials and the best so far."""
    from autotune.report import final_report, results_json, trial_table
    from autotune.results import read_driver, read_results

    folder = find_study(study, root)
    spec = folder.read_spec()
    driver, results = read_driver(spec, folder), read_results(spec, folder)
    if as_json:
        pools = results_json(results, trials=True)
        _print_json({"driver_pid": driver.pid if driver else None, "driver_host": driver.host if driver else None, "pools": pools})
        return
    console.print(f"driver: {f'running on {driver.host}, pid {driver.pid}' if driver else 'none is running'}")
    console.print(trial_table([record for result in results for record in result.records if not record.violations]))
    console.print(final_report(results, spec.measurement.warmup_steps))


@app.command()
@_friendly
def best(study: StudyName, root: Root = DEFAULT_ROOT, as_json: AsJson = False) -> None:
    """Show the best configuration, per pool and node count and over all of them."""
    from autotune.comparison import fastest
    from autotune.report import final_report, results_json
    from autotune.results import read_results

    folder = find_study(study, root)
    spec = folder.read_spec()
    results = read_results(spec, folder)
    if as_json:
        pool = overall.pool if (overall := fastest(results)) else None
        named = {"overall": pool.name if pool else None, "overall_nodes": pool.nodes if pool else None}
        _print_json({**named, "pools": results_json(results)})
    else:
        console.print(final_report(results, spec.measurement.warmup_steps))
    if not any(result.best for result in results):
        raise typer.Exit(1)


@app.command()
@_friendly
def export(
    study: StudyName,
    root: Root = DEFAULT_ROOT,
    pool: Annotated[str | None, typer.Option(help="Pool; none = the one with the most tokens/s")] = None,
    nodes: Annotated[int | None, typer.Option(help="Node count; none = the one with the most tokens/s")] = None,
    output: Annotated[Path | None, typer.Option(help="Folder for the files; none = the state folder")] = None,
    as_json: AsJson = False,
) -> None:
    """Print the winner as Megatron-LM arguments and as a torchrun command."""
    from autotune.export import export_winner

    exported = export_winner(find_study(study, root), pool, nodes, output)
    if as_json:
        _print_json(exported.to_dict())
    else:
        sys.stdout.write(exported.text() + "\n")


@app.command()
@_friendly
def ui(
    study: StudyName,
    root: Root = DEFAULT_ROOT,
    host: Annotated[str, typer.Option(help="Address to listen on")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on", min=1, max=65535)] = 5000,
) -> None:
    """Serve MLflow's pages for a study until Ctrl-C."""
    from autotune.tracking import check_address, ui_command, ui_environment, ui_tunnel

    folder = find_study(study, root)
    command = ui_command(folder.read_spec().tracking_uri or folder.path, host, port)
    check_address(host, port)
    console.print(f"MLflow on http://{host}:{port} (Ctrl-C ends it)")
    if "SSH_CONNECTION" in os.environ:
        console.print(f"on your own machine: {ui_tunnel(port)}", soft_wrap=True)
    os.execvpe(command[0], command, ui_environment())


register_plan(app, _friendly, console.print)
register_sync(app, _friendly, console.print)
register_doctor(app, _friendly, console)

if __name__ == "__main__":
    app()
