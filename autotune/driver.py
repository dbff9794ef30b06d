"""The part of a study that runs on Ray: slots, one Tuner, signals. Import it only inside a `RaySession`."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from ray import tune
from ray.tune.error import TuneError

from autotune.errors import InfrastructureError
from autotune.node_agent import AgentSetup
from autotune.placement import Slots
from autotune.pool_study import STOPPED_BY_USER, PoolStudy, Proposal
from autotune.ray_session import RaySession, pool_labels
from autotune.searcher import StudySearcher
from autotune.spec import StudySpec
from autotune.trial import MegatronTrial
from launchers.base import Launcher

# The slots hold all CPUs and GPUs, and Tune wants some resource: every cluster's head node has this one.
_ON_HEAD_NODE = {"node:__internal_head__": 0.001}
_NO_CHECKPOINTS = tune.CheckpointConfig(checkpoint_frequency=0, checkpoint_at_end=False)


def drive(
    spec: StudySpec,
    launcher: Launcher,
    log_root: Path,
    session: RaySession,
    studies: list[PoolStudy],
    on_launch: Callable[[PoolStudy, Proposal], None],
) -> None:
    """Let Ray Tune run the studies' trials until every study has ended.

    Raises:
        InfrastructureError: where a pool's nodes cannot be had or Ray Tune fails.
    """
    slots = Slots(session, spec.name)
    try:
        for study in studies:
            if not study.end_reason:
                slots.open(AgentSetup(study.pool, launcher.preload, pool_labels(study.pool)))
        searcher = StudySearcher(spec, launcher, studies, slots, log_root, on_launch)
        with session.watched(_give_up), _signals(searcher, slots.end_all):
            _fit(searcher, session.scratch / "tune")
    finally:
        slots.close()


def _fit(searcher: StudySearcher, scratch: Path) -> None:
    """One Tuner for everything; its own state is disposable and lies in the session's scratch folder."""
    tuner = tune.Tuner(
        tune.with_resources(MegatronTrial, tune.PlacementGroupFactory([_ON_HEAD_NODE])),
        tune_config=tune.TuneConfig(search_alg=searcher, num_samples=-1, reuse_actors=True),
        run_config=tune.RunConfig(name="study", storage_path=str(scratch), verbose=0, checkpoint_config=_NO_CHECKPOINTS),
    )
    try:
        tuner.fit()
    except TuneError as error:
        raise InfrastructureError(f"Ray Tune ended: {error}", "`autotune resume` goes on with the study") from error


@contextmanager
def _signals(searcher: StudySearcher, end_trials: Callable[[], None]) -> Iterator[None]:
    """The first Ctrl-C (or SIGTERM, SIGHUP) ends running trials and the study cleanly, the second one the process at once."""
    asked = threading.Event()

    def handler(_number: int, _frame: FrameType | None) -> None:
        if asked.is_set():
            # The session guard and the supervisors end what is left.
            os._exit(130)
        searcher.stop_reason = STOPPED_BY_USER
        asked.set()

    def stopper() -> None:
        asked.wait()
        if searcher.stop_reason:
            end_trials()

    thread = threading.Thread(target=stopper, name="stop-on-signal", daemon=True)
    thread.start()
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)
        asked.set()


def _give_up(what: str) -> None:
    """Ray itself is gone, and calls into it would block: end now; the storage is safe, `resume` closes what is open."""
    print(f"error: {what}; `autotune resume` goes on with the study", file=sys.stderr, flush=True)
    os._exit(1)
