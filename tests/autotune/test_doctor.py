"""The doctor in the situations that people meet: each is told what is wrong and what to type."""

import http.server
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from autotune import doctor
from autotune.doctor import Finding, Status, examine
from autotune.doctor.machine import check_disk, check_filesystem, check_gpus, check_shared_memory, read_filesystem
from autotune.doctor.services import Reply, check_mlflow_package, check_storage, check_tracking, http_get, without_password
from autotune.doctor.software import RAY_PROBE, check_megatron, check_python, check_ray, check_torch, torch_install_line
from autotune.filesystem import LockReport
from autotune.probes import Answer, Driver, Gpu, GpuList, RankPython, ask

OK, WARN, FAIL = Status.OK, Status.WARN, Status.FAIL
CPU_TORCH = RankPython("3.11.7", "2.13.0+cpu", megatron_core="0.16.1")
CU13_TORCH = RankPython("3.11.7", "2.13.0", cuda="13.0")
CU12_TORCH = RankPython("3.11.7", "2.7.0", cuda="12.6")
ROCM_TORCH = RankPython("3.11.7", "2.8.0", hip="6.4.43482")
NO_TORCH = RankPython("3.11.7", problem="No module named 'torch'")


@pytest.mark.parametrize(("version", "status"), [((3, 10), FAIL), ((3, 11), OK), ((3, 12), OK), ((3, 14), WARN)])
def test_python(version, status):
    assert check_python(version).status is status


@pytest.mark.parametrize(
    ("ranks", "driver", "status", "detail", "fix"),
    [
        pytest.param(NO_TORCH, Driver(), FAIL, "No module", "/cpu", id="no torch, no GPU"),
        pytest.param(NO_TORCH, Driver(nvidia="550.54.15"), FAIL, "No module", "/cu126", id="no torch, older driver"),
        pytest.param(NO_TORCH, Driver(nvidia="580.65.06"), FAIL, "No module", "/cu130", id="no torch, newer driver"),
        pytest.param(CPU_TORCH, Driver(), OK, "CPU pools only", "", id="laptop"),
        pytest.param(CPU_TORCH, Driver(nvidia="575.51"), WARN, "need a CUDA build", "/cu128", id="CPU build on an NVIDIA node"),
        pytest.param(
            CPU_TORCH, Driver(amdgpu=True, rocm="6.4"), WARN, "need a ROCm build", "/rocm6.4", id="CPU build on an AMD node"
        ),
        pytest.param(CU13_TORCH, Driver(), WARN, "no GPU driver is loaded", "/cpu", id="CUDA build without driver"),
        pytest.param(
            CU13_TORCH, Driver(amdgpu=True, rocm="7.0"), FAIL, "need a ROCm build", "/rocm7.0", id="CUDA build on an AMD node"
        ),
        pytest.param(ROCM_TORCH, Driver(nvidia="580.65"), FAIL, "need a CUDA build", "/cu130", id="ROCm build on an NVIDIA node"),
        pytest.param(
            CU13_TORCH, Driver(nvidia="550.54.15"), FAIL, "needs NVIDIA driver 580", "/cu126", id="driver older than torch"
        ),
        pytest.param(
            CU12_TORCH, Driver(nvidia="470.82"), FAIL, "needs NVIDIA driver 525", "update the NVIDIA driver", id="very old driver"
        ),
        pytest.param(CU12_TORCH, Driver(nvidia="550.54.15"), FAIL, "sees no GPU", "--gpus all", id="driver fits, no access"),
        pytest.param(ROCM_TORCH, Driver(amdgpu=True), FAIL, "sees no GPU", "/dev/kfd", id="ROCm, no access"),
    ],
)
def test_torch_against_the_driver(ranks, driver, status, detail, fix):
    finding = check_torch(ranks, driver, "/opt/python")
    assert finding.status is status
    assert detail in finding.detail
    assert fix in finding.fix
    assert bool(finding.fix) is (status is not OK)


def test_torch_that_sees_gpus_is_fine_whatever_the_driver_table_says():
    seen = RankPython("3.11.7", "2.13.0", cuda="13.0", visible_gpus=8)
    assert check_torch(seen, Driver(nvidia="550.54.15")).status is OK


def test_reason_that_torch_gives_is_passed_on():
    ranks = RankPython("3.11.7", "2.7.0", cuda="12.6", problem="Error 802: system not yet initialized")
    assert "Error 802" in check_torch(ranks, Driver(nvidia="550.54.15")).detail


