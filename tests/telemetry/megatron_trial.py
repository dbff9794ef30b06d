"""A real trial of the Megatron program on CPU, in a process of its own that sees scripted devices; run as a program.

Reads {folder, telemetry, seconds, clock, pool, soak} as JSON from its first argument; leaves steps, telemetry, end, and from where
on the steps count in a pickle there. Second 0 of the scenario is the end of the first step. It ends after `seconds`, with `soak`
once `MEASUREMENT` was made on warm GPUs.
"""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
import time
from pathlib import Path

from autotune.settling import Settling
from autotune.spec_parts import Measurement, Soaking
from autotune.telemetry.node import NodeGpus, run_measured
from autotune.telemetry.series import NodeTelemetry
from launchers.base import Rendezvous, StepRecord
from launchers.megatron_core.launcher import MegatronCoreLauncher
from launchers.process import LaunchRequest, Limits, Supervised
from search_spaces.config import TrialConfig
from search_spaces.hardware import PoolSpec, RankEnvironment
from search_spaces.model import ModelSpec, Workload

MEASUREMENT = Measurement(steps=302, warmup_steps=2)
MODEL = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 128}


def run(folder, telemetry, seconds, clock, pool, soak):
    pool = PoolSpec(name="laptop", gpu="cpu", gpus_per_node=1, telemetry=telemetry, **pool)
    workload = Workload(model=ModelSpec(**MODEL), world_size=1, global_batch_size=4, seq_length=32, device="cpu")
    launcher = MegatronCoreLauncher()
    job = launcher.job(workload, TrialConfig(precision="fp32"), steps=100_000, seed=1)
    devices = NodeGpus(pool, ())
    settling = Settling(Soaking(**soak), MEASUREMENT, 100_000, devices.slopes_c_per_min) if soak else None
    supervised = Supervised(RankEnvironment(env={"OMP_NUM_THREADS": "1"}), preload=launcher.preload)
    launch = LaunchRequest(
        trial="telemetry",
        program=launcher.program,
        job=job,
        rendezvous=Rendezvous("127.0.0.1", 0, 1, 0, 1),
        ranks=(0,),
        log_folder=folder / "logs",
    )
    steps, measured, ends = [], [], []
    stop_s = [float("inf")]
    try:
        for item in run_measured(devices, supervised, launch, Limits(300.0, 60.0, 600.0), 0, lambda: time.monotonic() >= stop_s[0]):
            if isinstance(item, StepRecord):
                steps.append(item)
                if len(steps) == 1:
                    partial = clock.with_suffix(".partial")
                    partial.write_text(f"{item.time_s!r}\n")
                    partial.rename(clock)
                    stop_s[0] = time.monotonic() + seconds
                if settling and settling.stepped(item):
                    stop_s[0] = 0.0
            else:
                (measured if isinstance(item, NodeTelemetry) else ends).append(item)
    finally:
        supervised.close()
    (folder / "trial.pickle").write_bytes(pickle.dumps((steps, measured, ends[0], settling and settling.ended())))


def play(folder: Path, environment: dict[str, str], telemetry: dict, seconds: float, **pool):
    """Run it beside scripted devices; steps, telemetry, end, and the Unix time of the scenario's second 0.

    `pool` holds further fields of the trial's pool.
    """
    steps, measured, end, _ = _play(folder, environment, telemetry, seconds, pool=pool)
    return steps, measured, end, float((folder / "clock").read_text())


def play_warm(folder: Path, environment: dict[str, str], telemetry: dict, soak: dict, seconds: float):
    """Run it until its GPUs are warm and it is measured, for `seconds` at most; steps, telemetry, and from where on steps count."""
    steps, measured, _, settled = _play(folder, environment, telemetry, seconds, soak=soak)
    return steps, measured, settled


def _play(folder, environment, telemetry, seconds, pool=None, soak=None):
    folder.mkdir(parents=True, exist_ok=True)
    arguments = {"folder": str(folder), "telemetry": telemetry, "seconds": seconds, "clock": str(folder / "clock")}
    arguments |= {"pool": pool or {}, "soak": soak}
    command = [sys.executable, "-m", "tests.telemetry.megatron_trial", json.dumps(arguments)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=170, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return pickle.loads((folder / "trial.pickle").read_bytes())


if __name__ == "__main__":
    values = json.loads(sys.argv[1])
    clock = Path(values["clock"])
    run(Path(values["folder"]), values["telemetry"], values["seconds"], clock, values["pool"], values["soak"])
