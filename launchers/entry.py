"""Runs `launchers/<name>.py`'s `main()` by path: `python .../launchers/entry.py <name>`.

The package `launchers` becomes importable without its parent folder, or this folder, on `sys.path`: a rank in the pool's own
Python must see neither our packages nor modules of ours under bare names.
"""

from __future__ import annotations

import importlib
import os
import sys
import types


def register_package(folder: str) -> None:
    """Make `launchers` importable from `folder` alone."""
    sys.path[:] = [entry for entry in sys.path if os.path.realpath(entry) != folder]
    package = types.ModuleType("launchers")
    package.__path__ = [folder]
    sys.modules["launchers"] = package


if __name__ == "__main__":
    register_package(os.path.dirname(os.path.realpath(__file__)))
    importlib.import_module(f"launchers.{sys.argv[1]}").main()