def test_install_line_names_the_interpreter_and_asks_for_rocm_where_it_is_missing():
    assert torch_install_line(Driver(), "/opt/python").startswith("/opt/python -m pip install")
    assert "install ROCm" in torch_install_line(Driver(amdgpu=True))


@pytest.mark.parametrize(
    ("python", "version", "status", "wanted"),
    [
        ("3.11.7", "0.16.1", OK, ""),
        ("3.12.3", "0.19.2", OK, ""),
        ("3.11.7", "0.19.2", WARN, "0.16"),
        ("3.12.3", "0.16.1", WARN, "0.19"),
        ("3.12.3", None, FAIL, "0.19"),
        ("", None, FAIL, "0.16"),
    ],
)
def test_megatron_core_fits_the_python(python, version, status, wanted):
    finding = check_megatron(RankPython(python, megatron_core=version))
    assert finding.status is status
    assert wanted in finding.fix


NO_LIBRARY = """\
  File ".../amdsmi/amdsmi_wrapper.py", line 211, in <module>
    amdsmi_free_name_value_pairs = _libraries['libamd_smi.so'].amdsmi_free_name_value_pairs
KeyError: 'libamd_smi.so'
"""
OLD_LIBRARY = """\
  File ".../amdsmi/amdsmi_wrapper.py", line 2318, in <module>
AttributeError: /opt/rocm/lib/libamd_smi.so: undefined symbol: amdsmi_get_gpu_busy_percent
"""


@pytest.mark.parametrize(
    ("answer", "status", "detail", "fix"),
    [
        (Answer(0, "2.60.0\n"), OK, "2.60.0", ""),
        (Answer(1, stderr=NO_LIBRARY), FAIL, "amdsmi", "uninstall amdsmi"),
        (Answer(1, stderr=OLD_LIBRARY), FAIL, "undefined symbol", "uninstall amdsmi"),
        (Answer(1, stderr="ModuleNotFoundError: No module named 'ray'"), FAIL, "No module named 'ray'", "ray[tune]"),
        (Answer(None, stderr="python did not end within 12 s"), FAIL, "did not end", "disk"),
    ],
)
def test_ray_and_the_crash_of_a_broken_amdsmi(answer, status, detail, fix):
    finding = check_ray(answer)
    assert finding.status is status
    assert detail in finding.detail
    assert fix in finding.fix


def test_real_ray_with_a_broken_amdsmi_is_recognised(tmp_path):
    """The package's own way of failing, met by the real `import ray`."""
    (tmp_path / "amdsmi").mkdir()
    (tmp_path / "amdsmi/__init__.py").write_text("from . import amdsmi_wrapper\n")
    (tmp_path / "amdsmi/amdsmi_wrapper.py").write_text("_libraries = {}\nx = _libraries['libamd_smi.so'].amdsmi_init\n")
    answer = ask((sys.executable, "-c", f"import sys; sys.path.insert(0, {str(tmp_path)!r}); {RAY_PROBE}"), 30)
    finding = check_ray(answer)
    assert finding.status is FAIL
    assert "amdsmi" in finding.detail


def _gpus(*power: float | None, mig: bool = False) -> GpuList:
    return GpuList(tuple(Gpu("nvidia", "NVIDIA H200", 141.0, "580.65", watts, mig) for watts in power))


@pytest.mark.parametrize(
    ("nvidia", "amd", "root", "status", "detail"),
    [
        (GpuList(), GpuList(), True, OK, "CPU pools only"),
        (GpuList(problem="Driver/library version mismatch"), GpuList(), True, FAIL, "mismatch"),
        (_gpus(70.0, 71.0), GpuList(), True, OK, "2 x NVIDIA H200; limits can be set"),
        (_gpus(70.0), GpuList(), False, OK, "not set"),
        (_gpus(None, 70.0), GpuList(), True, WARN, "1 do not tell their power"),
        (GpuList((*_gpus(70.0).gpus, *_gpus(None, mig=True).gpus)), GpuList(), True, OK, "1 more cut by MIG"),
        (_gpus(70.0), GpuList(problem="amd-smi: failed"), True, WARN, "amd-smi: failed"),
        (GpuList(), GpuList((Gpu("amd", "MI300X"),)), False, OK, "1 x MI300X"),
    ],
)
def test_gpus_and_telemetry_rights(nvidia, amd, root, status, detail):
    finding = check_gpus(nvidia, amd, root=root)
    assert finding.status is status
    assert detail in finding.detail


