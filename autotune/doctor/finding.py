"""Finding: what one check of the doctor says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum

from rich.table import Table
from rich.text import Text


class Status(StrEnum):
    """How bad a finding is: fine, works with a loss, or a study would fail."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class Finding:
    """The answer of one check.

    Attributes:
        name: What was checked, in a word or two.
        status: How bad it is.
        detail: What was found.
        fix: What to type or change; empty where nothing is wrong.
    """

    name: str
    status: Status
    detail: str
    fix: str = ""

    def to_dict(self) -> dict[str, str]:
        """Plain values, for JSON."""
        return {name: str(value) for name, value in asdict(self).items()}


_STYLES = {Status.OK: "green", Status.WARN: "yellow", Status.FAIL: "bold red"}


def findings_table(findings: Sequence[Finding]) -> Table:
    """Findings for a person, each problem with its fix."""
    table = Table(box=None, pad_edge=False, show_header=False)
    for finding in findings:
        table.add_row(Text(finding.status, style=_STYLES[finding.status]), finding.name, finding.detail)
        if finding.fix:
            table.add_row("", "", Text(f"fix: {finding.fix}", style="yellow"))
    return table
