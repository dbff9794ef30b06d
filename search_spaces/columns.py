"""Columns: many configurations at once, one array per knob. A single configuration is a table of one row.

Every knob is stored as codes into its distinct values, so a question about a value ("is it full?") is asked once per distinct
value and spread by index. A knob that has one value everywhere is an array of length one: numpy stretches it where needed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt

from search_spaces.config import TrialConfig
from search_spaces.layout import Layout, parse_layout
from search_spaces.model import ModelSpec, Workload

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
Floats = npt.NDArray[np.float64]
Places = npt.NDArray[np.intp]


class Column(NamedTuple):
    """One knob of many configurations: `values[codes[i]]` is the value in row i."""

    values: tuple[Any, ...]
    codes: npt.NDArray[np.integer[Any]]


_ONE_ROW = np.zeros(1, dtype=np.intp)


class Columns:
    """The knobs of many configurations of one workload, and the sizes that Megatron derives from them.

    Attributes:
        workload: What is trained.
        columns: The stored knobs by name; all others have their default.
        asked: Names of the knobs that were looked at, for working out what a rule depends on.
    """

    def __init__(self, workload: Workload, columns: Mapping[str, Column], defaults: TrialConfig | None = None) -> None:
        self.workload = workload
        self.columns = dict(columns)
        self.asked: set[str] = set()
        self._defaults = defaults or TrialConfig()

    @classmethod
    def of(cls, workload: Workload, config: TrialConfig) -> Self:
        """A table of one row."""
        return cls(workload, {}, config)

    def with_columns(self, columns: Mapping[str, Column]) -> Columns:
        """Another table of the same workload and defaults."""
        return Columns(self.workload, columns, self._defaults)

    def __len__(self) -> int:
        """Rows of the table."""
        return max((len(column.codes) for column in self.columns.values()), default=1)

    # Values of a knob -------------------------------------------------------------------------------------------------------

    def column(self, knob: str) -> Column:
        """The stored column, or the default in a column of length one."""
        self.asked.add(knob)
        stored = self.columns.get(knob)
        return stored if stored is not None else Column((getattr(self._defaults, knob),), _ONE_ROW)

    def number(self, knob: str) -> Ints:
        """A knob as integers; none counts as 0."""
        return self.derive(knob, lambda value: int(value or 0))

    def flag(self, knob: str) -> Bools:
        """Where a switch is on."""
        return self.where(knob, bool)

    def given(self, knob: str) -> Bools:
        """Where a knob has a value that is not none."""
        return self.where(knob, lambda value: value is not None)

    def equals(self, knob: str, *values: Any) -> Bools:
        """Where a knob has one of these values."""
        return self.where(knob, lambda value: value in values)

    def holds(self, knob: str, item: str) -> Bools:
        """Where the tuple in a knob contains this item."""
        return self.where(knob, lambda value: value is not None and item in value)

    def where(self, knob: str, question: Callable[[Any], bool]) -> Bools:
        """The answer to a question about a knob's value."""
        column = self.column(knob)
        answers = np.array([question(value) for value in column.values], dtype=np.bool_)
        return answers.take(column.codes)

    def derive(self, knob: str, number: Callable[[Any], int]) -> Ints:
        """A whole number worked out from a knob's value."""
        column = self.column(knob)
        numbers = np.array([number(value) for value in column.values], dtype=np.int64)
        return numbers.take(column.codes)

    def replace(self, knob: str, where: Bools, value: Any) -> None:
        """Write a value, or one whole number per row, into a knob where the mask says so."""
        column = self.column(knob)
        if isinstance(value, np.ndarray):
            new, codes = np.unique(value, return_inverse=True)
            fresh = tuple(int(item) for item in new)
        else:
            fresh, codes = (value,), np.zeros(1, dtype=np.intp)
        values = column.values + tuple(item for item in fresh if item not in column.values)
        positions = np.array([values.index(item) for item in fresh], dtype=np.intp)
        self.columns[knob] = Column(values, np.where(where, positions[codes], column.codes))

    def text(self, knob: str, words: Callable[[Any], str]) -> npt.NDArray[np.str_]:
        """Words worked out from a knob's value."""
        column = self.column(knob)
        return np.array([words(value) for value in column.values]).take(column.codes)

    def variable(self, name: str) -> npt.NDArray[np.str_]:
        """An environment variable of the ranks: its value, "unset", or "auto" where the launcher chooses."""
        outer = self.workload.settings.env
        inherited = "auto" if outer is None else outer.get(name)
        return self.text("environment", lambda inner: dict(inner).get(name, inherited) or "unset")

    # Shapes and sizes -------------------------------------------------------------------------------------------------------

    @property
    def model(self) -> ModelSpec:
        """The model that is trained."""
        return self.workload.model

    @property
    def v19(self) -> bool:
        """Whether Megatron-Core 0.19's rules hold, else 0.16's."""
        return self.workload.megatron == "0.19"

    @property
    def tp(self) -> Ints:
        """Tensor parallel size."""
        return self.number("tensor_model_parallel_size")

    @property
    def pp(self) -> Ints:
        """Pipeline parallel size."""
        return self.number("pipeline_model_parallel_size")

    @property
    def cp(self) -> Ints:
        """Context parallel size."""
        return self.number("context_parallel_size")

    @property
    def ep(self) -> Ints:
        """Expert parallel size."""
        return self.number("expert_model_parallel_size")

    @property
    def etp(self) -> Ints:
        """Expert tensor parallel size; Megatron's default is TP (validate_args)."""
        given = self.number("expert_tensor_parallel_size")
        return np.where(given > 0, given, self.tp)

    @property
    def vpp(self) -> Ints:
        """Virtual stages per pipeline rank, given or in the layout; 0 = no interleaving."""
        in_layout = self.layout_number(lambda layout: len(layout.stages)) // self.pp
        given = self.number("num_virtual_stages_per_pipeline_rank")
        stages = np.where(self.given("pipeline_model_parallel_layout"), in_layout, given)
        return np.where(stages > 1, stages, 0)

    def layout_number(self, number: Callable[[Layout], int]) -> Ints:
        """A whole number worked out from the pipeline layout; 0 without one."""
        return self.derive("pipeline_model_parallel_layout", lambda text: number(parse_layout(text)) if text is not None else 0)

    @property
    def mbs(self) -> Ints:
        """Micro-batch size."""
        return self.number("micro_batch_size")

    @property
    def sp(self) -> Bools:
        """Whether sequence parallelism is on."""
        return self.flag("sequence_parallel")

    @property
    def low_precision(self) -> Bools:
        """Where matrix products run in 8 or 4 bits."""
        return self.given("fp8_format") | self.given("fp4_format")

    def recomputes(self, module: str) -> Bools:
        """Where selective recomputation covers a module; Megatron's default is core_attn alone (transformer_config.py)."""
        named = self.holds("recompute_modules", module)
        if module == "core_attn":
            named = named | ~self.given("recompute_modules")
        return self.equals("recompute_granularity", "selective") & named

    @property
    def model_ranks(self) -> Ints:
        """Ranks of one replica on the attention mesh: TP x PP x CP."""
        return self.tp * self.pp * self.cp

    @property
    def expert_ranks(self) -> Ints:
        """Ranks of one replica on the expert mesh: ETP x EP x PP."""
        return self.etp * self.ep * self.pp

    @property
    def dp(self) -> Ints:
        """Data parallel size of the attention mesh, rounded down, at least 1."""
        return np.maximum(self.workload.world_size // self.model_ranks, 1)

    @property
    def micro_batches(self) -> Ints:
        """Micro-batches per step and replica, rounded down."""
        return self.workload.global_batch_size // (self.mbs * self.dp)
