"""Accuracy of predicted memory, step time and slow-down on published measurements, by source.

    python benchmarks/accuracy.py FOLDER [--json] [--write]

Every source is scored with coefficients that were fitted without it ("shipped"), then with a few of its own rows measured
("calibrated"); see `accuracy_memory`, `accuracy_time` and `accuracy_power` for which. Under "oom": how rows that ran out of
memory and rows that ran are called. `--write` records the mean errors of the step time in `search_spaces/step_time_error.yaml`,
from which predictions take their error band.
"""

from __future__ import annotations

import argparse
import json
import sys
from datetime import date
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks import accuracy_memory, accuracy_power, accuracy_time  # noqa: E402  the repository is no package

TABLES = ("throughput.csv", "megatron_golden.csv", "vtrain_a100.csv")
ERROR_BAND = ROOT / "search_spaces" / "step_time_error.yaml"


def results(folder: Path) -> dict[str, Any]:
    """All groups, and the verdicts on memory; of the tables that the folder has."""
    found: dict[str, Any] = {"groups": [], "oom": {}}
    if any((folder / name).is_file() for name in TABLES):
        found = accuracy_memory.report(folder)
        found["groups"] += accuracy_time.groups(folder)
    if (folder / "power.csv").is_file():
        found["groups"] += accuracy_power.groups(folder)
    return found


def table(groups: list[dict[str, Any]]) -> str:
    """The groups as text."""
    lines = [f"{'source':26}{'quantity':13}{'mode':11}{'n':>5}{'mean':>7}{'max':>7}{'bias':>8}  ranking or rows within 5 points"]
    for g in groups:
        head = f"{g['source']:26}{g['quantity']:13}{g['mode']:11}{g['n']:5d}"
        lines.append(f"{head}{g['mape']:7.1%}{g['max_ape']:7.1%}{g['bias']:+8.1%}  {_ranking(g)}")
    return "\n".join(lines)


def verdicts(oom: dict[str, Any]) -> str:
    """How rows were called, as text."""
    lines = [f"out of memory: {row}: {verdict}" for row, verdict in oom["rows"].items()]
    lines += [f"out of memory: {row} cannot be expressed: {reason}" for row, reason in oom["not_expressed"].items()]
    lines.append(f"called out: {oom['called_out']:.0%} of {len(oom['rows'])} rows that ran out of memory")
    return "\n".join([*lines, f"of {oom['ran']} rows that ran: {oom['wrongly_refused']:.1%} refused, {oom['at_risk']:.1%} at risk"])


def _ranking(group: dict[str, Any]) -> str:
    if group["quantity"] == "slowdown":
        return f"{group['within_5_points']} of {group['n']}"
    if group["kendall_tau"] is None:
        return "-"
    own = f"tau {group['kendall_tau']:.2f} (worst {group['kendall_tau_min']:.2f}, {group['tau_groups']} groups)"
    if "tau_parameters_tokens" not in group:
        return own
    return f"{own}, parameters x tokens {group['tau_parameters_tokens']:.2f}, fewest ranks {group['tau_fewest_ranks']:.2f}"


def error_band(groups: list[dict[str, Any]]) -> dict[str, Any]:
    """Mean absolute error of the step time by mode, each source counted once, and where it was measured."""
    band: dict[str, Any] = {
        "source": "published step times, benchmarks/accuracy.py; mean absolute error, each source counted once",
        "date": date.today().isoformat(),
    }
    for mode in ("shipped", "calibrated"):
        found = [group for group in groups if group["quantity"] == "step_time_s" and group["mode"] == mode]
        error = sum(group["mape"] for group in found) / len(found)
        band[mode] = {"error": round(error, 3), "sources": len(found), "rows": sum(group["n"] for group in found)}
    return band


def main() -> None:
    """Print the table or JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="folder with throughput.csv, megatron_golden.csv, vtrain_a100.csv and power.csv")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--write", action="store_true", help="record the mean errors of the step time in the package")
    options = parser.parse_args()
    found = results(options.folder)
    if not found["groups"]:
        parser.error(f"{options.folder}: no {', '.join(TABLES)} or power.csv with rows that can be read")
    if options.write:
        ERROR_BAND.write_text(yaml.safe_dump(error_band(found["groups"]), sort_keys=False), encoding="utf-8")
    if options.json:
        print(json.dumps(found, indent=1))
        return
    print(table(found["groups"]))
    if found["oom"]:
        print(verdicts(found["oom"]))


if __name__ == "__main__":
    main()
