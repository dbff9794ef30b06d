"""Installing as docs/install.md says: without network, beside a vendor's own torch, without root, from the wheel alone.

The quick tests install this project's wheel with pip's real resolver and take the dependencies from the environment that runs the
tests, seen through a path file: what is covered is our metadata and packaging, not the download of others. The tests marked
`acceptance` install all dependencies from their wheels and need a package index, or pip settings that name one.
"""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
PACKAGES = "import autotune, launchers, search_spaces"
NOBODY = 65534
# pip as on a machine that knows no index: no settings, and a proxy that refuses if a connection is tried all the same.
OFFLINE = {
    "PIP_CONFIG_FILE": os.devnull,
    "PIP_NO_INDEX": "1",
    "https_proxy": "http://127.0.0.1:9",
    "http_proxy": "http://127.0.0.1:9",
}


def _environment(**extra: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "PYTHON", "VIRTUAL_ENV"))}
    return {**kept, "PIP_DISABLE_PIP_VERSION_CHECK": "1", **extra}


def _run(
    *command: str | Path, cwd: Path, env: Mapping[str, str] | None = None, timeout: float = 60
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env=dict(env or _environment()),
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


@pytest.fixture(scope="session")
def wheel_folder(tmp_path_factory) -> Path:
    """A folder that holds this project's wheel, built without network."""
    folder = tmp_path_factory.mktemp("wheels")
    built = _run(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder, cwd=ROOT)
    assert built.returncode == 0, built.stderr
    return folder


@pytest.fixture(scope="session")
def dependencies() -> Iterator[Path]:
    """A folder of links to all that is installed here, pip included, but for this project."""
    folder = Path(tempfile.mkdtemp(prefix="autotune-dependencies-"))
    folder.chmod(0o755)
    own = ("autotune", "launchers", "search_spaces", "_megatron_autotune", "megatron_autotune")
    for entry in Path(sysconfig.get_path("purelib")).iterdir():
        if not entry.name.startswith(own) and entry.name != "__pycache__":
            (folder / entry.name).symlink_to(entry)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def venv(tmp_path, dependencies) -> Path:
    """A new environment that also sees the dependencies of this one, but not this project."""
    return _venv(tmp_path / "venv", dependencies)


def _venv(folder: Path, dependencies: Path, python: str = sys.executable, prefix: tuple[str, ...] = ()) -> Path:
    made = _run(*prefix, python, "-m", "venv", "--without-pip", folder, cwd=folder.parent)
    assert made.returncode == 0, made.stderr
    (folder / "lib/python3.11/site-packages/dependencies.pth").write_text(f"{dependencies}\n")
    return folder


def _pip(venv: Path, *arguments: str | Path, prefix: tuple[str, ...] = (), **extra: str) -> subprocess.CompletedProcess[str]:
    # From the environment's own folder: the project's metadata in the checkout must not count as installed.
    return _run(*prefix, venv / "bin/python", "-m", "pip", *arguments, cwd=venv, env=_environment(**OFFLINE, **extra))


def _install(
    venv: Path, folder: Path, *arguments: str, prefix: tuple[str, ...] = (), **extra: str
) -> subprocess.CompletedProcess[str]:
    return _pip(venv, "install", "--find-links", folder, *arguments, "megatron-autotune", prefix=prefix, **extra)


def _where(venv: Path, prefix: tuple[str, ...] = ()) -> str:
    found = _run(*prefix, venv / "bin/python", "-c", f"{PACKAGES}; print(autotune.__file__)", cwd=venv)
    assert found.returncode == 0, found.stderr
    return found.stdout.strip()


def test_without_network_from_a_wheel_folder(venv, wheel_folder):
    """The wheel comes from the folder; pip's resolver accepts the dependencies that are there and asks no index."""
    installed = _install(venv, wheel_folder)
    assert installed.returncode == 0, installed.stderr
    assert "Successfully installed megatron-autotune" in installed.stdout
    checked = _pip(venv, "check")
    assert checked.returncode == 0, checked.stdout
    assert _where(venv).startswith(str(venv))


@pytest.mark.acceptance
@pytest.mark.timeout(300)
def test_a_study_runs_from_the_wheel_outside_the_checkout(venv, wheel_folder, tmp_path):
    """`autotune tune` with real trials; the ranks run in the same environment and find the trial program by its path."""
    assert _install(venv, wheel_folder, "--no-deps").returncode == 0
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    tuned = _run(venv / "bin/autotune", "tune", "quickstart", "--trials", "2", "--json", cwd=elsewhere, timeout=240)
    assert tuned.returncode == 0, tuned.stderr
    (pool,) = json.loads(tuned.stdout)
    assert pool["outcomes"]["COMPLETED"] == 2
    assert pool["best"]["metrics"]["tokens_per_s_per_gpu"] > 0
    assert (elsewhere / ".autotune" / "quickstart" / "mlflow.db").is_file()


def test_wheel_without_dependencies_works_outside_the_checkout(venv, wheel_folder):
    """As on a node that has everything else: the packages, their data and the console script are the wheel's own."""
    assert _install(venv, wheel_folder, "--no-deps").returncode == 0
    code = (
        f"{PACKAGES}; from importlib.metadata import distribution; found = distribution('megatron-autotune'); "
        "print([(entry.name, entry.value) for entry in found.entry_points], found.metadata['License-Expression'])"
    )
    found = _run(venv / "bin/python", "-c", code, cwd=venv)
    assert found.returncode == 0, found.stderr
    assert found.stdout.strip() == "[('autotune', 'autotune.cli:app')] Apache-2.0"
    assert os.access(venv / "bin/autotune", os.X_OK)
    assert _where(venv).startswith(str(venv))


def _vendor_torch(venv: Path, version: str) -> Path:
    """Puts a torch of the vendor's own build into the environment, in front of every other."""
    site = venv / "lib/python3.11/site-packages"
    (site / "torch").mkdir()
    module = site / "torch/__init__.py"
    module.write_text(f"__version__ = {version!r}  # the vendor's own build\n")
    info = site / f"torch-{version.replace('-', '_')}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n")
    (info / "INSTALLER").write_text("pip\n")
    (info / "RECORD").write_text(f"torch/__init__.py,,\n{info.name}/METADATA,,\n{info.name}/INSTALLER,,\n{info.name}/RECORD,,\n")
    return module


