"""Store: refitted coefficients in a small JSON file, by pool and software version, for the next study and for plans."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter

from search_spaces.coefficients import MEANING, Coefficients

MOST_STUDIES = 8
"""Studies whose coefficients are kept per pool and software; the one that was refitted longest ago goes first."""


@dataclass(frozen=True, slots=True)
class Calibration:
    """Coefficients refitted from measured trials.

    Attributes:
        coefficients: The refit.
        trials: Measured trials behind it, those of the calibration that it started from included.
        error: Mean absolute error of trials' seconds as predicted before each ran, as a share; None = not known yet.
    """

    coefficients: Coefficients
    trials: int
    error: float | None = None


_CONTENT = TypeAdapter(dict[str, dict[str, dict[str, Calibration]]])


class Store:
    """Calibrations by pool, software and study; a file that is not there is an empty store.

    Raises:
        OSError: from every method, where the file cannot be read or written.
        ValueError: from every method, where the file holds something else.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def get(self, pool: str, software: str, but_of: str = "") -> Calibration | None:
        """The newest calibration of a pool under a software version; None where nothing was measured.

        Args:
            pool: Which machines.
            software: What the ranks ran, e.g. "megatron-core 0.16.1, torch 2.9".
            but_of: A study whose own calibration is left out: its prior must not hold its own trials. So are those of the node
                counts that run beside it, which may have started from its own: names that differ behind the last slash only.
        """
        studies = self._read().get(pool, {}).get(_key(software), {})
        return next((studies[name] for name in reversed(studies) if _beside(name) != _beside(but_of)), None)

    def put(self, pool: str, software: str, study: str, calibration: Calibration) -> None:
        """Keep a study's calibration as the newest; the file is replaced in one piece.

        Args:
            pool: Which machines.
            software: What the ranks ran.
            study: The study that measured.
            calibration: The refit.
        """
        content = self._read()
        studies = content.setdefault(pool, {}).setdefault(_key(software), {})
        studies.pop(study, None)
        studies[study] = calibration
        for old in list(studies)[:-MOST_STUDIES]:
            del studies[old]
        draft = self.path.with_name(f"{self.path.name}.{os.getpid()}")
        draft.write_bytes(_CONTENT.dump_json(content, indent=1))
        draft.replace(self.path)

    def _read(self) -> dict[str, dict[str, dict[str, Calibration]]]:
        return _CONTENT.validate_json(self.path.read_bytes()) if self.path.is_file() else {}


def _beside(study: str) -> str:
    """What the studies of one pool in one study file share of their names."""
    return study.rpartition("/")[0] or study


def _key(software: str) -> str:
    """What coefficients are kept under: refitted where they meant something else, they are another software's."""
    return f"{software}, coefficients {MEANING}"
