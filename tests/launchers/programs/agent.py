"""An agent in a process of its own: argv = JSON of {"python", "preload", "env", "program", "log_folder", "exit_command"}."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from launchers.base import Rendezvous
from launchers.process import LaunchRequest, Limits, Supervised, run_trial
from search_spaces.hardware import RankEnvironment


def main():
    options = json.loads(sys.argv[1])
    tree = Supervised(RankEnvironment(python=options["python"], env=options["env"]), preload=options["preload"])
    tree.set_exit_command(options["exit_command"])
    tree.start()
    print(json.dumps(tree.poll(10)), flush=True)
    request = LaunchRequest("t", options["program"], {}, Rendezvous("127.0.0.1", 1, 2, 0, 2), (0, 1), Path(options["log_folder"]))
    for step in run_trial(tree, request, Limits(60, 60, 120)):
        print(json.dumps({"step": repr(step)}), flush=True)


if __name__ == "__main__":
    main()
