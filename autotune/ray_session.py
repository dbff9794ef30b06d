"""Where Ray runs: a private one for this study, or the cluster whose address the user gave.

`ray` must not be imported before `RaySession` has set the environment that Ray reads on import.
"""

from __future__ import annotations

import itertools
import os
import secrets
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil

from autotune import session_guard
from autotune.errors import InfrastructureError
from autotune.session_guard import SESSION_VARIABLE
from search_spaces.hardware import GPU_SELECTION, PoolSpec

NAMESPACE = "autotune"
_MOST_SOCKET_CHARACTERS = 107
_LONGEST_SOCKET = len("/session_2026-11-30_03-37-24_279909_4194304/sockets/plasma_store")
_RANDOM_CHARACTERS = 8  # of `mkdtemp`
_OBJECT_STORE_BYTES = 200 * 1024 * 1024

# Ray's and Tune's own reporting is off: results are in Optuna's storage and MLflow; Ctrl-C is the study's to handle.
_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",
    "TUNE_DISABLE_SIGINT_HANDLER": "1",
    "TUNE_GLOBAL_CHECKPOINT_S": "3600",
    "RAY_TRAIN_V2_ENABLED": "0",
    "RAY_AIR_NEW_OUTPUT": "0",
    "RAY_DEDUP_LOGS": "0",
}


def pool_labels(pool: PoolSpec) -> dict[str, str]:
    """Ray node labels that a pool's nodes carry: its own, or `autotune-pool-<name>=yes` (a node may serve several pools)."""
    return dict(pool.labels) or {f"autotune-pool-{pool.name}": "yes"}


class RaySession:
    """Starts or joins Ray; on exit shuts down only what it started.

    A private Ray has its own short folder, listens on loopback only, wants a token, has no dashboard, a 200 MB object store and
    only the GPUs in `gpus`. Its daemons end with this process (parent-death signal), so it must be
    entered on the main thread.

    Attributes:
        private: Whether it is this study's own.
        pools: The study's pools.
        scratch: A short temporary folder of this process, removed at its end.
    """

    def __init__(self, pools: tuple[PoolSpec, ...], address: str | None = None, gpus: tuple[str, ...] = ()) -> None:
        self.private = address is None
        self.pools = pools
        self._address = address
        self._visible = gpus if self.private else ()
        self._cleanup = ExitStack()
        self.scratch = _temporary_folder()

    def __enter__(self) -> Self:
        """Start or join.

        Raises:
            InfrastructureError: where the cluster cannot be reached or two pools of one machine want different labels.
        """
        with self._cleanup:  # whatever goes wrong below is undone; what went well is kept for the end
            self._cleanup.callback(shutil.rmtree, self.scratch, ignore_errors=True)
            self._set_environment(_ENVIRONMENT)
            if self.private:
                self._start_private()
            else:
                self._join()
            self._cleanup = self._cleanup.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Leave the cluster; end it if it is private."""
        self._cleanup.close()

    @contextmanager
    def watched(self, on_lost: Callable[[str], None]) -> Iterator[None]:
        """Call `on_lost`, in another thread, when this Ray's raylet dies: calls into Ray would then block for long."""
        import ray

        raylet_pid = ray._private.worker.global_worker.node.all_processes.get("raylet") if self.private else None
        if not raylet_pid:
            yield
            return
        descriptor = os.pidfd_open(raylet_pid[0].process.pid)
        stop_read, stop_write = os.pipe()

        def watch() -> None:
            ready, _, _ = select.select([descriptor, stop_read], [], [])
            if stop_read not in ready:
                on_lost("Ray's own daemon (raylet) died")

        thread = threading.Thread(target=watch, name="watch-raylet", daemon=True)
        thread.start()
        try:
            yield
        finally:
            os.write(stop_write, b"x")
            thread.join()
            for end in (descriptor, stop_read, stop_write):
                os.close(end)

    def _set_environment(self, values: Mapping[str, str]) -> None:
        for name, value in values.items():
            self._cleanup.callback(_restore_variable, name, os.environ.get(name))
            os.environ[name] = value

    def _start_private(self) -> None:
        gpus = self._shares()
        self._set_environment(
            {
                "RAY_AUTH_MODE": "token",
                "RAY_AUTH_TOKEN": secrets.token_hex(32),
                # Ray's own switch for single-machine use: every daemon binds to loopback.
                "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
                # Ray's processes keep their start environment readable, by which the session guard knows them.
                "SPT_NOENV": "1",
                "CUDA_VISIBLE_DEVICES": ",".join(gpus),
            }
        )
        session_id = secrets.token_hex(8)
        folder = self.scratch
        self._cleanup.enter_context(_guard(session_id, folder))
        self._set_environment({SESSION_VARIABLE: session_id})
        import ray

        self._cleanup.callback(ray.shutdown)
        with _signals_left_to_us(), _start_errors():
            ray.init(
                address="local",
                namespace=NAMESPACE,
                num_cpus=max(os.cpu_count() or 1, len(self.pools)),
                num_gpus=len(gpus),
                labels=_private_labels(self.pools),
                include_dashboard=False,
                object_store_memory=_OBJECT_STORE_BYTES,
                log_to_driver=False,
                logging_level="error",
                _temp_dir=str(folder),
                _node_ip_address="127.0.0.1",
            )

    def _join(self) -> None:
        import ray

        self._cleanup.callback(ray.shutdown)
        try:
            with _signals_left_to_us():
                ray.init(address=self._address, namespace=NAMESPACE, log_to_driver=False, logging_level="error")
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise InfrastructureError(
                f"no Ray cluster at {self._address}: {error}", "check the address with `ray status --address ...`"
            ) from error
        _check_job_environment(ray.get_runtime_context().runtime_env.get("env_vars") or {})

    def gpus_of(self, pool: PoolSpec) -> tuple[str, ...]:
        """The GPUs of a pool on a private Ray, where pools take turns with the same ones; empty where Ray chooses."""
        return self._visible[: pool.gpus_per_node] if pool.device == "cuda" else ()

    def _shares(self) -> tuple[str, ...]:
        """What Ray may hand out: as many as all pools want together, so that each can hold its own from the start."""
        wanted = [pool.gpus_per_node for pool in self.pools if pool.device == "cuda"]
        if len(self._visible) < max(wanted, default=0):
            return self._visible  # too few: the pool that wants more is refused when its slot is opened
        return tuple(itertools.islice(itertools.cycle(self._visible), sum(wanted)))


