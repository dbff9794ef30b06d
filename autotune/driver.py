"""The part of a study that runs on Ray: slots and one Tuner. Import it only inside a `RaySession`."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable
from pathlib import Path

from ray import tune
from ray.exceptions import RayError
from ray.tune.error import TuneError

from autotune.errors import InfrastructureError
from autotune.node_agent import AgentSetup
from autotune.node_figures import measure_nodes
from autotune.nodes import check_nodes
from autotune.placement import Slots
from autotune.pool_study import PoolStudy
from autotune.proposal import Proposal
from autotune.ray_session import RaySession, pool_labels
from autotune.searcher import StudySearcher
from autotune.simulation import is_simulated
from autotune.spec import StudySpec
from autotune.stop_signals import StopSignals, give_up
from autotune.time_limits import STARTUP_S
from autotune.trial import MegatronTrial

__all__ = ["check_nodes", "drive"]

# The slots hold all CPUs and GPUs, and Tune wants some resource: every cluster's head node has this one.
_ON_HEAD_NODE = {"node:__internal_head__": 0.001}
_NO_CHECKPOINTS = tune.CheckpointConfig(checkpoint_frequency=0, checkpoint_at_end=False)


def drive(
    spec: StudySpec,
    log_root: Path,
    session: RaySession,
    studies: list[PoolStudy],
    on_launch: Callable[[PoolStudy, Proposal], None],
    stop: StopSignals,
) -> None:
    """Let Ray Tune run the studies' trials until every study has ended, or the user stops them.

    Args:
        spec: What to do.
        log_root: Where the ranks' logs go.
        session: Its pools are the machines of the studies that have not ended: a slot each.
        studies: All studies.
        on_launch: Hears of each launch.
        stop: What the user wants.

    Raises:
        KeyboardInterrupt: where the user stops it before the first trial.
        InfrastructureError: where a pool's nodes cannot be had or Ray Tune fails.
    """
    with session.watched(_ray_is_gone), Slots(session, spec.name) as slots:
        stop.arm()  # Ray's C++ handler of SIGTERM comes before ours
        with stop.interruptible():
            for host in session.pools:
                own = [study for study in studies if study.pool.name == host.name and not study.end_reason]
                slot = slots.open(AgentSetup(host, own[0].launcher.preload, pool_labels(host), session.gpus_of(host)))
                new = [study for study in own if study.refit.knows_nothing]
                if new and not is_simulated(spec):
                    folder = log_root / host.name / "figures"
                    figures = measure_nodes(slot, own[0].launcher, spec.measurement.startup_timeout_s or STARTUP_S, folder)
                    for study in new:
                        study.refit.seed(figures)
        searcher = StudySearcher(spec, studies, slots, log_root, on_launch, stop.asked)
        with stop.calling(slots.end_all):
            _fit(searcher, session.scratch / "tune")


def _fit(searcher: StudySearcher, scratch: Path) -> None:
    """Tune until the searcher has nothing more, with another Tuner where one ended over a worker that Ray itself had killed."""
    for number in itertools.count():
        cause = _fit_once(searcher, scratch, f"study-{number}")
        if cause is None:
            return
        if not searcher.in_flight:  # no trial ended with it: another Tuner would fare no better
            raise InfrastructureError(f"Ray Tune ended: {cause}", "`autotune resume` goes on with the study") from cause
        searcher.abandon(cause)
        gc.collect()  # what the ended Tuner refers to in Ray goes while Ray runs: later it would end this process


def _fit_once(searcher: StudySearcher, scratch: Path, name: str) -> RayError | None:
    """One Tuner for everything; its own state is disposable and lies in the session's scratch folder.

    Returns:
        How a worker ended of which Tune could make no sense, such as by Ray's memory monitor; None where Tune ended as it should.
    """
    tuner = tune.Tuner(
        tune.with_resources(MegatronTrial, tune.PlacementGroupFactory([_ON_HEAD_NODE])),
        tune_config=tune.TuneConfig(search_alg=searcher, num_samples=-1, reuse_actors=True),
        run_config=tune.RunConfig(name=name, storage_path=str(scratch), verbose=0, checkpoint_config=_NO_CHECKPOINTS),
    )
    try:
        tuner.fit()
    except TuneError as error:
        raise InfrastructureError(f"Ray Tune ended: {error}", "`autotune resume` goes on with the study") from error
    except RuntimeError as error:
        if isinstance(error.__cause__, RayError):
            return error.__cause__.with_traceback(None)
        raise
    return None


def _ray_is_gone(what: str) -> None:
    """Calls into Ray would block."""
    give_up(f"{what}; `autotune resume` goes on with the study")
