"""StudySpec: a study file, checked before anything starts."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    FiniteFloat,
    NonNegativeInt,
    PositiveFloat,
    ValidationError,
    model_validator,
)

import search_spaces
from autotune.errors import NOTHING
from autotune.hf_model import shapes_of
from autotune.machines import check_hardware, check_limits
from autotune.objective import DEFAULT_WEIGHTS
from autotune.power_domains import check_domains
from autotune.spec_checks import check_budget, check_metrics
from autotune.spec_errors import field_error, nearest, spec_error, wrong
from autotune.spec_file import odd_numbers, read_yaml
from autotune.spec_parts import Bound, Budget, Confirmation, Measurement, Part, PowerDomain
from search_spaces.choices import GROUPS
from search_spaces.config import TrialConfig, knobs
from search_spaces.gpus import OwnHardware, arch_major
from search_spaces.hardware import PoolSpec
from search_spaces.model import ModelSpec, RunSettings, Workload, installed_megatron
from search_spaces.presets import NAMES, STUDY, load_preset
from search_spaces.space import SearchSpace
from search_spaces.whole import PositiveInt

SamplerName = Literal["residual", "tpe", "gp", "nsga2", "random", "grid"]
_PRESETS = Path(search_spaces.__file__).parent / "presets"
_TRACKING_SCHEMES = ("http", "https", "sqlite", "postgresql", "mysql", "mssql")
_STORAGE_SCHEMES = ("sqlite", "postgresql", "mysql", "journal")


def _url(schemes: tuple[str, ...]) -> AfterValidator:
    def check(value: str) -> str:
        scheme = re.match(r"([a-z]+)(\+[a-z0-9]+)?://", value)
        if scheme is None or scheme.group(1) not in schemes:
            raise ValueError(f"is not a URL that can be used here; known: {', '.join(f'{name}://' for name in schemes)}")
        return value

    return AfterValidator(check)


def _choices_of(search: Any) -> Any:
    """The choices of a preset where one is named."""
    return load_preset(search) if isinstance(search, str) and search in NAMES else search


class StudySpec(Part):
    """A study file: what is trained, where, what may be tried, and for how long.

    Attributes:
        name: Name of the study; the state folder and the MLflow experiment carry it.
        model: Shapes of the model; in a file also the path of a Hugging Face config.json, from the file's folder.
        pools: Where trials run; one Optuna study for each node count of each.
        hardware: The study's own GPUs and links, entries as in search_spaces/hardware.yaml.
        power_domains: Feeds, racks and rooms with a limit in watts.
        global_batch_size: Sequences per optimiser step. A workload, never a knob.
        seq_length: Tokens per sequence.
        gpus: GPUs of this machine (indices or UUIDs) that a private Ray may use; none = those in CUDA_VISIBLE_DEVICES, else all.
        launcher: `megatron_core`, or `package.module:Class` of your own launcher.
        baseline: Knobs of the configuration to compare with; it runs first.
        recipes: Whether configurations that published recipes for models of this kind point at run next; see docs/search.md.
        transfer: Whether the search starts with what trials of earlier studies of the same pool showed; see docs/search.md.
        search: Knob -> choices; or `auto`, or a preset's name.
        objective: Weight by metric; positive where more is better. See `autotune.objective`.
        pareto: Whether the terms are not summed: one direction each, by the sign of the weight, and a front as the answer.
        limits: Bounds on metrics of the answer, e.g. `gpu_mean_power_w: {max: 560}`; they may be crossed while exploring.
        gpu_power_guard_w: Watts that no GPU may draw over a second, in any launch; see `autotune.guards`.
        confirm: How the winner is chosen among the best.
        budget: When the study ends.
        measurement: How long a trial runs.
        sampler: `residual` (ours: learns where the predictions are wrong), Optuna samplers that learn from failures, and `grid`.
        seed: Seed of the sampler, the weights and the batches.
        storage: Optuna storage URL; none = a journal file in the state folder.
        tracking_uri: MLflow tracking URI; none = SQLite in the state folder.
    """

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,62}$")]
    model: ModelSpec
    pools: Annotated[tuple[PoolSpec, ...], Field(min_length=1)]
    hardware: OwnHardware = OwnHardware()
    power_domains: tuple[PowerDomain, ...] = ()
    global_batch_size: PositiveInt
    seq_length: PositiveInt
    gpus: tuple[NonNegativeInt | str, ...] | None = None
    launcher: str = "megatron_core"
    baseline: TrialConfig = TrialConfig()
    recipes: bool = True
    transfer: bool = True
    search: Annotated[dict[str, Any] | Literal["auto"], BeforeValidator(_choices_of)]
    objective: Annotated[dict[str, FiniteFloat], Field(min_length=1)] = Field(default_factory=lambda: dict(DEFAULT_WEIGHTS))
    pareto: bool = False
    limits: dict[str, Bound] = Field(default_factory=dict)
    gpu_power_guard_w: PositiveFloat | None = None
    confirm: Confirmation = Confirmation()
    budget: Budget = Budget()
    measurement: Measurement = Measurement()
    sampler: SamplerName = "residual"
    seed: NonNegativeInt = 0
    storage: Annotated[str, _url(_STORAGE_SCHEMES)] | None = None
    tracking_uri: Annotated[str, _url(_TRACKING_SCHEMES)] | None = None

    @model_validator(mode="after")
    def _pool_names_differ(self) -> Self:
        names = [pool.name for pool in self.pools]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise wrong("pools", twice[0], "two pools have the same name", "every pool needs a name of its own")
        return self

    @model_validator(mode="after")
    def _the_objective_has_directions(self) -> Self:
        if self.pareto and len(self.objective) < 2:  # noqa: PLR2004
            raise wrong("objective", self.objective, "has one term, and a front needs two", "name a second metric")
        hint = "give a positive weight where more is better, else a negative one"
        if not any(self.objective.values()):
            raise wrong("objective", self.objective, "weighs nothing", hint)
        if self.pareto and (flat := [name for name, weight in self.objective.items() if weight == 0]):
            raise wrong(f"objective.{flat[0]}", 0, "has no direction", hint)
        return self

    @model_validator(mode="after")
    def _machines_are_known(self) -> Self:
        check_hardware(self.hardware, self.pools)
        check_domains(self.power_domains, self.pools)
        return self

    @model_validator(mode="after")
    def _what_is_asked_for_can_be_told(self) -> Self:
        check_metrics("objective", self.objective, self.power_domains)
        check_metrics("limits", self.limits, self.power_domains)
        check_budget(self.budget, self.pools, self.launcher)
        return self

    @model_validator(mode="after")
    def _choices_can_be_read(self) -> Self:
        for pool in self.pools:
            for name, wanted in self.search.items() if isinstance(self.search, dict) else ():
                self._check_choices(pool, name, wanted)
            try:
                space = SearchSpace(self.workload(pool), self.search, base=self.baseline)
            except ValueError as error:
                raise wrong("search", NOTHING, str(error), "choose every knob once, by itself or in its group") from None
            check_limits(self.hardware, pool, space)
        return self

    @property
    def studied_pools(self) -> tuple[PoolSpec, ...]:
        """Every pool at each of its node counts: one Optuna study each."""
        return tuple(at_count for pool in self.pools for at_count in pool.at_each_node_count())

    @property
    def confirm_steps(self) -> int:
        """Optimiser steps of a confirming trial."""
        return self.confirm.steps or 2 * self.measurement.steps

    def measurement_of(self, confirming: bool) -> Measurement:
        """How a trial is measured; a confirming one runs all of its steps."""
        if not confirming:
            return self.measurement
        return self.measurement.model_copy(update={"steps": self.confirm_steps, "interval": 0.0})

    def _check_choices(self, pool: PoolSpec, name: str, wanted: Any) -> None:
        """One knob's choices by themselves, so that the message can name it."""
        known = [*TrialConfig.model_fields, *GROUPS]
        if name not in known:
            raise wrong(f"search.{name}", wanted, "is not a knob", nearest(name, known))
        if "grid_search" in str(wanted):
            hint = "list the choices, e.g. [1, 2, 4]; `sampler: grid` tries them all in order"
            raise wrong(f"search.{name}", wanted, "Ray's grid_search is not used here", hint)
        try:
            SearchSpace(self.workload(pool), {name: wanted}, base=self.baseline)
        except ValueError as error:
            raise wrong(f"search.{name}", wanted, *_about_choices(name, str(error))) from None

    def workload(self, pool: PoolSpec, megatron: Literal["0.16", "0.19"] | None = None) -> Workload:
        """What is trained on `pool`, under the rules of `megatron`; none = the installed megatron-core's."""
        return Workload(
            megatron=megatron or installed_megatron(),
            gpus_per_node=pool.gpus_per_node,
            model=self.model,
            world_size=pool.world_size,
            global_batch_size=self.global_batch_size,
            seq_length=self.seq_length,
            device=pool.device,
            settings=RunSettings(gpu_arch_major=arch_major(pool.gpu, self.hardware.gpus)),
        )


