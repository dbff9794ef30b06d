"""Watts at the wall from a command: what its output says, real commands that answer, fail and hang, and a real trial beside one."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import numpy as np
import pyarrow.parquet as pq
import pytest

from autotune.steady_state import steady_window
from autotune.telemetry.base import WALL
from autotune.telemetry.storage import charts, write_samples
from autotune.telemetry.wall import WallMeter, wall_watts
from autotune.telemetry_summary import TrialTelemetry, summarise_telemetry
from launchers.outcome import Outcome
from launchers.process_tree import all_processes, descendants
from search_spaces.hardware import PoolSpec
from tests.telemetry.devices import ROOT
from tests.telemetry.megatron_trial import play

IPMITOOL = """
    Instantaneous power reading:                   412 Watts
    Minimum during sampling period:                  8 Watts
    Maximum during sampling period:                731 Watts
    Average power reading over sample period:      398 Watts
    IPMI timestamp:                           Mon Mar  2 10:22:43 2026
    Sampling period:                          00000001 Seconds.
    Power reading state is:                   activated

"""
IPMI_DCMI = """Current Power                        : 412 Watts
Minimum Power over sampling duration : 8 watts
Maximum Power over sampling duration : 731 watts
Average Power over sampling duration : 398 watts
Time Stamp                           : 03/02/2026 - 10:22:43
Statistics reporting time period     : 1000 milliseconds
Power Measurement                    : Active
"""
REDFISH = """{"@odata.type": "#Power.v1_7_1.Power", "Id": "Power", "PowerControl": [{"MemberId": "0",
 "Name": "System Power Control", "PowerAllocatedWatts": 2600, "PowerAvailableWatts": 0,
 "PowerCapacityWatts": 2600, "PowerConsumedWatts": 412.5,
 "PowerLimit": {"LimitInWatts": 2500}, "PowerMetrics": {"AverageConsumedWatts": 398, "IntervalInMin": 1, "MaxConsumedWatts": 731}}],
 "PowerSupplies": [{"MemberId": "0", "LastPowerOutputWatts": 201, "PowerCapacityWatts": 1300}]}"""
SLURM = """NodeName=n17 Arch=x86_64 CoresPerSocket=56
   CPUAlloc=224 CPUEfctv=224 CPUTot=224 CPULoad=31.20
   RealMemory=2063000 AllocMem=0 FreeMem=1911000 Sockets=2 Boards=1
   CurrentWatts=412 AveWatts=398
   ExtSensorsJoules=n/s ExtSensorsWatts=0 ExtSensorsTemp=n/s
