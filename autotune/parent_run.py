"""What MLflow says of a study as a whole: the run above its trials."""

from __future__ import annotations

from autotune.forecast import Forecast
from autotune.pareto_text import front_lines
from autotune.pool_study import STOPPED_BY_USER, PoolStudy
from autotune.results import FORECAST
from autotune.spec import StudySpec
from autotune.tracking import ParentRun, Tracker


class ParentOf:
    """The MLflow parent run of one pool's study."""

    def __init__(self, tracker: Tracker, spec: StudySpec, study: PoolStudy) -> None:
        self._tracker = tracker
        self._study = study
        self._run_id: str | None = None
        started_with = {"recipes_left_out": "\n".join(study.starts.left_out), "earlier": study.results().earlier}
        self._parent = ParentRun(
            study=study.name,
            experiment=spec.name,
            pool=study.pool.name,
            nodes=study.pool.nodes,
            params={
                **study.workload.model.model_dump(exclude_defaults=True),
                **study.workload.model_dump(exclude={"model"}),
                "launcher": spec.launcher,
                "sampler": spec.sampler,
                "pareto": spec.pareto,
                "seed": spec.seed,
                "budget_trials": spec.budget.trials,
                "candidates": len(study.table),
            },
            tags={name: text for name, text in started_with.items() if text},
        )

    def open(self) -> None:
        """Open it, and log what MLflow does not have of earlier trials."""
        self._run_id = self._tracker.open_parent(self._parent)
        self._tracker.rebuild(self._study.records)

    def foretell(self, forecast: Forecast | None) -> None:
        """Tag it with what the rest of the budget buys; with nothing once the study explores no more."""
        if self._run_id is not None:
            self._tracker.tag_parent(self._run_id, {FORECAST: forecast.words() if forecast else ""})

    def close(self) -> None:
        """End it with the study's reason and the winner's figures."""
        if self._run_id is None:
            return
        best, results = self._study.best, self._study.results()
        covered = {} if results.hypervolume is None else {"hypervolume": results.hypervolume, "front_size": len(results.front)}
        status = "FINISHED" if best is not None else "FAILED"
        self._tracker.close_parent(
            self._run_id,
            "KILLED" if self._study.end_reason == STOPPED_BY_USER else status,
            metrics=covered | ({f"best_{name}": value for name, value in best.metrics.items()} if best else {}),
            tags={
                "end_reason": self._study.end_reason,
                FORECAST: "",
                "mlflow.note.content": "\n\n".join([*results.explanation, *front_lines(results)]),
                **({"best_trial": str(best.number)} if best else {}),
                **({"front": ", ".join(str(point.record.number) for point in results.front)} if results.front else {}),
            },
        )
