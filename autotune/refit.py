"""Refit: what physics predicts of a pool's candidates, corrected by every trial that was measured on the pool."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

import numpy as np

from autotune.errors import SpecError
from autotune.machines import machines_of
from autotune.records import TrialRecord
from autotune.spec import StudySpec
from launchers.outcome import Outcome
from search_spaces.calibration import NOISE, Measured, Sample, fit
from search_spaces.calibration_store import Calibration, Store
from search_spaces.candidates import CandidateTable
from search_spaces.columns import Columns
from search_spaces.config import TrialConfig
from search_spaces.hardware import PoolSpec
from search_spaces.node_figures import NodeFigures
from search_spaces.prediction import CALIBRATING_TRIALS, Machines, Prediction, Predictions, predict, recalibrated

log = logging.getLogger(__name__)

MOST_ROWS = 40
PREFIX = "predicted_"
CALIBRATION_FILE = "calibration.json"
_NEWS = 0.25
_LATEST_ERRORS = 20
_LEAST_ERRORS = 3
_FITS = {"fits": 1.0, "at_risk": 0.5, "does_not_fit": 0.0}
_ITERATIONS = 6
_DISTURBED_WEIGHT = 0.01  # of a trial that somebody disturbed; it is run once more


class Row(NamedTuple):
    """A measured trial and how much it counts, at most 1."""

    sample: Sample
    weight: float


class Refit:
    """Predictions of one pool's candidates. They never stop a study: what cannot be predicted or refitted is None or stays.

    Attributes:
        machines: What the pool is made of, with the coefficients of the last refit; None where its GPU is unknown.
    """

    def __init__(
        self, study: str, table: CandidateTable, machines: Machines | None, key: tuple[str, str], store: Store | None
    ) -> None:
        """Start from the store's newest calibration of these machines, else from the shipped coefficients.

        Args:
            study: Name of the study, under which its calibration is kept.
            table: Its candidates.
            machines: The machines with shipped coefficients; None where they are unknown.
            key: Pool and software in the store.
            store: Where calibrations are kept; None = nowhere.
        """
        self._study, self._table, self._key, self._store = study, table, key, store
        self._prior = _from_store(machines, store, key, but_of=study)
        self.machines = self._prior
        self._rows: list[Row] = []
        self._errors: list[float] = []
        self._fitted = 0
        self._predictions: Predictions | None = None

    @classmethod
    def of(cls, study: str, spec: StudySpec, pool: PoolSpec, table: CandidateTable, kept_in: Path | None) -> Refit:
        """The refit of a pool's study; `kept_in` is the folder of the calibration file."""
        store = Store(kept_in / CALIBRATION_FILE) if kept_in is not None else None
        try:
            machines = machines_of(pool, spec.hardware)
        except SpecError as error:
            log.info("pool %s: no predictions: %s", pool.name, error)
            machines = None
        return cls(study, table, machines, calibration_key(pool), store)

    @property
    def knows_nothing(self) -> bool:
        """Whether the machines' kind is known, and nothing measured of them."""
        return self._prior is not None and not self._prior.trials and not self._rows

    def seed(self, figures: NodeFigures | None) -> None:
        """Take what the nodes themselves reach into the prior."""
        if figures is None or self._prior is None:
            return
        found = figures.seed(self._prior.gpu, self._prior.links, self._prior.coefficients)
        self.machines = self._prior = replace(self._prior, coefficients=found)
        log.info("pool %s: %s", self._key[0], figures)

    def learn(self, record: TrialRecord) -> None:
        """Take in an ended trial; only a measured one without a limit on power (below TDP) or clocks tells something."""
        seconds = record.metrics.get("step_time_s", 0.0)
        if self._prior is None or record.outcome is not Outcome.COMPLETED or seconds <= 0.0:
            return
        if record.config.sm_clock_limit_mhz or (record.config.gpu_power_limit_w or math.inf) < self._prior.gpu.tdp_w:
            return
        measured = Measured(self._table.workload, record.config, seconds)
        weight = _weight(record.metrics) * (_DISTURBED_WEIGHT if record.contaminated else 1.0)
        self._rows.append(Row(Sample(measured, self._prior.gpu, self._prior.links), weight))
        if not record.contaminated and record.metrics.get(f"{PREFIX}from_trials", 0.0) >= CALIBRATING_TRIALS:
            self._errors.append(abs(record.metrics[f"{PREFIX}step_time_s"] / seconds - 1.0))

    def predictions(self, news: float = _NEWS) -> Predictions | None:
        """Of every row of the table, after the trials so far; None where the GPU is unknown or the table is empty.

        Args:
            news: As for `update`.
        """
        self.update(news)
        if self.machines is None or not len(self._table):
            return None
        if self._predictions is None:
            self._predictions = predict(self._table.columns, self.machines)
        elif self._predictions.machines is not self.machines:
            self._predictions = recalibrated(self._predictions, self._table.columns, self.machines)
        return self._predictions

    def predict(self, config: TrialConfig) -> Prediction | None:
        """Of one legal configuration, in the table or not; None where the GPU is unknown."""
        self.update()
        if self.machines is None:
            return None
        return predict(Columns.of(self._table.workload, config), self.machines).row(0)

    def metrics(self, config: TrialConfig) -> dict[str, float]:
        """What is predicted of a configuration now, named as what is measured, with `predicted_` before it.

        `predicted_fits`: 1 fits, 0.5 at risk, 0 does not fit. `predicted_from_trials`: measured trials behind the numbers.
        Watts are a board's, as measured ones are.
        """
        found = self.predict(config)
        if found is None or self.machines is None:
            return {}
        named = {
            "step_time_s": found.step_time_s,
            "tokens_per_s_per_gpu": found.tokens_per_s_per_gpu,
            "peak_memory_gib": found.memory_gib,
            "mean_power_w": found.mean_power_w,
            "peak_power_w": found.peak_power_w,
            "fits": _FITS[found.fits],
            "from_trials": float(self.machines.trials),
        }
        return {PREFIX + name: value for name, value in named.items()}

    def update(self, news: float = _NEWS) -> None:
        """Fit the coefficients again where enough trials have been measured since the last time, and keep them.

        One more is enough at first; with many behind it, one more moves little, so it takes a quarter more.

        Args:
            news: Share of the trials behind the last fit that must have come since.
        """
        if self._prior is None or self.machines is None or len(self._rows) <= self._fitted * (1.0 + news):
            return
        self._fitted = len(self._rows)
        rows = chosen(self._rows)
        weights = np.array([row.weight for row in rows])
        try:
            samples = [row.sample for row in rows]
            found = fit(
                samples, self._prior.coefficients, weights=weights, iterations=_ITERATIONS, start=self.machines.coefficients
            )
        except (ValueError, ArithmeticError) as error:
            log.warning("pool %s: the predictions were not refitted: %s", self._key[0], error)
            return
        self.machines = replace(
            self.machines, coefficients=found, trials=self._prior.trials + len(self._rows), own_error=self._own_error()
        )
        self._keep(Calibration(found, self.machines.trials, self.machines.own_error))

    def _own_error(self) -> float | None:
        """Mean absolute error of the latest trials' seconds as predicted before each ran; None where they are too few."""
        latest = self._errors[-_LATEST_ERRORS:]
        return float(np.mean(latest)) if len(latest) >= _LEAST_ERRORS else self._prior.own_error if self._prior else None

    def _keep(self, calibration: Calibration) -> None:
        if self._store is None:
            return
        try:
            self._store.put(*self._key, self._study, calibration)
        except (OSError, ValueError) as error:
            log.warning("the calibration was not kept: %s", error)