def _private_labels(pools: tuple[PoolSpec, ...]) -> dict[str, str]:
    """The one node of a private Ray carries every pool's labels; pools that share it take turns."""
    labels: dict[str, str] = {}
    for pool in pools:
        for name, value in pool_labels(pool).items():
            if labels.setdefault(name, value) != value:
                raise InfrastructureError(
                    f"pool {pool.name!r} wants label {name}={value}, another pool {name}={labels[name]}, and this is one machine",
                    "give the address of a Ray cluster, or take the labels out of the pools",
                )
    return labels


def _check_job_environment(variables: Mapping[str, str]) -> None:
    """Refuse a choice of GPUs that was given to the whole Ray job: agents would inherit it on every node."""
    if named := [name for name in GPU_SELECTION if name in variables]:
        raise InfrastructureError(
            f"the runtime environment of this Ray job sets {named[0]}={variables[named[0]]} on every node",
            "leave it out of the job's `env_vars`: Ray gives each agent the GPUs of its own node",
        )


@contextmanager
def _start_errors() -> Iterator[None]:
    try:
        yield
    except (OSError, RuntimeError, ValueError) as error:
        raise InfrastructureError(f"a private Ray does not start here: {error}", "`autotune doctor` looks for the cause") from error


@contextmanager
def _signals_left_to_us() -> Iterator[None]:
    """Ray sets no handler of its own inside, and the processes that it starts ignore a terminal that closes, as they do Ctrl-C.

    They get a terminal's signals as we do, and a study must end before its Ray.
    """
    from ray._private import utils

    set_handler, utils.set_sigterm_handler = utils.set_sigterm_handler, lambda _handler: None
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})
    try:
        yield
    finally:
        utils.set_sigterm_handler = set_handler
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def _guard(session_id: str, folder: Path) -> Iterator[None]:
    """A process that ends this Ray's processes when we end, however that comes; see `session_guard`."""
    guard = subprocess.Popen(
        [sys.executable, "-I", "-S", str(Path(session_guard.__file__).resolve()), session_id, str(folder)],
        stdin=subprocess.PIPE,
        start_new_session=True,
        env={},
    )
    try:
        yield
    finally:
        if guard.stdin is not None:
            guard.stdin.close()
        guard.wait(timeout=30.0)


def _temporary_folder() -> Path:
    """A folder named by this process, short enough for Ray's Unix sockets; those of ended processes are removed."""
    prefix = f"autotune-{os.getuid()}-"
    roots = [Path(tempfile.gettempdir()), Path("/tmp")]
    for old in (old for root in roots for old in root.glob(f"{prefix}*")):
        pid = old.name.split("-")[2]
        if pid.isdigit() and not psutil.pid_exists(int(pid)):
            shutil.rmtree(old, ignore_errors=True)
    prefix += f"{os.getpid()}-"
    fits = len(str(roots[0] / prefix)) + _RANDOM_CHARACTERS + _LONGEST_SOCKET <= _MOST_SOCKET_CHARACTERS
    return Path(tempfile.mkdtemp(prefix=prefix, dir=roots[0] if fits else roots[1]))


def _restore_variable(name: str, value: str | None) -> None:
    if value is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = value