def pool_title(spec: StudySpec, pool: PoolSpec) -> str:
    """A pool's name, with its node count where the study gives it several."""
    return pool.name if pool in spec.pools else f"{pool.name}, {node_words(pool)}"


def node_words(pool: PoolSpec) -> str:
    """How many nodes a trial takes."""
    return "1 node" if pool.nodes == 1 else f"{pool.nodes} nodes"


def pool_key(spec: StudySpec, pool: PoolSpec) -> str:
    """The same as part of a file's name; no pool has an `@` in its own."""
    return pool.name if pool in spec.pools else f"{pool.name}@{pool.nodes}"


def _about_choices(name: str, message: str) -> tuple[str, str]:
    """What is wrong with a knob's choices, and what they may be."""
    if message.startswith("invalid literal"):
        message = "the ends of a range must be whole numbers"
    problem = re.sub(r" \([^()]*(\(.*\))?[^()]*\)$", "", message).removeprefix(name).lstrip(": ")
    meaning = f"{name}: {knobs()[name].description}; " if name in TrialConfig.model_fields else ""
    return problem, f"{meaning}give a list of choices, e.g. [{_example(name)}]"


def _example(name: str) -> str:
    default = TrialConfig().model_dump().get(name, "none")
    if isinstance(default, bool):
        return "false, true"
    return "1, 2, 4" if isinstance(default, int) else str(default if default is not None else "none").lower()


