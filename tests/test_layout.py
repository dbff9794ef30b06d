"""The house rules that no linter knows: sizes, directions, one door for each framework, what ships and what is locked."""

import ast
import re
import subprocess
import sys
import tomllib
import zipfile
from importlib.metadata import distributions
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("autotune", "launchers", "search_spaces")
MODULES = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
LOCK = (ROOT / "requirements/lock.txt").read_text()
MAX_LINES = 300


def _run(*command: str, cwd: Path = ROOT, timeout: float = 60) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=timeout, check=False)


def test_every_mutation_finds_the_text_that_it_replaces():
    mutations = yaml.safe_load((ROOT / "tests" / "mutations.yaml").read_text())
    assert len(mutations) > 20
    gone = [one["rule"] for one in mutations if one["before"] not in (ROOT / one["file"]).read_text()]
    assert not gone, "rewritten since"


def test_no_module_exceeds_300_lines():
    assert len(MODULES) > 10
    sizes = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in MODULES}
    assert {name: size for name, size in sizes.items() if size > MAX_LINES} == {}


def test_mlflow_from_the_repository_root_is_the_real_package():
    found = _run(sys.executable, "-c", "from mlflow import MlflowClient; import mlflow; print(mlflow.__file__)")
    assert found.returncode == 0, found.stderr
    assert "site-packages" in found.stdout


def test_mlflow_folder_holds_the_servers_files_and_no_python():
    names = {path.name for path in (ROOT / "mlflow").rglob("*")}
    assert {"compose.yaml", "Dockerfile", "README.md"} <= names
    assert not [name for name in names if name.endswith((".py", ".pyc", ".pyi"))]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> list[str]:
    folder = tmp_path_factory.mktemp("wheel")
    built = _run(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder))
    assert built.returncode == 0, built.stderr
    (path,) = folder.glob("*.whl")
    return zipfile.ZipFile(path).namelist()


def test_wheel_holds_the_three_packages_and_nothing_else(wheel):
    tops = {name.split("/", maxsplit=1)[0] for name in wheel}
    assert {top for top in tops if not top.endswith(".dist-info")} == set(PACKAGES)
    assert any(name.endswith("licenses/LICENSE") for name in wheel)


def test_wheel_holds_every_data_file(wheel):
    """Presets and hardware figures are data: a file that stays behind fails only on somebody else's machine."""
    files = [path for package in PACKAGES for path in (ROOT / package).rglob("*") if path.is_file()]
    source = {str(path.relative_to(ROOT)) for path in files if "__pycache__" not in path.parts}
    assert source - set(wheel) == set()


def _requirements(*groups: str) -> list[Requirement]:
    extras = PROJECT["optional-dependencies"]
    return [Requirement(line) for line in [*PROJECT["dependencies"], *(line for group in groups for line in extras[group])]]


def test_amdsmi_is_in_its_own_extra_only():
    holders = [group for group in PROJECT["optional-dependencies"] if "amdsmi" in {found.name for found in _requirements(group)}]
    assert holders == ["amd"]
    assert "amdsmi" not in {found.name for found in _requirements()}
    assert "amdsmi" not in LOCK


def test_lock_pins_every_direct_dependency_to_a_version_that_the_project_accepts():
    pins = dict(line.split("==") for line in LOCK.splitlines() if not line.startswith("#"))
    locked = {canonicalize_name(name): version for name, version in pins.items()}
    wanted = [
        found for found in _requirements("dev", "service") if not found.marker or found.marker.evaluate({"python_version": "3.11"})
    ]
    assert len(wanted) > 20
    refused = [str(found) for found in wanted if not found.specifier.contains(locked.get(canonicalize_name(found.name), "0"))]
    assert refused == []
    assert locked["torch"] == "2.13.0"


def test_lock_names_no_machine():
    """Exact versions alone: no index, path, URL or local build, so that any machine's own settings apply."""
    lines = [line for line in LOCK.splitlines() if not line.startswith("#")]
    assert len(lines) > 100
    assert [line for line in lines if not re.fullmatch(r"[A-Za-z0-9._-]+==[0-9][0-9a-z.]*", line)] == []


def test_lock_is_complete():
    """Everything that an installed locked package needs is locked too, or pip would choose a version of its own."""
    locked = {canonicalize_name(line.split("==")[0]) for line in LOCK.splitlines() if not line.startswith("#")}
    needed = set()
    for found in distributions():
        if canonicalize_name(found.metadata["Name"]) in locked:
            for line in found.requires or []:
                requirement = Requirement(line)
                if not requirement.marker or requirement.marker.evaluate({"extra": ""}):
                    needed.add(canonicalize_name(requirement.name))
    # A CUDA build of torch brings its own exactly pinned packages.
    assert {name for name in needed - locked if not name.startswith(("nvidia-", "cuda-", "triton"))} == set()


def test_import_contracts_hold():
    found = _run(str(Path(sys.executable).parent / "lint-imports"), "--no-cache")
    assert found.returncode == 0, found.stdout + found.stderr
    assert "0 broken" in found.stdout


def _imports(path: Path) -> set[str]:
    """Top-level names of all that a module imports, wherever in it."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module.split(".")[0])
    return names


@pytest.mark.parametrize(
    ("framework", "door"),
    [
        ("mlflow", r"autotune/tracking[^/]*\.py|autotune/tracking/[^/]*\.py"),
        ("pynvml", r"autotune/telemetry/nvidia\.py"),
        ("amdsmi", r"autotune/telemetry/amd\.py"),
        ("megatron", r"launchers/megatron_core/.*\.py"),
    ],
)
def test_each_framework_has_one_door(framework, door):
    importers = [str(path.relative_to(ROOT)) for path in MODULES if framework in _imports(path)]
    assert [name for name in importers if not re.fullmatch(door, name)] == []
    if framework != "megatron":
        assert len(importers) <= 1
