"""Power limits: what is written before a change, what is put back, and what is refused or dropped before a study."""

from __future__ import annotations

import json
import os

import pytest

from autotune import power_rights
from autotune.doctor.finding import Status
from autotune.doctor.machine import check_power_limits
from autotune.errors import SpecError
from autotune.power_limits import PowerLimits, left_behind, read_records, request_limit, restore_records
from autotune.power_rights import Rights, check_rights, probe_rights, without
from autotune.telemetry import PowerLimitError
from launchers.process_tree import read_process
from search_spaces.hardware import PoolSpec

from .gpu_fakes import FakeGpu
from .study_cases import study_spec

KNOB = "gpu_power_limit_w"
GPUS = {"pools": [{"name": "a", "gpu": "h100-sxm", "gpus_per_node": 4}]}


def files(folder):
    return sorted(path.name for path in folder.glob("*"))


def test_the_requested_limit_comes_back_not_the_enforced_one(tmp_path):
    gpu = FakeGpu()
    limits = PowerLimits([gpu], folder=tmp_path)
    limits.set(500)
    record = read_records(tmp_path)[0]
    assert (record.uuid, record.vendor, record.watts) == ("GPU-0", "nvidia", 700.0)
    assert record.owner == read_process(os.getpid()).key
    limits.set(300)
    assert read_records(tmp_path)[0].watts == 700.0  # the second change does not replace what must come back
    assert limits.restore() == []
    assert gpu.asked == [500, 300, 700.0]
    assert files(tmp_path) == []


def test_a_package_of_two_dies_is_set_once(tmp_path):
    first, second, third = FakeGpu(0, package="p"), FakeGpu(1, package="p"), FakeGpu(2)
    PowerLimits([first, second, third], folder=tmp_path).set(400)
    assert (first.asked, second.asked, third.asked) == ([400], [], [400])


def test_what_cannot_be_put_back_is_named_and_its_record_stays(tmp_path):
    gpu = FakeGpu()
    limits = PowerLimits([gpu], folder=tmp_path)
    limits.set(500)
    gpu.may_set = False
    assert "GPU-0 should get 700 W back" in limits.restore()[0]
    assert "does not show it" in restore_records(read_records(tmp_path), [], tmp_path)[0]
    assert files(tmp_path) == ["GPU-0.json"]
    assert check_power_limits(read_records(tmp_path), ["GPU-0: no"]).status is Status.FAIL
    assert "700 W on GPU-0" in check_power_limits(read_records(tmp_path), []).detail


def test_only_records_of_ended_agents_and_of_this_boot_are_left_behind(tmp_path):
    limits = PowerLimits([FakeGpu(0), FakeGpu(1), FakeGpu(2)], folder=tmp_path)
    limits.set(500)
    for index, changes in ((1, {"owner": [os.getpid(), 1]}), (2, {"boot": "another"})):
        path = tmp_path / f"GPU-{index}.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    (tmp_path / "torn.json").write_text('{"uuid": ')
    assert [record.uuid for record in left_behind(tmp_path)] == ["GPU-1"]
    assert files(tmp_path) == ["GPU-0.json", "GPU-1.json", "torn.json"]  # a limit does not outlive a boot


@pytest.mark.parametrize(
    ("command", "problem"),
    [
        ("false {gpu} {watts}", "ended with 1"),
        ("no-such-program {gpu} {watts}", "No such file"),
        ("true {gpu} {watts}", "is 700 W"),
    ],
)
def test_a_sites_command_that_did_not_do_it_is_an_error(command, problem):
    with pytest.raises(PowerLimitError, match=problem):
        request_limit(FakeGpu(), 400, command)


@pytest.mark.parametrize(
    "command", ["set {watts}", "set {gpu}", "set {gpu} {watts} {name}", "set {gpu} {watts} {", "awk {print} {gpu} {watts}"]
)
def test_a_command_that_does_not_say_which_gpu_and_how_much_is_refused(command):
    with pytest.raises(ValueError, match="watts"):
        PoolSpec(name="a", gpus_per_node=1, power_limit_command=command)


def test_rights_are_asked_with_the_limit_that_is_there(monkeypatch, tmp_path):
    monkeypatch.setenv("AUTOTUNE_RESTORE", str(tmp_path))
    gpus = [FakeGpu(0, limits_w=(200.0, 700.0)), FakeGpu(1, limits_w=(150.0, 650.0))]
    monkeypatch.setattr(power_rights, "open_gpus", lambda vendor, ids: gpus)
    assert probe_rights("nvidia", None, None) == Rights(200.0, 650.0)
    assert [gpu.asked for gpu in gpus] == [[700.0], [700.0]]
    gpus[1].may_set = False
    assert "GPU 1: NVML: NO_PERMISSION" in probe_rights("nvidia", None, None).problem
    gpus[0].info = FakeGpu(0, mig=True).info
    assert "MIG" in probe_rights("nvidia", None, None).problem
    assert files(tmp_path) == []


def test_without_the_right_the_knob_leaves_search_and_baseline_by_name():
    spec = study_spec(search={KNOB: [400, 500], "micro_batch_size": [1, 2]}, baseline={KNOB: 600}, **GPUS)
    notes = check_rights(spec, lambda pool: [Rights(200, 700), Rights(problem="GPU 3: NO_PERMISSION")])
    assert "gpu_power_limit_w was dropped: GPU 3: NO_PERMISSION; ask the administrator" in notes["a"][0]
    reduced = without(spec, notes["a"])
    assert (list(reduced.search), reduced.baseline.gpu_power_limit_w) == (["micro_batch_size"], None)
    assert without(spec, check_rights(spec, lambda pool: [Rights(200, 700)]).get("a", [])) is spec


def test_clock_limits_are_dropped_by_name_as_nobody_could_put_them_back():
    spec = study_spec(search={"sm_clock_limit_mhz": [1000, 1500], "micro_batch_size": [1, 2]}, **GPUS)
    notes = check_rights(spec, lambda pool: pytest.fail("nothing to ask"))
    assert notes["a"][0].startswith("sm_clock_limit_mhz was dropped")
    assert list(without(spec, notes["a"]).search) == ["micro_batch_size"]


@pytest.mark.parametrize("wanted", [[200, 400], [400, 700], {"range": [200, 202]}])
def test_a_limit_that_these_boards_do_not_take_is_refused_with_their_range(wanted):
    spec = study_spec(search={KNOB: wanted, "micro_batch_size": [1, 2]}, **GPUS)
    with pytest.raises(SpecError, match=KNOB) as refused:
        check_rights(spec, lambda pool: [Rights(300, 600)])
    assert "300 to 600 W" in refused.value.hint


def test_nobody_is_asked_where_no_limit_is_wanted_or_there_is_no_gpu():
    ask = lambda pool: pytest.fail("asked")  # noqa: E731
    assert check_rights(study_spec(**GPUS), ask) == {}
    assert check_rights(study_spec(search={KNOB: [400], "micro_batch_size": [1]}), ask) == {}
