"""One NVIDIA GPU in eight minutes: can it be measured, and do the predictions hold? Prints one table.

    python tests/gpu/one_gpu.py [--gpu 0] [--output one_gpu.json]
    python tests/gpu/one_gpu.py --cpu          # a rehearsal of the same steps on this machine's CPU, without telemetry

Runs `autotune doctor`, `doctor --telemetry`, a study of 12 trials of a small GPT in bf16 on that GPU alone, `status` and `best`,
in a folder of its own. Exit code 0: all of it was shown; 1: something was not, and it says what; 2: there is no such GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from autotune.detect import gpu_type  # noqa: E402  the repository is no package
from autotune.probes import Gpu  # noqa: E402
from autotune.records import short  # noqa: E402
from search_spaces.config import TrialConfig  # noqa: E402

LIMIT_S = 480.0
TRIALS = 12
_DOCTOR_S = 60.0
_READ_S = 30.0
_END_S = 20.0  # a study that is interrupted ends its trial, Ray and MLflow first
_STUDY = {
    "name": "one-gpu",
    # 350 million parameters: seconds of measurement per trial, and memory that recompute and micro-batch move several times over.
    "model": {"num_layers": 24, "hidden_size": 1024, "num_attention_heads": 16, "vocab_size": 50304},
    "global_batch_size": 32,
    "seq_length": 1024,
    "baseline": {"precision": "bf16", "micro_batch_size": 1},
    "search": {"micro_batch_size": [1, 2, 4, 8, 16], "recompute": ["none", "selective", "full"]},
    "sampler": "residual",
    "budget": {"trials": TRIALS, "wall_time_s": 300, "confidence": None},
    "confirm": {"top": 1, "repeats": 2, "steps": 20, "soak": {"timeout_s": 0}},  # it has 8 minutes in all
    "measurement": {
        "steps": 20,
        "warmup_steps": 3,
        "racing": False,  # every trial is compared with its prediction
        "startup_timeout_s": 60,
        "step_timeout_s": 30,
        "trial_timeout_s": 90,
        "when_busy": "fail",
    },
}
_REHEARSAL = {
    "model": {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 128},
    "seq_length": 32,
    "baseline": {"precision": "fp32", "micro_batch_size": 1},
}


class NotShownError(Exception):
    """Ends the run with a message for the person.

    Attributes:
        code: Exit code.
    """

    def __init__(self, message: str, code: int = 1) -> None:
        super().__init__(message)
        self.code = code


def autotune(arguments: Sequence[str], deadline_s: float, limit_s: float) -> tuple[int, str]:
    """Run the command line; its exit code and standard output. Messages for a person go to ours.

    Args:
        arguments: Verb and options.
        deadline_s: Monotonic time at which everything must have ended.
        limit_s: Longest time for this one. It is then interrupted as by Ctrl-C, and killed after `_END_S`.
    """
    left_s = min(limit_s, deadline_s - time.monotonic())
    if left_s <= 0:
        raise NotShownError(f"no time was left for `autotune {' '.join(arguments)}`")
    return bounded([sys.executable, "-m", "autotune.cli", *arguments], left_s)


def bounded(command: Sequence[str], limit_s: float) -> tuple[int, str]:
    """Run a command no longer than `limit_s`, then interrupt it, then kill it; its exit code and standard output."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    try:
        output, _ = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)
        try:
            output, _ = process.communicate(timeout=_END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            output, _ = process.communicate()
    return process.returncode, output


def read_json(arguments: Sequence[str], deadline_s: float, limit_s: float) -> Any:
    """What a verb prints with `--json`.

    Raises:
        NotShownError: where it prints nothing; its own message is then above.
    """
    code, output = autotune([*arguments, "--json"], deadline_s, limit_s)
    if not output.strip():
        raise NotShownError(f"`autotune {arguments[0]}` told nothing (exit code {code}): its message is above")
    return json.loads(output)


def chosen_gpu(report: dict[str, Any], wanted: str) -> dict[str, Any]:
    """The device of `doctor --telemetry --json` with this number or UUID.

    Raises:
        NotShownError: where there is none, with the reason.
    """
    devices = [device for device in report["devices"] if device["vendor"] == "nvidia"]
    for device in devices:
        if wanted in (str(device["index"]), device["uuid"]):
            return dict(device)
    why = f"known: {', '.join(str(device['index']) for device in devices)}" if devices else report["problems"].get("nvidia", "none")
    raise NotShownError(f"no NVIDIA GPU {wanted}: {why}\nhint: run it where there is one, or rehearse with --cpu", code=2)


def study_on(device: dict[str, Any] | None) -> dict[str, Any]:
    """The study file's mapping for this GPU; for one CPU rank without one."""
    if device is None:
        return {**_STUDY, **_REHEARSAL, "pools": [{"name": "laptop", "gpu": "cpu", "gpus_per_node": 1}]}
    kind = gpu_type(Gpu("nvidia", device["name"]))
    return {**_STUDY, "gpus": [device["uuid"]], "pools": [{"name": "one-gpu", "gpu": kind, "gpus_per_node": 1}]}


def run_study(study: dict[str, Any], folder: Path, deadline_s: float) -> tuple[list[dict[str, Any]], dict[str, Any] | None]:
    """Tune it; its ended trials, and the winner where there is one."""
    file, state = folder / "study.yaml", ["--state", str(folder / "state")]
    file.write_text(yaml.safe_dump(study), encoding="utf-8")
    for_tuning_s = deadline_s - time.monotonic() - _END_S - 2 * _READ_S
    autotune(["tune", str(file), *state, "--json"], deadline_s, for_tuning_s)
    (pool,) = read_json(["status", study["name"], *state], deadline_s, _READ_S)["pools"] or ({"trials": []},)
    if not pool["trials"]:
        raise NotShownError("no trial ended: the message of `autotune tune` is above")
    best = read_json(["best", study["name"], *state], deadline_s, _READ_S)["pools"][0]["best"]
    return pool["trials"], best


_COLUMNS = {
    "tokens/s": ("tokens_per_s_per_gpu", ",.0f"),
    "mean W": ("gpu_mean_power_w", ".0f"),
    "peak W (1 s)": ("gpu_peak_power_w_1s", ".0f"),
    "J": ("pool_gpu_energy_j", ",.0f"),
    "throttled": ("throttle_fraction", ".0%"),
    "at the cap": ("power_cap_fraction", ".0%"),
}
_COMPARED = {"GiB": "peak_memory_gib", "step s": "step_time_s"}


def table_of(trials: Sequence[dict[str, Any]], best: dict[str, Any] | None, title: str) -> Table:
    """A row per trial; `-` where nothing was measured or predicted."""
    table = Table(title=title)
    for name in ("trial", "configuration", *_COLUMNS):
        table.add_column(name)
    for name in _COMPARED:
        table.add_column(f"{name}: predicted / measured")
    for trial in trials:
        metrics = trial["metrics"]
        number = f"{trial['trial']}{' best' if best and best['trial'] == trial['trial'] else ''} {trial['phase']}"
        shown = short(TrialConfig(**trial["config"])) + (f"  {trial['outcome']}" if trial["outcome"] != "COMPLETED" else "")
        cells = [format(metrics[name], form) if name in metrics else "-" for name, form in _COLUMNS.values()]
        table.add_row(number, shown, *cells, *(_compared(metrics, name) for name in _COMPARED.values()))
    return table


def _compared(metrics: dict[str, float], name: str) -> str:
    predicted, measured = metrics.get(f"predicted_{name}"), metrics.get(name)
    both = " / ".join("-" if value is None else f"{value:.3g}" for value in (predicted, measured))
    return f"{both} ({predicted / measured - 1:+.0%})" if predicted and measured else both


def mean_error(trials: Sequence[dict[str, Any]], name: str) -> float | None:
    """Mean absolute relative error of a prediction over the trials that have both; None where none has."""
    pairs = [(trial["metrics"].get(f"predicted_{name}"), trial["metrics"].get(name)) for trial in trials]
    errors = [abs(predicted / measured - 1) for predicted, measured in pairs if predicted and measured]
    return statistics.fmean(errors) if errors else None


def not_shown(trials: Sequence[dict[str, Any]], best: dict[str, Any] | None, *, telemetry: bool) -> list[str]:
    """What is missing, in words; empty where everything was shown."""
    explored = [trial for trial in trials if trial["phase"] != "confirm" and trial["outcome"] != "LOST"]
    completed = [trial for trial in trials if trial["outcome"] == "COMPLETED"]
    missing = []
    if len(explored) < TRIALS:
        missing.append(f"{len(explored)} of {TRIALS} trials ended within the time")
    if best is None:
        missing.append("no winner")
    if broken := [trial for trial in explored if trial["outcome"] not in ("COMPLETED", "OOM")]:
        missing.append(f"trial {broken[0]['trial']} ended as {broken[0]['outcome']}: {broken[0]['detail'].splitlines()[0]}")
    wanted = [*_COMPARED.values(), *(["gpu_mean_power_w", "pool_gpu_energy_j"] if telemetry else [])]
    for name in wanted:
        if without := [str(trial["trial"]) for trial in completed if name not in trial["metrics"]]:
            missing.append(f"no {name} in trials {', '.join(without)}")
    return missing


def show(trials: list[dict[str, Any]], best: dict[str, Any] | None, title: str, *, telemetry: bool) -> int:
    """Print the table and what it says; the exit code."""
    console = Console(width=max(180, Console().width))
    console.print(table_of(trials, best, title))
    for label, name in (("peak memory", "peak_memory_gib"), ("step time", "step_time_s")):
        error = mean_error([trial for trial in trials if trial["outcome"] == "COMPLETED"], name)
        console.print(f"{label}: mean error of the prediction {'unknown' if error is None else f'{error:.1%}'}")
    missing = not_shown(trials, best, telemetry=telemetry)
    for line in missing:
        console.print(f"NOT SHOWN: {line}")
    return int(bool(missing))


def run(options: argparse.Namespace) -> int:
    """All of it, within `LIMIT_S`."""
    started_s = time.monotonic()
    deadline_s = started_s + LIMIT_S - _END_S
    device = None
    if not options.cpu:
        device = chosen_gpu(read_json(["doctor", "--telemetry"], deadline_s, _DOCTOR_S), options.gpu)
        gaps = "; ".join(f"no {name}: {why}" for name, why in device["gaps"].items())
        sys.stdout.write(f"{device['name']} {device['uuid']} {device['sensor']}\n{gaps or 'every field can be read'}\n")
    with tempfile.TemporaryDirectory(prefix="autotune-one-gpu-") as scratch:
        code, output = autotune(["doctor", "--state", f"{scratch}/state"], deadline_s, _DOCTOR_S)
        sys.stdout.write(output)
        if code:
            raise NotShownError("`autotune doctor` found what must be mended first: see above")
        trials, best = run_study(study_on(device), Path(scratch), deadline_s)
    title = f"{device['name'] if device else 'rehearsal on CPU: nothing here says anything of a GPU'}, {{:.0f}} s"
    failed = show(trials, best, title.format(time.monotonic() - started_s), telemetry=device is not None)
    if options.output:
        told = {"device": device, "trials": trials, "best": best}
        options.output.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
    return failed


def main() -> int:
    """Exit code 0, 1 or 2; see above."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0].strip()
    parser.add_argument("--gpu", default=visible or "0", help="number or UUID; none = the first of CUDA_VISIBLE_DEVICES, else 0")
    parser.add_argument("--cpu", action="store_true", help="rehearse on one CPU rank")
    parser.add_argument("--output", type=Path, help="write the trials as JSON")
    try:
        return run(parser.parse_args())
    except NotShownError as problem:
        sys.stderr.write(f"NOT SHOWN: {problem}\n")
        return problem.code


if __name__ == "__main__":
    sys.exit(main())
