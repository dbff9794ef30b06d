"""Scripted devices: our own libnvidia-ml and libamd_smi, built here, that play a scenario to the real bindings."""

from __future__ import annotations

import functools
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = Path(__file__).parent / "scripted"
AMDSMI = "amdsmi==7.0.2"
FOREVER = 1e9

H100 = {
    "driver": "580.82.07",
    "name": "NVIDIA_H100_80GB_HBM3",
    "power_mw": 300_000,
    "reasons": 0,
    "sm_clock": 1980,
    "max_sm_clock": 1980,
    "memory_clock": 2619,
    "max_memory_clock": 2619,
    "temperature": 50,
    "utilization": 99,
    "memory_mib": 1024,
    "limit_mw": 700_000,
    "default_mw": 700_000,
    "min_mw": 200_000,
    "max_mw": 700_000,
    "field_82": 60,
    "active_74": 0,
    "active_76": 0,
    "active_269": 0,
    "active_270": 0,
    "active_271": 0,
}
MI300X = {
    "name": "AMD_Instinct_MI300X",
    "power_w": 600,
    "cap_uw": 750_000_000,
    "clock": 2100,
    "max_clock": 2100,
    "memory_clock": 1300,
    "hotspot": 60,
    "vram_temperature": 50,
    "activity": 99,
    "vram_mib": 2048,
    "violations": 0,
}
MI250 = {**MI300X, "name": "AMD_Instinct_MI250X", "cap_uw": 560_000_000, "current_w": 65535, "average_w": 480, "power_w": 480}
del MI250["violations"]


class Scenario:
    """What devices say, second by second.

    Args:
        base: Keys that every device has from the start; see the C sources for their meaning.
        count: Devices.
        vendor: "nvidia" or "amd".
    """

    def __init__(self, base, count=1, vendor="nvidia"):
        self.vendor = vendor
        self.lines = []
        for key, value in {"gpus": count, **base}.items():
            self.set("*", key, value)
        for gpu in range(count):
            bus = 0x10 + gpu
            self.set(gpu, "uuid", f"GPU-{gpu:08x}-0000" if vendor == "nvidia" else f"{gpu:08x}-0000-1000")
            self.set(gpu, "bus_id", f"00000000:{bus:02X}:00.0" if vendor == "nvidia" else bus << 8)
            if vendor == "amd":
                self.set(gpu, "hip_id", gpu)

    def set(self, gpu, key, value, start_s=-FOREVER, end_s=FOREVER, every_s=0.0):
        """From `start_s` to `end_s`, again every `every_s`. An error of the library is "E<code>"."""
        self.lines.append(f"{gpu} {key} {value} {start_s!r} {end_s!r} {every_s!r}")
        return self

    def write(self, folder: Path, *, clock: Path | None = None) -> dict[str, str]:
        """Write it; the environment variables that make the libraries play it."""
        file = folder / f"{self.vendor}.devices"
        file.write_text("\n".join(self.lines) + "\n")
        values = {"SCRIPTED_DEVICES": str(file), "SCRIPTED_CALLS": str(folder / "calls"), "SCRIPTED_STATE": str(folder)}
        if clock is not None:
            values["SCRIPTED_CLOCK"] = str(clock)
        return values


@functools.cache
def built(kind: str) -> Path:
    """The folder with the library of that vendor, compiled now; skips where there is no compiler or no package to build it for."""
    folder = Path(tempfile.mkdtemp(prefix=f"scripted-{kind}-"))
    includes = ["-I", str(folder)]
    if kind == "amd":
        package = amdsmi_folder() / "amdsmi"
        wrapper = (package / "amdsmi_wrapper.py").read_text()
        symbols = set(re.findall(r"_libraries\['libamd_smi.so'\]\.(\w+)", wrapper))
        own = set(re.findall(r"^int (amdsmi_\w+)\(", (SOURCES / "amdsmi.c").read_text(), re.MULTILINE))
        (folder / "exports.h").write_text("".join(f"EXPORT({name})\n" for name in sorted(symbols - own)))
    source, library = {"nvidia": ("nvml.c", "libnvidia-ml.so.1"), "amd": ("amdsmi.c", "lib/libamd_smi.so")}[kind]
    (folder / library).parent.mkdir(exist_ok=True)
    command = ["gcc", "-shared", "-fPIC", "-O2", *includes, "-o", str(folder / library), str(SOURCES / source), "-lm"]
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=120)
    except FileNotFoundError:
        pytest.skip("no gcc: the scripted devices cannot be built")
    return folder


@functools.cache
def amdsmi_folder() -> Path:
    """The real amdsmi package in a folder of its own, never in this environment: with no library it breaks other imports."""
    folder = Path(os.environ.get("AUTOTUNE_AMDSMI", Path(tempfile.gettempdir()) / f"autotune-test-{os.getuid()}-amdsmi-7.0.2"))
    if not (folder / "amdsmi" / "__init__.py").exists():
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder), AMDSMI]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        if done.returncode:
            pytest.skip(f"{AMDSMI} cannot be fetched: {done.stderr.strip().splitlines()[-1]}")
    return folder


def environment(*scenarios: Scenario, folder: Path, clock: Path | None = None) -> dict[str, str]:
    """What the process that measures, and it alone, gets so that it sees these devices."""
    values: dict[str, str] = {}
    for scenario in scenarios:
        values |= scenario.write(folder, clock=clock)
        if scenario.vendor == "nvidia":
            values["LD_LIBRARY_PATH"] = str(built("nvidia"))
        else:
            values |= {"ROCM_PATH": str(built("amd")), "PYTHONPATH": os.pathsep.join((str(ROOT), str(amdsmi_folder())))}
    return values


def ask(code: str, values: dict[str, str], timeout_s: float = 60.0):
    """Run code in a process that sees the devices; it prints one line of JSON, which is returned."""
    process_environment = {**os.environ, "PYTHONPATH": str(ROOT), **values}
    command = [sys.executable, "-c", code]
    done = subprocess.run(
        command, cwd=ROOT, env=process_environment, capture_output=True, text=True, timeout=timeout_s, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.strip().splitlines()[-1])
