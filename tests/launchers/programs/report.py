"""Tells what a rank sees: environment, path, job, modules. Or emits what the job says."""

from __future__ import annotations

import os
import sys

from steps_helper import MARK  # from the pool's own PYTHONPATH

import launchers


def main(job, context):
    if size := job.get("emit_bytes"):
        context.emit({"event": "big", "text": "x" * size})
    for name, value in os.environ.items():
        context.emit({"event": "variable", "name": name, "value": value[:2000]})
    paths = {"path": sys.path, "package": list(launchers.__path__), "mark": MARK, "executable": sys.executable}
    context.emit({"event": "report", "job_size": len(str(job)), "prefix": sys.prefix, **paths})
