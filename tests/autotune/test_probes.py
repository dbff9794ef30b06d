"""Answers of real tools are read as they are; a tool that hangs, fails or is absent costs its limit and no more."""

import json
import os
import sys
import time

import pytest

from autotune.probes import Answer, Driver, Gpu, amd_gpus, ask, nvidia_gpus, rank_python, read_driver

ABSENT = Answer(None, stderr="tool: No such file or directory")
OPEN_MODULE = (
    "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build  (root@host)\nGCC version: gcc 12.3.0\n"
)
CLOSED_MODULE = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.183  Sun May 12 19:39:15 UTC 2024\n"


def _says(**answers: Answer):
    return lambda command, timeout_s: answers.get(command[0].replace("-", "_"), ABSENT)


def test_ask_returns_what_a_command_said():
    answer = ask((sys.executable, "-c", "import sys; print(sys.stdin.read()); sys.exit(3)"), 10, stdin="word")
    assert (answer.returncode, answer.stdout.strip(), answer.ok) == (3, "word", False)


def test_ask_ends_a_command_and_its_children_at_the_limit(tmp_path):
    child = f"import os, time; open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid())); time.sleep(60)"
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    started = time.monotonic()
    answer = ask((sys.executable, "-c", parent), 3)
    assert time.monotonic() - started < 8
    assert answer.returncode is None
    assert "did not end within 3 s" in answer.last_line
    pid = int((tmp_path / "pid").read_text())
    deadline = time.monotonic() + 2
    while time.monotonic() < deadline and _runs(pid):
        time.sleep(0.05)
    assert not _runs(pid)