@pytest.mark.parametrize(
    "version",
    ["2.8.0a0+34c6371d24.nv25.8", "2.6.0", pytest.param("2.9.0+rocm7.0.0.git1b0d0f5e", marks=pytest.mark.acceptance)],
)
def test_torch_of_a_vendor_image_is_never_replaced(venv, wheel_folder, tmp_path, version):
    """NVIDIA's and AMD's images carry builds that are on no index, and pin them by a constraint file."""
    module = _vendor_torch(venv, version)
    before = (module.read_text(), module.stat().st_mtime_ns)
    (tmp_path / "constraint.txt").write_text(f"torch=={version}\n")
    installed = _install(venv, wheel_folder, PIP_CONSTRAINT=str(tmp_path / "constraint.txt"))
    assert installed.returncode == 0, installed.stderr
    assert "uninstalling" not in installed.stdout.lower()
    assert (module.read_text(), module.stat().st_mtime_ns) == before
    found = _run(venv / "bin/python", "-c", f"{PACKAGES}; import torch; print(torch.__version__)", cwd=venv)
    assert found.stdout.strip() == version


def test_torch_that_is_too_old_is_refused_by_name_and_kept(venv, wheel_folder, tmp_path):
    module = _vendor_torch(venv, "2.5.1+vendor")
    (tmp_path / "constraint.txt").write_text("torch==2.5.1+vendor\n")
    refused = _install(venv, wheel_folder, PIP_CONSTRAINT=str(tmp_path / "constraint.txt"))
    assert refused.returncode != 0
    said = refused.stdout + refused.stderr
    assert "megatron-autotune" in said and "torch>=2.6" in said, said
    assert "2.5.1+vendor" in said
    assert "2.5.1+vendor" in module.read_text()
    assert not (venv / "bin/autotune").exists()


def _as_nobody() -> tuple[str, ...]:
    """Prefix that runs a command without any right of root; empty where this process has none to begin with."""
    if os.geteuid() != 0:
        return ()
    if shutil.which("setpriv") is None:
        pytest.skip("root without setpriv: cannot become another user")
    return ("setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups", "--inh-caps=-all", "--bounding-set=-all")


