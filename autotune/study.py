"""Runs a study: opens storage, tracking, Ray and slots, lets Ray Tune drive, and ends every pool with a reason."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Protocol

from optuna.storages import BaseStorage

from autotune import pareto
from autotune.detect import usable_gpus
from autotune.errors import SpecError
from autotune.guards import UnkeptGuardError
from autotune.lacking import lacking_words
from autotune.machines import find_gpu
from autotune.one_driver import only_driver
from autotune.parent_run import ParentOf
from autotune.pool_study import STOPPED_BY_USER, PoolStudy
from autotune.power_rights import Probe, Rights, ask_cluster, ask_here, check_rights, without
from autotune.proposal import Proposal
from autotune.ray_session import RaySession
from autotune.records import TrialRecord
from autotune.results import PoolResults, keep_notes, study_name
from autotune.simulation import host_pool, is_simulated, note, twin_launcher
from autotune.spec import StudySpec, node_words, pool_key
from autotune.state_folder import StateFolder
from autotune.stop_signals import StopSignals, give_up
from autotune.storage import drop_stale_lock, failing_as_ours, open_storage
from autotune.time_limits import check_time_limits, predicted_step_s
from autotune.tracking import Tracker
from launchers.base import Launcher
from search_spaces.hardware import PoolSpec

_TRACKER_CLOSE_S = 60.0


class Listener(Protocol):
    """Hears what happens while a study runs; called from the driver's main thread."""

    def opened(self, studies: list[PoolStudy]) -> None:
        """All pools' studies are open; nothing runs yet."""

    def launched(self, study: PoolStudy, proposal: Proposal) -> None:
        """A trial is being launched."""

    def ended(self, study: PoolStudy, record: TrialRecord) -> None:
        """A trial ended, or a proposal was refused."""


def load_launcher(name: str) -> Launcher:
    """The launcher of that name, or of `package.module:Class`.

    Raises:
        SpecError: where there is none.
    """
    path = {"megatron_core": "launchers.megatron_core.launcher:MegatronCoreLauncher"}.get(name, name)
    module, _, attribute = path.partition(":")
    try:
        launcher: Launcher = getattr(importlib.import_module(module), attribute)()
    except (ImportError, AttributeError, ValueError) as error:
        raise SpecError(
            "launcher", name, f"cannot be loaded: {error}", "`megatron_core`, or `package.module:Class` of your own"
        ) from None
    return launcher


def check_runnable(spec: StudySpec) -> None:
    """Refuse what must show before anything is made.

    Raises:
        SpecError: where the launcher cannot be loaded.
    """
    for pool in spec.studied_pools:
        launcher_of(spec, pool)


def launcher_of(spec: StudySpec, pool: PoolSpec) -> Launcher:
    """What runs a pool's trials.

    Raises:
        SpecError: where there is no such launcher.
    """
    return twin_launcher(spec, pool) if is_simulated(spec) else load_launcher(spec.launcher)


@contextmanager
def driving(spec: StudySpec, folder: StateFolder) -> Iterator[BaseStorage]:
    """Be the only driver that writes to the folder and to the study's storage, which is given.

    Raises:
        SpecError: where another driver runs it.
    """
    with folder.locked():
        drop_stale_lock(spec.storage, folder.path)
        storage = open_storage(spec.storage, folder.path)
        with only_driver(storage, [study_name(spec, pool) for pool in spec.studied_pools], give_up):
            yield storage


def open_studies(
    spec: StudySpec,
    folder: StateFolder,
    storage: BaseStorage,
    on_record: Callable[[PoolStudy, TrialRecord], None],
    address: str | None = None,
) -> list[PoolStudy]:
    """Open the studies of every pool, without Ray; knobs that its nodes do not let us set are dropped by name.

    Raises:
        SpecError: where the storage holds something else under a study's name, a pool has nothing that keeps the guards, or the
            baseline would reach the study's own time limits.
    """
    notes = check_rights(spec, _prober(spec, address))
    studies: list[PoolStudy] = []
    kept_in = None if is_simulated(spec) else folder.path.parent
    for pool in spec.pools:
        dropped = notes.get(pool.name, [])
        open_one = partial(_open_one, without(spec, dropped), storage=storage, on_record=on_record, kept_in=kept_in)
        opened, left_out = _at_node_counts(pool, open_one)
        front = [pareto.NOTE] if spec.pareto else []
        for study in opened:
            check_baseline_time(spec, study)
            machines = study.refit.machines
            lacking = lacking_words(machines.gpu, study.table, study.baseline) if machines is not None else []
            keep_notes(storage, study.name, note(spec) + dropped + front + left_out + lacking)
        studies += opened
    return studies


def _open_one(
    spec: StudySpec,
    pool: PoolSpec,
    storage: BaseStorage,
    on_record: Callable[[PoolStudy, TrialRecord], None],
    kept_in: Path | None,
) -> PoolStudy:
    return PoolStudy(spec, pool, launcher_of(spec, pool), storage, on_record, kept_in)


def check_baseline_time(spec: StudySpec, study: PoolStudy) -> None:
    """Refuse, before anything is launched, time limits below what the study's baseline is predicted to take.

    Raises:
        SpecError: with the limit and what is predicted.
    """
    if not study.records and not study.violations(study.baseline):
        check_time_limits(spec.measurement, predicted_step_s(study.pool, study.refit.metrics(study.baseline)))