HOLD = LockReport(True, True, True)
NO_RECORD = LockReport(False, True, True, "record locks: no locks available")
NOTHING = LockReport(False, False, False, "cannot write")


@pytest.mark.parametrize(
    ("network", "locks", "status", "detail"),
    [
        (False, HOLD, OK, "local disk (ext4)"),
        (True, HOLD, WARN, "network disk"),
        (True, NO_RECORD, WARN, "no locks available"),
        (False, NOTHING, FAIL, "cannot write"),
    ],
)
def test_state_folder(network, locks, status, detail):
    finding = check_filesystem(Path("/state"), "ext4", network, locks)
    assert finding.status is status
    assert detail in finding.detail


def test_state_folder_that_does_not_exist_yet_is_tested_where_it_would_be(tmp_path):
    assert read_filesystem(tmp_path / "a" / "b").status is OK
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("free", "status"), [(16, OK), (15, WARN), (10, WARN), (6, WARN), (5, FAIL), (0, FAIL)])
def test_C035_disk_warns_at_85_percent_and_fails_where_ray_stops_spilling(free, status):
    finding = check_disk("temporary disk", Path("/tmp"), 100, free)
    assert finding.status is status
    assert f"{100 - free}% full" in finding.detail


@pytest.mark.parametrize(("mib", "status"), [(None, FAIL), (64, WARN), (511, WARN), (512, OK)])
def test_shared_memory(mib, status):
    finding = check_shared_memory(None if mib is None else mib * 1024**2)
    assert finding.status is status
    assert ("--shm-size" in finding.fix) is (status is not OK)


def test_mlflow_is_the_real_package_from_the_repository_root():
    assert check_mlflow_package().status is OK


def test_folder_named_mlflow_is_not_taken_for_the_package(tmp_path):
    (tmp_path / "mlflow").mkdir()
    code = "from autotune.doctor.services import check_mlflow_package; print(check_mlflow_package())"
    root = Path(doctor.__file__).parent.parent.parent
    path = f"import sys; sys.path[:0] = [{str(tmp_path)!r}, {str(root)!r}]; "
    output = subprocess.run([sys.executable, "-I", "-S", "-c", path + code], capture_output=True, text=True, timeout=30, check=True)
    assert "a folder named mlflow" in output.stdout


HOST_REFUSED = Reply(403, "Invalid Host header - possible DNS rebinding attack detected")


@pytest.mark.parametrize(
    ("reply", "status", "detail", "fix"),
    [
        (Reply(200, '{"experiments": []}'), OK, "answers API calls", ""),
        (Reply(200, "<html>Log in</html>"), FAIL, "not as MLflow", "path prefix"),
        (HOST_REFUSED, FAIL, "refuses API calls", "--allowed-hosts"),
        (Reply(401), FAIL, "credentials", "MLFLOW_TRACKING_USERNAME"),
        (Reply(404), FAIL, "no MLflow API", "path prefix"),
        (Reply(500), FAIL, "HTTP 500", "log"),
        (Reply(0, "[Errno 111] Connection refused"), FAIL, "refused", "start the server"),
    ],
)
def test_tracking_server(reply, status, detail, fix):
    finding = check_tracking("https://person:secret@mlflow.example/prefix/", lambda url, headers: reply)
    assert finding.status is status
    assert detail in finding.detail
    assert fix in finding.fix
    assert "secret" not in str(finding)


def test_tracking_server_is_asked_at_an_api_route_with_the_clients_credentials():
    asked = []
    check_tracking("https://person:secret@mlflow.example/prefix/", lambda url, headers: asked.append((url, headers)) or Reply(401))
    ((url, headers),) = asked
    assert url == "https://mlflow.example/prefix/api/2.0/mlflow/experiments/search?max_results=1"
    assert headers == {"Authorization": "Basic cGVyc29uOnNlY3JldA=="}