def _runs(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_ask_says_which_command_is_absent():
    answer = ask(("/no/such/tool",), 1)
    assert (answer.returncode, answer.last_line) == (None, "/no/such/tool: No such file or directory")


@pytest.mark.parametrize(("text", "version"), [(OPEN_MODULE, "580.65.06"), (CLOSED_MODULE, "535.183")])
def test_nvidia_driver_from_the_kernels_file(tmp_path, text, version):
    (tmp_path / "proc/driver/nvidia").mkdir(parents=True)
    (tmp_path / "proc/driver/nvidia/version").write_text(text)
    assert read_driver(tmp_path) == Driver(nvidia=version)


def test_amd_driver_counts_only_with_its_compute_device(tmp_path):
    (tmp_path / "sys/module/amdgpu").mkdir(parents=True)
    assert read_driver(tmp_path) == Driver()
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/kfd").touch()
    (tmp_path / "opt/rocm/.info").mkdir(parents=True)
    (tmp_path / "opt/rocm/.info/version").write_text("6.4.1-83\n")
    assert read_driver(tmp_path) == Driver(amdgpu=True, rocm="6.4")


def test_nvidia_smi_lines():
    lines = (
        "NVIDIA H100 80GB HBM3, 81559, 550.54.15, 71.52, Disabled\n"
        "NVIDIA H100 80GB HBM3, 81559, 550.54.15, [N/A], Enabled\n"
        "NVIDIA GB10, [N/A], 580.95.05, 4.10, [N/A]\n"
        "a line that is no GPU\n"
    )
    found = nvidia_gpus(_says(nvidia_smi=Answer(0, lines)))
    assert found.gpus == (
        Gpu("nvidia", "NVIDIA H100 80GB HBM3", 81559 / 1024, "550.54.15", 71.52, False),
        Gpu("nvidia", "NVIDIA H100 80GB HBM3", 81559 / 1024, "550.54.15", None, True),
        Gpu("nvidia", "NVIDIA GB10", None, "580.95.05", 4.10, False),
    )


def test_nvidia_tool_absent_is_no_problem_and_failing_is_one():
    mismatch = "Failed to initialize NVML: Driver/library version mismatch"
    assert nvidia_gpus(_says()).problem == ""
    assert nvidia_gpus(_says(nvidia_smi=Answer(18, f"{mismatch}\nNVML library version: 580.95\n"))).problem
    assert mismatch in nvidia_gpus(_says(nvidia_smi=Answer(18, mismatch))).problem


AMD_SMI_6 = [
    {"gpu": 0, "asic": {"market_name": "AMD Instinct MI300X"}, "vram": {"type": "HBM", "size": {"value": 196592, "unit": "MB"}}}
]
AMD_SMI_7 = {
    "gpu_data": [{"gpu": 0, "asic": {"market_name": "AMD Instinct MI355X"}, "vram": {"size": {"value": 288, "unit": "GB"}}}]
}
ROCM_SMI = {
    "card0": {"Card Series": "AMD Instinct MI250X", "VRAM Total Memory (B)": "68702699520"},
    "card1": {"Card series": "AMD Instinct MI250X", "VRAM Total Memory (B)": "68702699520"},
    "system": {"Driver version": "6.7.0"},
}


@pytest.mark.parametrize(
    ("answers", "names", "memory"),
    [
        ({"amd_smi": AMD_SMI_6}, ["AMD Instinct MI300X"], 196592 / 1024),
        ({"amd_smi": AMD_SMI_7}, ["AMD Instinct MI355X"], 288),
        ({"rocm_smi": ROCM_SMI}, ["AMD Instinct MI250X"] * 2, 68702699520 / 1024**3),
        ({"amd_smi": [{"asic": "N/A", "vram": "N/A"}]}, ["AMD GPU"], None),
    ],
)
def test_amd_tools_of_each_release(answers, names, memory):
    found = amd_gpus(_says(**{tool: Answer(0, json.dumps(answer)) for tool, answer in answers.items()}))
    assert [gpu.name for gpu in found.gpus] == names
    assert found.gpus[0].memory_gib == memory
    assert found.problem == ""


def test_amd_tools_that_fail_are_named():
    assert amd_gpus(_says()).problem == ""
    found = amd_gpus(_says(amd_smi=Answer(1, stderr="ERROR: driver not loaded"), rocm_smi=Answer(0, "not json")))
    assert found.gpus == ()
    assert "driver not loaded" in found.problem
    assert "rocm-smi" in found.problem


def test_rank_python_reports_the_torch_of_that_interpreter(tmp_path):
    interpreter = _interpreter(
        tmp_path,
        "torch",
        "__version__='9.1'\nclass version: cuda='12.6'; hip=None\nclass cuda:\n is_available=lambda: True\n device_count=lambda: 3",
    )
    facts = rank_python(interpreter)
    assert (facts.torch, facts.cuda, facts.visible_gpus, facts.problem) == ("9.1", "12.6", 3, "")


@pytest.mark.parametrize(
    ("module", "problem"),
    [
        ("raise ImportError('libcudart.so.13: cannot open shared object file')", "libcudart.so.13"),
        ("import os; os.kill(os.getpid(), 11)", "signal 11"),
        ("import sys; sys.stderr.write('boom'); sys.exit(4)", "boom"),
    ],
)
def test_torch_that_cannot_be_imported_is_a_problem_not_a_crash(tmp_path, module, problem):
    facts = rank_python(_interpreter(tmp_path, "torch", module))
    assert facts.torch is None
    assert problem in facts.problem


def test_warning_of_a_torch_without_gpus_is_kept(tmp_path):
    warn = "sys.stderr.write('the driver on your system is too old') == 0"
    module = f"import sys\n__version__='2.7'\nclass version: cuda='13.0'; hip=None\nclass cuda:\n is_available=lambda: {warn}"
    assert "too old" in rank_python(_interpreter(tmp_path, "torch", module)).problem


def test_interpreter_that_is_absent_is_a_problem():
    assert "No such file" in rank_python("/no/python").problem


def _interpreter(folder, name: str, text: str) -> str:
    """A command that behaves as Python with one module replaced."""
    (folder / f"{name}.py").write_text(text)
    script = folder / "python"
    script.write_text(f'#!/bin/sh\nPYTHONPATH={folder} exec {sys.executable} "$@"\n')
    os.chmod(script, 0o755)
    return str(script)
