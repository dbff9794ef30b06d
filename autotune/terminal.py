"""Where the command line prints: a person's terminal, or a file or pipe that nothing may be lost in."""

from __future__ import annotations

import os
import sys

from rich.console import Console

PIPED_WIDTH = 500
"""Columns where nobody looks at a terminal: a cut or broken line in a file is of no use, and rich would take 80."""


def terminal(*, stderr: bool = False) -> Console:
    """Standard output, or standard error; `COLUMNS` in the environment sets the width of either."""
    is_terminal = (sys.stderr if stderr else sys.stdout).isatty()
    return Console(stderr=stderr, width=None if is_terminal or "COLUMNS" in os.environ else PIPED_WIDTH)
