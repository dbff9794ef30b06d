"""A node's devices: without libraries, with one vendor's, with both; what is charged; files and charts; the doctor."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import numpy as np
import pyarrow.parquet as pq
import pytest

from autotune.errors import SpecError
from autotune.telemetry.host import open_all as open_host
from autotune.telemetry.series import NodeTelemetry
from autotune.telemetry.storage import charts, write_samples
from autotune.tracking.charts import chart_points
from launchers.gpu_sample import GpuSample
from search_spaces.hardware import PoolSpec
from tests.autotune.test_power_metrics import series
from tests.telemetry.devices import H100, MI300X, ROOT, Scenario, amdsmi_folder, ask, environment

NODE = """
import json, time
from autotune.telemetry.node import NodeGpus
from search_spaces.hardware import PoolSpec
pool = PoolSpec(name="p", gpu={gpu!r}, gpus_per_node=1, telemetry={telemetry!r})
node = NodeGpus(pool, {ids!r})
with node.recording() as recording:
    time.sleep(0.3)
    found = recording.end(0)
answer = dict(seen=[(s.info.vendor, s.info.index) for s in found.series], charged=[s.info.uuid for s in found.series if s.charged])
print(json.dumps(answer | dict(problems=found.problems, readings=found.cost.readings)))
"""


def node(values, gpu="cpu", telemetry=None, ids=()):
    return ask(NODE.format(gpu=gpu, telemetry=telemetry or {}, ids=tuple(ids)), values)


def test_a_node_without_libraries_says_why_and_measures_nothing():
    found = node({}, telemetry={"vendors": ("nvidia", "amd")})
    assert found["seen"] == []
    assert "LIBRARY_NOT_FOUND" in found["problems"]["nvidia"]
    assert "amdsmi" in found["problems"]["amd"]


def test_the_amd_package_without_its_library_is_a_reason_and_no_crash():
    """On import it prints, then fails with a KeyError."""
    values = {"PYTHONPATH": os.pathsep.join((str(ROOT), str(amdsmi_folder()))), "ROCM_PATH": "/nonexistent"}
    found = node(values, telemetry={"vendors": ("amd",)})
    assert "libamd_smi.so" in found["problems"]["amd"]


def test_a_laptop_asks_for_no_gpu_library():
    assert set(node({})["problems"]) <= {"host"}


def test_one_vendor(tmp_path):
    values = environment(Scenario(H100, 2), folder=tmp_path)
    found = node(values, gpu="h100-sxm", ids=("1",))
    assert found["seen"] == [["nvidia", 0], ["nvidia", 1]]
    assert found["charged"] == ["GPU-00000001-0000"]
    assert found["readings"] > 0


def test_both_vendors_and_only_the_pools_is_opened(tmp_path):
    values = environment(Scenario(H100, 1), Scenario(MI300X, 1, "amd"), folder=tmp_path)
    assert node(values, telemetry={"vendors": ("nvidia", "amd")})["seen"] == [["nvidia", 0], ["amd", 0]]
    assert node(values, gpu="mi300x", ids=("0",))["seen"] == [["amd", 0]]


def test_rays_number_of_an_amd_gpu_counts_what_rocr_leaves(tmp_path):
    values = environment(Scenario(MI300X, 4, "amd"), folder=tmp_path) | {"ROCR_VISIBLE_DEVICES": "2,3"}
    assert node(values, gpu="mi300x", ids=("1",))["charged"] == ["00000003-0000-1000"]


def test_a_name_that_means_nothing_leaves_the_others_as_context(tmp_path):
    found = node(environment(Scenario(H100, 2), folder=tmp_path), gpu="h100-sxm", ids=("7",))
    assert found["charged"] == []
    assert len(found["seen"]) == 2
    assert "means no GPU" in found["problems"]["nvidia"]


SET = """
import json
from autotune.telemetry import PowerLimitError, open_gpus
gpu = open_gpus({vendor!r})[0]
answers = [gpu.enforced_power_limit_w()]
for watts in (500.0, 9000.0):
    try:
        gpu.set_power_limit_w(watts)
        answers.append(gpu.requested_power_limit_w())
    except PowerLimitError as error:
        answers.append([error.permission, error.hint])