def calibration_key(pool: PoolSpec) -> tuple[str, str]:
    """Under what a pool's calibration is kept: its machines, and what its ranks run."""
    machines = f"{pool.name}: {pool.gpus_per_node} x {pool.gpu}" + (f", {pool.network}" if pool.network else "")
    place = " ".join((*pool.environment.container, pool.environment.python or ""))
    return machines, place.strip() or f"megatron-core {_version('megatron-core')}, torch {_version('torch')}"


def calibrated(machines: Machines, pool: PoolSpec, folder: Path) -> Machines:
    """Machines with the newest calibration of the pool that a folder keeps, or as they are."""
    return _from_store(machines, Store(folder / CALIBRATION_FILE), calibration_key(pool)) or machines


def _weight(metrics: Mapping[str, float]) -> float:
    """A trial whose interval is wider than the fit's own noise counts less, by the ratio of the variances."""
    middle, low, high = (metrics.get(f"tokens_per_s_per_gpu{end}", 0.0) for end in ("", "_low", "_high"))
    spread = (high - low) / 4.0 / middle if middle > 0.0 else 0.0  # the 95 % interval is four standard errors wide
    return float(min(1.0, (NOISE / spread) ** 2)) if spread > 0.0 else 1.0


def chosen(rows: Sequence[Row]) -> list[Row]:
    """At most `MOST_ROWS`: the newest half, and of the others those that spread evenly from the fastest to the slowest."""
    if len(rows) <= MOST_ROWS:
        return list(rows)
    newest = MOST_ROWS // 2
    older = sorted(rows[:-newest], key=lambda row: row.sample.measured.step_time_s)
    places = np.linspace(0, len(older) - 1, MOST_ROWS - newest).round().astype(int)
    return [*(older[place] for place in places), *rows[-newest:]]


def _from_store(machines: Machines | None, store: Store | None, key: tuple[str, str], but_of: str = "") -> Machines | None:
    if machines is None or store is None:
        return machines
    try:
        kept = store.get(*key, but_of=but_of)
    except (OSError, ValueError) as error:
        log.warning("the calibration in %s cannot be read: %s", store.path, error)
        return machines
    return replace(machines, coefficients=kept.coefficients, trials=kept.trials, own_error=kept.error) if kept else machines


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "none"
