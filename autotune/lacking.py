"""What a study asks of a GPU that it does not have: nothing forbids it, so a person should know before the first trial."""

from __future__ import annotations

import numpy as np

from search_spaces.candidates import CandidateTable
from search_spaces.columns import Columns
from search_spaces.config import TrialConfig
from search_spaces.device_rules import CONTEXT_ATTENTION, arithmetic_findings
from search_spaces.gpus import GpuSpec

_AS_IF = "Predictions and rehearsals take the next format that it has."
_FAILS = "Predictions and rehearsals take no notice; real trials fail."


def lacking_words(gpu: GpuSpec, table: CandidateTable, baseline: TrialConfig) -> list[str]:
    """A sentence for everything that a pool's GPU lacks and the study uses: where, what happens, and what to set.

    Args:
        gpu: The device.
        table: The pool's legal candidates.
        baseline: What the study starts with, a candidate or not.
    """
    of_baseline = arithmetic_findings(gpu, Columns.of(table.workload, baseline))
    found = []
    for name, finding in arithmetic_findings(gpu, table.columns).items() if len(table) else ():
        count = int(np.broadcast_to(finding.broken, (len(table),)).sum())
        if who := _who(count, len(table), bool(of_baseline[name].broken.any())):
            what = _FAILS if name == CONTEXT_ATTENTION else _AS_IF
            found.append(f"{who}: {finding.text}, under `baseline` or in `search`. {what}")
    return found


def _who(count: int, candidates: int, baseline: bool) -> str:
    counted = f"{'all' if count == candidates else f'{count:,} of'} {candidates:,} candidates" if count else ""
    return " and ".join(["the baseline"] * baseline + [counted] * bool(counted)).capitalize()
