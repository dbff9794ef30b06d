"""Store: refitted coefficients in a small JSON file, by pool and software version, for the next study."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from search_spaces.coefficients import Coefficients


class Store:
    """Coefficients by pool and software; a file that is not there is an empty store."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def get(self, pool: str, software: str) -> Coefficients | None:
        """The coefficients of a pool under a software version; None where nothing was measured."""
        entry = self._read().get(pool, {}).get(software)
        return Coefficients.model_validate(entry["coefficients"]) if entry else None

    def put(self, pool: str, software: str, coefficients: Coefficients, rows: int) -> None:
        """Keep coefficients; the file is replaced in one piece.

        Args:
            pool: Name of the pool.
            software: What the ranks ran, e.g. "megatron-core 0.16.1, torch 2.9".
            coefficients: The refit.
            rows: Measured trials behind it.
        """
        content = self._read()
        content.setdefault(pool, {})[software] = {"rows": rows, "coefficients": coefficients.model_dump()}
        draft = self.path.with_name(f"{self.path.name}.{os.getpid()}")
        draft.write_text(json.dumps(content, indent=1, sort_keys=True), encoding="utf-8")
        draft.replace(self.path)

    def _read(self) -> dict[str, Any]:
        return dict(json.loads(self.path.read_text(encoding="utf-8"))) if self.path.is_file() else {}
