"""Accuracy of predicted memory, step time and slow-down on published measurements, by source.

    python benchmarks/accuracy.py FOLDER [--json]

Every source is scored with coefficients that were fitted without it ("shipped"), then with a few of its own rows measured
("calibrated"); see `accuracy_memory`, `accuracy_time` and `accuracy_power` for which. Under "oom": how rows that ran out of
memory and rows that ran are called.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import accuracy_memory, accuracy_power, accuracy_time  # noqa: E402  the repository is no package


def results(folder: Path) -> dict[str, Any]:
    """All groups, and the verdicts on memory; of the tables that the folder has."""
    found: dict[str, Any] = {"groups": [], "oom": {}}
    if (folder / "throughput.csv").is_file():
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


def main() -> None:
    """Print the table or JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="folder with throughput.csv, megatron_golden.csv, vtrain_a100.csv and power.csv")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args()
    found = results(options.folder)
    if options.json:
        print(json.dumps(found, indent=1))
        return
    print(table(found["groups"]))
    if found["oom"]:
        print(verdicts(found["oom"]))


if __name__ == "__main__":
    main()
