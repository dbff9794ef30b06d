"""What is predicted of the metrics that a study values or limits."""

import numpy as np
import pytest

from autotune.acquisition import choose
from autotune.outlook import METRICS_NOISE, Expects, followed, outlook_of, predicted_log
from autotune.seen import Seen
from autotune.spec_parts import Bound

from .test_residual_sampler import gpu_study, truth

DOMAIN = "domain_rack_peak_power_w_10s"
MEAN, PEAK = "pool_gpu_mean_power_w", "pool_gpu_peak_power_w_1s"


@pytest.mark.parametrize(
    ("metric", "boards"),
    [
        (DOMAIN, "pool_gpu_peak_power_w"),
        ("pool_wall_mean_power_w", MEAN),
        ("pool_wall_mean_power_w_estimated", MEAN),
        ("node_wall_peak_power_w_1s", "pool_gpu_peak_power_w"),
        ("pool_wall_joules_per_token", "joules_per_token"),
        (MEAN, MEAN),
        ("throttle_fraction", "throttle_fraction"),
    ],
)
def test_metrics_at_the_wall_follow_those_of_the_boards(metric, boards):
    assert followed(metric) == boards


def test_energy_and_watts_are_predicted_from_the_same_step():
    found = truth()
    power_w, tokens, joules, per_kw = (
        np.exp(predicted_log(name, found)) for name in (MEAN, "tokens_per_s_per_gpu", "joules_per_token", "tokens_per_s_per_kw")
    )
    assert joules == pytest.approx(power_w / 8 / tokens)
    assert per_kw * joules == pytest.approx(np.full(len(joules), 1000.0))
    assert (predicted_log(PEAK, found) >= predicted_log(MEAN, found) - 1e-12).all()
    assert predicted_log("host_mean_power_w", found) is None
    assert predicted_log("pool_gpu_power_swing_w", found) is None


def test_a_term_at_the_wall_is_worth_what_the_boards_predict():
    energy = Expects({"pool_wall_joules_per_token": -1.0}, {})
    assert energy.score(truth()) == pytest.approx(-predicted_log("joules_per_token", truth()))


def test_one_trial_tells_the_factor_between_a_domain_and_its_boards():
    """1.7 times the boards' watts there: what draws less than the first trial keeps the limit, what draws more does not."""
    table, watts = gpu_study().table, predicted_log(PEAK, truth())
    order = np.argsort(watts)
    middle = int(order[len(order) // 2])
    most = float(np.exp(watts[middle])) * 1.7
    view = outlook_of(table, truth(), Expects({"tokens_per_s_per_gpu": 1.0}, {DOMAIN: Bound(max=most)}))
    seen = Seen([middle], [0.0], [0.02], [{DOMAIN: most}], [METRICS_NOISE])
    chances = [choose(view, seen, np.array([row]), (0, 0)).keeps for row in (order[0], order[-1])]
    assert chances[0] > 0.75
    assert chances[1] < 0.4