def load_study(path: Path, overrides: dict[str, Any] | None = None) -> StudySpec:
    """Read and check a study file.

    Args:
        path: A YAML file.
        overrides: Top level fields given on the command line; None values are ignored.

    Raises:
        SpecError: with field, value and hint, for anything that is wrong with it.
    """
    data = read_yaml(path)
    if isinstance(config := data.get("model"), str):
        data["model"] = shapes_of(path.parent / config, "model").model_dump(mode="json", exclude_defaults=True)
    return _validated(data, overrides or {})


def override(spec: StudySpec, overrides: dict[str, Any]) -> StudySpec:
    """The same study with some fields replaced, as `load_study` does it.

    Raises:
        SpecError: where the new values are wrong.
    """
    return _validated(spec.model_dump(mode="json", exclude_defaults=True), overrides)


def _validated(data: dict[str, Any], overrides: dict[str, Any]) -> StudySpec:
    """Overrides win; a mapping in them replaces only the keys that it has."""
    for key, value in overrides.items():
        if isinstance(value, dict) and isinstance(data.get(key), dict):
            data[key] = {**data[key], **value}
        elif value is not None:
            data[key] = value
    try:
        spec = StudySpec.model_validate(data)
    except ValidationError as error:
        raise spec_error(error, StudySpec) from None
    for place, value, problem in odd_numbers(data, spec.model_dump(exclude={"search"})):
        raise field_error(place, value, problem, StudySpec)
    return spec


def study_file(text: str) -> Path:
    """The study file that a person means: a path, or the name of a shipped study such as `quickstart`."""
    path = Path(text)
    return _PRESETS / f"{text}.yaml" if text == STUDY and not path.exists() else path
