"""The environment of a pool's ranks: the node's and the pool's own, never the agent's."""

from __future__ import annotations

import os
from pathlib import Path

from search_spaces.hardware import GPU_SELECTION

_AGENT_ONLY_PREFIXES = ("PYTHON", "RAY_")
_AGENT_ONLY = ("VIRTUAL_ENV", "LD_LIBRARY_PATH", "LD_PRELOAD")


def node_environment(raylet_pid: int | None) -> dict[str, str]:
    """The node's own environment: without what this agent got for itself, with the GPUs that it was given.

    The raylet's environment is the node's; without a raylet it is this process's. Its Python and virtual environment are left
    out, and, where there is no raylet to tell the node's from the agent's, library paths too.
    """
    node = _environment_of(raylet_pid)
    agent_only = _AGENT_ONLY if node is None else ("VIRTUAL_ENV",)
    base = os.environ if node is None else node | {name: os.environ[name] for name in GPU_SELECTION if name in os.environ}
    return {name: value for name, value in base.items() if name not in agent_only and not name.startswith(_AGENT_ONLY_PREFIXES)}


def _environment_of(pid: int | None) -> dict[str, str] | None:
    if not pid:
        return None
    try:
        text = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return None
    pairs = (os.fsdecode(entry).partition("=") for entry in text.split(b"\0") if b"=" in entry)
    return {name: value for name, _, value in pairs} or None
