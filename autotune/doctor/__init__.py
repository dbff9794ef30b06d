"""`autotune doctor`: what this machine lacks, each finding with its fix. Every wait is bounded.

Nothing is changed, but for one thing: GPU power limits that a killed study left behind are put back.
"""

from __future__ import annotations

import logging
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from autotune.doctor.finding import Finding, Status
from autotune.doctor.machine import check_gpus, check_power_limits, is_root, read_disk, read_filesystem, read_shared_memory
from autotune.doctor.services import check_mlflow_package, check_storage, check_tracking
from autotune.doctor.software import RAY_PROBE, check_megatron, check_python, check_ray, check_torch
from autotune.power_restore import restore_left_behind
from autotune.probes import Driver, amd_gpus, ask, nvidia_gpus, rank_python, read_driver

__all__ = ["Finding", "Status", "examine"]

LIMIT_S = 14.0
RAY_LIMIT_S = 12.0

Check = Callable[[], list[Finding]]
_logger = logging.getLogger(__name__)


def examine(
    state: Path, *, python: str | None = None, tracking_uri: str | None = None, storage: str | None = None, limit_s: float = LIMIT_S
) -> list[Finding]:
    """Examines this machine for tuning.

    Args:
        state: Folder of studies; need not exist.
        python: Interpreter of the ranks; None = the one that runs now.
        tracking_uri: MLflow tracking URI; None = embedded.
        storage: Optuna storage, URL or path; None = embedded.
        limit_s: Limit for all checks together; one that has not answered by then is a finding itself.

    Returns:
        The findings, in a fixed order.
    """
    own, ranks = sys.executable, python or sys.executable
    return run_checks(
        {
            "Python": lambda: [check_python(sys.version_info[:2])],
            "torch, megatron-core": lambda: _ranks(ranks),
            "Ray": lambda: [check_ray(ask((own, "-c", RAY_PROBE), RAY_LIMIT_S), own)],
            "power limits": lambda: [check_power_limits(*restore_left_behind())],
            "GPUs": lambda: [check_gpus(nvidia_gpus(), amd_gpus(), root=is_root())],
            "state folder": lambda: [read_filesystem(state)],
            "state disk": lambda: [read_disk("state disk", state)],
            "temporary disk": lambda: [read_disk("temporary disk", Path(tempfile.gettempdir()))],
            "shared memory": lambda: [read_shared_memory()],
            "MLflow": lambda: [check_mlflow_package()],
            "MLflow tracking": lambda: [check_tracking(tracking_uri)],
            "Optuna storage": lambda: [check_storage(storage)],
        },
        limit_s,
    )


def _ranks(python: str) -> list[Finding]:
    facts = rank_python(python)
    return [check_torch(facts, _driver(), python), check_megatron(facts, python)]


def _driver() -> Driver:
    """The loaded drivers; WSL shows NVIDIA's only through nvidia-smi."""
    driver = read_driver()
    if driver.nvidia is None:
        versions = [gpu.driver for gpu in nvidia_gpus().gpus if gpu.driver]
        driver = replace(driver, nvidia=versions[0] if versions else None)
    return driver


def run_checks(checks: dict[str, Check], limit_s: float) -> list[Finding]:
    """Runs all checks at once, each in a thread of its own, and gives up on those that have not answered at the limit."""
    answers: dict[str, list[Finding]] = {}
    deadline = time.monotonic() + limit_s
    threads = [threading.Thread(target=_run, args=(name, check, answers), daemon=True) for name, check in checks.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    late = f"no answer within {limit_s:g} s"
    fix = "a hanging disk, driver or server is likely: see `dmesg` and the mounts"
    return [finding for name in checks for finding in answers.get(name, [Finding(name, Status.FAIL, late, fix)])]


def _run(name: str, check: Check, answers: dict[str, list[Finding]]) -> None:
    try:
        answers[name] = check()
    except OSError as error:
        _logger.debug("check %s failed", name, exc_info=True)
        answers[name] = [Finding(name, Status.FAIL, f"cannot be examined: {error}", "see the rights on that path")]
