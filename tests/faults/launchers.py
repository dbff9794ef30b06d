"""Launchers whose ranks misbehave on request: `$FAULTS/plan` holds one behaviour per line, and each trial takes the first.

The last line stays. They are named in study files, so driver, agents and Tune workers import them as a user's own launcher.
"""

from __future__ import annotations

import os
from pathlib import Path

from launchers.base import Command

ON_PATH = Path(__file__).parent / "on_path"


class FaultLauncher:
    """Ranks that need neither torch nor Megatron."""

    name = "fault"
    program = str(Path(__file__).parent / "rank_program.py")
    preload = ("fault_preload",)

    def refusals(self, workload, config):
        return []

    def job(self, workload, config, *, steps, seed):
        plan = Path(os.environ["FAULTS"]) / "plan"
        first, *rest = plan.read_text().split()
        if rest:
            plan.write_text("\n".join(rest))
        return {"behaviour": first, "steps": steps}

    def command(self, workload, config, folder, *, steps, seed):
        return Command(("false",), {})


class GlooLauncher(FaultLauncher):
    """Ranks that meet in real collectives."""

    preload = ("fault_preload", "torch", "torch.distributed")