def test_tracking_token_is_sent(monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", "abc")
    seen = []
    check_tracking("http://mlflow.example", lambda url, headers: seen.append(headers) or Reply(401))
    assert seen == [{"Authorization": "Bearer abc"}]


@pytest.mark.parametrize(
    ("uri", "status"), [(None, OK), ("databricks://profile", WARN), ("file:///proc/nothing", OK), ("mlruns", OK)]
)
def test_tracking_without_a_server(uri, status, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("os.access", lambda *args: True)
    assert check_tracking(uri, lambda url, headers: Reply(0, "must not be asked")).status is status


class _Server(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        if self.path.startswith("/slow"):
            time.sleep(3)
        self.send_response(403 if self.path.startswith("/refuse") else 200)
        self.end_headers()
        self.wfile.write(b'{"experiments": []}')

    def log_message(self, *args):
        pass


@pytest.fixture(scope="module")
def server():
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Server) as found:
        threading.Thread(target=found.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{found.server_port}"
        found.shutdown()


def test_http_get_over_a_real_connection(server, monkeypatch):
    monkeypatch.setattr("autotune.doctor.services.HTTP_TIMEOUT_S", 0.5)
    assert http_get(server, {}).code == 200
    assert http_get(f"{server}/refuse", {}).code == 403
    assert http_get("http://127.0.0.1:1", {}).code == 0
    started = time.monotonic()
    assert http_get(f"{server}/slow", {}) == Reply(0, "timed out")
    assert time.monotonic() - started < 2


def test_storage_of_its_own_needs_no_check():
    assert check_storage(None).status is OK


@pytest.mark.parametrize("url", ["{}/new/journal.log", "sqlite:///{}/new/study.db"])
def test_storage_in_a_file_needs_a_folder_that_can_be_written_and_creates_nothing(url, tmp_path, monkeypatch):
    assert check_storage(url.format(tmp_path)).status is OK
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr("os.access", lambda *args: False)
    finding = check_storage(url.format(tmp_path))
    assert finding.status is FAIL
    assert str(tmp_path) in finding.detail


URL = "postgresql+psycopg2://optuna:secret@db.example:5432/studies"


@pytest.mark.parametrize(
    ("answer", "status", "word"),
    [
        (Answer(0), OK, "accepts"),
        (
            Answer(1, stderr="sqlalchemy.exc.OperationalError: connection refused\n(Background on this error)"),
            FAIL,
            "connection refused",
        ),
        (Answer(1, stderr="ModuleNotFoundError: No module named 'psycopg2'"), FAIL, "psycopg2"),
        (Answer(None, stderr="python did not end within 8 s"), FAIL, "did not end"),
    ],
)
def test_database(answer, status, word):
    finding = check_storage(URL, lambda url: answer)
    assert finding.status is status
    assert word in finding.detail
    assert "secret" not in str(finding)


def test_real_database_connection_is_tried_in_a_process_of_its_own():
    finding = check_storage("postgresql://person:secret@127.0.0.1:1/none")
    assert finding.status is FAIL
    assert "secret" not in str(finding)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        (URL, "postgresql+psycopg2://optuna:***@db.example:5432/studies"),
        ("sqlite:///a.db", "sqlite:///a.db"),
        ("http://a@b", "http://a@b"),
    ],
)
def test_passwords_are_hidden(url, shown):
    assert without_password(url) == shown


def test_check_that_hangs_or_fails_is_a_finding_and_the_others_still_answer():
    def fails():
        raise PermissionError(13, "Permission denied", "/state")

    fine = Finding("fine", OK, "yes")
    started = time.monotonic()
    findings = doctor.run_checks({"hangs": lambda: time.sleep(30) or [], "fails": fails, "fine": lambda: [fine]}, 0.5)
    assert time.monotonic() - started < 2
    assert [(finding.name, finding.status) for finding in findings] == [("hangs", FAIL), ("fails", FAIL), ("fine", OK)]
    assert "no answer within 0.5 s" in findings[0].detail
    assert "/state" in findings[1].detail


def test_this_machine_is_examined_within_its_limit_and_each_finding_is_complete(tmp_path):
    started = time.monotonic()
    findings = examine(tmp_path)
    assert time.monotonic() - started < 15
    assert len({finding.name for finding in findings}) == len(findings) >= 12
    assert all(finding.fix for finding in findings if finding.status is not OK)
    assert {finding.name: finding.status for finding in findings}["megatron-core"] is OK
    assert all(set(finding.to_dict()) == {"name", "status", "detail", "fix"} for finding in findings)


def test_doctor_itself_imports_neither_ray_nor_torch():
    code = "import sys, autotune.doctor; print(sorted({'ray', 'torch', 'mlflow', 'optuna'} & set(sys.modules)))"
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=True)
    assert output.stdout.strip() == "[]"
