"""The verb `plan`: predictions before a GPU is used. Its own module so that `cli` stays short."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Protocol

import typer
from rich.console import RenderableType

from autotune.errors import SpecError
from autotune.state_folder import DEFAULT_ROOT

if TYPE_CHECKING:
    from autotune.check import Checked, MegatronVersion
    from autotune.spec import StudySpec
    from search_spaces.hardware import PoolSpec
    from search_spaces.prediction import Machines

    Pools = Sequence[tuple[PoolSpec, Machines]]

STUDY_OR_MODEL = "`autotune plan study.yaml`, or --model, --gpu, --gpus, --global-batch-size and --seq-length"


class Friendly(Protocol):
    """Wraps a command so that our errors are shown as one message."""

    def __call__(self, command: Callable[..., None], /) -> Callable[..., None]:
        """The wrapped command."""
        ...


def register_plan(app: typer.Typer, friendly: Friendly, show: Callable[[RenderableType], None]) -> None:
    """Add the verb to the program."""

    def plan(
        study: Annotated[str | None, typer.Argument(help="Study file, or `quickstart`", show_default=False)] = None,
        top: Annotated[int, typer.Option(min=1, help="How many of the best to show")] = 5,
        settings: Annotated[
            list[str] | None, typer.Option("--set", help="knob=value of one configuration, on the baseline")
        ] = None,
        model: Annotated[Path | None, typer.Option(help="A Hugging Face config.json, in place of a study")] = None,
        gpu: Annotated[str | None, typer.Option(help="With --model: kind of GPU, e.g. h200")] = None,
        num_gpus: Annotated[int | None, typer.Option("--gpus", min=1, help="With --model: how many")] = None,
        gpus_per_node: Annotated[int | None, typer.Option(min=1, help="With --model: GPUs of a node; none = at most 8")] = None,
        global_batch_size: Annotated[int | None, typer.Option(min=1, help="With --model: sequences per step")] = None,
        seq_length: Annotated[int | None, typer.Option(min=1, help="With --model: tokens per sequence")] = None,
        network: Annotated[
            str | None, typer.Option(help="Link between nodes, e.g. ib-400; none = the GPU generation's usual")
        ] = None,
        jsonl: Annotated[
            bool, typer.Option("--jsonl", help="Read a case a line from standard input, write a prediction a line")
        ] = False,
        megatron: Annotated[str | None, typer.Option(help="Rules of 0.16 or 0.19; none = the installed, 0.19 for --jsonl")] = None,
        output: Annotated[Path | None, typer.Option(help="HTML file for the figures")] = None,
        root: Annotated[
            Path, typer.Option("--state", help="Folder of the studies' state, for what they measured", envvar="AUTOTUNE_STATE")
        ] = DEFAULT_ROOT,
        as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for scripts")] = False,
    ) -> None:
        """Predict memory, step time and watts of a study's candidates and show the best, in seconds, with no GPU."""
        from autotune.check import rules_of
        from autotune.machines import machines_of
        from autotune.refit import calibrated

        version = rules_of(megatron)
        given = {"--gpu": gpu, "--gpus": num_gpus, "--global-batch-size": global_batch_size, "--seq-length": seq_length}
        if jsonl:
            _alone(
                "--jsonl", {"STUDY": study, "--set": settings, "--model": model, **given, "--network": network, "--output": output}
            )
            from autotune.plan_cases import run_jsonl

            sys.stdout.writelines(line + "\n" for line in run_jsonl(sys.stdin, version or "0.19"))
            return
        spec = _study(study, model, given, gpus_per_node)
        known = [(pool, machines_of(pool, spec.hardware, network, "--gpu" if model else "")) for pool in spec.pools]
        if model is None:
            known = [(pool, calibrated(machines, pool, root)) for pool, machines in known]
        pools = [(at_count, machines) for pool, machines in known for at_count in pool.at_each_node_count()]
        if settings:
            _alone("--set, which has no figures", {"--output": output})
            answer = _plan_settings(spec, pools, settings, version, of_study=study is not None)
        else:
            answer = _plan_all(spec, pools, top, output, version, of_study=study is not None)
        if as_json:
            sys.stdout.write(json.dumps(answer.to_json(), indent=2) + "\n")
        else:
            show(answer.for_person())
        if not answer.ok:
            raise typer.Exit(1)

    app.command()(friendly(plan))


def _alone(option: str, others: Mapping[str, object]) -> None:
    """Refuse options that would be passed over beside another one.

    Raises:
        SpecError: the first of them that is given.
    """
    for name, value in others.items():
        if value is not None:
            raise SpecError(name, value, f"does not go together with {option}", STUDY_OR_MODEL)


def _study(study: str | None, model: Path | None, given: Mapping[str, Any], gpus_per_node: int | None) -> StudySpec:
    """The study file, or one made of the options.

    Raises:
        SpecError: neither or both are given, something is missing, or options that a study file answers stand beside one.
    """
    from autotune.plan import model_study
    from autotune.spec import load_study, study_file

    if (study is None) == (model is None):
        raise SpecError("STUDY", study, "give a study file or --model", STUDY_OR_MODEL)
    if model is None:
        _alone("a study file, which says it", {**given, "--gpus-per-node": gpus_per_node})
        return load_study(study_file(str(study)))
    missing = [name for name, value in given.items() if value is None]
    if missing:
        raise SpecError(missing[0], None, "is needed with --model", STUDY_OR_MODEL)
    gpu, num_gpus, global_batch_size, seq_length = given.values()
    return model_study(model, gpu, num_gpus, gpus_per_node, global_batch_size, seq_length)


def _plan_all(
    spec: StudySpec, pools: Pools, top: int, output: Path | None, megatron: MegatronVersion | None, *, of_study: bool
) -> Checked:
    """Plan every pool, with what a study's baseline says; write the figures if asked for."""
    from autotune.baseline import baseline_cautions, check_baseline
    from autotune.plan import compares_power, launcher_caution, plan_pool
    from autotune.plan_text import PlansAnswer
    from autotune.study import launcher_of

    if of_study:
        check_baseline(spec, megatron)
    plans = tuple(plan_pool(spec, pool, machines, megatron) for pool, machines in pools)
    if of_study:
        told = [
            (*baseline_cautions(spec, pool, len(plan.table), megatron), *launcher_caution(plan, launcher_of(spec, pool), top))
            for (pool, _), plan in zip(pools, plans, strict=True)
        ]
        plans = tuple(replace(plan, cautions=cautions) for plan, cautions in zip(plans, told, strict=True))
    if output is not None:
        from autotune.plan_figures import write_html

        write_html(output, plans, top)
    return PlansAnswer(plans, top, compares_power(spec))


def _plan_settings(
    spec: StudySpec, pools: Pools, settings: list[str], megatron: MegatronVersion | None, *, of_study: bool
) -> Checked:
    """Plan one configuration on every pool; a study's launcher is asked, too."""
    from autotune.check import configuration
    from autotune.plan import plan_one
    from autotune.plan_text import OnesAnswer
    from autotune.study import launcher_of

    config = configuration(spec, settings, None)
    asked = [launcher_of(spec, pool) if of_study else None for pool, _ in pools]
    planned = zip(pools, asked, strict=True)
    return OnesAnswer(tuple(plan_one(spec, pool, config, machines, megatron, who) for (pool, machines), who in planned))
