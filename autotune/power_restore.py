"""Puts power limits back that a study left behind: the supervisor's exit command, and the next start on this node."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from autotune.power_limits import RestoreRecord, left_behind, read_records, restore_folder, restore_records
from autotune.telemetry import Gpu, TelemetryError, open_gpus


def restore_left_behind(folder: Path | None = None) -> tuple[list[RestoreRecord], list[str]]:
    """Put back what ended agents of this node left; those records, and what could not be put back, one phrase each."""
    folder = folder or restore_folder()
    records = left_behind(folder)
    return records, _restore(records, folder)


def _restore(records: Sequence[RestoreRecord], folder: Path) -> list[str]:
    problems = []
    for vendor in sorted({record.vendor for record in records}):
        mine = [record for record in records if record.vendor == vendor]
        try:
            gpus: Sequence[Gpu] = open_gpus(vendor, [record.uuid for record in mine])
        except TelemetryError as error:
            problems.append(f"power limits of {len(mine)} GPUs are still changed: {error}")
            continue
        problems += restore_records(mine, gpus, folder)
    return problems


def main() -> None:
    """`power_restore FOLDER UUID...`: whoever owns the records; exit code 1 where a limit could not be put back."""
    folder, uuids = Path(sys.argv[1]), set(sys.argv[2:])
    problems = _restore([record for record in read_records(folder) if record.uuid in uuids], folder)
    sys.stderr.writelines(problem + "\n" for problem in problems)
    sys.exit(1 if problems else 0)
