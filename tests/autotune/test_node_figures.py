"""Nodes are measured before the first trial, once, and a failure of it is no failure of the study."""

from types import SimpleNamespace

import pytest
from ray.exceptions import RayActorError

from autotune import node_figures
from autotune.node_figures import measure_nodes
from launchers.megatron_core.launcher import MegatronCoreLauncher
from search_spaces.hardware import PoolSpec

from .study_cases import NoLauncher, completed, open_pool, study_spec

POOL = PoolSpec(name="two", nodes=2, gpus_per_node=1)
FIGURES = {"event": "figures", "gemm_flops_per_s": 2e9}


class Method:
    def __init__(self, answer):
        self.answer, self.calls = answer, []

    def remote(self, *arguments):
        self.calls.append(arguments)
        return self.answer


def agent(answer):
    return SimpleNamespace(describe=Method({"address": "10.0.0.1"}), free_port=Method(4711), measure=Method(answer))


@pytest.fixture
def ray_answers(monkeypatch):
    def get(answer, timeout):
        for one in answer if isinstance(answer, list) else [answer]:
            if isinstance(one, Exception):
                raise one
        return answer

    monkeypatch.setattr(node_figures.ray, "get", get)


def slot(*answers):
    return SimpleNamespace(pool=POOL, agents=[agent(answer) for answer in answers])


def test_all_nodes_are_asked_together_and_meet_on_the_first(ray_answers, tmp_path):
    both = slot([FIGURES], [{**FIGURES, "gemm_flops_per_s": 4e9}])
    assert measure_nodes(both, MegatronCoreLauncher(), 60.0, tmp_path).gemm_flops_per_s == 3e9
    for rank, one in enumerate(both.agents):
        ((request, *rest),) = one.measure.calls
        assert rest == [rank, 2, "10.0.0.1", 4711]
        assert (request.program, request.job) == (MegatronCoreLauncher.figures_program, {"device": "cpu"})


@pytest.mark.parametrize("second", [[], RayActorError()], ids=["no answer of a rank", "agent died"])
def test_what_is_not_measured_is_not_known(ray_answers, tmp_path, caplog, second):
    assert measure_nodes(slot([FIGURES], second), MegatronCoreLauncher(), 60.0, tmp_path) is None
    assert "pool two" in caplog.text


def test_a_launcher_that_cannot_measure_is_not_asked(ray_answers, tmp_path):
    both = slot([FIGURES], [FIGURES])
    assert measure_nodes(both, NoLauncher(), 60.0, tmp_path) is None
    assert not both.agents[0].measure.calls


def test_figures_seed_the_predictions_of_machines_of_which_nothing_is_known(ray_answers, tmp_path):
    study = open_pool(study_spec(), refits=True)
    before = study.refit.predictions().step_time_s
    assert study.refit.knows_nothing
    study.refit.seed(None)
    study.refit.seed(measure_nodes(slot([FIGURES], [FIGURES]), MegatronCoreLauncher(), 60.0, tmp_path))
    after = study.refit.predictions()
    assert (after.step_time_s > 1.5 * before).all()  # 2 GFLOP/s is far below what hardware.yaml says
    assert after.machines.trials == 0
    study.finish(study.propose(), completed(0.5))
    assert not study.refit.knows_nothing
