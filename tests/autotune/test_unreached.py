"""Power limits that were not reached: what only repeats a trial is known without a launch."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from autotune import acquisition
from autotune.acquisition import Seen, choose
from autotune.candidates import candidate_table
from autotune.outlook import METRICS_NOISE, Limit, Outlook, outlook_of
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
    found = PowerLimits.of(rows).same_run([row_of(rows, 1, limit_w)], [told])
    repeated = {rows.config(row).gpu_power_limit_w for row in np.flatnonzero(found == 0)}
    assert repeated == same
    assert all(rows.config(row).micro_batch_size == 1 for row in np.flatnonzero(found == 0))


@pytest.mark.parametrize(("watts", "keeps"), [(0.9, 1.0), (1.1, 0.0)])
def test_what_repeats_a_trial_promises_nothing_and_keeps_limits_as_that_did(watts, keeps):
    rows = table()
    view = view_of(rows)
    view = replace(view, limits=(Limit("watts", np.zeros(len(rows)), 0.0),))
    tried = row_of(rows, 1, 400)
    seen = Seen(rows=[tried], scores=[0.0], noise=[0.02], metrics=[{"watts": watts, **FREE}], metrics_noise=[METRICS_NOISE])
    same = choose(view, seen, np.array([row_of(rows, 1, 500)]), (0, 0))
    assert same.keeps == keeps
    assert same.improvement == np.inf if keeps == 0.0 else same.improvement < 1e-6
    assert same.chance_of_gain == pytest.approx(1.0 if keeps == 0.0 else 0.0, abs=1e-6)
    assert 0.0 < choose(view, seen, np.array([row_of(rows, 2, 500)]), (0, 0)).keeps < 1.0


def test_a_disturbed_trial_tells_nothing_of_its_repetition():
    rows = table()
    view = view_of(rows)
    view = replace(view, limits=(Limit("watts", np.zeros(len(rows)), 0.0),))
    seen = Seen(rows=[row_of(rows, 1, 400)], scores=[0.0], noise=[1.0], metrics=[{"watts": 1.1, **FREE}], metrics_noise=[1.0])
    assert choose(view, seen, np.array([row_of(rows, 1, 500)]), (0, 0)).keeps > 0.0


def test_what_repeats_a_trial_is_tried_last():
    rows = table()
    view = view_of(rows)
    tried = row_of(rows, 2, 400)
    seen = Seen(
        rows=[tried] * acquisition.FIRST_BY_MEAN,
        scores=[0.0] * acquisition.FIRST_BY_MEAN,
        noise=[0.02] * acquisition.FIRST_BY_MEAN,
        metrics=[FREE] * acquisition.FIRST_BY_MEAN,
        metrics_noise=[METRICS_NOISE] * acquisition.FIRST_BY_MEAN,
    )
    repeated = np.flatnonzero(view.power_limits.same_run(seen.rows, seen.metrics) >= 0)
    found = choose(view, seen, np.setdiff1d(np.arange(len(rows)), [tried]), (0, 0)).row
    assert found not in repeated
    assert rows.config(found).micro_batch_size == 1
