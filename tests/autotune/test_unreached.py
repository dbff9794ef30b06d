"""Power limits that were not reached: what only repeats a trial is known without a launch."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from autotune.acquisition import choose
from autotune.candidates import candidate_table
from autotune.outlook import METRICS_NOISE, Limit, Outlook, outlook_of
from autotune.seen import Seen
from autotune.unreached import PowerLimits
from search_spaces.candidates import CandidateTable
from search_spaces.gpus import gpu
from search_spaces.prediction import Machines, predict
from tests.autotune.study_cases import study_spec

LIMITS = ["none", 300, 400, 500]
FREE = {"power_cap_fraction": 0.0, "gpu_peak_power_w_0.1s": 280.0}


def table() -> CandidateTable:
    spec = study_spec(
        pools=[{"name": "h200", "gpu": "h200", "gpus_per_node": 8}],
        launcher="simulated",
        search={"micro_batch_size": [1, 2], "gpu_power_limit_w": LIMITS},
    )
    return candidate_table(spec, spec.pools[0])


def view_of(rows: CandidateTable) -> Outlook:
    return outlook_of(rows, predict(rows.columns, Machines.shipped(gpu("h200"), 8)))


def row_of(rows: CandidateTable, micro_batch_size: int, limit_w: int | None) -> int:
    configs = [rows.config(row) for row in range(len(rows))]
    wanted = (micro_batch_size, limit_w)
    (found,) = [row for row, config in enumerate(configs) if (config.micro_batch_size, config.gpu_power_limit_w) == wanted]
    return found


@pytest.mark.parametrize(
    ("limit_w", "told", "same"),
    [
        (400, {"power_cap_fraction": 0.0, "gpu_peak_power_w_0.1s": 350.0}, {400, 500, None}),
        (400, FREE, {300, 400, 500, None}),
        (400, {"power_cap_fraction": 0.0}, {400, 500, None}),
        (400, {"power_cap_fraction": 0.0, "gpu_peak_power_w_0.1s": 295.0}, {400, 500, None}),
        (None, {"power_cap_fraction": 0.0, "gpu_peak_power_w_0.1s": 450.0}, {500, None}),
        (400, {"power_cap_fraction": 0.01, "gpu_peak_power_w_0.1s": 280.0}, set()),
        (400, {"gpu_peak_power_w_0.1s": 280.0}, set()),
    ],
)
def test_limits_that_were_not_reached_make_the_same_run(limit_w, told, same):
    rows = table()
    found = [rows.config(int(row)) for row in np.flatnonzero(PowerLimits.of(rows).same_run([(row_of(rows, 1, limit_w), told)]))]
    assert {config.gpu_power_limit_w for config in found} == same
    assert all(config.micro_batch_size == 1 for config in found)


def kept(watts: float, noise: float = METRICS_NOISE, micro_batch_size: int = 1) -> float:
    """How likely a candidate keeps a limit of one watt whose program drew so many under a limit of 400 that it did not reach."""
    rows = table()
    view = replace(view_of(rows), limits=(Limit("watts", np.zeros(len(rows)), 1.0),))
    metrics = {"watts": watts, **FREE}
    seen = Seen(rows=[row_of(rows, 1, 400)], scores=[0.0], noise=[0.02], metrics=[metrics], metrics_noise=[noise])
    return choose(view, seen, np.array([row_of(rows, micro_batch_size, 500)]), (0, 0)).keeps


def test_what_repeats_a_crossing_crosses_again():
    assert kept(1.1) == 0.0
    assert kept(1.1, micro_batch_size=2) > 0.0
    assert kept(0.9) > 0.5


def test_what_repeats_a_disturbed_crossing_may_keep_the_limit():
    assert kept(1.1, noise=10 * METRICS_NOISE) > 0.0
