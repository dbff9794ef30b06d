"""`autotune check`: how many candidates a study has and which rules refused the rest, or whether one configuration is legal."""

from __future__ import annotations

import difflib
import shlex
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, Protocol

import yaml
from pydantic import ValidationError
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from autotune.baseline import baseline_cautions, check_baseline, verdict_on
from autotune.candidates import candidate_table
from autotune.errors import SpecError
from autotune.guards import guards_of, keep
from autotune.lacking import lacking_words
from autotune.launchable import accepted
from autotune.machines import check_config_limits, machines_of
from autotune.records import as_settings
from autotune.spec import StudySpec, pool_title
from autotune.spec_errors import spec_error
from autotune.study import launcher_of
from launchers.base import Launcher
from search_spaces.case import SHORT_NAMES
from search_spaces.check import Verdict
from search_spaces.choices import GROUPS, parse_value
from search_spaces.columns import Columns
from search_spaces.config import TrialConfig, knobs
from search_spaces.device_rules import arithmetic_findings, violations
from search_spaces.hardware import PoolSpec
from search_spaces.prediction import predict

MegatronVersion = Literal["0.16", "0.19"]


class Checked(Protocol):
    """An answer of `autotune check`."""

    @property
    def ok(self) -> bool:
        """Whether everything asked about can be launched."""
        ...

    def to_json(self) -> Any:
        """For scripts."""
        ...

    def for_person(self) -> RenderableType:
        """For the terminal."""
        ...


@dataclass(frozen=True, slots=True)
class CheckedPool:
    """One pool's candidates.

    Attributes:
        pool: Pool name.
        world_size: Ranks of a trial.
        legal: Candidates that would be launched.
        refused: Combinations refused, by rule of Megatron, the launcher or a guard; one that breaks several may count for each.
        cautions: What nothing forbids and a person should know, a sentence each.
    """

    pool: str
    world_size: int
    legal: int
    refused: dict[str, int]
    cautions: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class CheckedStudy:
    """All pools' candidates."""

    pools: tuple[CheckedPool, ...]

    @property
    def ok(self) -> bool:
        """Whether every pool has something to launch."""
        return all(pool.legal for pool in self.pools)

    def to_json(self) -> list[dict[str, Any]]:
        """One entry per pool."""
        return [asdict(pool) for pool in self.pools]

    def for_person(self) -> RenderableType:
        """One row per pool, then what to know of it."""
        table = Table("pool", "ranks", "legal", "refusals by rule")
        for pool in self.pools:
            rules = ", ".join(f"{name} {count:,}" for name, count in Counter(pool.refused).most_common())
            table.add_row(pool.pool, str(pool.world_size), f"{pool.legal:,}", rules or "none")
        cautions = [Text(f"{pool.pool}: {words}", style="yellow") for pool in self.pools for words in pool.cautions]
        return Group(table, *cautions)


@dataclass(frozen=True, slots=True)
class CheckedConfiguration:
    """One configuration's verdict on each pool, by pool name."""

    verdicts: dict[str, Verdict]

    @property
    def ok(self) -> bool:
        """Whether it is legal on every pool."""
        return all(verdict.legal for verdict in self.verdicts.values())

    def to_json(self) -> dict[str, Any]:
        """One entry per pool: legal, violations, and what to change."""
        return {
            pool: {
                "legal": verdict.legal,
                "violations": [asdict(v) for v in verdict.violations],
                "nearest_change": verdict.change,
                "advice": verdict.advice,
            }
            for pool, verdict in self.verdicts.items()
        }

    def for_person(self) -> RenderableType:
        """Every reason, then the nearest legal change."""
        return Group(*(_verdict_text(pool, verdict) for pool, verdict in self.verdicts.items()))


def rules_of(version: str | None) -> MegatronVersion | None:
    """The version of `--megatron`.

    Raises:
        SpecError: where there are no rules for it.
    """
    match version:
        case None | "0.16" | "0.19":
            return version
    raise SpecError("--megatron", version, "no rules for this version", "0.16 or 0.19")


def check_study(spec: StudySpec, megatron: MegatronVersion | None = None) -> CheckedStudy:
    """Count every pool's candidates, by the rules of the installed Megatron or of `megatron`.

    Raises:
        SpecError: for a GPU that nothing is known of, or a baseline that is not legal on a pool at any of its node counts.
    """
    _known_gpus(spec)
    check_baseline(spec, megatron)
    return CheckedStudy(tuple(_check_pool(spec, pool, launcher_of(spec, pool), megatron) for pool in spec.studied_pools))