def _at_node_counts(pool: PoolSpec, open_one: Callable[[PoolSpec], PoolStudy]) -> tuple[list[PoolStudy], list[str]]:
    """A pool's studies, one for each node count at which something keeps the guards, and why the others were left out.

    Raises:
        UnkeptGuardError: there is no such node count.
    """
    opened: list[PoolStudy] = []
    unkept: list[tuple[PoolSpec, UnkeptGuardError]] = []
    for at_count in pool.at_each_node_count():
        try:
            opened.append(open_one(at_count))
        except UnkeptGuardError as error:
            unkept.append((at_count, error))
    if not opened:
        raise unkept[0][1]
    return opened, [f"Not tuned on {node_words(at_count)}: {error}; {error.hint}." for at_count, error in unkept]


def _prober(spec: StudySpec, address: str | None) -> Probe:
    if is_simulated(spec):
        return lambda pool: [Rights(*find_gpu(pool.gpu, f"pools.{pool.name}.gpu", spec.hardware).power_limit_w)]
    return ask_cluster(spec, address) if address else lambda pool: ask_here(_gpus(spec))(pool)  # noqa: PLW0108  asks nvidia-smi


def prepare_study(spec: StudySpec, folder: StateFolder, address: str | None = None) -> None:
    """Check that the study can be opened, and keep its spec, so that another process can go on with it.

    Raises:
        AutotuneError: where another driver runs it, or the storage holds something else under its name.
    """
    check_runnable(spec)
    with driving(spec, folder) as storage:
        open_studies(spec, folder, storage, lambda study, record: None, address)
        folder.write_spec(spec)


def run_study(spec: StudySpec, folder: StateFolder, listener: Listener, *, address: str | None = None) -> list[PoolResults]:
    """Run, or go on with, a study until every pool has ended.

    Args:
        spec: What to do.
        folder: Where its state is.
        listener: Progress.
        address: Ray cluster to join; None starts a private Ray.

    Returns:
        What every pool's study showed, with the reason of its end.

    Raises:
        AutotuneError: where the study cannot start or its infrastructure is lost.
    """
    check_runnable(spec)
    with failing_as_ours(), StopSignals() as stop, ExitStack() as stack:
        with stop.interruptible():
            storage = stack.enter_context(driving(spec, folder))
        tracker = Tracker(spec.tracking_uri, folder.path)
        try:
            return _run(spec, folder, storage, listener, tracker, address, stop)
        finally:
            tracker.close(_TRACKER_CLOSE_S)


def _run(
    spec: StudySpec,
    folder: StateFolder,
    storage: BaseStorage,
    listener: Listener,
    tracker: Tracker,
    address: str | None,
    stop: StopSignals,
) -> list[PoolResults]:
    def on_record(study: PoolStudy, record: TrialRecord) -> None:
        tracker.log_trial(record)
        _keep_best(spec, folder, study)
        listener.ended(study, record)

    studies = open_studies(spec, folder, storage, on_record, address)
    # Only now: a study that the storage refuses must not replace the spec of the one that it holds.
    folder.write_spec(spec)
    runs = {study.name: ParentOf(tracker, spec, study) for study in studies}
    listener.opened(studies)
    if any(not study.end_reason for study in studies):
        try:
            _run_on_ray(spec, folder, listener, address, stop, studies, runs)
        except KeyboardInterrupt:
            for study in studies:
                study.end_reason = study.end_reason or STOPPED_BY_USER
    for study in studies:
        study.close()
        _keep_best(spec, folder, study)
        runs[study.name].close()
    return [study.results() for study in studies]


def _keep_best(spec: StudySpec, folder: StateFolder, study: PoolStudy) -> None:
    """The best need not be the trial that has just ended: confirming may show that of another one."""
    folder.write_best(pool_key(spec, study.pool), study.best, note(spec))


def _gpus(spec: StudySpec) -> tuple[str, ...]:
    """GPUs for a private Ray; none where every pool runs on CPU."""
    if all(host_pool(spec, pool).device == "cpu" for pool in spec.pools):
        return ()
    return usable_gpus(spec.gpus, os.environ.get("CUDA_VISIBLE_DEVICES"))


def _run_on_ray(
    spec: StudySpec,
    folder: StateFolder,
    listener: Listener,
    address: str | None,
    stop: StopSignals,
    studies: list[PoolStudy],
    runs: dict[str, ParentOf],
) -> None:
    hosts = _hosts(spec, studies)
    with ExitStack() as stack:
        session = stack.enter_context(RaySession(hosts, address, _gpus(spec)))  # Ray does not bear an exception while it starts
        with stop.interruptible():
            # Only now: Ray reads its environment when it is imported.
            driver = importlib.import_module("autotune.driver")
            driver.check_nodes(hosts)
            for run in runs.values():
                run.open()

        def on_launch(study: PoolStudy, proposal: Proposal) -> None:
            runs[study.name].foretell(proposal.forecast)
            listener.launched(study, proposal)

        driver.drive(spec, folder.log_root, session, studies, on_launch, stop)


def _hosts(spec: StudySpec, studies: list[PoolStudy]) -> tuple[PoolSpec, ...]:
    """The machines of every pool that has something left to run, as many nodes as its largest such study takes."""
    left = sorted((study.pool for study in studies if not study.end_reason), key=lambda pool: pool.nodes)
    largest = {pool.name: pool for pool in left}
    return tuple(host_pool(spec, largest[pool.name]) for pool in spec.pools if pool.name in largest)
