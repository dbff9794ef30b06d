"""Recipes: how published models were trained fastest, as figures with their source, and the candidates that they point at.

A recipe is no prediction and no result of this project: it is where a search may look first. Data in recipes.yaml, written by
`benchmarks/write_recipes.py`.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import yaml
from pydantic import BaseModel, ConfigDict, PositiveInt

from search_spaces.candidates import CandidateTable
from search_spaces.columns import Bools, Columns
from search_spaces.config import TrialConfig
from search_spaces.gpus import GpuSpec, gpu
from search_spaces.model import ModelSpec, Workload
from search_spaces.prediction import Predictions

_FILE = Path(__file__).with_name("recipes.yaml")

MOST = 2
"""Recipes that one search starts from."""
SHAPE_FACTOR = 1.5
"""Layers and parameters per layer of one family differ by no more."""
SEQUENCE_FACTOR = 2.0
"""Sequence lengths: a micro-batch of the same size has so many more tokens."""
BATCH_FACTOR = 1.5
"""Sequences per GPU and step. With as many, more GPUs are more replicas of the same split; with others, other micro-batches and
splits are best. Less than the factor of two in which these come.
"""
MEMORY_FACTOR = 1.5
"""Memory of the GPUs: on a larger one a recipe splits the model for nothing."""


class Recipe(BaseModel):
    """How a published model was trained.

    Attributes:
        name: The model, as its source calls it.
        model: Its shapes.
        gpu: Kind of GPU, a name in hardware.yaml.
        gpus: How many.
        global_batch_size: Sequences per optimiser step.
        seq_length: Tokens per sequence.
        config: Split, micro-batch, recomputation and precision; what is not stated there is not part of the recipe.
        source: Where the figures are from.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    model: ModelSpec
    gpu: str
    gpus: PositiveInt
    global_batch_size: PositiveInt
    seq_length: PositiveInt
    config: TrialConfig
    source: str

    def __str__(self) -> str:
        """Such as `LLAMA3_70B on 64 x h100-sxm (source)`."""
        return f"{self.name} on {self.gpus} x {self.gpu} ({self.source})"


@dataclass(frozen=True, slots=True)
class Start:
    """A candidate that a recipe points at.

    Attributes:
        row: Its row in the table.
        recipe: The recipe.
    """

    row: int
    recipe: Recipe


@cache
def recipes() -> tuple[Recipe, ...]:
    """All shipped recipes, in the order of the file."""
    return tuple(Recipe.model_validate(entry) for entry in yaml.safe_load(_FILE.read_text(encoding="utf-8")))


def nearest(workload: Workload, device: GpuSpec, among: Sequence[Recipe] | None = None) -> list[Recipe]:
    """The recipes of a workload's family, nearest first.

    One family: with or without experts alike, and within the factors above. Near: a small sum of the absolute logarithms of the
    ratios of layers, parameters per layer, sequence length, sequences per GPU and step, GPU memory and number of GPUs.

    Args:
        workload: What is to be trained.
        device: On which kind of GPU.
        among: The recipes to choose from; none = all shipped ones.
    """
    among = recipes() if among is None else among
    distances = [(_distance(recipe, workload, device), place) for place, recipe in enumerate(among)]
    return [among[place] for distance, place in sorted(distances) if math.isfinite(distance)]


def starts(
    table: CandidateTable,
    device: GpuSpec,
    allowed: Bools,
    predictions: Predictions,
    taken: Collection[int],
    among: Sequence[Recipe] | None = None,
) -> tuple[list[Start], list[str]]:
    """The candidates that the nearest recipes point at, at most `MOST`, all different.

    Of the candidates that agree with a recipe in TP, PP, CP, EP, virtual stages and micro-batch size, the fastest predicted one;
    none where it is slower than the fastest of all even if either is off by the predictions' mean error.

    Args:
        table: The candidates.
        device: Kind of GPU.
        allowed: Which rows may be launched, (rows,).
        predictions: Of all rows.
        taken: Rows that are tried anyway.
        among: As for `nearest`.

    Returns:
        The candidates, and why each recipe that was looked at and left out was.
    """
    found: list[Start] = []
    left_out: list[str] = []
    for recipe in nearest(table.workload, device, among):
        if len(found) == MOST:
            break
        row, problem = _fastest(recipe, table, allowed, predictions)
        if not problem and (row in taken or row in [start.row for start in found]):
            problem = "points at a candidate that is tried anyway"
        if problem:
            left_out.append(f"{recipe}: {problem}")
        else:
            found.append(Start(row, recipe))
    return found, left_out


def _distance(recipe: Recipe, workload: Workload, device: GpuSpec) -> float:
    """How far a recipe is from a workload; infinite outside its family."""
    own, model = recipe.model, workload.model
    if own.is_moe != model.is_moe:
        return math.inf
    bounded = (
        (own.num_layers / model.num_layers, SHAPE_FACTOR),
        (own.parameters / own.num_layers / (model.parameters / model.num_layers), SHAPE_FACTOR),
        (recipe.seq_length / workload.seq_length, SEQUENCE_FACTOR),
        (recipe.global_batch_size / recipe.gpus / (workload.global_batch_size / workload.world_size), BATCH_FACTOR),
        (gpu(recipe.gpu).memory_gib / device.memory_gib, MEMORY_FACTOR),
    )
    logs = [(abs(math.log(ratio)), math.log(factor)) for ratio, factor in bounded]
    if any(log > most + 1e-9 for log, most in logs):
        return math.inf
    return sum(log for log, _ in logs) + abs(math.log(recipe.gpus / workload.world_size))


def _fastest(recipe: Recipe, table: CandidateTable, allowed: Bools, predictions: Predictions) -> tuple[int, str]:
    """The fastest predicted row that agrees with a recipe, or why there is none."""
    agrees = _agreeing(recipe, table)
    if not agrees.any():
        return -1, "no legal candidate has its split and micro-batch size"
    if not (agrees & allowed).any():
        return -1, "what has its split and micro-batch size may not be launched here"
    fits = allowed & (predictions.fits != "does_not_fit")
    if not (agrees & fits).any():
        return -1, "nothing with its split and micro-batch size is predicted to fit"
    seconds, error = np.where(fits, predictions.step_time_s, np.inf), predictions.machines.step_time_error
    row = int(np.where(agrees, seconds, np.inf).argmin())
    if seconds[row] * (1.0 - error) > seconds.min() * (1.0 + error):
        slower = seconds[row] / seconds.min() - 1.0
        return -1, f"predicted {slower:.0%} slower than the fastest, more than the predictions' mean error of {error:.0%} explains"
    return row, ""


def _agreeing(recipe: Recipe, table: CandidateTable) -> Bools:
    """Which rows have a recipe's split and micro-batch size, (rows,)."""
    own, rows = Columns.of(table.workload, recipe.config), table.columns
    equal = (rows.tp == own.tp) & (rows.pp == own.pp) & (rows.cp == own.cp) & (rows.ep == own.ep) & (rows.vpp == own.vpp)
    return np.broadcast_to(equal & (rows.mbs == own.mbs), (len(table),))