print(json.dumps([*answers, gpu.enforced_power_limit_w()]))
"""


@pytest.mark.parametrize(
    ("vendor", "base", "call"), [("nvidia", H100, "SetPowerManagementLimit"), ("amd", MI300X, "set_power_cap")]
)
def test_power_limits(vendor, base, call, tmp_path):
    highest = (base.get("max_mw") or base["cap_uw"] / 1e3) / 1e3
    values = environment(Scenario({**base, "enforced_mw": 450_000}, 1, vendor), folder=tmp_path)
    before, asked, refused, enforced = ask(SET.format(vendor=vendor), values)
    assert asked == 500.0
    assert refused[0] is False
    assert str(highest) in refused[1]
    assert (before, enforced) == ((450.0, 450.0) if vendor == "nvidia" else (750.0, 500.0))
    assert len([line for line in (tmp_path / "calls").read_text().splitlines() if call in line]) == 2


@pytest.mark.parametrize(("vendor", "base", "key"), [("nvidia", H100, ("set_limit", "E4")), ("amd", MI300X, ("set_cap", "E10"))])
def test_a_power_limit_without_the_right(vendor, base, key, tmp_path):
    values = environment(Scenario(base, 1, vendor).set("*", *key), folder=tmp_path)
    _, (permission, hint), *_ = ask(SET.format(vendor=vendor), values)
    assert permission is True
    assert "administrator" in hint


def test_processes_of_a_gpu(tmp_path):
    values = environment(Scenario(H100, 2).set(1, "process", 4242).set(1, "process_mib", 2048), folder=tmp_path)
    code = (
        "import json; from autotune.telemetry import open_gpus; "
        "print(json.dumps([[(p.pid, p.memory_gib) for p in gpu.processes()] for gpu in open_gpus('nvidia')]))"
    )
    assert ask(code, values) == [[], [[4242, 2.0]]]


def test_readings_survive_parquet_and_become_charts(tmp_path):
    """Two GPUs of the trial and one beside it; one field that only one of them has."""
    found = [series(), series(index=1, sm_clock_mhz=lambda second: 1000.0)]
    write_samples([NodeTelemetry(0, tuple(found))], tmp_path)
    table = pq.read_table(tmp_path / "telemetry.parquet")
    assert table.num_rows == 2 * 200
    assert table["sm_clock_mhz"].null_count == 200
    assert table["power_w"].null_count == 0
    times, watts = charts(tmp_path / "telemetry.parquet", 10)["telemetry/power_w"]
    assert np.allclose(watts, 600.0)
    assert times[0] == pytest.approx(0.5, abs=0.1)
    points = [point for point in chart_points(tmp_path / "telemetry.parquet", 0.0, 10) if point.key == "telemetry/power_w"]
    assert len(points) == 10
    assert (points[0].step, points[0].time_ms) == (round(times[0] * 10), int(times[0] * 1000))
    assert chart_points(tmp_path / "absent.parquet", 0.0, 10) == []
    assert write_samples([NodeTelemetry()], tmp_path / "none") is None


def zone(folder, number, name, energy_uj, range_uj=1_000_000):
    folder = folder / f"intel-rapl:{number}"
    folder.mkdir(exist_ok=True)
    (folder / "name").write_text(name)
    (folder / "energy_uj").write_text(str(energy_uj))
    (folder / "max_energy_range_uj").write_text(str(range_uj))


def test_energy_of_the_host_wraps_at_the_range_that_the_kernel_states(tmp_path):
    zone(tmp_path, "0", "package-0", 900_000)
    zone(tmp_path, "0:0", "core", 5)
    zone(tmp_path, "0:1", "dram", 10)
    package, dram = open_host(tmp_path)
    assert (package.info.name, dram.info.name) == ("package-0", "dram")
    before: GpuSample = package.read()
    zone(tmp_path, "0", "package-0", 100_000)
    after = package.read()
    assert after.energy_j - before.energy_j == pytest.approx(0.2)
    assert after.power_w > 0


def doctor(values, *options):
    command = [sys.executable, "-m", "autotune.cli", "doctor", *options]
    process_environment = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "160", **values}
    return subprocess.run(command, env=process_environment, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)


def test_the_doctor_shows_every_field_or_its_reason(tmp_path):
    values = environment(Scenario(H100, 2).set(1, "field_82", "E3"), folder=tmp_path)
    shown = doctor(values, "--telemetry", "--json")
    assert shown.returncode == 0, shown.stderr
    first, second = json.loads(shown.stdout)["devices"]
    assert first["values"]["memory_temperature_c"] == 60
    assert "NOT_SUPPORTED" in second["gaps"]["memory_temperature_c"]
    fields = set(GpuSample.__slots__) - {"time_s", "gpu", "throttle_counts"}
    assert fields <= set(second["values"]) | set(second["gaps"])
    assert "no memory_temperature_c: NVML: NOT_SUPPORTED (nvidia 1)" in doctor(values, "--telemetry").stdout


def test_the_doctor_on_a_machine_without_gpus():
    shown = doctor({}, "--telemetry")
    assert shown.returncode == 0
    assert "no nvidia: NVML: LIBRARY_NOT_FOUND" in shown.stdout


def test_the_doctors_live_table(tmp_path):
    values = environment(Scenario(H100, 2).set(1, "reasons", 0x40), folder=tmp_path)
    code = (
        "import json, io; from rich.console import Console; from autotune.doctor.telemetry import watch; "
        "c = Console(width=160, file=io.StringIO()); watch(c, 0.05, 2, ('nvidia',)); print(json.dumps(c.file.getvalue()))"
    )
    table = ask(code, values)
    assert "300" in table
    assert "hw_thermal" in table


def test_a_pool_says_how_it_is_measured():
    pool = PoolSpec.model_validate({"name": "p", "gpus_per_node": 1, "telemetry": {"vendors": ["amd"], "env": {"ROCM_PATH": "/r"}}})
    assert pool.telemetry.vendors == ("amd",)
    with pytest.raises((ValueError, SpecError), match="period_s"):
        PoolSpec.model_validate({"name": "p", "gpus_per_node": 1, "telemetry": {"period_s": 0}})