"""


@pytest.mark.parametrize(
    ("answer", "watts"),
    [
        (IPMITOOL, 412.0),
        (IPMI_DCMI, 412.0),
        (REDFISH, 412.5),
        (SLURM, 412.0),
        ("412\n", 412.0),
        ("  412.5 W\n", 412.5),
        ("Pwr Consumption  | 412 Watts         | ok", 412.0),
        ("rack 7, outlet 3: 1.25e3", None),
        ("1.25e3", 1250.0),
        ('{"PowerConsumedWatts":"412"}', 412.0),
    ],
)
def test_what_a_command_says(answer, watts):
    if watts is None:
        with pytest.raises(ValueError, match="no number"):
            wall_watts(answer)
    else:
        assert wall_watts(answer) == watts


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (SLURM.replace("412", "0"), "CurrentWatts is 0, which no node"),
        (SLURM.replace("412", "n/s"), "CurrentWatts is 'n/s'"),
        (SLURM.replace("412", "4294967294"), "no node"),
        (SLURM + SLURM.replace("n17", "n18"), "names CurrentWatts 2 times"),
        (IPMITOOL.replace(" 412 ", " 0 "), "no node"),
        (IPMITOOL.replace("state is:                   activated", "state is:                   deactivated"), "deactivated"),
        (REDFISH.replace("412.5", "null"), "'null'"),
        ("N/A", "'N/A'"),
        ("", "''"),
        ("0", "no node"),
        ("-3 W", "no number"),
        ("412,5 W", "no number"),
        ("PSU1 201 W, PSU2 211 W", "2 numbers of watts"),
        ("nan", "no node"),
        ("inf", "no node"),
        ("Get Power Reading failed", "no number"),
    ],
)
def test_what_is_no_reading_is_never_a_number(answer, why):
    with pytest.raises(ValueError, match=why):
        wall_watts(answer)


def read(command, seconds, period_s=0.1, limit_s=5.0):
    """What a command tells in some seconds."""
    meter = WallMeter(command, period_s, limit_s)
    meter.start()
    time.sleep(seconds)
    meter.halt()
    return meter.series(3)


def until(condition, limit_s=10.0):
    end_s = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end_s
        time.sleep(0.01)


def test_readings_are_a_series_of_their_own_scope():
    series = read(["echo", "412 W"], 1.0)
    times, watts = series.column("power_w")
    assert len(times) >= 3
    assert set(watts) == {412.0}
    assert np.all(np.diff(times) > 0)
    assert abs(times[-1] - time.time()) < 30.0
    assert (series.info.vendor, series.info.is_board, series.node, series.gaps) == (WALL, False, 3, {})


def test_a_failing_command_is_a_gap_with_its_reason_once(caplog):
    series = read(["bash", "-c", "echo Could not open device at /dev/ipmi0 >&2; exit 1"], 1.0)
    assert series.columns == {}
    (why,) = series.gaps.values()
    assert "it ended with 1: Could not open device at /dev/ipmi0" in why
    failed, total = why.partition(" readings")[0].split(" of ")
    assert failed == total
    assert int(total) >= 2
    assert len(caplog.records) == 1


@pytest.mark.parametrize(
    ("command", "why"), [(["/nonexistent/meter"], "No such file"), (["cat"], "''"), (["bash", "-c", "kill -9 $$"], "ended with")]
)
def test_commands_that_cannot_answer(command, why):
    assert why in read(command, 0.5).gaps["power_w"]


def test_a_command_that_hangs_is_ended_at_its_limit_with_all_that_it_started():
    """Also where it does not listen to SIGTERM and has a child of its own."""
    meter = WallMeter(["bash", "-c", "trap '' TERM; sleep 4243 & wait; sleep 4243"], 0.1, limit_s=0.5)
    meter.start()
    until(lambda: meter.series().gaps)
    meter.halt()
    assert "no answer within 0.5 s" in meter.series().gaps["power_w"]
    until(lambda: not sleeping("4243"))


def sleeping(seconds):
    """Living processes of this test that sleep for so long."""
    wanted = f"sleep\0{seconds}\0".encode()
    found = []
    for process in all_processes():
        try:
            with open(f"/proc/{process.pid}/cmdline", "rb") as file:
                found += [process] if not process.dead and file.read() == wanted else []
        except OSError:
            continue
    return found


def test_the_end_of_a_trial_ends_a_running_command_and_leaves_no_child():
    meter = WallMeter(["sleep", "4244"], 1.0)
    meter.start()
    until(lambda: sleeping("4244"))
    begin_s = time.monotonic()
    meter.halt()
    assert time.monotonic() - begin_s < 4.0, "halt waited for the command's limit"
    until(lambda: not sleeping("4244"))
    assert [process for process in all_processes() if process.parent == os.getpid() and process.name == "timeout"] == []
    assert meter.series().gaps == {}


def test_a_command_outlives_a_killed_agent_by_its_limit_at_most():
    code = (
        "import time; from autotune.telemetry.wall import WallMeter; "
        "WallMeter(['sleep', '4245'], 1.0, limit_s=2.0).start(); time.sleep(60)"
    )
    agent = subprocess.Popen([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE)
    try:
        until(lambda: sleeping("4245"), 30.0)
    finally:
        agent.kill()
        agent.communicate()
    until(lambda: not sleeping("4245"))


def test_a_command_without_end_of_output_is_cut_off():
    meter = WallMeter(["yes", "412"], 0.1, limit_s=60.0)
    meter.start()
    until(lambda: meter.series().gaps)
    meter.halt()
    assert not [process for process in descendants(os.getpid()) if process.name == "yes"]


SCRIPT = """#!/bin/bash
# Tells 412 W as ipmitool does; its second look fails.
count=$(( $(cat {folder}/count 2>/dev/null || echo 0) + 1 ))
echo $count > {folder}/count
if (( count == 2 )); then echo "Unable to establish IPMI v2 session" >&2; exit 1; fi
printf '\\n    Instantaneous power reading: %25s Watts\\n    Average power reading over sample period: 398 Watts\\n' 412
"""


@pytest.mark.timeout(300)
def test_a_real_trial_beside_a_command(tmp_path):
    """412 W all the time: the mean, the energy and every peak that readings a second apart can tell."""
    script = tmp_path / "meter"
    script.write_text(SCRIPT.format(folder=tmp_path))
    script.chmod(0o755)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    steps, (node,), end, _ = play(tmp_path, environment, {}, 6.0, wall_power_command=str(script))
    assert end.outcome is Outcome.STOPPED
    window = steady_window(steps, 1)
    found = summarise_telemetry(TrialTelemetry((node,)), window)
    assert found.metrics["pool_wall_mean_power_w"] == pytest.approx(412.0)
    assert found.metrics["pool_wall_energy_j"] == pytest.approx(412.0 * window.length_s)
    assert found.metrics["pool_wall_joules_per_token"] == pytest.approx(412.0 * window.length_s / window.tokens)
    peaks = {name: value for name, value in found.metrics.items() if name.startswith("pool_wall_peak")}
    assert set(peaks) <= {f"pool_wall_peak_power_w_{seconds}s" for seconds in (1, 10, 60, 900)}
    assert set(peaks) >= {f"pool_wall_peak_power_w_{seconds}s" for seconds in (10, 60, 900)}
    assert list(peaks.values()) == pytest.approx([412.0] * len(peaks))
    assert found.marks["wall.source"] == "wall_power_command"
    assert "Unable to establish IPMI v2 session" in found.marks["gaps.wall.node0"]
    assert not [name for name in found.metrics if name.startswith(("gpu_", "pool_gpu_"))]

    table = pq.read_table(write_samples([node], tmp_path / "raw")).to_pylist()
    readings = [row for row in table if row["vendor"] == WALL]
    assert len(readings) >= 3
    assert {row["power_w"] for row in readings} == {412.0}
    assert "telemetry/power_w" not in charts(tmp_path / "raw" / "telemetry.parquet", 10)


def test_a_pool_names_its_command_as_words_or_as_one_string():
    listed = PoolSpec(name="a", gpus_per_node=1, wall_power_command=["ipmitool", "dcmi", "power", "reading"])
    assert PoolSpec(name="a", gpus_per_node=1, wall_power_command="ipmitool dcmi power reading") == listed
    quoted = PoolSpec(name="a", gpus_per_node=1, wall_power_command="bash -c 'curl -s $BMC | jq .Reading'")
    assert quoted.wall_power_command == ("bash", "-c", "curl -s $BMC | jq .Reading")
    assert PoolSpec(name="a", gpus_per_node=1).wall_power_command == ()
    with pytest.raises(ValueError, match="no closing quotation"):
        PoolSpec(name="a", gpus_per_node=1, wall_power_command="bash -c 'curl")
    with pytest.raises(ValueError, match="wall_power_period_s"):
        PoolSpec(name="a", gpus_per_node=1, telemetry={"wall_power_period_s": 0.1})
