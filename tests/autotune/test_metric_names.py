"""The list of metric names is what trials really carry: no name that nothing makes, and no metric that is not listed."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from optuna.storages import InMemoryStorage

from autotune.contamination import Witness
from autotune.host_load import HostLoad
from autotune.measured import measure
from autotune.metric_names import FAMILIES, may_be_zero, metric_names
from autotune.metrics import derived
from autotune.pool_study import PoolStudy
from autotune.records import TrialResult
from autotune.run_spread import RunSpread
from autotune.settling import Settled
from autotune.spec_parts import Measurement
from autotune.steady_state import Window
from autotune.telemetry.base import HOST, WALL, GpuInfo
from autotune.telemetry.series import NodeTelemetry, Series
from autotune.telemetry_summary import TrialTelemetry
from autotune.wall_metrics import DOMAIN, scope_metrics, wall_curve
from benchmarks.twin_worlds import World, played
from launchers.base import StepRecord
from launchers.gpu_sample import Throttle
from launchers.outcome import Outcome
from search_spaces.gpus import gpu
from search_spaces.hardware import PoolSpec
from search_spaces.model import ModelSpec, Workload

from .study_cases import MODEL, NoLauncher, study_spec
from .test_power_metrics import series

POOL = PoolSpec(name="p", gpu="h200", gpus_per_node=2, usd_per_gpu_hour=2.0)
WORKLOAD = Workload(model=ModelSpec(**MODEL), world_size=2, global_batch_size=4, seq_length=32, device="cuda")
STEPS = 60


def sensed(index: int) -> Series:
    """A board on which every sensor and every reason of throttling tells something."""
    return series(
        seconds=61.0,
        index=index,
        throttling=lambda second: tuple(Throttle),
        reason_bits=lambda second: 255,
        sm_clock_mhz=lambda second: 1500.0,
        temperature_c=lambda second: 50.0 + second,
        memory_temperature_c=lambda second: 60.0,
    )


def meter(vendor: str) -> Series:
    times = np.arange(0.0, 62.0, 0.1)
    info = GpuInfo(vendor, 0, vendor, vendor, "", vendor, power_source="counter")
    return Series(info, {"power_w": (times, np.full(len(times), 500.0)), "energy_j": (times, times * 500.0)})


def result(*found: Series, raced_out: bool) -> TrialResult:
    """A minute of steps whose memory grows, warmed up or raced out, beside others on the host's processors."""
    steps = tuple(StepRecord(number, float(number), 1.0, 2.0, 1.0, 128, 10.0 + number) for number in range(1, STEPS + 1))
    return TrialResult(
        Outcome.COMPLETED,
        "",
        steps,
        raced_out=raced_out,
        settled=None if raced_out else Settled(5, "settled"),
        witnesses=(Witness(loads=(HostLoad(0.0, 61.0, 0.1, "a neighbour"),)),),
        telemetry=TrialTelemetry((NodeTelemetry(series=found),)),
    )


def shown(found: TrialResult) -> set[str]:
    metrics = measure(WORKLOAD, found, Measurement(steps=100), RunSpread()).metrics
    return set(metrics) | set(derived(metrics, WORKLOAD, POOL, gpu("h200")))


def predicted() -> set[str]:
    spec = study_spec(pools=[{"name": "h", "gpu": "h200", "gpus_per_node": 4}])
    study = PoolStudy(spec, spec.pools[0], NoLauncher(), InMemoryStorage(), lambda _, record: None)
    return set(study.refit.metrics(spec.baseline))


def test_every_name_is_made_and_everything_that_is_made_has_a_name() -> None:
    boards = (sensed(0), sensed(1))
    at_the_wall = shown(result(*boards, meter(HOST), meter(WALL), raced_out=False))
    estimated = shown(result(*boards, raced_out=True))
    curve = wall_curve(meter(WALL).column("power_w"), Window(0.0, 61.0, 1))
    assert curve is not None
    attached = set(scope_metrics(f"{DOMAIN}rack-7_", [curve], Window(0.0, 61.0, 1)))
    made = at_the_wall | estimated | attached | predicted()
    assert sorted(made - set(metric_names(["rack-7"]))) == [], "not listed"
    assert sorted(set(metric_names(["rack-7"])) - made) == [], "made by nothing"


@pytest.mark.parametrize("kind", ["physics", "table"])
def test_a_simulated_trial_carries_listed_metrics_only(kind: str) -> None:
    world = World(kind, 0, 4)  # type: ignore[arg-type]
    spec, launcher = world.spec, world.launcher()
    study = PoolStudy(spec, spec.pools[0], launcher, InMemoryStorage(), lambda _, record: None)
    proposal = study.propose()
    assert proposal is not None
    record = study.finish(proposal, played(launcher, spec, proposal))
    assert record.outcome is Outcome.COMPLETED and len(record.metrics) > 40
    assert set(record.metrics) <= set(metric_names())


def test_names_are_written_out_and_domains_are_the_studys_own() -> None:
    assert len(set(metric_names())) == len(metric_names())
    assert not any("<" in name for name in metric_names(["rack"]))
    assert "domain_rack_peak_power_w_10s" in metric_names(["rack"])
    assert not any(name.startswith("domain_") for name in metric_names())
    assert any("<domain>" in name for name in FAMILIES)


def test_what_a_quiet_trial_measures_as_zero_is_a_term_by_differences() -> None:
    """No throttling, no clock lost, no warming: what is 0 in a perfect run has no logarithm."""
    still = series(seconds=61.0, throttling=lambda _: (), reason_bits=lambda _: 0, sm_clock_mhz=lambda _: 2000.0)
    still = replace(still, columns={**still.columns, "temperature_c": (np.arange(0.0, 61.0), np.full(61, 50.0))})
    found = measure(WORKLOAD, result(still, raced_out=True), Measurement(steps=STEPS), RunSpread()).metrics
    zero = {name for name, value in found.items() if math.isclose(value, 0.0, abs_tol=1e-9)}
    assert {"throttle_events_per_minute", "throttle_s_hw_thermal", "clock_deficit", "temperature_slope_c_per_min"} <= zero
    constant = {"pool_gpu_power_swing_w", "pool_gpu_power_ramp_w_per_s", "raced_out_saved_s"}
    assert {name for name in zero if not may_be_zero(name)} <= constant
