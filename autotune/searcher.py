"""StudySearcher: one Ray Tune Searcher for all pools' studies, each on Optuna's ask and tell.

Tune asks it for the next trial; it answers with a pool that has a free slot and something left to try. Refusals never reach Tune.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from ray.exceptions import RayError
from ray.tune.search import Searcher

from autotune.confirm_time import soaking, steps_to_warm_up
from autotune.errors import InfrastructureError
from autotune.guards import boards_guards
from autotune.judge import as_asked
from autotune.lost_actors import names_a_node, verdict_of_loss
from autotune.node_agent import SlotRequest
from autotune.placement import Slot, Slots
from autotune.pool_study import STOPPED_BY_USER, PoolStudy
from autotune.power_domains import share_power
from autotune.proposal import Proposal
from autotune.records import Phase, TrialResult
from autotune.simulation import WALL_LIMITS, host_pool, is_simulated, starting_at
from autotune.spec import StudySpec, pool_key
from autotune.spec_parts import Measurement, Soaking
from autotune.study_clock import StudyClock
from autotune.time_limits import limits_of, predicted_step_s
from autotune.trial import RESULT_KEY
from launchers.limits import Limits
from launchers.outcome import Outcome, Verdict

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _InFlight:
    study: PoolStudy
    proposal: Proposal
    slot: Slot
    log_folder: Path


class StudySearcher(Searcher):
    """Multiplexes the pools' studies onto their slots.

    Attributes:
        stop_reason: Why nothing more is launched; empty while it goes on.
        in_flight: Running trials by Tune's trial id.
    """

    def __init__(
        self,
        spec: StudySpec,
        studies: list[PoolStudy],
        slots: Slots,
        log_root: Path,
        on_launch: Callable[[PoolStudy, Proposal], None],
        stopped_by_user: threading.Event,
    ) -> None:
        super().__init__()
        self.stop_reason = ""
        self.in_flight: dict[str, _InFlight] = {}
        self._spec = spec
        self._studies = list(studies)
        self._slots = slots
        self._log_root = log_root
        self._on_launch = on_launch
        self._stopped_by_user = stopped_by_user
        virtual = is_simulated(spec)
        before_s = max((record.ended_s for study in studies for record in study.records), default=0.0) if virtual else 0.0
        self._clock = StudyClock(max(time.time(), before_s), virtual=virtual)
        self._deadline_s = self._clock.opened_s + spec.budget.wall_time_s if spec.budget.wall_time_s else None
        for study in studies:
            study.stopping.follow(partial(self._clock.now_s, study.pool.name), self._deadline_s)
        self._first_trials: set[str] = set()
        self._neighbours = {
            study.name: {
                other.name for other in studies if other is not study and share_power(study.pool, other.pool, spec.power_domains)
            }
            for study in studies
        }
        self._held: dict[str, Proposal] = {}

    def suggest(self, trial_id: str) -> dict[str, Any] | str | None:
        """The next trial's config, None where no slot is free now, FINISHED at the end."""
        if self._stopped_by_user.is_set():
            self.stop_reason = STOPPED_BY_USER
        for study in self._studies:
            study.end_reason = study.end_reason or self.stop_reason or self._out_of_time(study)
            if study.end_reason and (held := self._held.pop(study.name, None)) is not None:
                held.withdraw()
            config = None if study.end_reason else self._launch(trial_id, study)
            if config is not None:
                return config
        waiting = self.in_flight or any(not study.end_reason for study in self._studies)
        return None if waiting else Searcher.FINISHED

    def on_trial_complete(self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False) -> None:
        """End a trial through its study's funnel, and see to its slot."""
        flight = self.in_flight.pop(trial_id, None)
        if flight is None:
            return
        shown = (result or {}).get(RESULT_KEY)
        self._end(flight, shown if isinstance(shown, TrialResult) else self._without_worker(flight))

    def abandon(self, cause: RayError) -> None:
        """End every running trial: Tune itself ended, because it could not make sense of how one of its workers did."""
        for trial_id in list(self.in_flight):
            flight = self.in_flight.pop(trial_id)
            self._end(flight, self._without_worker(flight, cause))

    def _without_worker(self, flight: _InFlight, cause: RayError | None = None) -> TrialResult:
        """What a trial shows whose Tune worker died; memory that ran out on its node is what it did."""
        slot = flight.slot
        died = self._slots.end_trial(slot)
        verdict = Verdict(Outcome.LOST, "the Tune worker of this trial died")
        if cause is not None and names_a_node(cause, slot.node_ids[: slot.used]):
            verdict = verdict_of_loss(cause, "the Tune worker of this trial")
        elif died is not None:
            verdict = verdict_of_loss(died, "an agent")
        return TrialResult(verdict.outcome, verdict.detail, log_folder=flight.log_folder, agent_failed=died is not None)

    def _end(self, flight: _InFlight, shown: TrialResult) -> None:
        broken = {witness.node_rank: witness.broken for witness in shown.witnesses if witness.broken}
        if (broken or shown.agent_failed or shown.outcome is Outcome.LOST) and not self._stopped_by_user.is_set():
            self._repair(flight, broken, shown.agent_failed)
        self._slots.release(flight.slot)
        if fatal := [witness.fatal for witness in shown.witnesses if witness.fatal]:
            flight.study.end_reason = f"infrastructure: {fatal[0]}"
        shown = as_asked(shown, flight.study.workload)
        record = flight.study.finish(flight.proposal, shown, stopped_by_user=self._stopped_by_user.is_set())
        self._clock.reach(record.ended_s, *self._waiting_for(flight.study, flight.proposal))
        self._reorder(flight.study)

    def _out_of_time(self, study: PoolStudy) -> str:
        """That a study's wall time is over, as the reason of its end; empty while it is not."""
        if self._deadline_s is None or self._clock.now_s(study.pool.name) <= self._deadline_s:
            return ""
        return f"budget: {self._spec.budget.wall_time_s:g} s of wall time"

    def save(self, checkpoint_path: str) -> None:
        """Nothing: Optuna's storage is the truth, Tune's state is disposable."""

    def restore(self, checkpoint_path: str) -> None:
        """Nothing, as `save`."""

    def __getstate__(self) -> dict[str, Any]:
        """Tune copies and pickles its searcher; slots and storages stay here."""
        return {}

    def _launch(self, trial_id: str, study: PoolStudy) -> dict[str, Any] | None:
        if self._must_wait(study, self._held.get(study.name)):
            return None
        slot = self._slots.lease(host_pool(self._spec, study.pool))
        if slot is None:
            return None
        proposal = self._held.pop(study.name, None) or study.propose()
        if proposal is not None and self._must_wait(study, proposal):
            self._held[study.name] = proposal
            proposal = None
        if proposal is None:
            self._slots.release(slot)
            return None
        proposal = replace(proposal, proposed_s=self._clock.now_s(*self._waiting_for(study, proposal)))
        slot.trial = f"{study.name}/{proposal.trial.number}"
        folder = self._log_root / pool_key(self._spec, study.pool) / f"trial-{proposal.trial.number:04d}"
        self.in_flight[trial_id] = _InFlight(study, proposal, slot, folder)
        self._on_launch(study, proposal)
        return {"agents": slot.trial_agents, "request": self._request(study, proposal, slot.trial, folder)}

    def _must_wait(self, study: PoolStudy, proposal: Proposal | None) -> bool:
        """Whether a trial of a study must not be launched now: a confirming one runs alone in the power domains of its pool.

        One that waits for that keeps the pools around it from launching others, so that it waits for running trials only, and all
        of these have limits.

        Args:
            study: Whose trial.
            proposal: What would be launched; None = what the study proposes next, its kind not known yet.
        """
        around = self._neighbours[study.name]
        running = [flight.proposal.phase for flight in self.in_flight.values() if flight.study.name in around]
        if proposal is not None and proposal.phase is Phase.CONFIRM:
            return bool(running)
        return Phase.CONFIRM in running or not around.isdisjoint(self._held)

    def _waiting_for(self, study: PoolStudy, proposal: Proposal) -> list[str]:
        """The pools whose other trials a trial waits for, and that wait for it."""
        around = self._neighbours[study.name] if proposal.phase is Phase.CONFIRM else ()
        return [study.pool.name, *(other.pool.name for other in self._studies if other.name in around)]

    def _request(self, study: PoolStudy, proposal: Proposal, trial: str, folder: Path) -> SlotRequest:
        confirming = proposal.phase is Phase.CONFIRM
        measurement = self._spec.measurement_of(confirming)
        left_s = self._deadline_s - self._clock.now_s(study.pool.name) if self._deadline_s is not None else None
        soak = soaking(self._spec, study.records, left_s) if confirming else None
        steps = measurement.steps
        if soak is not None:
            steps += steps_to_warm_up(soak, study.pool, proposal.config, study.records, proposal.predicted)
        first = study.pool.name not in self._first_trials
        self._first_trials.add(study.pool.name)
        limits = self._limits(study, proposal, measurement, soak, first=first)
        simulated = is_simulated(self._spec)
        job = study.launcher.job(study.workload, proposal.config, steps=steps, seed=self._spec.seed)
        return SlotRequest(
            trial=trial,
            program=study.launcher.program,
            job=starting_at(job, proposal.proposed_s) if simulated else job,
            limits=WALL_LIMITS if simulated else limits,
            virtual_limits=limits if simulated else None,
            log_folder=folder,
            measurement=measurement,
            gpu_power_limit_w=None if simulated else proposal.config.gpu_power_limit_w,
            beaten_s=proposal.beaten_s,
            spread=study.run_spread,
            guards=boards_guards(self._spec, study.pool, study.refit.machines.gpu) if study.refit.machines else (),
            soak=soak,
            most_steps=steps,
        )

    def _limits(
        self, study: PoolStudy, proposal: Proposal, measurement: Measurement, soak: Soaking | None, *, first: bool
    ) -> Limits:
        said_s, exploring = predicted_step_s(study.pool, proposal.predicted), self._spec.measurement.steps
        found = limits_of(measurement, said_s, steps=measurement.steps, exploring_steps=exploring, first=first)
        return replace(found, trial_s=found.trial_s + (soak.timeout_s if soak is not None else 0.0))

    def _repair(self, flight: _InFlight, broken: dict[int, str], agent_failed: bool) -> None:
        """A slot whose nodes can neither be had again nor be replaced ends its pool's studies; the others go on."""
        try:
            if broken:
                self._slots.leave(flight.slot, broken)
            else:
                self._slots.repair(flight.slot, anew=agent_failed)
        except InfrastructureError as error:
            for study in self._studies:
                if study.pool.name == flight.study.pool.name:
                    study.end_reason = study.end_reason or f"infrastructure: {error}"

    def _reorder(self, study: PoolStudy) -> None:
        """The pool that just ran goes last, so that pools on shared nodes take turns."""
        self._studies.remove(study)
        self._studies.append(study)
