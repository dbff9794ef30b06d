"""MLflow's side of a study: every trial is one run. Optuna's storage stays the only truth; MLflow can be rebuilt from it.

Importing this package does not import mlflow, which takes a second: `Tracker` does that in its own thread.
"""

from __future__ import annotations

from autotune.tracking.server import check_address, run_url, tracking_uri_of, ui_command, ui_environment, ui_tunnel
from autotune.tracking.tracker import ParentRun, Tracker
from autotune.tracking.upload import RUN_STATUS

__all__ = [
    "RUN_STATUS",
    "ParentRun",
    "Tracker",
    "check_address",
    "run_url",
    "tracking_uri_of",
    "ui_command",
    "ui_environment",
    "ui_tunnel",
]
