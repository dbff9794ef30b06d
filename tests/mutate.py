"""Breaks one rule at a time and shows whether a test notices: `make mutate`, or `python tests/mutate.py [WORD ...]` for some.

Each mutation names the rule that it breaks, the text that it replaces, and the tests that must go red. It is made in a copy of the
repository. A mutation whose text is gone fails as well: the list is kept with the code.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parent.parent
TIMEOUT_S = 300


@dataclass(frozen=True)
class Mutation:
    """One broken rule."""

    rule: str
    file: str
    before: str
    after: str
    tests: str


MUTATIONS = tuple(Mutation(**entry) for entry in yaml.safe_load((ROOT / "tests" / "mutations.yaml").read_text(encoding="utf-8")))


def main(words: list[str]) -> int:
    """Try them; exit code 1 where a test did not notice."""
    chosen = [mutation for mutation in MUTATIONS if not words or any(word in mutation.rule for word in words)]
    unnoticed = []
    with tempfile.TemporaryDirectory() as scratch:
        copy = Path(scratch) / "copy"
        ignored = shutil.ignore_patterns(".git", ".venv", ".autotune", "__pycache__", ".*_cache")
        shutil.copytree(ROOT, copy, ignore=ignored)
        for mutation in chosen:
            begin_s = time.monotonic()
            problem = try_mutation(mutation, copy)
            print(f"{problem or 'noticed':32} {time.monotonic() - begin_s:5.0f} s  {mutation.rule}", flush=True)
            unnoticed += [mutation] if problem else []
    print(f"{len(chosen) - len(unnoticed)} of {len(chosen)} broken rules were noticed")
    return int(bool(unnoticed))


def try_mutation(mutation: Mutation, copy: Path) -> str:
    """Why the mutation was not noticed; empty where a test went red."""
    file = copy / mutation.file
    source = file.read_text(encoding="utf-8")
    if source.count(mutation.before) < 1:
        return "ITS TEXT IS GONE"
    file.write_text(source.replace(mutation.before, mutation.after, 1), encoding="utf-8")
    try:
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-m", "not acceptance and not gpu", "-p", "no:cacheprovider"]
        ended = subprocess.run([*command, *mutation.tests.split()], cwd=copy, capture_output=True, timeout=TIMEOUT_S, check=False)
        return "" if ended.returncode == 1 else f"NO TEST NOTICED (exit code {ended.returncode})"
    except subprocess.TimeoutExpired:
        return "THE TESTS DID NOT END"
    finally:
        file.write_text(source, encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