@pytest.fixture
def home() -> Iterator[Path]:
    """A home folder of a user who is not root; pytest's own folders are closed to others."""
    folder = Path(tempfile.mkdtemp(prefix="autotune-home-"))
    if os.geteuid() == 0:
        os.chown(folder, NOBODY, NOBODY)
    yield folder
    shutil.rmtree(folder)


def _python_for(prefix: tuple[str, ...]) -> str:
    """A Python 3.11 that the user without root can run: this one may lie in root's home."""
    for python in (os.path.realpath(sys.executable), "/usr/bin/python3.11", "/usr/local/bin/python3.11"):
        with tempfile.TemporaryDirectory() as folder:
            os.chmod(folder, 0o755)
            # By way of a shell: setpriv itself still reaches into closed folders, what it starts does not.
            command = (*prefix, "sh", "-c", '"$0" -c "import venv, ensurepip"', python)
            if _run(*command, cwd=Path(folder)).returncode == 0:
                return python
    pytest.skip("no Python 3.11 that a user without root can run")


def test_without_root_into_a_home_folder(home, wheel_folder, dependencies):
    """A user who may write into the home folder and nowhere else; dependencies as in the other quick tests."""
    prefix = _as_nobody()
    venv = _venv(home / "venv", dependencies, _python_for(prefix), prefix)
    if _run(*prefix, venv / "bin/python", "-c", "import pip, pydantic", cwd=home).returncode:
        pytest.skip("the environment that runs the tests lies where a user without root cannot read")
    shutil.copytree(wheel_folder, home / "wheels")
    (home / "wheels").chmod(0o755)
    installed = _install(venv, home / "wheels", prefix=prefix, HOME=str(home))
    assert installed.returncode == 0, installed.stderr
    assert _where(venv, prefix).startswith(str(home))
    assert (venv / "bin/autotune").stat().st_uid == (NOBODY if prefix else os.geteuid())


@pytest.mark.acceptance
@pytest.mark.timeout(1200)
def test_everything_from_a_wheel_folder_without_network(tmp_path, wheel_folder):
    """docs/install.md, "Without network": the lock's wheels, collected on a machine with an index, installed without one."""
    wheels = tmp_path / "wheels"
    collected = subprocess.run(
        [sys.executable, "-m", "pip", "download", "--quiet", "-d", wheels, "-r", ROOT / "requirements/lock.txt"],
        capture_output=True, text=True, timeout=900, check=False,
    )  # fmt: skip
    if collected.returncode:
        pytest.skip(f"no package index to collect wheels from: {collected.stderr.strip()[-200:]}")
    shutil.copytree(wheel_folder, wheels, dirs_exist_ok=True)
    made = _run(sys.executable, "-m", "venv", tmp_path / "venv", cwd=tmp_path, timeout=120)
    assert made.returncode == 0, made.stderr
    command = (tmp_path / "venv/bin/python", "-m", "pip", "install", "--find-links", wheels, "-c", ROOT / "requirements/lock.txt")
    installed = _run(*command, "megatron-autotune", cwd=tmp_path, env=_environment(**OFFLINE), timeout=900)
    assert installed.returncode == 0, installed.stderr
    found = _run(tmp_path / "venv/bin/python", "-c", f"{PACKAGES}; import torch, ray, optuna, megatron.core", cwd=tmp_path)
    assert found.returncode == 0, found.stderr


@pytest.mark.acceptance
@pytest.mark.timeout(1200)
def test_make_install_without_root(home):
    """docs/install.md, "Without root": the first command of the README, by a user with a home folder only."""
    prefix = _as_nobody()
    python = _python_for(prefix)
    copied = _run("git", "clone", "--quiet", ROOT, home / "checkout", cwd=ROOT)
    assert copied.returncode == 0, copied.stderr
    if prefix:
        _run("chown", "-R", f"{NOBODY}:{NOBODY}", home / "checkout", cwd=home)
    environment = {**os.environ, "HOME": str(home)}
    made = _run(*prefix, "make", "install", f"PYTHON={python}", cwd=home / "checkout", env=environment, timeout=900)
    assert made.returncode == 0, made.stderr[-2000:]
    again = _run(*prefix, "make", "install", f"PYTHON={python}", cwd=home / "checkout", env=environment)
    assert "Nothing to be done" in again.stdout, "the second run must reuse the environment"