def configuration(spec: StudySpec, settings: Sequence[str], argv: str | None) -> TrialConfig:
    """The baseline with `name=value` settings, or what a Megatron command line asks for, with the settings on top.

    Raises:
        SpecError: for an unknown knob, a value that it cannot have, or a limit that a pool's GPU does not take.
    """
    try:
        config = TrialConfig.from_argv(shlex.split(argv)) if argv is not None else spec.baseline
    except ValueError as error:
        raise SpecError("--argv", argv, str(error).splitlines()[0], "give the arguments of one Megatron-LM command line") from None
    config = TrialConfig.model_validate({**config.model_dump(), **dict(_setting(text) for text in settings)})
    check_config_limits(spec.hardware, spec.pools, config, "--set")
    return config


def _setting(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if name not in knobs():
        raise SpecError("--set", text, "no such knob", _meant(name))
    if not equals:
        raise SpecError("--set", text, "has no value", f"--set {name}=VALUE")
    try:
        given = yaml.safe_load(value)
    except yaml.YAMLError:
        raise SpecError("--set", text, "is not a value in YAML", f"--set {name}=VALUE, a list as [1, 2]") from None
    try:
        return name, parse_value(name, given)
    except ValueError:
        raise _bad_value(name, given) from None


def _meant(name: str) -> str:
    """A hint at the knobs that a group's or a short name stands for, or at the nearest knob."""
    if name in GROUPS:
        return f"a group of `search`; set its knobs: {', '.join(GROUPS[name])}"
    name = SHORT_NAMES.get(name, name)
    if name in knobs():
        return f"did you mean {name}?"
    if name in StudySpec.model_fields:
        return f"{name} is said by the study file, it is no knob"
    near = difflib.get_close_matches(name, knobs(), n=1, cutoff=0.5)
    return f"did you mean {near[0]}?" if near else "knobs have Megatron's argument names, with _ for -"


def _bad_value(name: str, value: Any) -> SpecError:
    """What is wrong with a knob's value, and what the knob is."""
    try:
        TrialConfig.model_validate({name: value})
    except ValidationError as error:
        return spec_error(error, TrialConfig)
    return SpecError(name, value, "is not a value of this knob", f"{name}: {knobs()[name].description}")


def check_one(spec: StudySpec, config: TrialConfig, megatron: MegatronVersion | None = None) -> CheckedConfiguration:
    """Whether one configuration is legal on each pool, by Megatron's rules and, where they accept it, the launcher's.

    Raises:
        SpecError: for a GPU that nothing is known of.
    """
    return CheckedConfiguration({pool_title(spec, pool): _verdict(spec, pool, config, megatron) for pool in spec.studied_pools})


def _verdict(spec: StudySpec, pool: PoolSpec, config: TrialConfig, megatron: MegatronVersion | None) -> Verdict:
    """The verdict on a pool; what its GPU lacks is advice, since Megatron would start such a training."""
    device = machines_of(pool, spec.hardware).gpu
    verdict = verdict_on(spec, pool, config, megatron)
    lacking = arithmetic_findings(device, Columns.of(spec.workload(pool, megatron), config))
    return replace(verdict, advice=[*verdict.advice, *(found.message for found in violations(lacking))])


def _verdict_text(pool: str, verdict: Verdict) -> Text:
    text = Text.assemble((f"{pool}: ", "bold"), ("legal", "green") if verdict.legal else ("not legal", "red"))
    for violation in verdict.violations:
        text.append(f"\n  {violation.name}: {violation.message}")
    if verdict.change:
        text.append("\n  nearest legal: " + as_settings(verdict.change), style="yellow")
    for advice in verdict.advice:
        text.append(f"\n  advice: {advice}", style="dim")
    return text


def _known_gpus(spec: StudySpec) -> None:
    for pool in spec.pools:
        machines_of(pool, spec.hardware)


def _check_pool(spec: StudySpec, pool: PoolSpec, launcher: Launcher, megatron: MegatronVersion | None) -> CheckedPool:
    table = candidate_table(spec, pool, megatron)
    allowed, refused = accepted(table, launcher)
    machines = machines_of(pool, spec.hardware)
    guards = guards_of(spec, pool, table.columns, predict(table.columns, machines)) if len(table) else []
    kept, over = keep(allowed, guards)
    lacking = lacking_words(machines.gpu, table, spec.baseline)
    cautions = (*baseline_cautions(spec, pool, int(allowed.sum()), megatron), *lacking)
    counted = dict(Counter(table.refused) + refused + over)
    return CheckedPool(pool_title(spec, pool), pool.world_size, int(kept.sum()), counted, cautions)
