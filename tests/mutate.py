"""Shows which lines no test guards: changes one operator, constant or return of a module at a time and runs the module's tests.

    python tests/mutate.py search_spaces/legality.py autotune/filesystem.py --limit 30

Each change is made in a copy of the repository. A survivor is printed as a diff: a test is missing, or the line is not needed.
"""

from __future__ import annotations

import argparse
import ast
import copy
import difflib
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TIMEOUT_S = 90
COMPARISONS = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
ARITHMETIC = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult, ast.Mod: ast.FloorDiv,
    ast.And: ast.Or, ast.Or: ast.And,
}  # fmt: skip


@dataclass(frozen=True)
class Mutant:
    """One changed source."""

    module: Path
    source: str

    def diff(self) -> str:
        """What was changed."""
        before = ast.unparse(ast.parse((ROOT / self.module).read_text()))
        lines = difflib.unified_diff(before.splitlines(), self.source.splitlines(), lineterm="", n=0)
        return "\n".join(line for line in lines if not line.startswith(("---", "+++")))


def mutants(module: Path) -> Iterator[Mutant]:
    """Every change that this tool knows for a module."""
    tree = ast.parse((ROOT / module).read_text())
    for index, node in enumerate(ast.walk(tree)):
        for change in changes(node):
            changed = copy.deepcopy(tree)
            target = next(found for position, found in enumerate(ast.walk(changed)) if position == index)
            for name, value in change.items():
                setattr(target, name, value)
            yield Mutant(module, ast.unparse(ast.fix_missing_locations(changed)))


def changes(node: ast.AST) -> Iterator[dict[str, object]]:
    """New values of a node's fields, one dict for each mutant."""
    if isinstance(node, ast.Compare) and type(node.ops[0]) in COMPARISONS:
        yield {"ops": [COMPARISONS[type(node.ops[0])](), *node.ops[1:]]}
    elif isinstance(node, ast.BinOp | ast.BoolOp) and type(node.op) in ARITHMETIC:
        yield {"op": ARITHMETIC[type(node.op)]()}
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield {"value": not node.value}
    elif isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        yield {"value": node.value + 1}
    elif isinstance(node, ast.Return) and node.value is not None and not isinstance(node.value, ast.Constant):
        yield {"value": ast.Constant(None)}
    elif isinstance(node, ast.If | ast.IfExp | ast.While):
        yield {"test": ast.UnaryOp(ast.Not(), node.test)}


def tests_of(module: Path) -> list[str]:
    """The mirrored test file, of the module or of the package that it is in."""
    folder = Path("tests") / module.parent
    names = [folder / f"test_{module.stem}.py", folder.with_name(f"test_{folder.name}.py"), folder]
    return [str(name) for name in names if (ROOT / name).exists()][:1]


def survives(mutant: Mutant, copied: Path, tests: list[str]) -> bool:
    """Whether the tests still pass with the change; a hang counts as found."""
    target = copied / mutant.module
    original = target.read_text()
    target.write_text(mutant.source)
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-m", "not acceptance and not gpu", *tests]
    with subprocess.Popen(
        command, cwd=copied, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
        env={**os.environ, "PYTHONPATH": str(copied), "PYTHONDONTWRITEBYTECODE": "1"},
    ) as process:  # fmt: skip
        try:
            return process.wait(TIMEOUT_S) == 0
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            return False
        finally:
            target.write_text(original)


def main() -> int:
    """Runs the mutants of the modules named; exit code 1 if fewer than `--minimum` of them were found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("modules", nargs="+", type=Path)
    parser.add_argument("--tests", nargs="*", default=[], help="tests to run; by default the mirrored file")
    parser.add_argument("--limit", type=int, default=20, help="mutants per module, drawn with a fixed seed")
    parser.add_argument("--minimum", type=float, default=0.8, help="fraction that the tests must find")
    options = parser.parse_args()
    found = total = 0
    with tempfile.TemporaryDirectory() as folder:
        copied = Path(folder) / "copy"
        shutil.copytree(ROOT, copied, ignore=shutil.ignore_patterns(".*", "__pycache__", "dist"))
        for module in options.modules:
            tests = options.tests or tests_of(module)
            if not survives(Mutant(module, (ROOT / module).read_text()), copied, tests):
                sys.exit(f"{module}: its tests {' '.join(tests)} fail without any change")
            every = list(mutants(module))
            drawn = random.Random(0).sample(every, min(options.limit, len(every)))
            living = [mutant for mutant in drawn if survives(mutant, copied, tests)]
            found, total = found + len(drawn) - len(living), total + len(drawn)
            print(f"{module}: {len(drawn) - len(living)} of {len(drawn)} changes found by {' '.join(tests)}", flush=True)
            for mutant in living:
                print(mutant.diff(), flush=True)
    print(f"{found} of {total} changes found")
    return int(total == 0 or found < options.minimum * total)


if __name__ == "__main__":
    sys.exit(main())
